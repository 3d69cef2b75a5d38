"""Problems of evaluation sets: found in other words or inside other text, not with another number; what is compared."""

from dataclasses import replace

import numpy as np
import pytest
from made_words import named

from megatron_daro.workshop.curate import leaks
from megatron_daro.workshop.curate.leaks import drop_leaks
from megatron_daro.workshop.curate.rows import Decisions

HELD_OUT = [
    ("A train leaves the station at noon and travels 60 km per hour for 3 hours. How far does it go in total?", "180"),
    ("Compute $1-2+3-4+5- \\dots +99-100$.", "-50"),
    ("Determine the number of ways to arrange the letters of the word ELLIPSE.", "1260"),
    ('How many distinct arrangements of the letters in the word "monkey" are there?', "720"),
]
TRAIN = HELD_OUT[0][0]


@pytest.fixture
def found(rows_of):
    def run(*cases, **options):
        decisions = Decisions(len(cases))
        drop_leaks(rows_of(*cases), {"exam": rows_of(*HELD_OUT)}, decisions, **options)
        return decisions

    return run


@pytest.mark.parametrize(
    ("text", "answer", "held_out"),
    [
        (TRAIN, "180", "exam:1"),
        (TRAIN.replace("noon", "midday").replace("How far", "Determine how far"), "180", "exam:1"),
        ("Here is a task with 4 parts. " + TRAIN + " Give 2 reasons for it.", "7", "exam:1"),
        ("compute  \\(1-2+3-4+5-\\ldots+99-100\\)", "-50", "exam:2"),
        (HELD_OUT[3][0].replace("distinct", "different"), "720", "exam:4"),
    ],
)
def test_leaks_are_found(found, text, answer, held_out):
    decisions = found((text, answer))
    assert [(one.reason, one.other) for one in decisions.dropped.values()] == [("leak", held_out)]


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (TRAIN.replace("60", "70"), "210"),
        ("Compute $1-2+3-4+5- \\dots +97-98$.", "-49"),
        (HELD_OUT[2][0].replace("ELLIPSE", "TARTAR"), "90"),
        (HELD_OUT[3][0].replace("monkey", "basic"), "120"),
        ("How far is it?", "1"),
    ],
)
def test_other_problems_stay(found, text, answer):
    assert found((text, answer)).kept() == [0]


def test_a_long_run_of_words_is_noted_or_dropped(found):
    sibling = (TRAIN.replace("3 hours", "4 hours"), "240")
    decisions = found(sibling)
    assert [(note.reason, note.other) for note in decisions.notes_on_kept()] == [("overlap", "exam:1")]
    assert found(sibling, drop_overlaps=True).counts() == {"overlap": 1}
    assert found(sibling, ngram=30).note_counts() == {}


def test_a_run_that_many_rows_share_says_nothing(found):
    siblings = [(TRAIN.replace("3 hours", f"{i} hours"), str(60 * i)) for i in range(4, 15)]
    assert len(siblings) == 11 and found(*siblings).note_counts() == {}
    assert found(*siblings[:10]).note_counts() == {"overlap": 10}


def test_a_word_and_the_answer_differ_in_a_short_statement(found):
    decisions = found((HELD_OUT[3][0].replace("monkey", "basic"), "120"))
    assert [note.detail for note in decisions.notes_on_kept()] == ["a few words and the answer differ"]


def test_rows_dropped_before_are_not_looked_at(rows_of):
    decisions = Decisions(1)
    decisions.drop(0, "unverifiable")
    drop_leaks(rows_of(HELD_OUT[0]), {"exam": rows_of(*HELD_OUT)}, decisions)
    assert decisions.counts() == {"unverifiable": 1}


def test_sets_without_long_statements(rows_of):
    decisions = Decisions(2)
    drop_leaks(rows_of(("1+1", "2"), ("2+2", "4")), {"exam": rows_of(("1+1", "2"))}, decisions)
    assert decisions.kept() == [1]


