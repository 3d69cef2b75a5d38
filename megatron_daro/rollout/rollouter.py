"""From prompt to scored group: one turn each, groups under way, what counts of the answers, and their verdicts.

Holds no books: the ledger does.

Verdicts on answers to prompts: any of a prompt's gold answers counts as right.

(answer text, prompt) -> pairs of text and gold -> Scorer -> one Verdict each. Training and
evaluation both ask here. Refuses a scorer that does not give one verdict a pair.

Groups that are not complete: while they are generated (Pending), and between two batches (PartialGroup).

The sampler admits prompts as Pending; answers and verdicts are put into them; a group that is
still unfinished when its batch is complete is kept as a PartialGroup, in checkpoints too, and goes on in the next
batch. Holds no engine and no books. It refuses recorded groups that contradict themselves.

Where answers of an engine come in: which of them count, what they are worth, what was generated for nothing.

GroupRequest -> engine -> RolloutCollector -> rollouts and verdicts in the Pending groups. Both
ways to fill a batch (`Rounds`, `EarlyFill`) take their answers in here. It refuses answers that were not asked for,
that
come late or twice, and those whose columns do not fit; it decides nothing about groups.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from megatron_daro.data.templates import Template, verified_text
from megatron_daro.errors import DataError, DeadlineError, EngineError, RewardError
from megatron_daro.rollout.deadlines import Deadlines
from megatron_daro.rollout.group_columns import RecordedGroup
from megatron_daro.rollout.ledger import Ledger
from megatron_daro.rollout.protocol import Engine, Notices, PhaseTimer, PromptSource, Rollouter, Scorer
from megatron_daro.types import Group, GroupRequest, Prompt, Rollout, SamplingParams, Verdict


async def judge(scorer: Scorer, answers: Sequence[tuple[str, Prompt]]) -> list[Verdict]:
    """One verdict per (answer text, prompt), in order.

    Where a prompt has alternatives, the verdict is that of the first gold that matches, else that of its first gold.

    Raises:
        RewardError: the scorer gave more or fewer verdicts than it was asked for.
    """
    pairs = [(text, gold, prompt.statement) for text, prompt in answers for gold in prompt.answers]
    verdicts = await scorer.score_async(pairs)
    if len(verdicts) != len(pairs):
        raise RewardError(f"the verifier gave {len(verdicts)} verdicts for {len(pairs)} answers; allowed: one each")
    in_order = iter(verdicts)
    each = [[next(in_order) for _ in prompt.answers] for _, prompt in answers]
    return [next((one for one in of_golds if one.correct), of_golds[0]) for of_golds in each]


class SingleTurn:
    """The Rollouter of one answer a rollout, which the verifiers judge."""

    continues_partial = True

    def __init__(self, engine: Engine, scorer: Scorer) -> None:
        """Start nothing."""
        self._engine, self._scorer = engine, scorer

    def generate(self, requests: Sequence[GroupRequest]) -> AsyncIterator[tuple[Rollout, ...]]:
        """Return the engine's own iterator."""
        return self._engine.generate(requests)

    async def abort(self, group_ids: Collection[int] | None = None) -> None:
        """Stop these groups (None: all)."""
        await self._engine.abort(group_ids)

    async def score(self, rollouts: Sequence[tuple[Rollout, Prompt]]) -> list[Verdict]:
        """Have the texts verified. Raises RewardError: a verdict is missing."""
        return await judge(self._scorer, [(rollout.text, prompt) for rollout, prompt in rollouts])

    @property
    def failed_verifier_starts(self) -> int:
        """Starts of verifier processes that failed and were tried again."""
        return self._scorer.failed_starts

    def counters(self) -> dict[str, int]:
        """Count nothing: there is nothing between engine and verifiers that fails."""
        return {}

    def load_counters(self, counters: Mapping[str, int]) -> None:
        """Take nothing over."""

    async def close(self) -> None:
        """End nothing: engine and scorer belong to the run."""


