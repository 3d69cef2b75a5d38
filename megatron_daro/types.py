"""Records that cross a process border: prompts, rollouts, verdicts, groups, the columns of a step.

Prompts -> engine -> Rollout -> verifier -> Verdict -> Group -> StepBatch -> actor -> StepResult. Everything is frozen,
slotted, annotated and made of plain Python and numpy, so it pickles cheaply and imports no torch.

Shape letters: N samples, K rollouts per prompt; T tokens, R response tokens, each of all samples end to end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise
from typing import Any, Literal, Self

import numpy as np

from megatron_daro.routed_experts import StoredExperts

FinishReason = Literal["stop", "length", "abort", "repetition", "segment"]
"""abort: it ended before it was complete. segment: it reached its limit in `GroupRequest.limits`; only engines give
this reason, and between batches it is kept as "abort"."""
PlainValue = str | int | float | bool | None
"""What a setting or a field of a record can be, written to JSON or YAML."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One problem. Either `text` (plain template) or `messages` (chat template) is set.

    `answer` is the gold answer; each of `alternatives` counts as right too.
    `tokens` are the token ids the engine receives, after the template was applied. `category` is a label by which
    evaluation also reports (a difficulty, a subject); empty where the data has none.
    """

    id: str
    answer: str
    source: str
    text: str | None = None
    messages: tuple[Mapping[str, Any], ...] | None = None
    tokens: tuple[int, ...] = ()
    category: str = ""
    alternatives: tuple[str, ...] = ()

    @property
    def answers(self) -> tuple[str, ...]:
        """Every gold answer; one of them is enough."""
        return (self.answer, *self.alternatives)

    @property
    def statement(self) -> str:
        """The problem's own text: `text`, or the content of the last message."""
        return (self.text or "") if not self.messages else str(self.messages[-1].get("content", ""))


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How an engine samples. `temperature` 0 is greedy; `top_p` in (0, 1]; lengths in tokens.

    stop: texts that end an answer: at the first token after which the answer's text, without special tokens, contains
    one.
    routed_experts: (layers, experts per token) of the model, if the engine is to report which experts it chose.
    repetition: (tokens, period): an answer ends once its last `tokens` tokens repeat a block of at most `period`.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    max_new_tokens: int = 1024
    stop_token_ids: tuple[int, ...] = ()
    routed_experts: tuple[int, int] | None = None
    stop: tuple[str, ...] = ()
    repetition: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class GroupRequest:
    """What an engine is asked for: rollouts `indices` of one group, at one attempt.

    Rollout i's random numbers follow from (engine seed, group_id, attempt, turn, i), where the engine takes a seed.

    turn: of a conversation, from 0; `prompt` then holds the tokens of all turns before. answer_seed: takes the turn's
    place in the seed, if an agent asks for that. partial: index -> what an abort, or the end of a segment, left of that
    rollout, with at least one response token and fewer than max_new_tokens. An engine that can continue it reads prompt
    and partial tokens, reduces max_new_tokens by the latter, and answers with the whole rollout, joined by
    `Rollout.extended`; any other engine starts over. limits: index -> response tokens, fewer than max_new_tokens, at
    which that rollout ends with "segment".
    """

    group_id: int
    attempt: int
    prompt: Prompt
    indices: tuple[int, ...]
    sampling: SamplingParams
    partial: Mapping[int, Rollout] = field(default_factory=dict, hash=False)
    limits: Mapping[int, int] = field(default_factory=dict, hash=False)
    turn: int = 0
    answer_seed: int | None = None

    @property
    def draw(self) -> int:
        """Attempt and turn as one number; seeds are made of it, the group and the index. So each turn of each attempt
        has random numbers of its own, unless an agent names equal seeds. Below 2**63."""
        named = self.turn if self.answer_seed is None else 2**30 + self.answer_seed % 2**30
        return self.attempt + named * 2**32

    def room(self, index: int) -> int:
        """Return how many more tokens that rollout may get."""
        earlier = self.partial.get(index)
        so_far = earlier.response_length if earlier else 0
        return self.limits.get(index, self.sampling.max_new_tokens) - so_far


