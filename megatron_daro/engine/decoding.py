"""The state of one batch while transformers' `generate` decodes it: choosing tokens, recording them, stopping.

A stop text may end within any token, so for a row with stop texts the last tokens are decoded after each step.

`Decoding` is driven by a LogitsProcessor, which leaves `generate` only the chosen token to pick (so no scores need to
be kept), and by a StoppingCriteria. Once a quarter of at least 16 rows have finished, the criterion ends the call, and
the caller drops their caches and calls again with the rest. An `AbortSignal` from the event loop is checked between two
steps.

Every row draws one uniform number per step from a counter-based generator keyed by (seed, group, draw, index), and
inverts its cumulative distribution with it, so its draws do not depend on its neighbours; its log-probs do, in their
last bits. There is no top-k and there are no penalties: the training loss could not account for them.

Shape letters: N rows of the whole batch, B rows in the call, V vocabulary, M most new tokens, P distinct stop sets.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.generation import LogitsProcessor, StoppingCriteria

from megatron_daro.data.stops import Decode, repeated_at, window_of
from megatron_daro.errors import EngineError
from megatron_daro.types import FinishReason, GroupRequest


class AbortSignal:
    """Which groups of one `generate` call are to stop. An abort cannot be undone."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._all = False
        self._groups: frozenset[int] = frozenset()
        self.changes = 0

    def abort(self, group_ids: Collection[int] | None = None) -> None:
        """Ask the given groups to stop; None asks all."""
        with self._lock:
            self._all = self._all or group_ids is None
            self._groups |= frozenset(group_ids or ())
            self.changes += 1  # last, so that a reader who sees the new count sees the groups too

    def hits(self, group_id: int) -> bool:
        """Whether this group is to stop."""
        return self._all or group_id in self._groups


def row_uniforms(seed: int, group_id: int, draw: int, index: int, count: int) -> np.ndarray:
    """Return the uniform numbers of one rollout.

    Args:
        seed, group_id, draw, index: any integers of 64 bits; together they identify the answer.
        count: how many numbers, one per token.

    Returns:
        float32 [count] in [0, 1), multiples of 2**-24; a longer call begins with the same numbers.
    """
    # Words of fixed width: numpy would encode small integers in fewer words, and two different keys could coincide.
    words = np.array([part & (2**64 - 1) for part in (seed, group_id, draw, index)], dtype=np.uint64)
    entropy = [int(word) for word in words.view(np.uint32)]
    generator = np.random.Generator(np.random.Philox(np.random.SeedSequence(entropy)))
    return generator.random(count, dtype=np.float32)


def choose_tokens(
    logits_BV: Tensor, uniforms_B: Tensor, temperatures_B: Tensor, top_p_B: Tensor
) -> tuple[Tensor, Tensor]:
    """Choose one token per row.

    Args:
        logits_BV: float32.
        uniforms_B: float32 in [0, 1).
        temperatures_B: float32, 0 for the most likely token.
        top_p_B: float32 in (0, 1]; 1 keeps every token.

    Returns:
        tokens int64 [B], and their log-probs float32 [B] (natural log) in the distribution with the temperature applied
        and top-p not applied. At temperature 0 the log-prob is that of temperature 1.

    Raises:
        EngineError: the logits of a row give no distribution.
    """
    greedy_B = temperatures_B == 0
    scale_B = torch.where(greedy_B, 1.0, temperatures_B)
    logprobs_BV = torch.log_softmax(logits_BV / scale_B[:, None], dim=-1)
    if bool(logprobs_BV[:, 0].isnan().any()):  # one logit that is NaN or +inf makes all of its row NaN
        raise EngineError("the model's logits are NaN: its weights are not finite, or its activations overflow.")
    weights_BV = logprobs_BV.exp()
    narrow = torch.nonzero(top_p_B < 1).flatten()
    if len(narrow):
        weights_BV[narrow] = keep_nucleus(weights_BV[narrow], top_p_B[narrow])
    tokens_B = _invert(weights_BV, uniforms_B)
    if greedy_B.any():
        tokens_B = torch.where(greedy_B, logits_BV.argmax(dim=-1), tokens_B)
    return tokens_B, logprobs_BV.gather(1, tokens_B[:, None]).squeeze(1)


def keep_nucleus(probs_BV: Tensor, top_p_B: Tensor) -> Tensor:
    """Set probabilities to 0 outside the nucleus: the fewest most likely tokens that together have at least top_p.

    Args:
        probs_BV: float32, rows sum to 1.
        top_p_B: float32 in (0, 1].

    Returns:
        [B, V], not renormalised; each row keeps at least one token. Equal probabilities are ranked by token id.
    """
    sorted_BV, order_BV = probs_BV.sort(dim=-1, descending=True, stable=True)
    before_BV = sorted_BV.cumsum(dim=-1) - sorted_BV
    keep_BV = torch.zeros_like(probs_BV, dtype=torch.bool)
    keep_BV.scatter_(1, order_BV, before_BV < top_p_B[:, None])
    return probs_BV * keep_BV


