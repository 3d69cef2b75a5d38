"""What to tell people when answers carry no signal: verdicts by reason, two answers to look at, and when to warn.

The sampler's and the controller's groups -> text for an error or a warning. Pure: no clock, no files. Answers are text
of unknown origin: they are cut and made safe here. It decides nothing about training.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_daro.observe.logs import safe_text
from megatron_daro.types import Group, StepBatch, Verdict

NO_ANSWER = "no_answer"

PATIENCE = 3
"""Steps in a row without signal before a warning."""

_SHOWN_CHARACTERS = 160


def describe(groups: Sequence[Group]) -> str:
    """Say how the answers were judged, `no_answer` first, and show two of them, in one line for the end of a
    message."""
    verdicts = [verdict for group in groups for verdict in group.verdicts]
    if not verdicts:
        return "No answer was verified."
    counts = Counter(verdict.reason for verdict in verdicts)
    reasons = sorted(counts, key=lambda reason: (reason != NO_ANSWER, -counts[reason], reason))
    reason_counts = ", ".join(f"{safe_text(reason, 40, one_line=True)} {counts[reason]}" for reason in reasons)
    samples = "; ".join(_samples(groups, reasons))
    return f"Verdicts of {len(verdicts)} answers: {reason_counts}. For example {samples}."


def _samples(groups: Sequence[Group], reasons: Sequence[str]) -> list[str]:
    """Return two answers: of the two most telling reasons or, if there is only one reason, of two problems."""
    pairs = [
        (group, rollout.text, verdict)
        for group in groups
        for rollout, verdict in zip(group.rollouts, group.verdicts, strict=True)
    ]
    first = next(pair for pair in pairs if pair[2].reason == reasons[0])
    others = [pair for pair in pairs if pair is not first]
    rank = {reason: number for number, reason in enumerate((*reasons[1:], reasons[0]))}
    others.sort(key=lambda pair: (rank[pair[2].reason], pair[0] is first[0]))
    return [_sample(*pair) for pair in [first, *others[:1]]]


def _sample(group: Group, text: str, verdict: Verdict) -> str:
    """Show one answer by its end, where a verifier looks."""
    shown = safe_text(text[-_SHOWN_CHARACTERS:], 2 * _SHOWN_CHARACTERS, one_line=True)
    cut = "..." if len(text) > _SHOWN_CHARACTERS else ""
    prompt, gold = (safe_text(value, 80, one_line=True) for value in (group.prompt.id, group.prompt.answer))
    return f"{safe_text(verdict.reason, 40, one_line=True)}: prompt {prompt} (answer {gold!r}) got '{cut}{shown}'"


@dataclass(slots=True)
class SignalWatch:
    """Warns when for several steps in a row no group has both right and wrong answers and no answer has an advantage.
    Only a filter would end the run for that. What ranks learn from besides, such as a critic or a KL, is not looked at.

    Not part of a checkpoint: a resumed run counts anew.
    """

    _silent: int = 0

    def observe(self, step: int, groups: Sequence[Group], columns: StepBatch) -> str | None:
        """Take in one step. Args: columns: of its groups, with the advantages that the driver made.

        Returns:
            A warning at the 3rd step in a row without signal, the 6th, the 12th...; None otherwise.
        """
        wrong = sum(group.bin == 0 for group in groups)
        right = sum(0 < group.bin == len(group.verdicts) for group in groups)
        of_tokens_R = columns.token_advantages_R
        advantages = columns.advantages_N if of_tokens_R is None else of_tokens_R
        self._silent = self._silent + 1 if wrong + right == len(groups) and not advantages.any() else 0
        rounds, rest = divmod(self._silent, PATIENCE)
        if rest or rounds.bit_count() != 1:
            return None
        return (
            f"step {step}: for {self._silent} steps no group had both right and wrong answers (now {right} all right, "
            f"{wrong} all wrong), nor was any answer better rewarded than others. {describe(groups)} Use prompts the "
            "model solves sometimes; look at the samples of `megatron-daro report`, and at reward.verifier if right "
            "answers are judged wrong"
        )
