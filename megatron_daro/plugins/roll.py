"""DARO inside ROLL's actor worker: `actor_train.worker_cls: megatron_daro.plugins.roll.DaroActorWorker`.

`roll_driver` has written the advantages of whole groups and each sample's bin into the batch. Before an optimizer step
this worker counts tokens per bin over ranks. Its loss is ROLL's own with A w_k N / N_k instead of the advantages A, so
that ROLL's token mean is the weighted sum. After the step DARO's weights move. Clipping, importance weights, KL,
entropy and metrics stay ROLL's own; the token losses are read where ROLL averages them. The state is saved in ROLL's
checkpoints.
Refuses: a batch without bins, a loss whose tokens are not those that were counted, options that `roll_driver` refuses.

Scale: ROLL multiplies by the number of micro-batches and ranks itself. Each context-parallel rank computes the loss of
whole sequences, so sums run over data-parallel ranks alone.

Shape letters: M samples of a micro-batch, T = S - 1 positions of log-probs.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_daro.errors import AlgorithmError
from megatron_daro.plugins.core import STATE_FILE, DifficultyStep, SampleSums, resume, save_state
from megatron_daro.plugins.megatron_host import over_data, over_data_and_stages
from megatron_daro.plugins.options import read_options
from megatron_daro.plugins.roll_driver import BINS, HOST, check_options

if TYPE_CHECKING:
    from roll.distributed.scheduler.protocol import DataProto

Dispatch, register, actor_worker, *_, download_model, get_latest_ckpt = HOST.look_up(
    (
        "roll.distributed.scheduler.decorator:Dispatch",
        "roll.distributed.scheduler.decorator:register",
        "roll.pipeline.rlvr.actor_worker",
        "roll.pipeline.rlvr.actor_worker:agg_loss",
        "roll.pipeline.rlvr.actor_worker:ActorWorker.initialize",
        "roll.pipeline.rlvr.actor_worker:ActorWorker.loss_func",
        "roll.pipeline.rlvr.actor_worker:ActorWorker.do_checkpoint",
        "roll.utils.checkpoint_manager:download_model",
        "roll.utils.checkpoint_manager:get_latest_ckpt",
    )
).values()

_TOLERANCE = 1e-3
_TESTED = " or ".join(HOST.tested)


def _bins(data: DataProto) -> Tensor:
    """Return the bin of each sample, int64 [M]: the maximum of its row, which ROLL may have cut or padded with 0."""
    if BINS not in data.batch:
        raise AlgorithmError(
            f"batch: {BINS} missing, allowed is a batch of DARO's driver: start ROLL with python -m "
            "megatron_daro.plugins.roll_driver"
        )
    return data.batch[BINS].amax(1).to(torch.int64)


def _mask(data: DataProto) -> Tensor:
    """Return the mask of the trained log-probs, [M, T]."""
    if "final_response_mask" in data.batch:
        return data.batch["final_response_mask"]
    return data.batch["response_mask"][:, 1:]


@contextmanager
def _averaged() -> Iterator[list[tuple[Tensor, Tensor]]]:
    """Inside the context, collect (token losses, mask) of every average that ROLL's loss takes with sample weights."""
    own, losses = actor_worker.agg_loss, []

    def agg_loss(loss_mat: Tensor, loss_mask: Tensor, *others: object, **options: object) -> Tensor:
        if options.get("weights") is not None:
            losses.append((loss_mat.detach(), loss_mask))
        return own(loss_mat, loss_mask, *others, **options)

    actor_worker.agg_loss = agg_loss
    try:
        yield losses
    finally:
        actor_worker.agg_loss = own


def _first_result(own: Callable[..., Tensor], results: list[Tensor], **given: Tensor) -> Tensor:
    if not results:
        results.append(own(**given))
    return results[0]


@contextmanager
def _computed_once(strategy: object) -> Iterator[None]:
    """Inside the context, compute log-probs and entropy only once: Megatron's functions overwrite the logits."""
    names = ("op_compute_log_probs", "op_compute_entropy")
    for name in names:
        setattr(strategy, name, functools.partial(_first_result, getattr(strategy, name), []))
    try:
        yield
    finally:
        for name in names:
            delattr(strategy, name)


