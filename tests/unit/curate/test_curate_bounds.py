"""Where each rule of a curation begins and ends: the last text that still counts, and the first that does not."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from megatron_daro.config.sections import RewardSection
from megatron_daro.errors import ConfigError, DataError
from megatron_daro.reward.pool import RewardPool
from megatron_daro.types import Prompt
from megatron_daro.workshop.curate import alike, kinds, leaks, paraphrases, pass_rates
from megatron_daro.workshop.curate.kinds import is_proof, language_of, topic_of, words_of
from megatron_daro.workshop.curate.offline import Rules, decide, drop_unverifiable, guess_of
from megatron_daro.workshop.curate.paraphrases import similar
from megatron_daro.workshop.curate.rows import Decisions, Fields, read_all
from megatron_daro.workshop.curate.statements import (
    Statement,
    shared_lines,
    statement_of,
    tokens_of,
    without_figures,
    without_lines,
)
from megatron_daro.workshop.evaluate.measuring import MeasuredModel


def words(*tokens: str) -> Statement:
    return Statement(tokens, (), tuple(token for token in tokens if token.isdigit()))


def named(count: int, first: int = 0) -> tuple[str, ...]:
    """Words that differ."""
    return tuple("w" + chr(97 + i // 26) + chr(97 + i % 26) for i in range(first, first + count))


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


def test_a_bucket_of_48_is_compared_whole_and_of_49_in_part():
    whole, part = alike._within(np.arange(48)), alike._within(np.arange(49))
    assert len(whole) == 48 * 47 // 2 and len(part) > 49 * 48 // 2
    pairs = {tuple(pair) for pair in part.tolist()}
    assert {(i, 48) for i in (*range(24), *range(24, 48))} == {pair for pair in pairs if pair[1] == 48}
    large = {tuple(pair) for pair in alike._within(np.arange(100, 200)).tolist()}
    assert {e for e, later in large if later == 199} == {*range(100, 124), *range(175, 199)}
    assert all(earlier < later for earlier, later in large)


def test_pairs_agree_in_three_tenths_of_their_signatures():
    signatures = np.tile(np.arange(120, dtype=np.uint32), (3, 1))
    signatures[1, 36:] += 1000
    signatures[2, 35:] += 2000
    pairs, crowded = alike.similar_pairs(signatures, np.zeros(3, np.uint64))
    assert pairs.tolist() == [[0, 1]] and crowded == 0
    assert alike.similar_pairs(signatures[:1], np.zeros(1, np.uint64))[0].shape == (0, 2)
    full = np.tile(np.arange(120, dtype=np.uint32), (48, 1))
    assert alike.similar_pairs(full, np.zeros(48, np.uint64))[1] == 0
    assert alike.similar_pairs(np.concatenate([full, full[:1]]), np.zeros(49, np.uint64))[1] == alike.BANDS == 40


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


def test_another_form_is_a_repeat_only_where_the_problem_is_surely_the_same(rows_of):
    form = " The answer is in the form m/n. Please give m + n."
    problem = " ".join(named(20))
    close, far = (" ".join((*named(20 - changed), *named(changed, 300))) for changed in (2, 3))
    for text, reason in ((close, "duplicate_form"), (far, None)):
        decisions = Decisions(2)
        leaks.drop_near(rows_of((problem, "1"), (text + form, "2")), decisions)
        assert [one.reason for one in decisions.dropped.values()] == ([reason] if reason else [])
        assert len(decisions.notes) == (reason is None)


def test_only_eight_words_of_a_difference_are_shown(rows_of):
    first, second = rows_of((" ".join(named(9)), "1"), ("q r", "1"))
    assert leaks._difference(second, first) == f"here: {' '.join(named(8))}; there: q r"
    assert leaks._difference(first, first) == "here: -; there: -"


def test_equal_answers_of_any_size_are_one_value():
    assert leaks._one_key("1e100") == "1" + "0" * 100 and leaks._one_key("1e101") == "1E+101"
    assert leaks._one_key("0.50") == "1/2" and leaks._one_key("x + 1") == "x+1"


def test_votes_of_three_answers_count_the_two_most_frequent(rows_of):
    def kept(*answers: str) -> list[int]:
        decisions = Decisions(len(answers))
        leaks.drop_equal(rows_of(*(("a b", answer) for answer in answers)), decisions, "majority")
        return decisions.kept()

    assert kept("1", "2", "2", "3") == [1] and kept("1", "2", "2", "1", "3") == []
    decisions = Decisions(4)
    leaks.drop_equal(rows_of(*(("a b", answer) for answer in "1223")), decisions, "majority")
    assert [note.detail for note in decisions.notes] == ["2 of 4 rows have this answer"]
    assert decisions.dropped[0].other == "made.jsonl:2" and decisions.counts() == {"conflict": 2, "duplicate": 1}
    decisions = Decisions(2)
    leaks.drop_equal(rows_of(("a b", "1", "2"), ("a b", "3")), decisions, "drop")
    assert decisions.dropped[0].detail == "1 or 2 here, 3 there" and decisions.dropped[1].other == "made.jsonl:1"


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("\u00e9" * 18 + " \u0431\u0431", "ru"),
        ("\u00e9" * 19 + " \u0431\u0431", None),
        ("is the", "en"),
        ("is", None),
        ("der das", "de"),
        ("in is de la", None),  # as many of two languages
        ("\\alpha\\beta \u03b1", None),
        ("x \u03b1\u03b2\u03b3", "el"),
        ("The of $\\text{\u0431\u0431\u0431\u0431}$ and", "en"),
        ("12 + 3", None),
    ],
)
def test_a_language_is_told_by_a_tenth_of_the_letters_or_two_words(text, code):
    assert language_of(text) == code


def test_proofs_words_and_topics(rows_of):
    assert is_proof("What is it?", ["1", "proof"]) and not is_proof("What is it?", ["1"])
    assert not is_proof("Compute it.", ["1"]) and is_proof("Prove it.", ["1"])
    assert (words_of("\u7532\u4e59\u4e19"), words_of("\\text{ab} c \\mathrm{de}"), words_of("$ab cd$ ef")) == (2, 2, 1)
    texts = ("nothing here", "A circle and a prime and a radius", "\u5706\u5706 prime")
    assert [topic_of(row) for row in rows_of(*((text, "1") for text in texts))] == ["other", "geometry", "geometry"]
    (row,) = rows_of(("a circle", "1"))
    assert topic_of(replace(row, prompt=replace(row.prompt, category="mine"))) == "mine"


def test_a_sentence_of_as_many_words_as_are_allowed_stays(rows_of):
    decisions = Decisions(2)
    kinds.drop_sentences(rows_of(("a", "one two three"), ("b", "one two three four")), decisions, 3)
    assert decisions.kept() == [0] and decisions.dropped[1].detail == "4 words: one two three four"


def test_a_topic_may_have_all_of_one_and_which_go_follows_from_the_texts(rows_of):
    assert (kinds.largest_cap([3, 1], 0.75), kinds.largest_cap([3, 1], 0.7)) == (3, 2)
    assert kinds.largest_cap([5], 1.0) == 5 and kinds.largest_cap([5], 0.9) == 0
    rows = rows_of(*((f"a circle {i}", "1") for i in range(6)), *((f"a prime {i}", "1") for i in range(2)))
    decisions = Decisions(8)
    kinds.drop_surplus_topics(rows, decisions, 0.5)
    assert {one.detail for one in decisions.dropped.values()} == {"geometry: 6 of 8"}
    turned = Decisions(8)
    kinds.drop_surplus_topics(rows[::-1], turned, 0.5)
    assert {rows[i].prompt.text for i in decisions.kept()} == {rows[7 - i].prompt.text for i in turned.kept()}


def test_rules_have_their_usual_values():
    rules = Rules()
    assert (rules.conflicts, rules.near, rules.ngram, rules.drop_overlaps) == ("drop", True, 13, False)
    assert (rules.verifier, rules.workers, rules.guesses, rules.largest_integer) == ("math", 2, (), 10)
    assert (rules.proofs, rules.most_gold_words, rules.languages, rules.most_per_topic) == (True, None, (), None)
    assert (rules.paraphrases, rules.alike) == (False, 0.4)


class Matrix:
    """Of scipy.sparse.csr_matrix what is used: slices of rows, `.T`, `@`, and `tocoo` with the cells that are not 0."""

    def __init__(self, values):
        self.values = values

    @property
    def T(self):
        return Matrix(self.values.T)

    def __getitem__(self, rows):
        return Matrix(self.values[rows])

    def __matmul__(self, other):
        return Matrix(self.values @ other.values)

    def tocoo(self):
        row, col = np.nonzero(self.values)
        return SimpleNamespace(row=row, col=col, data=self.values[row, col])


class Counting:
    """In the place of TfidfVectorizer: counts of words, each row of length 1 (its `norm="l2"`), all words alike."""

    def fit_transform(self, texts):
        words = {word: i for i, word in enumerate(dict.fromkeys(" ".join(texts).split()))}
        counts = np.zeros((len(texts), len(words)))
        for row, text in enumerate(texts):
            for word in text.split():
                counts[row, words[word]] += 1
        return Matrix(counts / np.maximum(np.linalg.norm(counts, axis=1, keepdims=True), 1e-9))


def test_each_stage_says_what_is_left(rows_of, monkeypatch):
    monkeypatch.setattr(paraphrases, "_vectorizer", Counting)
    rows = rows_of(
        ("What is $2+2$ in total?", "4"), ("What is $2 + 2$ in total", "4"), ("Is 3 a circle?", "yes"),
        ("Compute the square of 17 circles of radius r", "289"), ("How many primes are there?", "x"),
        ("What remains is 7 of all primes?", "700"), ("broken", "1"),
    )  # fmt: skip
    rows[6] = replace(rows[6], unusable="no answer")
    said: list[str] = []
    rules = Rules(
        verifier="exact", guesses=("yes_no",), paraphrases=True, most_per_topic=0.9, workers=1, drop_overlaps=True
    )
    sets = {"exam": rows_of(("Compute the square of 17 circles of radius r", "289"))}
    decisions, crowded = decide(rows, sets, rules, said.append)
    assert said == [
        "7 rows read, 1 unusable",
        "problems that ask for a proof: 6 of 7 rows are left",
        "answers checked by the verifier exact: 6 of 7 rows are left",
        "compared with 1 evaluation sets: 5 of 7 rows are left",
        "equal problems: 4 of 7 rows are left",
        "nearly equal problems: 4 of 7 rows are left",
        "the same in other words: 4 of 7 rows are left",
        "answers that a guess hits: 3 of 7 rows are left",
        "topics with more than their share: 3 of 7 rows are left",
    ]
    assert crowded == 0 and decisions.dropped[6].detail == "no answer"
    said.clear()
    decide(rows, {}, Rules(verifier="none", proofs=False, near=False), said.append)
    assert said == ["7 rows read, 1 unusable", "equal problems: 5 of 7 rows are left"]


def test_a_gold_that_is_not_equal_to_itself_is_named(rows_of):
    rows = rows_of(("a", "7"), ("b", "8", "x y"))
    decisions = Decisions(2)
    with RewardPool("exact", workers=0) as pool:
        drop_unverifiable(rows, decisions, pool, "{answer}")
    assert decisions.dropped[0].detail == "no_answer: 7" and decisions.dropped[1].detail == "no_answer: 8"


def test_guesses_at_their_bounds():
    assert guess_of("B", "(A) 1 (B) 2", 1) == "choice" and guess_of("b", "(A) 1 (B) 2", 1) is None
    assert guess_of("(b)", "", 1) == "choice" and guess_of("(k)", "", 1) is None and guess_of("B", "", 1) is None
    assert guess_of("+1", "", 1) == guess_of("-1", "", 1) == "small_integer" and guess_of("2", "", 1) is None
    assert guess_of("false.", "", 1) == "true_false" and guess_of("NO", "", 1) == "yes_no"


def test_paraphrases_without_scikit_learn_are_refused(monkeypatch, rows_of):
    monkeypatch.setitem(sys.modules, "sklearn", None)
    monkeypatch.setitem(sys.modules, "sklearn.feature_extraction.text", None)
    with pytest.raises(ConfigError, match=r"--paraphrases: scikit-learn is not installed; .*\[curate\]"):
        list(similar(rows_of(("a", "1"), ("b", "1")), 0.4))


def test_of_rows_that_say_the_same_the_earliest_stays(monkeypatch, rows_of):
    monkeypatch.setattr(paraphrases, "_vectorizer", Counting)
    monkeypatch.setattr(paraphrases, "_AT_ONCE", 2)
    text = "red dogs run fast"
    rows = rows_of((text, "9"), (text, "1"), (text, "2"), (text + " today", "1.0"), (text, "1"), ("cats", "1"))
    decisions = Decisions(6)
    decisions.drop(0, "leak")
    paraphrases.drop_paraphrases(rows, decisions)
    assert {row: (one.reason, one.detail, one.other) for row, one in decisions.dropped.items() if row} == {
        3: ("paraphrase", "cosine 0.89", "made.jsonl:2"),
        4: ("paraphrase", "cosine 1.00", "made.jsonl:2"),
    }
    assert paraphrases.ALIKE == 0.4


def test_paraphrases_come_in_order_of_the_later_and_best_first(rows_of, monkeypatch):
    monkeypatch.setattr(paraphrases, "_vectorizer", Counting)
    texts = ["red dogs run fast 3", "red dogs run slowly 3", "red dogs run fast today 3", "red dogs run fast 4"]
    rows = rows_of(*((text, "1") for text in texts))
    found = list(similar(rows, 0.3))
    assert [(earlier, later) for earlier, later, _ in found] == [(0, 1), (0, 2), (1, 2)] and found[1][2] > found[2][2]
    assert list(similar(rows[:1], 0.0)) == [] and [pair[:2] for pair in similar(rows, found[1][2])] == [(0, 2)]
    for one, other in (("odd", "even"), ("not red", "red")):
        assert not list(similar(rows_of((f"{one} dogs run", "1"), (f"{other} dogs run", "1")), 0.1))
    assert list(similar(rows_of(("odd dogs run", "1"), ("dogs run", "1")), 0.1))


def test_the_form_of_an_answer_is_split_off_a_problem_of_eight_tokens():
    form = "Please give " + " ".join(named(58))
    assert statement_of(" ".join(named(8)) + " " + form).tokens == named(8)
    assert len(statement_of(" ".join(named(7)) + " " + form).form) == 0
    assert statement_of(" ".join(named(8)) + " " + form + " wz").form == ()


def test_drawings_go_where_sixteen_words_are_left():
    drawing = " [asy] x [/asy]"
    assert "asy" not in without_figures(" ".join(named(16)) + drawing)
    assert "asy" in without_figures(" ".join(named(15)) + drawing)


def test_lines_are_shared_by_ten_problems_and_a_fifth():
    texts = [f"Do it.\nproblem {i}\n" for i in range(10)]
    assert shared_lines(texts) == {"Do it."} and shared_lines(texts[:9]) == frozenset()
    single = [f"word {i}" for i in range(40)]
    assert shared_lines(texts + single) == {"Do it."} and shared_lines([*texts, *single, "x"]) == frozenset()
    assert shared_lines(["Do it."] * 10) == frozenset() and shared_lines(["Do it.\n\nDo it."] * 10) == {"Do it."}
    assert without_lines("a\nb", frozenset()) == "a\nb" and without_lines(" a \nb", frozenset({"a"})) == "b"


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("ABCDE ABCDEF \u00c9A", ("A", "B", "C", "D", "E", "ABCDEF", "\u00e9a")),
        (".5 .. 0.5", ("0.5", "0.5")),
        ("twenty-one Ninety nine thousand", ("21", "99", "1000")),
        ("a\\colon b", ("a", "b")),
        ("sin max most percent", ("\\sin", "\\max", "\\max", "%")),
        ("\\frac{1}{\\frac{2}{3}}", ("1", "/", "2", "/", "3")),
        ("\\frac12", ("1", "/", "2")),
        ("x\\,y a\\;b c~d e\\!f", ("xy", "a", "b", "c", "d", "ef")),
        ("60^{\\circ} 30\\degree", ("60", "degrees", "30", "degrees")),
        ("1,000,000 1,00", ("1000000", "1", "00")),
        ("A man and a", ("a", "man", "and", "a")),
        ("A + B", ("A", "+", "B")),
        ("a well-known f''", ("a", "well", "known", "f")),
        ("5 \\over 6", ("5", "/", "6")),
        ("\\mathbb{R}^{n}", ("R", "^", "n")),
        ("x! y !", ("x", "!", "y")),
        ("\u7532\u4e59", ("\u7532", "\u4e59")),
    ],
)
def test_the_tokens_of_a_text(text, tokens):
    assert tokens_of(text) == tokens


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        ("Example 12: a b", "a b"),
        ("(5 points) a b", "a b"),
        ("3) a b", "a b"),
        ("3. 5 b", "3 5 b"),
        ("1234. a", "1234 a"),
    ],
)
def test_the_number_of_a_problem_is_no_part_of_it(text, plain):
    assert statement_of(text).tokens == tuple(plain.split())


def test_files_are_named_by_the_ends_of_their_paths(tmp_path):
    paths = [tmp_path / name for name in ("a/x/d.jsonl", "b/x/d.jsonl", "e.jsonl")]
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"problem": "a b", "answer": "1", "level": [1, 2.0]}) + "\n")
    rows, shared = read_all(paths, Fields(keep=("level", "none")))
    assert [row.place for row in rows] == [
        "a/x/d.jsonl:1",
        "b/x/d.jsonl:1",
        f"{tmp_path.parent.name}/{tmp_path.name}/e.jsonl:1",
    ] and not shared
    assert json.loads(rows[0].kept["level"])[0] == 1 and rows[0].kept["none"] == "null"
    with pytest.raises(DataError, match="no file given"):
        read_all([], Fields())
    (tmp_path / "e.jsonl").write_text(json.dumps({"q": "a", "r": "1"}) + "\n")
    with pytest.raises(
        DataError, match=r"no usable row among 1: .*; the fields are q, r: name two with --problem-field"
    ):
        read_all(paths[2:], Fields())


def test_the_books_add_up_in_the_order_of_the_stages():
    decisions = Decisions(4)
    for row, reason in ((3, "topic"), (0, "leak"), (1, "proof")):
        decisions.drop(row, reason)
    decisions.note(2, "overlap", "", "b")
    decisions.note(2, "majority")
    decisions.note(2, "overlap", "", "a")
    decisions.note(0, "overlap")
    assert list(decisions.counts().items()) == [("proof", 1), ("leak", 1), ("topic", 1)] and decisions.kept() == [2]
    assert [(n.reason, n.other) for n in decisions.notes_on_kept()] == [
        ("majority", ""),
        ("overlap", "a"),
        ("overlap", "b"),
    ]
    assert decisions.note_counts() == {"overlap": 2, "majority": 1}
    with pytest.raises(ValueError, match="row -1 of 4 cannot be dropped as 'leak'"):
        decisions.drop(-1, "leak")


MODEL = MeasuredModel(Path("/m/base"), {"served": {"weight_version": "3"}}, ("http://127.0.0.1:1",))


@pytest.fixture
def settings(monkeypatch):
    """What a measurement is asked for."""
    given: list[dict[str, object]] = []

    def configuration(model, sets, out, *, base, overrides, source):
        (one,) = sets
        given.append({"set": one, "out": out, "base": base, "overrides": overrides, "source": source})

    monkeypatch.setattr(pass_rates.measuring, "configuration", configuration)
    return given


@pytest.mark.parametrize(("template", "temperature"), [("chat", 0.0), ("data", 0.7)])
def test_a_model_guesses_in_its_own_template_and_samples_in_the_given(settings, template, temperature):
    overrides = ("data.template=x", "engine.seed=1", "rollout.max_response_tokens=5", "rollout.other=1")
    sampling = pass_rates.Sampling(4, temperature, 0.9, template, "integer", overrides)
    pass_rates.guessing(MODEL, Path("p"), Path("o"), sampling, 3)
    pass_rates.configuration(MODEL, Path("p"), Path("o"), sampling)
    guess, sample = settings
    one = guess["set"]
    assert (one.name, one.path, one.rollouts_per_prompt, one.temperature, one.top_p) == (
        "guess", Path("p"), 3, temperature or 1.0, 0.9,
    )  # fmt: skip
    assert one.drop_unusable and guess["out"] == Path("o") and guess["source"] == sample["source"] == "curate"
    assert guess["overrides"] == ["engine.seed=1", "rollout.other=1", "rollout.max_response_tokens=64"]
    assert guess["base"]["reward"] == {"verifier": "integer", "strict": False}
    data = guess["base"]["data"]
    assert (data["train"], data["max_prompt_tokens"]) == (["p"], 2048)
    assert (data["prompt_template"], data["template"].endswith("\nAnswer:")) == (
        ("chat", False) if template == "chat" else ("plain", True)
    )
    one = sample["set"]
    assert (one.name, one.rollouts_per_prompt, one.temperature, one.top_p, one.template, one.drop_unusable) == (
        "curate", 4, temperature, 0.9, template, True,
    )  # fmt: skip
    assert sample["base"] == {"reward": {"verifier": "integer"}} and sample["overrides"] == overrides


@pytest.mark.parametrize(("version", "known"), [("3", False), ("default", True), ("", True), (None, True)])
def test_weights_of_servers_are_known_where_they_were_never_changed(monkeypatch, version, known):
    monkeypatch.setattr(pass_rates, "weights_digest", lambda path: f"digest of {path.name}")
    one = SimpleNamespace(rollouts_per_prompt=4, template="chat", temperature=1.0, top_p=0.9)
    config = SimpleNamespace(
        data=SimpleNamespace(eval=(one,)),
        rollout=SimpleNamespace(max_response_tokens=7),
        reward=RewardSection(verifier="exact", strict=False),
        engine=SimpleNamespace(seed=5),
    )
    served = {} if version is None else {"served": {"weight_version": version}}
    asked = pass_rates._asked(config, MeasuredModel(Path("/m/base"), served))  # type: ignore[arg-type]
    assert asked == pass_rates.Asked(
        4, "base", "digest of base" if known else "",
        {"template": "chat", "temperature": 1.0, "top_p": 0.9, "max_response_tokens": 7, "verifier": "exact",
         "strict": False, "seed": 5},
    )  # fmt: skip


def test_a_right_guess_is_enough_to_drop_a_row(rows_of):
    rows = rows_of(("a", "1"), ("b", "2"), ("c", "3"))
    decisions = Decisions(3)
    pass_rates.drop_guessed(rows, decisions, [(rows[0].prompt, 1), (rows[1].prompt, 0)], 8)
    assert {row: one.detail for row, one in decisions.dropped.items()} == {0: "1 of 8 guesses were right"}


def test_nothing_asked_has_no_mean_and_a_range_may_be_a_point():
    asked = pass_rates.Asked(2, "base", "", {})
    assert pass_rates.summary_of([], asked)["mean"] is None
    prompt = Prompt(id="", answer="1", source="s", text="a")
    assert pass_rates.summary_of([(prompt, 1), (prompt, 2)], asked)["mean"] == 0.75
    assert pass_rates.read_range("0.5:0.5") == (0.5, 0.5) and pass_rates.read_range(":") == (0.0, 1.0)
    with pytest.raises(ConfigError, match="got 'a'; allowed: LOW:HIGH, both from 0 to 1"):
        pass_rates.read_range("a")
