"""One sequence of tokens in the making: what the model was shown and what it said, as aligned columns.

A conversation has one, or several where an agent rewrites its history or branches off (environment.py). An engine's
answer comes in, with the tokens that were shown before it; `joined` puts all contexts into one rollout.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from megatron_daro.types import Rollout, TurnReport, joined_spans


@dataclass(slots=True, eq=False)
class Context:
    """base: the rollout's prompt; empty in all contexts but the first. rollout: all up to the last answer; None before
    the first. observed: tokens shown since. turns: numbers of (observed, generated) tokens of each answer. reports: of
    each answer. before: what is reported before the first answer. busy: whether an answer is under way.
    """

    base: tuple[int, ...] = ()
    rollout: Rollout | None = None
    observed: list[int] = field(default_factory=list)
    turns: list[tuple[int, int]] = field(default_factory=list)
    reports: list[TurnReport] = field(default_factory=list)
    before: TurnReport = field(default_factory=TurnReport)
    busy: bool = False

    @property
    def tokens(self) -> np.ndarray:
        """All token ids, int32."""
        said = self.base if self.rollout is None else self.rollout.tokens
        return np.concatenate([np.asarray(said, dtype=np.int32), np.array(self.observed, dtype=np.int32)])

    @property
    def length(self) -> int:
        """Number of tokens after the prompt."""
        return (0 if self.rollout is None else self.rollout.response_length) + len(self.observed)

    def take(self, answer: Rollout) -> None:
        """Add an answer, with the tokens that were observed before it as its untrained beginning."""
        generated, count = answer.response_length, len(self.observed)
        if not generated:
            return
        version, first = answer.version_spans[0]
        later = replace(
            answer,
            prompt_length=answer.prompt_length - count,
            version_spans=((version, first + count), *answer.version_spans[1:]),
            **_padded(answer, count, 0),
        )
        self.rollout = later if self.rollout is None else self.rollout.extended(later, "")
        self.turns.append((count, generated))
        self.reports.append(self.before)
        self.before, self.observed = TurnReport(), []

    def add(self, more: TurnReport) -> None:
        """Add to the report of the last answer, or of the first if there is none yet."""
        old = self.reports[-1] if self.reports else self.before
        new = TurnReport(
            old.reward + more.reward,
            old.tool_calls + more.tool_calls,
            old.tool_errors + more.tool_errors,
            old.seconds + more.seconds,
        )
        if self.reports:
            self.reports[-1] = new
        else:
            self.before = new

    def whole(self) -> Rollout:
        """Return the rollout with what was observed after the last answer. This gets the last answer's weight version,
        since no weights have read it."""
        assert self.rollout is not None
        whole, count = self.rollout, len(self.observed)
        if not count:
            return whole
        version, last = whole.version_spans[-1]
        return replace(
            whole,
            tokens=np.concatenate([whole.tokens, np.array(self.observed, dtype=np.int32)]),
            version_spans=(*whole.version_spans[:-1], (version, last + count)),
            routed_experts=whole.routed_experts and whole.routed_experts.longer(count),
            **_padded(whole, 0, count),
        )

    @property
    def whole_turns(self) -> list[tuple[int, int]]:
        """`turns`, and what was observed after the last answer."""
        return [*self.turns, *([(len(self.observed), 0)] if self.observed else [])]


def _padded(rollout: Rollout, before: int, after: int) -> dict[str, Any]:
    """Return the rollout's response columns with that many observed tokens before and after them."""
    return {name: np.pad(column, (before, after)) for name, column in rollout.response_columns.items()}


def joined(contexts: Sequence[Context]) -> Rollout:
    """Return all contexts as one rollout, in order. Experts that an engine chose are kept only if there is a single
    one.

    Args:
        contexts: the conversation's first one, and those in which the model said something; at least one of these.
    """
    base, said = contexts[0].base, [context.whole() for context in contexts if context.rollout is not None]
    alone = said[0]
    if len(contexts) > 1:
        unread = base if contexts[0].rollout is None else ()
        lengths = (*([len(unread)] if unread else []), *(len(one.tokens) for one in said))
        names = alone.response_columns
        columns: dict[str, Any] = {n: np.concatenate([one.response_columns[n] for one in said]) for n in names}
        alone = replace(
            alone,
            tokens=np.concatenate([np.array(unread, np.int32), *(one.tokens for one in said)]),
            prompt_length=len(base),
            weight_version=min(one.weight_version for one in said),
            version_spans=joined_spans([span for one in said for span in one.version_spans]),
            routed_experts=None,
            contexts=lengths,
            **columns,
        )
    return replace(
        alone,
        turns=tuple(turn for context in contexts for turn in context.whole_turns),
        reports=tuple(report for context in contexts for report in context.reports),
    )