def test_a_problem_shorter_than_any_run_is_a_leak_where_it_is_the_whole_statement(rows_of):
    decisions = Decisions(2)
    drop_leaks(rows_of(("Solve it.", "3"), ("Solve this.", "3")), {"exam": rows_of(("Solve it", "4"))}, decisions)
    assert {row: (one.reason, one.other) for row, one in decisions.dropped.items()} == {0: ("leak", "exam:1")}


def test_a_problem_in_few_words_in_common_is_a_leak_only_with_its_answer_or_in_a_long_text(rows_of):
    """From 25 tokens on, nine tenths of which agree, the answer does not matter."""

    def found(count: int, changed: int, answer: str) -> str:
        problem = " ".join(named(count))
        other = " ".join((*named(count - changed), *named(changed, 300)))
        decisions = Decisions(1)
        leaks.drop_leaks(rows_of((other, answer)), {"exam": rows_of((problem, "1"))}, decisions, ngram=99)
        notes = [note.detail for note in decisions.notes_on_kept()]
        return "leak" if decisions.dropped else notes[0] if notes else ""

    differ = "a few words and the answer differ"
    assert [found(25, 2, "2"), found(24, 2, "2"), found(24, 2, "1"), found(30, 4, "2"), found(30, 4, "1")] == [
        "leak", differ, "leak", differ, "leak",
    ]  # fmt: skip
    assert found(30, 3, "2") == "leak" and found(10, 3, "1") == ""


def postings(*pairs: tuple[int, int], count: int) -> leaks._Postings:
    grams, problems = (np.array(side) for side in zip(*pairs, strict=True))
    return leaks._Postings(grams.astype(np.uint64), problems.astype(np.int64), count)


def test_runs_of_more_than_forty_problems_say_nothing_unless_a_problem_has_no_others():
    shared = [(7, problem) for problem in range(41)]
    own = [(100 + i, 0) for i in range(3)] + [(200 + i, 1) for i in range(2)]
    left = postings(*shared, *own, count=41).rare()
    assert (7, 0) not in set(zip(left.grams.tolist(), left.problems.tolist(), strict=True))
    assert (7, 1) in set(zip(left.grams.tolist(), left.problems.tolist(), strict=True))
    few = postings(*[(7, problem) for problem in range(40)], *own, count=41).rare()
    assert len(few.grams) == 45 and len(leaks._Postings(few.grams[:0], few.problems[:0], 1).rare().grams) == 0


def test_candidates_have_a_fifth_of_a_problems_runs():
    index = postings(*[(i, 0) for i in range(10)], (3, 1), (3, 1), count=2)
    grams, rows = np.array([1, 2, 2, 3, 9], np.uint64), np.array([5, 5, 5, 6, 7])
    assert index.candidates(grams, rows, 0.2) == [(5, 0), (6, 1)]
    assert index.candidates(grams, rows, 0.0) == [(5, 0), (6, 0), (6, 1), (7, 0)]
    assert index.candidates(grams[:0], rows[:0], 0.0) == []
    assert index.frequency(np.array([3, 3, 3], np.uint64), np.array([1, 1, 2])).tolist() == [0, 0, 0, 2, 2, *[0] * 6]
    assert index.frequency(grams[:0], rows[:0]).tolist() == [0] * 11
    assert index.only(index.problems == 1).grams.tolist() == [3]


def test_a_held_out_problem_has_its_rows_number_and_no_drawing(rows_of):
    usable, broken = rows_of(("a b", "1"), ("c", "2"))
    drawn = replace(usable, prompt=replace(usable.prompt, text=" ".join(named(20)) + " [asy] x [/asy]"))
    found = leaks.held_out_of("exam", [replace(broken, unusable="x"), drawn])
    assert [(one.name, one.statement.tokens) for one in found] == [("exam:1", named(20))]
