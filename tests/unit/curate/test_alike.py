"""What may differ between two statements of one problem, and what may not; how much must agree."""

import pytest
from made_words import named

from megatron_daro.workshop.curate import alike
from megatron_daro.workshop.curate.alike import part_found, same_problem
from megatron_daro.workshop.curate.statements import Statement, statement_of

TEXT = "In a bag there are 12 red marbles and 5 blue ones. Find the sum of all odd numbers on the red marbles if x = 3."


def are_alike(one, other):
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
    assert are_alike(TEXT, other)


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
    assert old in TEXT and not are_alike(TEXT, TEXT.replace(old, new))


def test_too_many_words_are_another_problem():
    assert not are_alike("Tom has 5 dogs at home today", "Maria sees 5 tall trees over there")


def test_chinese_words_may_differ_and_its_negation_may_not():
    text = "\u6c42\u6ee1\u8db3 x > 5 \u7684\u6700\u5c0f\u6574\u6570 x \u7684\u503c\u662f\u591a\u5c11"
    assert are_alike(text, text.replace("\u503c", "\u6570\u503c"))
    assert not are_alike(text, text.replace("\u6ee1\u8db3", "\u4e0d\u6ee1\u8db3"))


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


def words(*tokens: str) -> Statement:
    return Statement(tokens, (), tuple(token for token in tokens if token.isdigit()))


def test_four_of_five_words_must_agree_in_order():
    same, other = named(8), named(2, 100)
    assert alike.same_problem(words(*same, *other), words(*same, *named(2, 200)))
    assert not alike.same_problem(words(*same[:7], *other, "x"), words(*same[:7], *named(3, 200)))
    assert not alike.same_problem(words(*same), words(*same, *named(5, 200)))
    assert alike.same_problem(words(*same), words(*same, *named(4, 200)))
    assert not alike.same_problem(words(*same), words(*same[4:], *same[:4]))
    assert not alike.same_problem(words(*same, *other), words(*same, *named(2, 200)), 0.9)


@pytest.mark.parametrize(
    ("mine", "theirs", "same"),
    [
        (("a",), (), True),
        (("I",), ("A",), True),
        (("x",), (), False),
        (("TARTAR",), (), False),
        (("*",), (), False),
        (("odd",), ("even",), False),
        (("odd",), (), True),
        (("odd", "fast"), ("odd",), True),
        (("not",), (), False),
        (("\u503c",), (), True),
        (("\\max",), ("\\min",), False),
        (("\\max",), (), True),
        (("\\sin",), (), False),
    ],
)
def test_what_may_come_and_go_in_a_gap(mine, theirs, same):
    one, other = (words(*named(10), *gap, *named(10, 50)) for gap in (mine, theirs))
    assert alike.same_problem(one, other) is same is alike.same_problem(other, one)
    at_the_end = [words(*named(20), *gap) for gap in (mine, theirs)]
    assert alike.same_problem(*at_the_end) is same
    at_the_start = [words(*gap, *named(20)) for gap in (mine, theirs)]
    assert alike.same_problem(*at_the_start) is same


def test_most_of_a_problem_must_stand_in_the_other_text():
    inner = words(*named(10))
    assert alike.part_found(inner, words("q", *named(8), "q")) == 0.8
    assert alike.part_found(inner, words("q", *named(7), *named(8, 300))) == 0.0
    assert alike.part_found(inner, words(*named(7))) == 0.0 and alike.part_found(inner, words(*named(8))) == 0.8
    assert alike.part_found(words(*named(9), "5"), words(*named(9))) == 0.0
    assert alike.part_found(words("5", "6", *named(8)), words("6", "5", *named(8))) == 0.0
    assert alike.part_found(words("TARTAR", *named(9)), words(*named(9))) == 0.0
    assert alike.part_found(words(*named(9), "not"), words(*named(9))) == 0.0
    assert alike.part_found(words(), words("q")) == 0.0


@pytest.mark.parametrize(
    ("blocks", "left"),
    [
        ([(0, 0, 3), (3, 10, 9)], [(3, 10, 9)]),
        ([(0, 0, 3), (3, 9, 9)], [(0, 0, 3), (3, 9, 9)]),
        ([(0, 0, 4), (4, 11, 9)], [(0, 0, 4), (4, 11, 9)]),
        ([(0, 0, 9), (9, 16, 3)], [(0, 0, 9)]),
        ([(0, 0, 9), (9, 15, 3)], [(0, 0, 9), (9, 15, 3)]),
        ([(0, 0, 9), (9, 16, 4)], [(0, 0, 9), (9, 16, 4)]),
        ([(0, 0, 1), (1, 20, 1), (2, 40, 9), (11, 60, 2)], [(2, 40, 9)]),
        ([(0, 0, 1)], [(0, 0, 1)]),
        ([], []),
    ],
)
def test_short_runs_far_away_do_not_belong_to_the_problem(blocks, left):
    assert alike._without_strays(blocks) == left
