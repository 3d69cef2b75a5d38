"""Problems of evaluation sets: found in other words and inside other text, not found with another number."""

import pytest

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
