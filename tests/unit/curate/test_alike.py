"""What may differ between two statements of one problem, and what may not."""

import pytest

from megatron_daro.workshop.curate.alike import part_found, same_problem
from megatron_daro.workshop.curate.statements import statement_of

TEXT = "In a bag there are 12 red marbles and 5 blue ones. Find the sum of all odd numbers on the red marbles if x = 3."


def alike(one, other):
    return same_problem(statement_of(one), statement_of(other))


@pytest.mark.parametrize(
    "other",
    [
        TEXT.replace("Find", "Determine"),
        TEXT.replace("bag", "large box").replace("marbles", "stones"),
        TEXT.replace("all ", ""),
        TEXT.replace("odd numbers", "numbers"),
    ],
)
def test_a_few_words_may_differ(other):
    assert alike(TEXT, other)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("12", "13"),
        ("odd", "even"),
        ("sum", "product"),
        ("x = 3", "y = 3"),
        ("x = 3", "x > 3"),
        ("are 12", "are not 12"),
        ("and 5", "and 5 green, 2"),
        ("x = 3", "x = -3"),
    ],
)
def test_what_makes_another_problem_may_not(old, new):
    assert old in TEXT and not alike(TEXT, TEXT.replace(old, new))


def test_too_many_words_are_another_problem():
    assert not alike("Tom has 5 dogs at home today", "Maria sees 5 tall trees over there")


def test_chinese_words_may_differ_and_its_negation_may_not():
    text = "\u6c42\u6ee1\u8db3 x > 5 \u7684\u6700\u5c0f\u6574\u6570 x \u7684\u503c\u662f\u591a\u5c11"
    assert alike(text, text.replace("\u503c", "\u6570\u503c"))
    assert not alike(text, text.replace("\u6ee1\u8db3", "\u4e0d\u6ee1\u8db3"))


def test_a_problem_inside_a_longer_text():
    inner = statement_of(TEXT)
    around = f"You are given 7 tasks, numbered 1 to 7. Task one follows. {TEXT} Write 2 sentences of reasons."
    assert part_found(inner, statement_of(around)) == 1.0
    assert 0.9 < part_found(inner, statement_of(around.replace("Find", "Determine"))) < 1.0
    assert part_found(inner, statement_of(around.replace("12 red", "11 red"))) == 0.0
    assert part_found(inner, statement_of(around.replace("odd", "even"))) == 0.0
    assert part_found(inner, statement_of("Find the sum of all odd numbers on the red marbles")) == 0.0


def test_names_in_capitals_are_no_words():
    one = "Determine the number of ways to arrange the letters of the word ELLIPSE."
    assert part_found(statement_of(one), statement_of(one.replace("ELLIPSE", "TARTAR"))) == 0.0