def _invert(weights_BV: Tensor, uniforms_B: Tensor) -> Tensor:
    """Return the first token whose cumulative weight exceeds u times the row's total; never one of weight 0."""
    cumulative_BV = weights_BV.cumsum(dim=-1)
    total_B = cumulative_BV[:, -1]
    # u * total can round up to total, which no cumulative weight exceeds.
    target_B = torch.minimum(uniforms_B * total_B, torch.nextafter(total_B, torch.zeros_like(total_B)))
    return torch.searchsorted(cumulative_BV, target_B[:, None], right=True).squeeze(1)


# Measured with 256 and 512 rows of a 0.5 M parameter model: 0.7 to 0.9 make no difference, and are 1.5 times as fast as
# never dropping rows.
_COMPACT_BELOW = 0.75
_COMPACT_AT_LEAST_ROWS = 16
_LOOK_FOR_REPETITION = 32
"""Steps between two checks. An answer is cut where it began to repeat itself, however late that is noticed."""
_RUNNING, _STOP, _LENGTH, _ABORT = range(4)
_REASONS: dict[int, FinishReason] = {_STOP: "stop", _LENGTH: "length", _ABORT: "abort"}


@dataclass(frozen=True, slots=True)
class Row:
    """One rollout to generate: number `index` of a request."""

    request: GroupRequest
    index: int

    @property
    def given(self) -> tuple[int, ...]:
        """The tokens that it continues from: the prompt, and the partial answer if there is one."""
        earlier = self.request.partial.get(self.index)
        return self.request.prompt.tokens if earlier is None else tuple(earlier.tokens.tolist())

    @property
    def room(self) -> int:
        """How many new tokens it may get."""
        return self.request.room(self.index)


class Decoding:
    """Chooses and records every row's tokens until all have finished.

    Args:
        rows: the batch.
        seed: of the engine.
        vocab: size of the model's vocabulary.
        abort: checked after every step.
        report: called with the position of each row, once, after the step in which it finished.
        decode: token ids -> text, for rows with stop texts.
    """

    def __init__(
        self,
        rows: Sequence[Row],
        seed: int,
        vocab: int,
        abort: AbortSignal,
        report: Callable[[int], None],
        decode: Decode | None = None,
    ) -> None:
        sampling = [row.request.sampling for row in rows]
        most = max(row.room for row in rows)
        self._rows = rows
        self._abort, self._report, self._decode = abort, report, decode
        self._windows = {n: window_of(s.stop) for n, s in enumerate(sampling) if s.stop}
        self._repeating = {n: s.repetition for n, s in enumerate(sampling) if s.repetition}
        self._uniforms_NM = torch.from_numpy(_uniforms(rows, seed, most))
        self._temperatures_N = torch.tensor([s.temperature for s in sampling], dtype=torch.float32)
        self._top_p_N = torch.tensor([s.top_p for s in sampling], dtype=torch.float32)
        self._limits_N = torch.tensor([row.room for row in rows])
        self._stops_PV, self._stop_set_N = _stop_table(sampling, vocab)
        self._tokens_NM = torch.zeros(len(rows), most, dtype=torch.int32)
        self._logprobs_NM = torch.zeros(len(rows), most)
        self._lengths_N = torch.zeros(len(rows), dtype=torch.int64)
        self._finish_N = torch.full((len(rows),), _RUNNING)
        self._reported_N = torch.zeros(len(rows), dtype=torch.bool)
        self._present_B = torch.arange(len(rows))
        self._step = 0
        self._seen_changes = -1

    @property
    def done(self) -> bool:
        """Whether every row has finished."""
        return not bool((self._finish_N == _RUNNING).any())

    @property
    def steps_left(self) -> int:
        """The most tokens that any running row may still get."""
        running_N = self._finish_N == _RUNNING
        return int(self._limits_N[running_N].max()) - self._step if bool(running_N.any()) else 0

    def compact(self) -> Tensor:
        """Drop the finished rows; return the positions, in the call that ended, of the running ones (int64 [B])."""
        keep_B = torch.nonzero(self._finish_N[self._present_B] == _RUNNING).flatten()
        self._present_B = self._present_B[keep_B]
        return keep_B

    def result(self, n: int) -> tuple[np.ndarray, np.ndarray, FinishReason]:
        """Return row n's response tokens int32 [R], log-probs float32 [R], and why it ended."""
        length = int(self._lengths_N[n])
        tokens, logprobs = self._tokens_NM[n, :length].numpy(), self._logprobs_NM[n, :length].numpy()
        return tokens.copy(), logprobs.copy(), _REASONS[int(self._finish_N[n])]

    def choose(self, logits_BV: Tensor) -> Tensor:
        """Choose one token for every row present, and record those of running rows. Returns them, int64 [B]."""
        present_B, step = self._present_B, self._step
        tokens_B, logprobs_B = choose_tokens(
            logits_BV, self._uniforms_NM[present_B, step], self._temperatures_N[present_B], self._top_p_N[present_B]
        )
        running_B = self._finish_N[present_B] == _RUNNING
        rows_B, tokens = present_B[running_B], tokens_B[running_B]
        self._tokens_NM[rows_B, step] = tokens.to(torch.int32)
        self._logprobs_NM[rows_B, step] = logprobs_B[running_B]
        self._lengths_N[rows_B] = step + 1
        at_limit = torch.where(self._limits_N[rows_B] == step + 1, _LENGTH, _RUNNING)
        stopped = self._stops_PV[self._stop_set_N[rows_B], tokens] | self._at_stop_text(rows_B, step + 1)
        if self._repeating and (step + 1) % _LOOK_FOR_REPETITION == 0:
            stopped |= self._repeats(rows_B, step + 1)
        self._finish_N[rows_B] = torch.where(stopped, _STOP, at_limit)
        self._step = step + 1
        return tokens_B

    def _at_stop_text(self, rows_B: Tensor, length: int) -> Tensor:
        """Return whether the last of each row's `length` tokens completes a stop text of its request: bool [B]."""
        if not self._windows:
            return torch.zeros(len(rows_B), dtype=torch.bool)
        assert self._decode is not None, "the generator refuses stop texts without it"
        matches = []
        for n in rows_B.tolist():
            window = self._windows.get(n, 0)
            tail = self._decode(self._tokens_NM[n, max(0, length - window) : length].tolist()) if window else ""
            matches.append(any(stop in tail for stop in self._rows[n].request.sampling.stop))
        return torch.tensor(matches, dtype=torch.bool)

    def _repeats(self, rows_B: Tensor, length: int) -> Tensor:
        """Return whether each row has begun to repeat itself since the last check: bool [B]. `until_end` cuts it."""
        repeating = []
        for n in rows_B.tolist():
            span, period = self._repeating.get(n, (length + 1, 1))
            tail_T = self._tokens_NM[n, max(0, length - span - _LOOK_FOR_REPETITION) : length].numpy()
            repeating.append(length >= span and repeated_at(tail_T, span, period) is not None)
        return torch.tensor(repeating, dtype=torch.bool)

    def should_end(self, rows: int) -> bool:
        """Settle; return whether a call over `rows` rows is to end now: all have finished, or enough to drop them."""
        self.settle()
        running = int((self._finish_N[self._present_B] == _RUNNING).sum())
        few = running <= _COMPACT_BELOW * rows and rows >= _COMPACT_AT_LEAST_ROWS
        return running == 0 or few

    def settle(self) -> None:
        """End aborted rows, and report every row that has finished and was not reported."""
        self._look_for_abort()
        new_N = (self._finish_N != _RUNNING) & ~self._reported_N
        self._reported_N |= new_N
        for n in torch.nonzero(new_N).flatten().tolist():
            self._report(n)

    def _look_for_abort(self) -> None:
        changes = self._abort.changes
        if changes == self._seen_changes:
            return
        self._seen_changes = changes
        hit_N = torch.tensor([self._abort.hits(row.request.group_id) for row in self._rows])
        self._finish_N[hit_N & (self._finish_N == _RUNNING)] = _ABORT


