"""What every adapter does in one optimizer step: counts -> coefficients -> loss sums -> new weights -> state.

An adapter calls `DifficultyStep.begin` before the first forward pass of an optimizer step, `weigh` in the loss of every
micro-batch, and `end` after the last one; in between, the host may do what it likes. The adapter passes in a function
that sums a vector over the ranks that hold different tokens. `end` raises an error when the tokens that the losses saw
are not the tokens that were counted: then the host masked, dropped or repeated samples in between, and every
denominator would be wrong.

Shape letters: N samples of this rank's part of the step, M samples of one micro-batch, T padded response positions,
K rollouts per prompt, [K+1] one entry per bin 0..K.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_daro import durable
from megatron_daro.algo.difficulty import bin_sums
from megatron_daro.algo.weighting import Algorithm, StepStats, StepTotals
from megatron_daro.errors import AlgorithmError, CheckpointError

Reduce = Callable[[Tensor], Tensor]
"""Sums a float64 vector over ranks, and returns the sum on each of them."""

logger = logging.getLogger(__name__)

STATE_FILE = "daro.json"
"""Name of the state beside a host's checkpoint."""


def over_group(group: object, device: torch.device | str = "cpu") -> Reduce:
    """Return a `Reduce` over a process group.

    Args:
        group: of torch.distributed; None for a single rank.
        device: where the group's backend reduces tensors: "cuda" for NCCL.
    """

    def reduce(vector: Tensor) -> Tensor:
        if group is None:
            return vector
        moved = vector.to(device, copy=True)
        dist.all_reduce(moved, group=group)
        return moved.to(vector.device)

    return reduce


def bins_of_pass_rates(pass_rates_N: Tensor, rollouts_per_prompt: int) -> Tensor:
    """Return bins from pass rates that a host carried as floating-point numbers.

    Args:
        pass_rates_N: [N], k/K of each sample's group; any floating dtype (bfloat16 is too coarse for most K
            from 27 on).
        rollouts_per_prompt: K.

    Returns:
        int64 [N], 0..K.

    Raises:
        AlgorithmError: a value times K is not within 0.05 of a whole number from 0 to K, so it is no pass rate.
    """
    counts_N = pass_rates_N.detach().to(torch.float64) * rollouts_per_prompt
    bins_N = counts_N.round()
    wrong_N = ~((counts_N - bins_N).abs() <= 0.05) | (bins_N < 0) | (bins_N > rollouts_per_prompt)
    if bool(wrong_N.any()):
        first = float(pass_rates_N[wrong_N][0])
        raise AlgorithmError(
            f"pass rate: got {first:g}, allowed are 0/{rollouts_per_prompt}, 1/{rollouts_per_prompt}, ... 1 "
            f"(rollouts_per_prompt {rollouts_per_prompt}); another K, a shaped reward, or something else in its place"
        )
    return bins_N.to(torch.int64)


