"""The stages that need no model, in order: what cannot be read, checked or trained on goes.

Files -> rows -> Decisions. Answers that no verifier can check and problems of evaluation sets go before repeats are
looked for, so that of several copies one stays that can be used.

A gold is usable if the verifier reads it as an answer and finds it equal to itself, within its limits of time and
memory; the verifier is the one that training will use. Golds that a guess hits are noted.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from megatron_daro.reward.normal_form import canonical
from megatron_daro.reward.pool import RewardPool
from megatron_daro.workshop.curate.kinds import drop_languages, drop_proofs, drop_sentences, drop_surplus_topics
from megatron_daro.workshop.curate.leaks import Conflicts, drop_equal, drop_leaks, drop_near
from megatron_daro.workshop.curate.paraphrases import ALIKE, drop_paraphrases
from megatron_daro.workshop.curate.rows import Decisions, Row

Guess = Literal["choice", "yes_no", "true_false", "small_integer"]
GUESSES: tuple[Guess, ...] = ("choice", "yes_no", "true_false", "small_integer")

_WRAPPER = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mbox|rm|bf)\s*|[{}()\s.:*]|\\[()\[\]]")
_CHOICE = re.compile(r"[A-Ja-j]")
_OPTIONS = re.compile(r"\(\s*A\s*\).*\(\s*B\s*\)|\bA\s*[.):].*\bB\s*[.):]|\\text(?:bf)?\s*\{\s*\(?A\)?", re.DOTALL)
_WHOLE = re.compile(r"[-+]?\d+")


def drop_unverifiable(rows: Sequence[Row], decisions: Decisions, pool: RewardPool, form: str) -> None:
    r"""Drop rows whose gold the verifier cannot read, or does not find equal to itself.

    Args:
        rows: every row that was read.
        decisions: what was dropped so far; written to.
        pool: the verifier.
        form: how an answer is written for it, with {answer} in it: \boxed{...} for math.
    """
    kept = decisions.kept()
    answers = [(row, answer) for row in kept for answer in rows[row].prompt.answers]
    distinct = list(dict.fromkeys(answer for _, answer in answers))
    problems = {distinct[i]: reason for i, reason in pool.check_golds(distinct).items()}
    usable = [gold for gold in distinct if gold not in problems]
    verdicts = pool.score([(form.replace("{answer}", gold), gold) for gold in usable])
    problems |= {gold: v.reason for gold, v in zip(usable, verdicts, strict=True) if not v.correct}
    for row in kept:
        unverifiable = [(answer, problems[answer]) for answer in rows[row].prompt.answers if answer in problems]
        if unverifiable:
            decisions.drop(row, "unverifiable", f"{unverifiable[0][1]}: {unverifiable[0][0]}")


def drop_guessable(rows: Sequence[Row], decisions: Decisions, kinds: Sequence[Guess], largest_integer: int) -> None:
    """Drop rows whose gold is one of a few that anybody would try.

    Args:
        rows: every row that was read.
        decisions: what was dropped so far; written to.
        kinds: which answers count.
        largest_integer: small_integer: whole numbers from its negative to it.
    """
    for row in decisions.kept():
        prompt = rows[row].prompt
        for answer in prompt.answers:
            kind = guess_of(answer, prompt.statement, largest_integer)
            if kind in kinds:
                decisions.drop(row, "guessable", f"{kind}: {answer}")
                break


def guess_of(answer: str, statement: str, largest_integer: int) -> Guess | None:
    """Return what kind of guess hits an answer; None: none does.

    A letter is a choice where it stands in brackets or a text wrapper, or the statement lists options: elsewhere it is
    a symbol.
    """
    text = canonical(answer)
    plain = _WRAPPER.sub("", text)
    word = plain.lower()
    if word in ("yes", "no"):
        return "yes_no"
    if word in ("true", "false"):
        return "true_false"
    if _CHOICE.fullmatch(plain) and (plain != text or (plain.isupper() and _OPTIONS.search(statement))):
        return "choice"
    if _WHOLE.fullmatch(text) and abs(int(text[:20])) <= largest_integer:
        return "small_integer"
    return None


ANSWER_FORMS = {"math": "\\boxed{{answer}}", "integer": "Answer: {answer}", "exact": "#### {answer}"}
"""Verifier -> how an answer is written for it."""


@dataclass(frozen=True, slots=True)
class Rules:
    """What is dropped. verifier: a key of ANSWER_FORMS, or "none". ngram: tokens of the run that makes an overlap.
    guesses: kinds of answers that a guess hits. largest_integer: of the kind small_integer. proofs: whether problems
    that ask for one go. most_gold_words, languages, most_per_topic: as kinds.py has them; None and (): all stay.
    paraphrases: whether problems go that a kept one says in other words; alike: the least cosine."""

    conflicts: Conflicts = "drop"
    near: bool = True
    ngram: int = 13
    drop_overlaps: bool = False
    verifier: str = "math"
    workers: int = 2
    guesses: tuple[Guess, ...] = ()
    largest_integer: int = 10
    proofs: bool = True
    most_gold_words: int | None = None
    languages: tuple[str, ...] = ()
    most_per_topic: float | None = None
    paraphrases: bool = False
    alike: float = ALIKE


def decide(
    rows: Sequence[Row], sets: Mapping[str, Sequence[Row]], rules: Rules, say: Callable[[str], None]
) -> tuple[Decisions, int]:
    """Drop what the rules say.

    Args:
        rows: every row that was read.
        sets: evaluation sets by name, as read; none: nothing is compared with them.
        rules: what is dropped.
        say: told of each stage as it ends.

    Returns:
        What happened to each row; and how many groups of candidates were too full to compare all of their pairs.
    """
    decisions = Decisions(len(rows))
    for index, row in enumerate(rows):
        if row.unusable:
            decisions.drop(index, "unusable", row.unusable)
    say(f"{len(rows)} rows read, {len(decisions.dropped)} unusable")
    _drop_kinds(rows, decisions, rules, say)
    if rules.verifier != "none":
        with RewardPool(rules.verifier, workers=0 if rules.verifier != "math" else rules.workers) as pool:
            drop_unverifiable(rows, decisions, pool, ANSWER_FORMS[rules.verifier])
        say(f"answers checked by the verifier {rules.verifier}: {_left(decisions)}")
    if sets:
        drop_leaks(rows, sets, decisions, ngram=rules.ngram, drop_overlaps=rules.drop_overlaps)
        say(f"compared with {len(sets)} evaluation sets: {_left(decisions)}")
    drop_equal(rows, decisions, rules.conflicts)
    say(f"equal problems: {_left(decisions)}")
    crowded = drop_near(rows, decisions) if rules.near else 0
    if rules.near:
        say(f"nearly equal problems: {_left(decisions)}")
    if rules.paraphrases:
        drop_paraphrases(rows, decisions, rules.alike)
        say(f"the same in other words: {_left(decisions)}")
    if rules.guesses:
        drop_guessable(rows, decisions, rules.guesses, rules.largest_integer)
        say(f"answers that a guess hits: {_left(decisions)}")
    if rules.most_per_topic is not None:
        drop_surplus_topics(rows, decisions, rules.most_per_topic)
        say(f"topics with more than their share: {_left(decisions)}")
    return decisions, crowded


def _drop_kinds(rows: Sequence[Row], decisions: Decisions, rules: Rules, say: Callable[[str], None]) -> None:
    """Drop problems of kinds that are not wanted."""
    if rules.proofs:
        drop_proofs(rows, decisions)
        say(f"problems that ask for a proof: {_left(decisions)}")
    if rules.most_gold_words is not None:
        drop_sentences(rows, decisions, rules.most_gold_words)
        say(f"sentences as answers: {_left(decisions)}")
    if rules.languages:
        drop_languages(rows, decisions, rules.languages)
        say(f"other languages: {_left(decisions)}")


def _left(decisions: Decisions) -> str:
    return f"{decisions.count - len(decisions.dropped)} of {decisions.count} rows are left"
