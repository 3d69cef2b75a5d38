"""The stages that need no model, in order: what cannot be read, checked or trained on goes.

Files -> rows -> Decisions. Answers that no verifier can check and problems of evaluation sets
go before repeats are looked for, so that of several copies one stays that can be used.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from megatron_daro.reward.pool import RewardPool
from megatron_daro.workshop.curate.decisions import Decisions
from megatron_daro.workshop.curate.golds import Guess, drop_guessable, drop_unverifiable
from megatron_daro.workshop.curate.leaks import Conflicts, drop_equal, drop_leaks, drop_near
from megatron_daro.workshop.curate.rows import Row

ANSWER_FORMS = {"math": "\\boxed{{answer}}", "integer": "Answer: {answer}", "exact": "#### {answer}"}
"""Verifier -> how an answer is written for it."""


@dataclass(frozen=True, slots=True)
class Rules:
    """What is dropped. verifier: a key of ANSWER_FORMS, or "none". ngram: tokens of the run that makes an overlap.
    guesses: kinds of answers that a guess hits. largest_integer: of the kind small_integer."""

    conflicts: Conflicts = "drop"
    near: bool = True
    ngram: int = 13
    drop_overlaps: bool = False
    verifier: str = "math"
    workers: int = 2
    guesses: tuple[Guess, ...] = ()
    largest_integer: int = 10


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
    if rules.guesses:
        drop_guessable(rows, decisions, rules.guesses, rules.largest_integer)
        say(f"answers that a guess hits: {_left(decisions)}")
    return decisions, crowded


def _left(decisions: Decisions) -> str:
    return f"{decisions.count - len(decisions.dropped)} of {decisions.count} rows are left"
