"""Takes in the answers of an engine: which of them count, their verdicts, and what was generated for nothing.

GroupRequest -> engine -> RolloutCollector -> rollouts and verdicts in groups in flight. It refuses answers that were
not asked for, come late or twice, or have columns that do not fit; it decides nothing about groups.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace

import numpy as np

from megatron_daro.data.batch import ALIGNED, misaligned_columns
from megatron_daro.data.templates import Template, verified_text
from megatron_daro.deadlines import Deadlines
from megatron_daro.errors import DeadlineError, EngineError
from megatron_daro.rollout.groups_under_way import GroupInFlight, UnfinishedGroup
from megatron_daro.rollout.ledger import Ledger
from megatron_daro.rollout.protocol import Notices, PhaseTimer, Rollouter, Teacher
from megatron_daro.types import GroupRequest, Rollout, SamplingParams


@dataclass(slots=True)
class RolloutCounters:
    """What sampling has cost since the run began. Each is the metric rollout/NAME, and checkpoints keep it.

    aborted_tokens: generated tokens that were thrown away, other than those of complete groups: because their group was
    given up, or their rollout started over, was not judged in time, or lost its files of experts. groups_aborted:
    groups that were unfinished when their batch was full. groups_resumed: unfinished groups that were continued,
    including those that were only set aside. batches_empty: tries to fill a batch that gave no trainable group.
    """

    batches_empty: int = 0
    groups_aborted: int = 0
    groups_resumed: int = 0
    aborted_tokens: int = 0

    def metrics(self) -> dict[str, int]:
        """Return the metrics."""
        return {f"rollout/{name}": count for name, count in asdict(self).items()}

    def load(self, metrics: Mapping[str, int]) -> None:
        """Continue from these. Raises KeyError: one is missing."""
        for name in asdict(self):
            setattr(self, name, int(metrics[f"rollout/{name}"]))


class RolloutCollector:
    """Takes answers in, and counts what became of them.

    fresh_tokens: tokens generated since the process began, each counted once.
    """

    def __init__(
        self,
        ledger: Ledger,
        *,
        rollouter: Rollouter,
        sampling: SamplingParams,
        rollouts_per_prompt: int,
        deadlines: Deadlines,
        phases: PhaseTimer,
        notices: Notices,
        segment_tokens: int | None = None,
        template: Template | None = None,
        opens_thinking: bool = False,
        teacher: Teacher | None = None,
    ) -> None:
        """Start nothing.

        Args:
            ledger: decides which answers count. rollouter: scores them. sampling: of every request. phases: measures
                the time of scoring. segment_tokens: the most tokens that an answer gets in one flight. template: the
                named template of the training data. opens_thinking: whether its prompts end with a <think>. teacher:
                reads each finished answer; None: there is no teacher.
        """
        self.rollouts_per_prompt = rollouts_per_prompt
        self.fresh_tokens = 0
        self.counters = RolloutCounters()
        self._ledger = ledger
        self._rollouter = rollouter
        self._sampling = sampling
        self._deadlines = deadlines
        self._phases = phases
        self._notices = notices
        self._segment = segment_tokens
        self._template, self._opens_thinking, self._teacher = template, opens_thinking, teacher

    def request(self, group_id: int, entry: GroupInFlight) -> GroupRequest:
        """Return a request, at the current attempt, for the rollouts of a group that this flight still generates."""
        indices = entry.to_generate(self.rollouts_per_prompt)
        return GroupRequest(
            group_id,
            self._ledger.attempt(group_id),
            entry.prompt,
            indices,
            self._sampling,
            partial={i: entry.partial[i] for i in indices if i in entry.partial},
            limits=self._limits(entry, indices),
        )

    def _limits(self, entry: GroupInFlight, indices: Sequence[int]) -> dict[int, int]:
        """Return the length at which this flight stops each rollout, for those where it is below max_new_tokens."""
        if self._segment is None:
            return {}
        ends = {i: entry.tokens_before.get(i, 0) + self._segment for i in indices}
        return {i: end for i, end in ends.items() if end < self._sampling.max_new_tokens}

    def accept(self, rollouts: Sequence[Rollout], groups: Mapping[int, GroupInFlight]) -> list[Rollout]:
        """Put the answers that count into their groups: those of the current attempt that were asked for, each index
        once.

        Returns:
            The finished rollouts, which need a verdict. Others are kept as partial where they can be continued.

        Raises:
            EngineError: a group or attempt that was never requested, or columns that do not fit.
        """
        finished: list[Rollout] = []
        prompts: dict[int, np.ndarray] = {}
        for rollout in rollouts:
            if not self._ledger.accepts(rollout.group_id, rollout.attempt):
                continue
            entry = groups.get(rollout.group_id)
            if entry is None or rollout.index not in entry.missing_rollouts(self.rollouts_per_prompt):
                if rollout.finish_reason != "abort":
                    self._ledger.refuse()
                continue
            if rollout.group_id not in prompts:
                prompts[rollout.group_id] = np.array(entry.prompt.tokens, dtype=np.int32)
            check_shape(rollout, prompts[rollout.group_id])
            if not rollout.is_finished:
                self._hold(rollout, entry)
            else:
                self._count(rollout, entry.partial.pop(rollout.index, None))
                entry.rollouts[rollout.index] = rollout
                finished.append(rollout)
        return finished

    async def score(self, rollouts: Sequence[Rollout], groups: Mapping[int, GroupInFlight]) -> None:
        """Verify finished rollouts of one group, and let the teacher read them.

        Raises:
            RewardError: a verdict is missing. EngineError: the teacher failed. DeadlineError.
        """
        if not rollouts:
            return
        answers = [(self._verified(rollout), groups[rollout.group_id].prompt) for rollout in rollouts]
        with self._phases.measure("reward"):
            verdicts = await self._deadlines.within(
                "score",
                self._rollouter.score(answers),
                what=f"verdicts of group {rollouts[0].group_id}; more reward.workers verify more at once",
            )
        if self._teacher:
            work, what = self._teacher.read(rollouts), "algorithm.distill.urls"
            rollouts = await self._deadlines.within("teacher", work, what=what)
        for rollout, verdict in zip(rollouts, verdicts, strict=True):
            entry = groups[rollout.group_id]
            entry.rollouts[rollout.index], entry.verdicts[rollout.index] = rollout, verdict

    def _verified(self, rollout: Rollout) -> Rollout:
        """Return a rollout with the text that the verifier reads."""
        text = verified_text(rollout.text, self._template, opens_thinking=self._opens_thinking)
        return replace(rollout, text=text)

    async def close(self, iterator: AsyncIterator[tuple[Rollout, ...]]) -> None:
        """Close the iterator of one attempt. One that is stuck is reported and left to the engine's own close."""
        aclose = getattr(iterator, "aclose", None)
        if aclose is None:
            return
        try:
            await self._deadlines.within("abort", aclose())
        except (RuntimeError, DeadlineError) as error:
            self._notices.warn(f"generation could not be ended: {error}")

    def count_discarded(self, group: UnfinishedGroup) -> None:
        """Count the tokens of a group that will not be finished."""
        self.counters.aborted_tokens += group.generated_tokens

    def count_unscored(self, entry: GroupInFlight) -> None:
        """Count the tokens of a group's finished answers for which verdict or teacher did not come in time."""
        unscored = [rollout for i, rollout in entry.rollouts.items() if i not in entry.verdicts]
        self.counters.aborted_tokens += sum(rollout.generated_length for rollout in unscored)

    def _hold(self, rollout: Rollout, entry: GroupInFlight) -> None:
        """Keep an unfinished rollout if it can be continued. A conversation cannot: the environment's state is lost."""
        earlier = entry.partial.pop(rollout.index, None)
        self._count(rollout, earlier)
        room = self._sampling.max_new_tokens - rollout.response_length
        if not rollout.turns and rollout.response_length and room > 0:
            entry.partial[rollout.index] = rollout
        else:
            self.counters.aborted_tokens += rollout.generated_length

    def _count(self, rollout: Rollout, earlier: Rollout | None) -> None:
        """Count a rollout's tokens. An earlier part that it continues is counted once, one that it does not is thrown
        away."""
        self.fresh_tokens += rollout.generated_length
        if earlier is None:
            return
        if rollout.continues(earlier):
            self.fresh_tokens -= earlier.response_length
        else:
            self.counters.aborted_tokens += earlier.response_length


def check_shape(rollout: Rollout, prompt: np.ndarray) -> None:
    """Reject columns that are not aligned: an engine that cuts or shifts its answers would train the wrong tokens.

    Raises:
        EngineError: the first tokens are not the prompt, or a column has another length than the response.
    """
    wrong = misaligned_columns(rollout)
    if rollout.prompt_length != len(prompt) or not np.array_equal(rollout.tokens[: rollout.prompt_length], prompt):
        wrong.append(f"the first {rollout.prompt_length} tokens are not the prompt")
    if wrong:
        raise EngineError(
            f"group {rollout.group_id} rollout {rollout.index}: {rollout.response_length} response tokens, but "
            f"{' and '.join(wrong)}; {ALIGNED}"
        )
