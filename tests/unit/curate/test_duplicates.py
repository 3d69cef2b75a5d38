"""Equal and nearly equal problems: which row stays, and what happens to answers that differ."""

from __future__ import annotations

import random

from curated_rows import PLAIN

LONG = "A bag holds 12 red marbles and 5 blue ones. How many marbles does the bag hold in total?"
FORM = " The answer is in the form m/n. Please give m + n."


def test_the_first_of_equal_problems_stays(curate):
    found = curate((LONG, "17"), (LONG.upper().lower(), "17.0"), ("What is $1+1$?", "2"), (f"  {LONG}\n", "17"))
    assert found.dropped == {2: ("duplicate", 1), 4: ("duplicate", 1)}
    assert found.statistics["dropped"] == {"duplicate": 2}


def test_equal_problems_that_disagree_all_go(curate):
    found = curate(*((LONG, answer) for answer in ("17", "18", "17")), PLAIN)
    assert found.dropped == {1: ("conflict", 2), 2: ("conflict", 1), 3: ("conflict", 2)}


def test_answers_are_compared_by_value_and_alternatives_in_any_order(curate):
    same = [("27.0", "27"), ("\\dfrac{1}{2}", "0.5"), ("1,080", "1080"), ("$x+1$", "x + 1")]
    other = [("3", "-3"), ("1e999999", "1e999998")]
    rows = []
    for number, pair in enumerate([*same, *other]):
        rows += [(f"Find the value of w in task {number}.", answer) for answer in pair]
    rows += [("Find two values.", "1", "2"), ("Find two values.", "2", "1.0")]
    rows += [("Find all values.", "1", "2"), ("Find all values.", "1")]
    found = curate(*rows, options="--drop proof")
    first = 2 * len(same)
    expected = dict.fromkeys(range(2, first + 1, 2), "duplicate")
    expected |= dict.fromkeys(range(first + 1, first + 5), "conflict")
    assert found.reasons == expected | {first + 6: "duplicate", first + 7: "conflict", first + 8: "conflict"}


def test_another_form_of_the_answer_is_no_conflict(curate):
    found = curate((LONG, "17"), (LONG + FORM, "18"), (LONG + FORM, "18"))
    assert found.dropped == {2: ("duplicate_form", 1), 3: ("duplicate", 2)}


def test_nearly_equal_problems_need_the_same_numbers_and_answers(curate):
    found = curate(
        (LONG, "17"),
        (LONG.replace("bag", "box", 1), "17"),
        (LONG.replace("12", "13"), "17"),
        (LONG.replace("red", "green"), "99"),
    )
    assert found.dropped == {2: ("near_duplicate", 1)} and "box" in found.details[2]
    assert [note[:2] for note in found.notes] == [(4, "other_answer")]
    assert curate((LONG, "17"), (LONG.replace("bag", "box", 1), "17"), options="--drop proof").kept == [1, 2]


def test_what_is_a_copy_of_a_dropped_row_only_stays(curate):
    rows = [(LONG, "no number"), (LONG.replace("bag", "box"), "17"), (LONG, "17")]
    found = curate(*rows, options="--verifier integer")
    assert found.reasons == {1: "unverifiable", 3: "near_duplicate"} and found.dropped[3][1] == 2


def test_what_training_takes_for_the_same_problem_is_the_same(curate):
    found = curate(("Find the fi ves", "1"), ("Find the fives", "1"), ("find the fives!", "1"), options="--drop proof")
    assert found.dropped == {2: ("duplicate", 1)}
    found = curate(("$", "1"), ("?", "2"), ("$", "1"))  # without words: equal to its own text only
    assert found.dropped == {3: ("duplicate", 1)}


TEXT = "In a bag there are 12 red marbles and 5 blue ones. Find the sum of all odd numbers on the red marbles if x = 3."
FEW_WORDS = [
    TEXT.replace("Find", "Determine"),
    TEXT.replace("bag", "large box").replace("marbles", "stones"),
    TEXT.replace("all ", ""),
    TEXT.replace("odd numbers", "numbers"),
]
ANOTHER = [
    *(("12", "13"), ("odd", "even"), ("sum", "product"), ("x = 3", "y = 3"), ("x = 3", "x > 3")),
    *(("are 12", "are not 12"), ("and 5", "and 5 green, 2"), ("x = 3", "x = -3")),
]


def test_a_few_words_may_differ_but_not_what_makes_another_problem(curate):
    rows = [TEXT, *FEW_WORDS, *(TEXT.replace(*change) for change in ANOTHER)]
    found = curate(*((text, "1") for text in rows))
    assert found.dropped == dict.fromkeys(range(2, 2 + len(FEW_WORDS)), ("near_duplicate", 1))


def test_chinese_words_may_differ_and_its_negation_may_not(curate):
    text = "求满足 x > 5 的最小整数 x 的值是多少"
    rows = [text, text.replace("值", "数值"), text.replace("满足", "不满足")]
    assert curate(*((one, "6") for one in rows)).dropped == {2: ("near_duplicate", 1)}


def test_near_copies_are_found_among_many_problems(curate):
    """Also where they share a bucket with hundreds."""
    rng, words = random.Random(2), [f"word{chr(97 + i // 26)}{chr(97 + i % 26)}" for i in range(400)]
    base = [rng.sample(words, 20) for _ in range(200)]
    near = [[*row[:-2], "wordnew", "wordother"] for row in base]
    same = [[*words[:20], f"last{chr(97 + i // 26)}{chr(97 + i % 26)}"] for i in range(200)]
    found = curate(*((" ".join(row), "1") for row in [*base, *near, *same]))
    assert {(number, other) for number, (_, other) in found.dropped.items()} >= {(201 + i, 1 + i) for i in range(200)}
    assert len([number for number in found.dropped if number > 400]) == 199
    assert set(found.reasons.values()) == {"near_duplicate"}