@dataclass(slots=True)
class Pending:
    """A group that is being completed.

    rollouts: finished ones by index. verdicts: of those that were verified. partial: by index, what an abort left of an
    unfinished one. begun: by index, tokens that were there when the batch began. set_aside: those that have got all
    that this batch gives them.
    """

    prompt: Prompt
    rollouts: dict[int, Rollout] = field(default_factory=dict)
    verdicts: dict[int, Verdict] = field(default_factory=dict)
    partial: dict[int, Rollout] = field(default_factory=dict)
    begun: dict[int, int] = field(default_factory=dict)
    set_aside: set[int] = field(default_factory=set)

    def missing(self, rollouts_per_prompt: int) -> tuple[int, ...]:
        """Return indices without a finished rollout."""
        return tuple(i for i in range(rollouts_per_prompt) if i not in self.rollouts)

    def wanted(self, rollouts_per_prompt: int) -> tuple[int, ...]:
        """Return those of them that this batch goes on with."""
        return tuple(i for i in self.missing(rollouts_per_prompt) if i not in self.set_aside)

    def waits(self, rollouts_per_prompt: int) -> bool:
        """Whether all that is missing is set aside."""
        return bool(self.set_aside) and not self.wanted(rollouts_per_prompt)

    @property
    def unscored(self) -> bool:
        """Whether finished rollouts wait for their verdicts."""
        return len(self.verdicts) < len(self.rollouts)

    def group(self, group_id: int) -> Group:
        """Return the group of what is finished and verified, in index order."""
        order = sorted(self.verdicts)
        return Group(
            group_id,
            self.prompt,
            tuple(self.rollouts[i] for i in order),
            tuple(self.verdicts[i] for i in order),
        )

    def kept(self, group_id: int) -> PartialGroup:
        """Return what to keep of it while nobody works on it."""
        return PartialGroup(self.group(group_id), tuple(self.partial[i] for i in sorted(self.partial)))


@dataclass(frozen=True, slots=True, eq=False)
class PartialGroup:
    """An unfinished group between two batches.

    finished: the finished rollouts with their verdicts, maybe none. unfinished: the others that have tokens, by index.
    """

    finished: Group
    unfinished: tuple[Rollout, ...] = ()

    @property
    def group_id(self) -> int:
        """The group's id."""
        return self.finished.group_id

    @property
    def weight_version(self) -> int | None:
        """The oldest policy version that produced a token of it; None: it has no token."""
        return min((r.weight_version for r in (*self.finished.rollouts, *self.unfinished)), default=None)

    @property
    def response_tokens(self) -> int:
        """Generated tokens so far."""
        return sum(r.generated_length for r in (*self.finished.rollouts, *self.unfinished))

    def pending(self) -> Pending:
        """Return the same, to be completed."""
        group = self.finished
        return Pending(
            group.prompt,
            rollouts={r.index: r for r in group.rollouts},
            verdicts={r.index: v for r, v in zip(group.rollouts, group.verdicts, strict=True)},
            partial={r.index: r for r in self.unfinished},
            begun={r.index: r.response_length for r in self.unfinished},
        )

    def to_record(self) -> RecordedGroup:
        """As a checkpoint holds it; `from_record` gives exactly the same group back."""
        return RecordedGroup(self.finished, None, self.unfinished)

    @classmethod
    def from_record(cls, record: RecordedGroup, rollouts_per_prompt: int) -> PartialGroup:
        """Return the inverse of `to_record`. Raises ValueError where the rollouts contradict each other."""
        finished, rollouts = record.group, record.unfinished
        indices = [r.index for r in (*finished.rollouts, *rollouts)]
        allowed = range(rollouts_per_prompt)
        if len(finished.rollouts) == len(allowed) or len({*indices}) < len(indices) or not {*indices} <= {*allowed}:
            raise ValueError(
                f"group {finished.group_id}: unfinished with the rollouts {indices}, {len(finished.rollouts)} of them "
                f"finished; allowed: each of 0 to {allowed[-1]} once at most, not all finished"
            )
        if any(r.finish_reason == "abort" for r in finished.rollouts) or any(
            r.finish_reason != "abort" for r in rollouts
        ):
            raise ValueError(f"group {finished.group_id}: a rollout is finished and aborted at once")
        return cls(finished, rollouts)


