"""The stages that need no model, in order: they drop rows that cannot be read, checked or trained on.

Rows whose answers cannot be checked and problems of evaluation sets are dropped before repeats are looked for, so that
of several copies a usable one is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from megatron_daro.workshop.curate.decisions import Decisions
from megatron_daro.workshop.curate.duplicates import drop_equal, drop_near
from megatron_daro.workshop.curate.kinds import (
    GUESSES,
    drop_free_text,
    drop_guessable,
    drop_proofs,
    drop_unverifiable,
)
from megatron_daro.workshop.curate.leaks import drop_leaks
from megatron_daro.workshop.curate.rows import Row

OPTIONAL = ("proof", "free_text", "overlap", "near_duplicate", *GUESSES)
"""Reasons for which rows are dropped only if `drop` names them."""


def decide(
    rows: Sequence[Row],
    sets: Mapping[str, Sequence[Row]],
    verifier: str,
    drop: Collection[str],
    say: Callable[[str], None],
) -> tuple[Decisions, int]:
    """Decide about every row.

    Args:
        rows: every row that was read.
        sets: evaluation sets by name, as read; if there are none, this stage is left out.
        verifier: must be able to check the answers; "none": they are not checked.
        drop: names of OPTIONAL.
        say: called with a line about each stage as it ends.

    Returns:
        What happened to each row; and how many groups of candidates were too full to compare all of their pairs.
    """
    decisions, crowded = Decisions(len(rows)), 0

    def ended(stage: str) -> None:
        say(f"{stage}: {decisions.count - len(decisions.dropped)} of {decisions.count} rows are left")

    for index, row in enumerate(rows):
        if row.unusable:
            decisions.drop(index, "unusable", row.unusable)
    ended("rows that cannot be used")
    if "proof" in drop:
        drop_proofs(rows, decisions)
        ended("problems that ask for a proof")
    if "free_text" in drop:
        drop_free_text(rows, decisions)
        ended("sentences as answers")
    if verifier != "none":
        drop_unverifiable(rows, decisions, verifier)
        ended(f"answers checked by the verifier {verifier}")
    if sets:
        drop_leaks(rows, sets, decisions, overlaps="overlap" in drop)
        ended(f"compared with {len(sets)} evaluation sets")
    drop_equal(rows, decisions)
    ended("equal problems")
    if "near_duplicate" in drop:
        crowded = drop_near(rows, decisions)
        ended("nearly equal problems")
    if guesses := [kind for kind in GUESSES if kind in drop]:
        drop_guessable(rows, decisions, guesses)
        ended("answers that a guess hits")
    return decisions, crowded