def consecutive_groups(prompts_BP: Tensor, rollouts_per_prompt: int, option: str) -> Tensor:
    """Return the group of each row, int64 [B], of a batch in which the K answers to a prompt are consecutive rows.

    Args:
        prompts_BP: [B, P], padded prompts; they must be equal within a group. Two groups may have the same prompt.
        rollouts_per_prompt: K.
        option: the host's name for K, for messages.

    Raises:
        AlgorithmError: K consecutive rows are not of one prompt: rows were filtered or reordered.
    """
    num_rows = len(prompts_BP)
    if num_rows % rollouts_per_prompt:
        raise AlgorithmError(
            f"groups: got {num_rows} answers, allowed is a multiple of {option}, {rollouts_per_prompt}: some were "
            "filtered one by one"
        )
    groups = prompts_BP.cpu().reshape(num_rows // rollouts_per_prompt, rollouts_per_prompt, -1)
    mixed = (groups != groups[:, :1]).flatten(1).any(1).nonzero().flatten().tolist()
    if mixed:
        raise AlgorithmError(
            f"groups: {len(mixed)} of {len(groups)} have answers to several prompts (first: group {mixed[0]}); allowed "
            f"are {rollouts_per_prompt} rows of one prompt ({option}), one after another: rows were reordered, or a "
            "prompt has fewer answers"
        )
    return torch.arange(num_rows) // rollouts_per_prompt


@dataclass(frozen=True, slots=True, eq=False)
class SampleSums:
    """Token losses of some samples, summed per sample; each float64 [M].

    losses_M: with gradient. abs_losses_M: detached. lengths_M: trained tokens that this rank holds.
    """

    losses_M: Tensor
    abs_losses_M: Tensor
    lengths_M: Tensor

    @classmethod
    def of_rows(cls, losses_MT: Tensor, mask_MT: Tensor) -> SampleSums:
        """Return the sums of padded rows: token losses [M, T] and a mask [M, T]; masked losses may be NaN."""
        kept_MT = mask_MT.bool()
        kept_losses_MT = torch.where(kept_MT, losses_MT, 0).to(torch.float64)
        return cls(kept_losses_MT.sum(1), kept_losses_MT.detach().abs().sum(1), kept_MT.sum(1, dtype=torch.float64))

    @classmethod
    def of_list(cls, losses: Sequence[Tensor], masks: Sequence[Tensor]) -> SampleSums:
        """Return the sums of ragged samples; each has a vector of token losses and a vector of its mask."""
        if not losses:
            return cls(*(torch.zeros(0, dtype=torch.float64) for _ in range(3)))
        rows = [cls.of_rows(loss_R[None], mask_R[None]) for loss_R, mask_R in zip(losses, masks, strict=True)]
        columns = ([row.losses_M for row in rows], [r.abs_losses_M for r in rows], [r.lengths_M for r in rows])
        return cls(*(torch.cat(column) for column in columns))


class DifficultyStep:
    """DARO over the optimizer steps of one rank; every rank holds the same state and makes the same calls."""

    def __init__(self, algorithm: Algorithm) -> None:
        """Start with no step open.

        Args:
            algorithm: with difficulty weights (daro); this object updates, saves and loads its state.

        Raises:
            AlgorithmError: the algorithm has no difficulty weights.
        """
        if algorithm.weights is None:
            raise AlgorithmError(f"algorithm: got {algorithm.name!r}, allowed is one with difficulty weights: daro")
        self.algorithm = algorithm
        self.rollouts_per_prompt = algorithm.rollouts_per_prompt
        self.steps = 0
        self.first_here = True
        """Whether this process has not ended a step yet: until then adapters compare their loss with the host's own."""
        self._totals: StepTotals | None = None
        self._groups = torch.zeros(0)
        self._sums = torch.zeros(0)

    @property
    def totals(self) -> StepTotals:
        """The totals of the open step.

        Raises:
            AlgorithmError: no step is open.
        """
        if self._totals is None:
            raise AlgorithmError(
                "difficulty step: got a loss without a step; allowed is begin, then losses, then end: the adapter's "
                "hook before the optimizer step did not run, so the tokens per pass rate are unknown"
            )
        return self._totals

    @property
    def open(self) -> bool:
        """Whether a step was begun and not ended."""
        return self._totals is not None

    def begin(self, bins_N: Tensor, lengths_N: Tensor, reduce: Reduce) -> StepTotals:
        """Count the optimizer step's trained tokens per bin over all ranks.

        Args:
            bins_N: int64 [N], of all samples that this rank will see in the step, each once.
            lengths_N: [N], trained tokens of each whole sample (its full mask, even where context-parallel ranks share
                a sample).
            reduce: sums over the ranks that hold different samples: data parallel without context parallel.

        Returns:
            The totals of the step.

        Raises:
            AlgorithmError: bins outside 0..K, or shapes that differ.
        """
        lengths_N = torch.as_tensor(lengths_N).to("cpu", torch.int64)
        bins_N = torch.as_tensor(bins_N).to("cpu", torch.int64)
        own = StepTotals.of(bins_N, lengths_N, self.rollouts_per_prompt)
        totals = StepTotals.from_vector(reduce(own.vector().to(torch.float64)).round())
        self._groups = totals.rollouts_per_bin / self.rollouts_per_prompt
        self._sums = torch.zeros(3 * (self.rollouts_per_prompt + 1) + 1, dtype=torch.float64)
        self._totals = totals
        return totals

    def weigh(self, sums: SampleSums, bins_M: Tensor) -> Tensor:
        """Return X, the sum of w_k / N_k * token losses over a micro-batch, and note its sums per bin.

        The loss of the whole step is the plain sum of X over micro-batches and ranks; an adapter multiplies X by what
        its host divides by.

        Args:
            sums: of the micro-batch.
            bins_M: int64 [M].

        Returns:
            0-dim float64 with gradient; 0 (still attached to the losses) where all samples are in bins 0 and K.

        Raises:
            AlgorithmError: no step is open, or a bin is outside 0..K.
        """
        totals = self.totals
        bins_M = torch.as_tensor(bins_M, device=sums.losses_M.device).to(torch.int64)
        per_bin = [
            bin_sums(values_M.detach(), bins_M, self.rollouts_per_prompt).cpu()
            for values_M in (sums.losses_M, sums.abs_losses_M, sums.lengths_M)
        ]
        coefficients_M = self.algorithm.bin_coefficients(bins_M, sums.lengths_M, totals)
        # Select instead of only multiplying: 0 times a loss of bin 0 or K that is not finite would make the sum NaN.
        weighed_M = torch.where(coefficients_M != 0, coefficients_M * sums.losses_M, 0.0)
        weighed = weighed_M.sum()
        self.note(per_bin[0], per_bin[1], per_bin[2], float(weighed.detach()))
        return weighed

    def note(self, loss_sums: Tensor, abs_loss_sums: Tensor, tokens: Tensor, weighed: float) -> None:
        """Add sums that were computed elsewhere, instead of `weigh`: three vectors float64 [K+1], and X as `weighed`.

        Raises:
            AlgorithmError: no step is open.
        """
        _ = self.totals
        self._sums[:-1] += torch.cat([loss_sums, abs_loss_sums, tokens])
        self._sums[-1] += weighed

    def end(self, reduce: Reduce, *, applied: bool = True) -> dict[str, float]:
        """Close the step: sum the losses over ranks, check the tokens, move the weights.

        Args:
            reduce: sums over the ranks whose micro-batches held different tokens: data parallel, and context parallel
                where each rank summed its own part of a sample.
            applied: whether the host's optimizer took the step; the weights move only then.

        Returns:
            Metrics under the names of docs/metrics.md, the same on every rank, and `difficulty/skipped` (1 where the
            weights were left as they were because the step was not applied or a sum was not finite).

        Raises:
            AlgorithmError: the losses saw other tokens than `begin` counted.
        """
        totals, num_bins = self.totals, self.rollouts_per_prompt + 1
        vector = reduce(self._sums)
        loss_sums, abs_sums, seen = vector[:-1].reshape(3, num_bins)
        self._totals = None
        if not torch.equal(seen.round().to(torch.int64), totals.tokens_per_bin):
            raise AlgorithmError(
                f"trained tokens per bin: counted {totals.tokens_per_bin.tolist()} before the step, the losses saw "
                f"{[int(n) for n in seen.round().tolist()]}; allowed are equal numbers: the host changed masks, "
                "dropped or repeated samples after they were counted, or ranks that share samples were summed"
            )
        metrics = self._metrics(totals, loss_sums, float(vector[-1]))
        learns = applied and bool(torch.isfinite(vector).all())
        if learns:
            self.algorithm.learn(StepStats.of_bins(totals, loss_sums, abs_sums))
        self.steps += 1
        if self.first_here and (not dist.is_initialized() or dist.get_rank() == 0):
            self._say_in_force(totals, learns)
        self.first_here = False
        return metrics | {
            "difficulty/clamped": float(self.algorithm.clamped),
            "difficulty/skipped": float(not learns),
        }

    def _say_in_force(self, totals: StepTotals, learns: bool) -> None:
        """Log, after the first step of this process, that it trained DARO's loss."""
        assert self.algorithm.weights is not None  # checked when this was made
        inner = slice(1, self.rollouts_per_prompt)
        logger.warning(
            "DARO is in force: optimizer step %d was its loss, over %d tokens of %d groups with signal; weights of "
            "pass rates 1/%d to %d/%d %s %s",
            *(self.steps, int(totals.tokens_per_bin[inner].sum()), round(float(self._groups[inner].sum()))),
            *(self.rollouts_per_prompt, self.rollouts_per_prompt - 1, self.rollouts_per_prompt),
            "are now" if learns else "stay, as nothing was learned from it:",
            [round(weight, 4) for weight in self.algorithm.weights[inner].tolist()],
        )

    def _metrics(self, totals: StepTotals, loss_sums: Tensor, policy_loss: float) -> dict[str, float]:
        """Return the step's metrics, with the weights that it used; called before the weights move."""
        metrics = {
            "loss/policy": policy_loss,
            "loss/total": policy_loss + self.algorithm.extra_loss(totals),
        }
        weights = self.algorithm.weights
        assert weights is not None  # checked when this was made
        for k, count in enumerate(totals.tokens_per_bin.tolist()):
            metrics[f"difficulty/groups/{k}"] = float(self._groups[k])
            metrics[f"difficulty/tokens/{k}"] = float(count)
            if count:
                metrics[f"difficulty/loss/{k}"] = float(loss_sums[k]) / count
            if 0 < k < self.rollouts_per_prompt:
                metrics[f"difficulty/weight/{k}"] = float(weights[k])
        return metrics

    def state_dict(self) -> dict[str, Any]:
        """Return plain data for JSON: the algorithm's state (K, weights, moments) and the number of steps."""
        return {"format": 1, "steps": self.steps, "algorithm": self.algorithm.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a saved state.

        Raises:
            CheckpointError: another format, another K, another parameter, or a torn state; nothing is changed then.
        """
        if state.get("format") != 1 or not isinstance(state.get("steps"), int):
            raise CheckpointError(
                f"DARO's state: got format {state.get('format')!r} with steps {state.get('steps')!r}, allowed is "
                "format 1 with a whole number of steps; the file is torn or of another version of this package"
            )
        self.algorithm.load_state_dict(state.get("algorithm") or {})
        self.steps = int(state["steps"])


def save_state(step: DifficultyStep, path: Path) -> None:
    """Write the state as JSON beside a host's checkpoint, whole or not at all. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    durable.write(beside, json.dumps(step.state_dict(), indent=1))
    beside.replace(path)
    durable.sync(path.parent)


def resume(step: DifficultyStep, path: Path, *, start_fresh: bool) -> None:
    """Take over the state beside a host's checkpoint, whether or not the host saved its optimizer.

    Collective where torch.distributed is initialized: one rank writes the file, so where each node has a folder of its
    own only that rank's node has it; all ranks take over what any of them finds.

    Args:
        step: whose weights are replaced.
        path: `STATE_FILE` of the checkpoint that the host resumes from.
        start_fresh: whether a checkpoint without the file is resumed with weights of 1, with a warning.

    Raises:
        CheckpointError: on every rank alike: no rank has the file (without start_fresh), ranks have different files,
            the file is torn, or the state does not fit.
    """
    texts = _of_every_rank(_text(path))
    ranks_with = {text: rank for rank, text in reversed(list(enumerate(texts))) if text is not None}
    if not ranks_with:
        if not start_fresh:
            raise CheckpointError(
                f"DARO's state: {path} is on no rank's node, allowed is a checkpoint that was saved with DARO; start "
                "from the weights alone, or set start_fresh=true in MEGATRON_DARO_OPTIONS to go on with weights of 1"
            )
        logger.warning("DARO: %s is on no rank's node; weights start at 1, as start_fresh says", path)
        return
    if len(ranks_with) > 1:
        digests = [f"{hashlib.sha256(text.encode()).hexdigest()[:8]} on rank {r}" for text, r in ranks_with.items()]
        raise CheckpointError(
            f"DARO's state: {path} has different contents on different nodes ({', '.join(sorted(digests))}), allowed "
            "is one state for all ranks: remove the file of the older run from the nodes that have it"
        )
    (text,) = ranks_with
    _take_over(step, text, path)
    logger.warning("DARO: weights after %d optimizer steps, from %s", step.steps, path)


def _take_over(step: DifficultyStep, text: str, path: Path) -> None:
    try:
        state = json.loads(text)
    except ValueError as error:
        raise CheckpointError(f"DARO's state: {path} is no JSON ({error}); the checkpoint is torn") from None
    if not isinstance(state, dict):
        raise CheckpointError(f"DARO's state: {path} holds no mapping; the checkpoint is torn or edited")
    step.load_state_dict(state)


def _text(path: Path) -> str | None:
    try:
        return path.read_bytes().decode("utf-8", "replace")
    except FileNotFoundError:
        return None


def _of_every_rank(text: str | None) -> list[str | None]:
    """Return what each rank has read, in rank order."""
    if not dist.is_initialized():
        return [text]
    texts: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(texts, text)
    return texts