def admit(source: PromptSource, ledger: Ledger, count: int) -> dict[int, Pending]:
    """Return new groups of the next `count` prompts, by id; they are in the books. Raises DataError if prompts run
    out."""
    prompts = source.next(count)
    if len(prompts) != count:
        raise DataError(f"the prompt source gave {len(prompts)} prompts instead of {count}; it must not end")
    return {i: Pending(prompt) for i, prompt in zip(ledger.admit(count), prompts, strict=True)}


class RolloutCollector:
    """Takes answers in, and counts what became of them since the run began.

    fresh_tokens: response tokens generated, each once. aborted_tokens: those of them that were thrown away because a
    rollout or its group was not finished. groups_aborted: unfinished when their batch was full. groups_resumed: begun
    again after that.
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
    ) -> None:
        """Start nothing. Arguments as the sampler's; segment_tokens: most tokens of an answer in a batch; template: the
        named one of the training data; opens_thinking: whether its prompts end with a <think>."""
        self.rollouts_per_prompt = rollouts_per_prompt
        self.fresh_tokens = 0
        self.aborted_tokens = 0
        self.groups_aborted = 0
        self.groups_resumed = 0
        self._ledger = ledger
        self._rollouter = rollouter
        self._sampling = sampling
        self._deadlines = deadlines
        self._phases = phases
        self._notices = notices
        self._segment = segment_tokens
        self._template, self._opens_thinking = template, opens_thinking

    @property
    def failed_verifier_starts(self) -> int:
        """Starts of verifier processes that failed and were tried again."""
        return self._rollouter.failed_verifier_starts

    def request(self, group_id: int, entry: Pending) -> GroupRequest:
        """Return a request for what a group still gets in this batch, at its current attempt, with what is there."""
        wanted = entry.wanted(self.rollouts_per_prompt)
        return GroupRequest(
            group_id,
            self._ledger.attempt(group_id),
            entry.prompt,
            wanted,
            self._sampling,
            partial={i: entry.partial[i] for i in wanted if i in entry.partial},
            limits=self._limits(entry, wanted),
        )

    def _limits(self, entry: Pending, indices: Sequence[int]) -> dict[int, int]:
        """Return how long each rollout may be when this batch ends, where that is shorter than any may be."""
        if self._segment is None:
            return {}
        ends = {i: entry.begun.get(i, 0) + self._segment for i in indices}
        return {i: end for i, end in ends.items() if end < self._sampling.max_new_tokens}

    def accept(self, rollouts: Sequence[Rollout], pending: Mapping[int, Pending]) -> list[Rollout]:
        """Put into the groups what counts: of the current attempt and asked for, each index once.

        Returns:
            The finished ones, which need a verdict. What an abort cut short is kept as partial.

        Raises:
            EngineError: a group or attempt that was never requested, or columns that do not fit.
        """
        finished: list[Rollout] = []
        prompts: dict[int, np.ndarray] = {}
        for rollout in rollouts:
            if not self._ledger.accepts(rollout.group_id, rollout.attempt):
                continue
            entry, aborted = pending.get(rollout.group_id), rollout.finish_reason == "abort"
            if entry is None or rollout.index not in entry.missing(self.rollouts_per_prompt):
                if not aborted:
                    self._ledger.refuse()
                continue
            if rollout.group_id not in prompts:
                prompts[rollout.group_id] = np.array(entry.prompt.tokens, dtype=np.int32)
            check_shape(rollout, prompts[rollout.group_id])
            if not aborted and self._is_segment(rollout):
                entry.set_aside.add(rollout.index)
                self._hold(replace(rollout, finish_reason="abort"), entry)
            elif aborted:
                self._hold(rollout, entry)
            else:
                self._count(rollout, entry.partial.pop(rollout.index, None))
                entry.rollouts[rollout.index] = rollout
                finished.append(rollout)
        return finished

    def _is_segment(self, rollout: Rollout) -> bool:
        """Whether an answer was ended by what a batch gives it, and not by its own limit."""
        short = rollout.response_length < self._sampling.max_new_tokens
        return self._segment is not None and rollout.finish_reason == "length" and short

    async def score(self, rollouts: Sequence[Rollout], pending: Mapping[int, Pending]) -> None:
        """Verify finished rollouts of one group. Raises RewardError if a verdict is missing, DeadlineError."""
        answers = [(self._verified(rollout), pending[rollout.group_id].prompt) for rollout in rollouts]
        with self._phases.measure("reward"):
            verdicts = await self._deadlines.within(
                "score", self._rollouter.score(answers), what=f"group {rollouts[0].group_id}"
            )
        for rollout, verdict in zip(rollouts, verdicts, strict=True):
            pending[rollout.group_id].verdicts[rollout.index] = verdict

    def _verified(self, rollout: Rollout) -> Rollout:
        """Return a rollout with the text that the verifier reads."""
        text = verified_text(rollout.text, self._template, opens_thinking=self._opens_thinking)
        return replace(rollout, text=text)

    async def close(self, iterator: AsyncIterator[tuple[Rollout, ...]]) -> None:
        """End a pass. An iterator that is stuck is reported and left; the engine's own close comes later."""
        aclose = getattr(iterator, "aclose", None)
        if aclose is None:
            return
        try:
            await self._deadlines.within("abort", aclose())
        except (RuntimeError, DeadlineError) as error:
            self._notices.warn(f"generation could not be ended: {error}")

    def discard(self, group: PartialGroup) -> None:
        """Count the tokens of a group that will not be finished."""
        self.aborted_tokens += group.response_tokens

    def _hold(self, rollout: Rollout, entry: Pending) -> None:
        """Keep what an abort left, if one can go on from there."""
        earlier = entry.partial.pop(rollout.index, None)
        self._count(rollout, earlier)
        room = self._sampling.max_new_tokens - rollout.response_length
        if self._rollouter.continues_partial and rollout.response_length and room > 0:
            entry.partial[rollout.index] = rollout
        else:
            self.aborted_tokens += rollout.generated_length

    def _count(self, rollout: Rollout, earlier: Rollout | None) -> None:
        """Count a rollout: one that goes on from an earlier part counts it once, one that began anew throws it away."""
        self.fresh_tokens += rollout.generated_length
        if earlier is None:
            return
        if rollout.continues(earlier):
            self.fresh_tokens -= earlier.response_length
        else:
            self.aborted_tokens += earlier.response_length


def check_shape(rollout: Rollout, prompt: np.ndarray) -> None:
    """Reject columns that are not aligned: an engine that cuts or shifts its answers would train the wrong tokens.

    Raises:
        EngineError: the first tokens are not the prompt, or a column has another length than the response.
    """
    lengths = {"logprobs": len(rollout.logprobs), "loss_mask": len(rollout.loss_mask)}
    wrong = [f"{name} has {n}" for name, n in lengths.items() if n != rollout.response_length]
    if rollout.routed_experts is not None and len(rollout.routed_experts) != len(rollout.tokens):
        wrong.append(f"routed_experts are of {len(rollout.routed_experts)} tokens in all")
    if rollout.prompt_length != len(prompt) or not np.array_equal(rollout.tokens[: rollout.prompt_length], prompt):
        wrong.append(f"the first {rollout.prompt_length} tokens are not the prompt")
    if wrong:
        raise EngineError(
            f"group {rollout.group_id} rollout {rollout.index}: {rollout.response_length} response tokens, but "
            f"{' and '.join(wrong)}; allowed: the prompt, then one log-prob and one mask entry per response token"
        )