@dataclass(frozen=True, slots=True)
class TurnReport:
    """What an environment says of one answer of the model.

    reward: of this turn, weighted; 0 if the environment gave none. tool_calls, tool_errors: tool calls in the answer,
    and how many of them failed. seconds: of the environment's own work on the answer.
    """

    reward: float = 0.0
    tool_calls: int = 0
    tool_errors: int = 0
    seconds: float = 0.0


RESPONSE_COLUMNS = ("logprobs", "loss_mask", "teacher_logprobs")
"""Columns of a Rollout that have an entry for each response token: 0 for tokens of the environment."""


@dataclass(frozen=True, slots=True, eq=False)
class Rollout:
    """One answer of a policy to a prompt.

    tokens: int32 [prompt_length + R], prompt then response (a stop token that was sampled is part of the response).
    loss_mask: uint8 [R], 1 where the token is trained. logprobs: float32 [R], natural log, of the behaviour
    distribution (temperature applied, top-p not). text: the response without special tokens, up to the end of a stop
    text (the tokens include the whole token in which it ends); of a conversation, the whole response. weight_version:
    the oldest policy version that produced a token of it, or may have read its prompt. version_spans: (weight_version,
    number of response tokens) in order, of all response tokens; if none are given, all are of weight_version.
    routed_experts: references to the experts that the engine chose for each token that it read; None if it was not
    asked, or an aborted request did not report them. turns: of a conversation, (observed, generated) response tokens of
    each turn in order; empty where the whole response is one answer of the model. Observed tokens are the
    environment's: loss_mask and log-prob are 0. contexts: of an agent that rewrote its history or branched off, the
    number of tokens of each sequence that the model read from its first token on, in order; `tokens` has the sequences
    end to end, and answers of an earlier one count as observed in a later one. Empty where all tokens are one sequence.
    reports: of a conversation, what the environment said of each answer, in order; may be empty. teacher_logprobs:
    float32 [R], log-probs of the model that the policy is distilled from, 0 where loss_mask is 0; None without such a
    model. verdict: the environment's; None if a verifier judges. Recorded with the group, not here.
    """

    prompt_id: str
    group_id: int
    attempt: int
    index: int
    tokens: np.ndarray
    prompt_length: int
    loss_mask: np.ndarray
    logprobs: np.ndarray
    finish_reason: FinishReason
    weight_version: int
    text: str = ""
    version_spans: tuple[tuple[int, int], ...] = ()
    routed_experts: StoredExperts | None = None
    turns: tuple[tuple[int, int], ...] = ()
    contexts: tuple[int, ...] = ()
    reports: tuple[TurnReport, ...] = ()
    teacher_logprobs: np.ndarray | None = None
    verdict: Verdict | None = None

    def __post_init__(self) -> None:
        if self.response_length and not self.version_spans:
            object.__setattr__(self, "version_spans", ((self.weight_version, self.response_length),))

    @property
    def is_finished(self) -> bool:
        """Whether it is complete: it can be verified and trained."""
        return self.finish_reason not in ("abort", "segment")

    @property
    def response_length(self) -> int:
        """Number of response tokens, observed ones included."""
        return len(self.tokens) - self.prompt_length

    @property
    def response_columns(self) -> dict[str, np.ndarray]:
        """The `RESPONSE_COLUMNS` that this rollout has, by name."""
        columns = {name: getattr(self, name) for name in RESPONSE_COLUMNS}
        return {name: column for name, column in columns.items() if column is not None}

    @property
    def generated_length(self) -> int:
        """Number of response tokens that the model generated."""
        return self.response_length - sum(observed for observed, _ in self.turns)

    def extended(self, later: Rollout, text: str) -> Rollout:
        """Return this partial rollout, extended by what was generated after its last token.

        Args:
            later: the continuation: its prompt is all of this rollout's tokens, its response the new ones (maybe none).
            text: the whole response, decoded anew, since the two texts may split a character.

        Returns:
            A rollout with prompt_length of this one; attempt and finish reason of `later`; response columns end to end;
                the spans of both with their own versions (equal neighbours joined), and the oldest version that
                produced a token; for each token, the experts chosen when it was first read.

        Raises:
            ValueError: `later` is of another rollout, or does not begin with all tokens of this one.
        """
        if (self.group_id, self.index) != (later.group_id, later.index):
            raise ValueError(
                f"group {later.group_id} rollout {later.index} cannot continue group {self.group_id} rollout "
                f"{self.index}; allowed: the same group and index"
            )
        if later.prompt_length != len(self.tokens) or not np.array_equal(
            later.tokens[: later.prompt_length], self.tokens
        ):
            raise ValueError(
                f"group {self.group_id} rollout {self.index}: the continuation's prompt ({later.prompt_length} tokens) "
                f"is not the {len(self.tokens)} tokens so far; the engine must be asked with exactly these"
            )
        earlier = self.response_columns
        columns: dict[str, Any] = {
            name: np.concatenate([earlier[name], column]) if name in earlier else None
            for name, column in later.response_columns.items()
        }
        return replace(
            later,
            prompt_length=self.prompt_length,
            weight_version=min(
                self.weight_version if self.response_length else later.weight_version,
                later.weight_version if later.response_length else self.weight_version,
            ),
            text=text,
            version_spans=joined_spans((*self.version_spans, *later.version_spans)),
            routed_experts=self._routed_first(later),
            **columns,
        )

    def cut(self, count: int, text: str, finish_reason: FinishReason = "stop") -> Rollout:
        """Return the beginning of this rollout as an answer that ended there.

        Args:
            count: response tokens that stay, at least 1. text: that of the answer. finish_reason: why it ended.
        """
        spans, left = [], count
        for version, tokens in self.version_spans:
            spans.append((version, min(tokens, left)))
            left -= spans[-1][1]
        columns: dict[str, Any] = {name: column[:count] for name, column in self.response_columns.items()}
        return replace(
            self,
            tokens=self.tokens[: self.prompt_length + count],
            finish_reason=finish_reason,
            text=text,
            version_spans=joined_spans(spans),
            routed_experts=self.routed_experts and self.routed_experts.cut(self.prompt_length + count),
            **columns,
        )

    def _routed_first(self, later: Rollout) -> StoredExperts | None:
        """Return the experts of `later`, but this rollout's own for the tokens that it read: `later` read these
        again."""
        if self.routed_experts is None or later.routed_experts is None:
            return later.routed_experts
        return self.routed_experts.continued(later.routed_experts)

    def continues(self, earlier: Rollout) -> bool:
        """Whether this rollout begins with `earlier`: with the same tokens, and the same log-probs of response
        tokens."""
        length = earlier.response_length
        return np.array_equal(self.tokens[: len(earlier.tokens)], earlier.tokens) and np.array_equal(
            self.logprobs[:length], earlier.logprobs
        )