class TokenChooser(LogitsProcessor):
    """Leaves `generate` one token per row to pick: the one that `Decoding` chose."""

    def __init__(self, decoding: Decoding) -> None:
        self._decoding = decoding

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return [B, V] with 0 at the chosen tokens and -inf elsewhere, written into the logits `scores` [B, V]."""
        tokens_B = self._decoding.choose(scores)
        return scores.fill_(-torch.inf).scatter_(1, tokens_B[:, None], 0.0)


class EndOfCall(StoppingCriteria):
    """Ends a `generate` call when it is time to drop finished rows, or all have finished."""

    def __init__(self, decoding: Decoding) -> None:
        self._decoding = decoding

    def __call__(self, input_ids: Tensor, scores: object, **kwargs: object) -> Tensor:
        """Return bool [B], all equal."""
        rows = len(input_ids)
        return torch.full((rows,), self._decoding.should_end(rows), dtype=torch.bool)


def _uniforms(rows: Sequence[Row], seed: int, most: int) -> np.ndarray:
    table_NM = np.zeros((len(rows), most), dtype=np.float32)
    for n, row in enumerate(rows):
        count = row.room
        table_NM[n, :count] = row_uniforms(seed, row.request.group_id, row.request.draw, row.index, count)
    return table_NM


def _stop_table(sampling: Sequence[Any], vocab: int) -> tuple[Tensor, Tensor]:
    """Return which tokens stop (bool [P, V]), and which line p of this table each row uses (int64 [N])."""
    sets = {stops: p for p, stops in enumerate(dict.fromkeys(s.stop_token_ids for s in sampling))}
    table_PV = torch.zeros(len(sets), vocab, dtype=torch.bool)
    for stops, p in sets.items():
        table_PV[p, list(stops)] = True
    return table_PV, torch.tensor([sets[s.stop_token_ids] for s in sampling])