class DaroActorWorker(actor_worker.ActorWorker):  # type: ignore[name-defined,misc]
    """ROLL's actor with DARO's loss: counts tokens before each optimizer step and updates DARO's weights after it."""

    daro: DifficultyStep

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def initialize(self, pipeline_config: object) -> None:
        """Start as ROLL's actor does, load DARO's state from a checkpoint, and wrap the optimizer step.

        Raises:
            ConfigError: lists the options of ROLL that DARO does not support.
            CheckpointError: the state is missing (without start_fresh), torn, or of another K.
        """
        check_options(pipeline_config)  # type: ignore[arg-type]
        super().initialize(pipeline_config)
        options = read_options()
        count = self.pipeline_config.actor_infer.generating_args.num_return_sequences
        self.daro = DifficultyStep(options.algorithm(count))
        path = self._resumed_state()
        if path is not None:
            resume(self.daro, path, start_fresh=options.start_fresh)
        self._wrap_train_step()
        HOST.announce(self.daro, options)

    def _resumed_state(self) -> Path | None:
        """Return the path of DARO's state in the checkpoint that ROLL resumes from; None where ROLL does not resume."""
        wanted = self.pipeline_config.resume_from_checkpoint
        if wanted is True:
            wanted = get_latest_ckpt(self.pipeline_config.checkpoint_config)
        return Path(download_model(wanted)) / STATE_FILE if wanted else None

    def _wrap_train_step(self) -> None:
        """Count tokens before each optimizer step of the strategy, and update DARO's weights after it."""
        own: Callable[..., dict[str, object]] = self.strategy.train_step

        def train_step(batch: DataProto, loss_func: object) -> dict[str, object]:
            self.daro.begin(_bins(batch), _mask(batch).sum(1), over_data(with_context=False))
            metrics = own(batch=batch, loss_func=loss_func)
            # Always applied: ROLL stops the run where its optimizer does not take a step.
            return metrics | self.daro.end(over_data_and_stages(with_context=False))

        self.strategy.train_step = train_step

    def loss_func(self, data: DataProto, output_tensor: Tensor) -> tuple[Tensor, dict[str, object]]:
        """Return ROLL's loss of a micro-batch and its metrics, with DARO's weight on each sample.

        Raises:
            AlgorithmError: no step is open, bins did not arrive, or this version of ROLL averages differently.
        """
        if not self.daro.first_here:
            return self._weighted_loss(data, output_tensor, probe=False)
        with _computed_once(self.strategy):
            return self._weighted_loss(data, output_tensor, probe=True)

    def _weighted_loss(
        self, data: DataProto, output_tensor: Tensor, *, probe: bool
    ) -> tuple[Tensor, dict[str, object]]:
        bins_M, plain_MT = _bins(data), data.batch["advantages"]
        counted = float(self.daro.totals.tokens_per_bin.sum())
        ones_M = torch.ones(len(bins_M), device=bins_M.device)
        factors_M = self.daro.algorithm.bin_coefficients(bins_M, ones_M, self.daro.totals).float() * counted
        data.batch["advantages"] = plain_MT * factors_M[:, None] * _mask(data)
        try:
            with _averaged() as losses:
                loss, metrics = super().loss_func(data, output_tensor)
        finally:
            data.batch["advantages"] = plain_MT
        if len(losses) != 1:
            raise AlgorithmError(
                f"loss: ROLL took {len(losses)} averages with sample weights, allowed is 1: another version of ROLL; "
                f"use {_TESTED}"
            )
        losses_MT, mask_MT = losses[0]
        per_token_MT = torch.where(factors_M[:, None] != 0, losses_MT / factors_M[:, None], 0.0)
        weighed = self.daro.weigh(SampleSums.of_rows(per_token_MT, mask_MT), bins_M)
        self._check_scale(float(weighed), float(metrics["actor/weighted_pg_loss@sum"]), losses_MT, counted)
        if probe:
            self._probe(data, output_tensor, per_token_MT, factors_M)
        return loss, metrics

    def _check_scale(self, wanted: float, got: float, losses_MT: Tensor, counted: float) -> None:
        """Compare ROLL's average with the weighted sum; they are equal only if ROLL divides by the counted tokens."""
        size = float(losses_MT.abs().sum()) / counted
        if not math.isclose(got, wanted, rel_tol=_TOLERANCE, abs_tol=_TOLERANCE * max(size, 1e-12)):
            raise AlgorithmError(
                f"loss: ROLL's average is {got:g}, the weighted sum {wanted:g}, allowed is a difference of "
                f"{_TOLERANCE:g}: ROLL divides by another number of tokens than {counted:g}; use {_TESTED}"
            )

    def _probe(self, data: DataProto, output_tensor: Tensor, per_token_MT: Tensor, factors_M: Tensor) -> None:
        """Check in the first step that token losses divided by the factors equal those with unweighted advantages."""
        with torch.no_grad(), _averaged() as losses:
            super().loss_func(data, output_tensor)
        plain_MT = torch.where((factors_M[:, None] != 0) & (_mask(data) > 0), losses[0][0], 0.0)
        size = float(plain_MT.abs().max()) + 1e-12
        if not torch.allclose(plain_MT, per_token_MT, rtol=_TOLERANCE, atol=_TOLERANCE * size):
            worst = float((plain_MT - per_token_MT).abs().max())
            raise AlgorithmError(
                f"loss of the first step: ROLL's token losses differ by {worst:g} between weighted and plain "
                f"advantages, allowed is {_TOLERANCE:g} of the largest, {size:g}: this version clips otherwise; use "
                f"{_TESTED}"
            )

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def do_checkpoint(self, global_step: int, is_last_step: bool | None = None) -> DataProto:
        """Save DARO's state in the checkpoint's folder, then ROLL's checkpoint, since ROLL may move the folder away."""
        if dist.get_rank() == 0:
            folder = Path(self.pipeline_config.output_dir) / self.worker_name / f"checkpoint-{global_step}"
            save_state(self.daro, folder / STATE_FILE)
        return super().do_checkpoint(global_step, is_last_step)