def joined_spans(spans: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Return the same spans with neighbours of one version made one, and without empty ones."""
    joined: list[tuple[int, int]] = []
    for version, count in spans:
        if joined and joined[-1][0] == version:
            joined[-1] = (version, joined[-1][1] + count)
        elif count:
            joined.append((version, count))
    return tuple(joined)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a verifier says. `correct` decides the pass rate; `reward` the advantage; `reason` is for people.

    Reasons are short words: "match", "no_match", "no_answer", "timeout", "memory", "too_long", "crash", ...
    rewards: the components of an environment's reward, (name, value before weighting), each name once.
    """

    correct: bool
    reward: float
    reason: str
    rewards: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """The K rollouts of one prompt with their verdicts, in index order.

    If the group was given up, or a later batch continues it, this holds only the rollouts that had finished, maybe
    none, and `bin` is not that of the whole group.
    """

    group_id: int
    prompt: Prompt
    rollouts: tuple[Rollout, ...]
    verdicts: tuple[Verdict, ...]

    @property
    def bin(self) -> int:
        """k = number of correct rollouts, 0..K."""
        return sum(v.correct for v in self.verdicts)

    @property
    def pass_rate(self) -> float:
        """mu = k / K."""
        return self.bin / len(self.verdicts)

    @property
    def weight_version(self) -> int:
        """The oldest policy version in the group."""
        return min(r.weight_version for r in self.rollouts)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Sequences:
    """Samples as columns, as far as splitting, packing and a pass read them. Suffixes name the entries: _N and _NK have
    one for each sample, _R for each response token and _T for each token, end to end in sample order.

    tokens_T int32 [T], prompt then response of each sample; lengths_N int64, prompt + response; prompt_lengths_N int64;
    loss_mask_R uint8. routed_experts_N: references to the experts that the engine chose for the tokens of each sample;
    None for a sample without, and altogether if no sample has any. contexts_N: number of tokens of each sequence that a
    sample consists of, see `Rollout.contexts`; None if every sample is one sequence.
    """

    tokens_T: np.ndarray
    lengths_N: np.ndarray
    prompt_lengths_N: np.ndarray
    loss_mask_R: np.ndarray
    routed_experts_N: tuple[StoredExperts | None, ...] | None = None
    contexts_N: tuple[tuple[int, ...], ...] | None = None

    @classmethod
    def of(cls, rollouts: Sequence[Rollout], **columns: Any) -> Self:
        """Return the columns of the rollouts, in order. Args: columns: those that a subclass adds."""
        experts_N = tuple(rollout.routed_experts for rollout in rollouts)
        contexts_N = tuple(rollout.contexts for rollout in rollouts)
        return cls(
            tokens_T=np.concatenate([np.asarray(r.tokens, dtype=np.int32) for r in rollouts]),
            lengths_N=np.array([len(r.tokens) for r in rollouts], dtype=np.int64),
            prompt_lengths_N=np.array([r.prompt_length for r in rollouts], dtype=np.int64),
            loss_mask_R=np.concatenate([np.asarray(r.loss_mask, dtype=np.uint8) for r in rollouts]),
            routed_experts_N=None if all(experts is None for experts in experts_N) else experts_N,
            contexts_N=contexts_N if any(contexts_N) else None,
            **columns,
        )

    def __len__(self) -> int:
        return len(self.lengths_N)

    @property
    def response_lengths_N(self) -> np.ndarray:
        """int64 [N], response tokens per sample."""
        return self.lengths_N - self.prompt_lengths_N

    @property
    def trained_tokens_N(self) -> np.ndarray:
        """int64 [N], response tokens per sample that the loss mask keeps."""
        parts = _ragged(self.loss_mask_R, self.response_lengths_N)
        return np.array([part.sum(dtype=np.int64) for part in parts], dtype=np.int64)

    def contexts_of(self, indices: Sequence[int]) -> list[tuple[int, ...]]:
        """Return, for each of these samples, the number of tokens of each of its sequences."""
        whole = self.contexts_N or ((),) * len(self)
        return [whole[i] or (int(self.lengths_N[i]),) for i in indices]

    def select(self, indices: Sequence[int]) -> Self:
        """Return the given samples, in the given order."""
        indices_M = np.asarray(indices, dtype=np.int64)
        changed: dict[str, Any] = {}
        for column_field in fields(self):
            name, column = column_field.name, getattr(self, column_field.name)
            if column is None:
                continue
            if name.endswith("_T"):
                changed[name] = _ragged_select(column, self.lengths_N, indices_M)
            elif name.endswith("_R"):
                changed[name] = _ragged_select(column, self.response_lengths_N, indices_M)
            elif name.endswith(("_N", "_NK")):
                is_array = isinstance(column, np.ndarray)
                changed[name] = column[indices_M] if is_array else tuple(column[i] for i in indices_M.tolist())
        return replace(self, **changed)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class StepBatch(Sequences):
    """The samples of one optimizer step (a mini-batch).

    rollout_logprobs_R float32; rewards_N float32 (shaped); correct_N uint8; bins_N int64 in 0..K; group_ids_N int64;
    advantages_N float32; truncated_N uint8 (finish reason "length"); old_logprobs_R and ref_logprobs_R float32:
    `PolicyGroup.prepare` adds those that the loss needs. token_advantages_R float32, None if advantages_N applies to
    all tokens of a sample, or until ranks compute them from columns. values_R and value_targets_R float32, the critic's
    values before each token when the batch began, and, on ranks only, its targets; None without a critic.
    group_lengths_NK int64 [N, K], trained tokens of every rollout of each sample's group; None unless the algorithm
    needs them. environments_N: int64, the number of each sample's environment; None if the run has only one.
    opens_batch: whether this is the first trained optimizer step of a batch of rollouts.
    """

    rollout_logprobs_R: np.ndarray
    rewards_N: np.ndarray
    correct_N: np.ndarray
    bins_N: np.ndarray
    group_ids_N: np.ndarray
    advantages_N: np.ndarray
    truncated_N: np.ndarray
    rollouts_per_prompt: int
    old_logprobs_R: np.ndarray | None = None
    ref_logprobs_R: np.ndarray | None = None
    token_advantages_R: np.ndarray | None = None
    values_R: np.ndarray | None = None
    value_targets_R: np.ndarray | None = None
    group_lengths_NK: np.ndarray | None = None
    environments_N: np.ndarray | None = None
    opens_batch: bool = True


def _ragged(column: np.ndarray, lengths_N: np.ndarray) -> list[np.ndarray]:
    """Return each sample's part of the column, as views, without an index for each element."""
    ends = np.cumsum(lengths_N).tolist()
    return [column[start:end] for start, end in pairwise([0, *ends])]


def _ragged_select(column: np.ndarray, lengths_N: np.ndarray, indices_M: np.ndarray) -> np.ndarray:
    """Return the chosen samples' parts, end to end."""
    parts = _ragged(column, lengths_N)
    chosen = [parts[i] for i in indices_M.tolist()]
    return np.concatenate(chosen) if chosen else column[:0]


@dataclass(frozen=True, slots=True, eq=False)
class PreparedStep:
    """What an optimizer step trains on. batch: with all columns that the loss needs. number: under which the policy
    keeps shards that it has already made for the step; None: it has none."""

    batch: StepBatch
    number: int | None = None


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one optimizer step reports. Metric keys are paths such as `loss/policy` (docs/metrics.md).

    own_s: seconds of this rank's forward and backward passes, before it waited for other replicas; 0: not measured.
    """

    metrics: Mapping[str, float]
    skipped: bool = False
    reason: str = ""
    own_s: float = 0.0


MemoryKind = Literal["weights", "gradients", "optimizer"]
"""What a rank's memory holds for training: parameters; sums of gradients; main parameters and Adam's moments."""
KINDS_OF_MEMORY: tuple[MemoryKind, ...] = ("weights", "gradients", "optimizer")
"""All of them."""
TrainedName = Literal["policy", "critic"]
"""The models that a rank may train."""


@dataclass(frozen=True, slots=True)
class MemoryMove:
    """One move of a rank's memory between device and host.

    moved: device bytes that were freed or allocated. left: bytes that the rank has on its device afterwards (on a CPU:
    those of weights, gradients and optimizer state). seconds: how long it took. others: bytes that other processes had
    on the device before, CUDA contexts of all included; 0 on a CPU.
    """

    moved: int
    left: int
    seconds: float
    others: int = 0
