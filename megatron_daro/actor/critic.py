"""The critic of one process: a second model, which estimates at each token what the answer will be worth.

It is built from the policy's checkpoint, or from one of its own, which may be of another shape, under the policy's
layout and on its ranks; the two compute one after the other. `values` is a pass before the first optimizer step of a
batch; `gradients` and `apply` are the critic's part of an optimizer step, with targets from actor/advantages.py. The
head has one output and is whole on every tensor-parallel rank; if the checkpoint has no head, values are 0 until it is
trained. Refuses a head with a bias that is not 0.

Legend: T packed tokens of a micro-batch on this CP rank, I selected positions of them, P response tokens, J trained
tokens, D hidden; N samples of the shard, R its response tokens.
"""

from __future__ import annotations

import math
import time
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_daro.actor import device
from megatron_daro.actor.building import first_weights, trained_parts
from megatron_daro.actor.compat import ValueModel
from megatron_daro.actor.critic_metrics import column_metrics
from megatron_daro.actor.forward import MicroBatches, packed_micro_batches, response_column, run_schedule
from megatron_daro.actor.loss import global_totals
from megatron_daro.actor.megatron import gather_from_sequence_parallel_region
from megatron_daro.actor.model import build_model
from megatron_daro.actor.optimizer import apply_update, check_gradients
from megatron_daro.actor.precision import uses_transformer_engine
from megatron_daro.actor.reductions import reduced_on_all_stages
from megatron_daro.actor.settings import PolicySettings
from megatron_daro.actor.step import CriticReport, TrainedModel
from megatron_daro.actor.translation import megatron_options, transformer_config_of
from megatron_daro.actor.weights import load_hf_weights
from megatron_daro.algo.ppo import value_losses
from megatron_daro.config.actor import ActorSection
from megatron_daro.config.algorithm import CriticSection
from megatron_daro.config.model_shape import CRITIC_HEADS, read_model_shape
from megatron_daro.convert.hf_files import HFCheckpoint
from megatron_daro.convert.megatron_weights import MegatronWeights
from megatron_daro.data.packing import PackedMicroBatch
from megatron_daro.errors import ModelError
from megatron_daro.types import Sequences, StepBatch

_BIAS = "score.bias"
FOLDER = "critic"
"""Folder of a checkpoint that holds the critic's part of it."""


class Critic:
    """One rank's part of the critic."""

    def __init__(
        self,
        settings: PolicySettings,
        actor: ActorSection,
        section: CriticSection,
        *,
        to_be_restored: bool = False,
    ) -> None:
        """Build the model, load the weights, make optimizer and schedule. Collective.

        Args:
            settings, actor: of the policy; the section overrides options of its optimizer. to_be_restored: read no
                weights.

        Raises:
            ModelError: the checkpoint cannot be used.
        """
        shape = read_model_shape(section.path or settings.model_path, CRITIC_HEADS)
        self.shape = replace(shape, tie=False)
        options = megatron_options(actor, shape)
        config = transformer_config_of(shape, actor, options["transformer"])
        self.pretrain_steps, self._clip = section.pretrain_steps, section.value_clip
        transformer_engine = uses_transformer_engine(actor, shape)
        self.chunks = build_model(self.shape, config, transformer_engine=transformer_engine, kind=ValueModel)
        if not to_be_restored:
            with first_weights(settings, shape, section.path) as tensors:
                _refuse_bias(tensors, section)
                load_hf_weights(self.chunks, self.shape, tensors)
        chosen, total_steps = section.optimizer_of(actor.optimizer), settings.total_steps
        parts = trained_parts(self.chunks, config, chosen, dtype=actor.dtype, options=options, total_steps=total_steps)
        self.state = TrainedModel(*parts)

    def values(self, batch: Sequences, micro_batches: MicroBatches) -> np.ndarray | None:
        """Return the value before each response token, float32 [R]; None before the last stage."""
        last: ValueModel = self.state.chunks[-1].module

        def at(_: PackedMicroBatch, hidden_T1D: Tensor, positions_P: Tensor) -> Tensor:
            return position_values(last, hidden_T1D, positions_P)

        batch = replace(batch, routed_experts_N=None)  # they are the policy's, not this model's
        return response_column(self.state.chunks, batch, micro_batches, at, vocab_size=self.shape.vocab)

    def gradients(self, batch: StepBatch, micro_batches: MicroBatches) -> CriticReport:
        """Run forward and backward of a whole step; gradients end up summed over all ranks. Collective.

        Args:
            batch: this rank's shard, with `values_R`, `value_targets_R` and `token_advantages_R`.
        """
        started, last = time.perf_counter(), self.state.chunks[-1].module
        self.state.begin_step()
        batch = replace(batch, routed_experts_N=None)
        packs = packed_micro_batches(last.config, batch, micro_batches, vocab_size=self.shape.vocab)
        loss = _ValueLoss(last, global_totals(batch).tokens, self._clip)
        run_schedule(self.state.chunks, packs, loss.micro_batch, forward_only=False)
        value, clipped = reduced_on_all_stages(loss.sums).tolist()
        check = check_gradients(self.state.optimizer, allowed=math.isfinite(value))
        metrics = {
            "critic/loss": value,
            "critic/clip_fraction": clipped,
            "critic/grad_norm": check.grad_norm,
            **column_metrics(batch),
            "timing/critic_s": time.perf_counter() - started,
        }
        return CriticReport(check.fit, check.grad_norm, metrics)

    def apply(self, report: CriticReport) -> dict[str, float]:
        """Update the critic from the gradients that the report is about. Returns further metrics."""
        learning_rate = apply_update(self.state.optimizer, self.state.scheduler, report.grad_norm)
        return {"critic/learning_rate": learning_rate}


def position_values(model: ValueModel, hidden_T1D: Tensor, positions_I: Tensor) -> Tensor:
    """Return the values at chosen positions, fp32 [I], differentiable, the same on every tensor-parallel rank.

    Each of these ranks has the whole head and sees all tokens, and so has the whole gradient of both. Nothing is summed
    over them; under sequence parallelism each keeps the hidden gradient of its own tokens.
    """
    if model.config.sequence_parallel:
        hidden_T1D = gather_from_sequence_parallel_region(hidden_T1D, tensor_parallel_output_grad=False)
    hidden_ID = hidden_T1D.squeeze(1).index_select(0, positions_I)
    return torch.nn.functional.linear(hidden_ID.float(), model.output_layer.weight.float())[:, 0]


class _ValueLoss:
    """Half the mean squared error over all trained tokens of the step; sums: float64 [2], loss and clipped fraction."""

    def __init__(self, model: ValueModel, tokens: int, clip: float | None) -> None:
        self._model, self._scale, self._clip = model, 1.0 / max(tokens, 1), clip
        self.sums = torch.zeros(2, dtype=torch.float64, device=device.current())

    def micro_batch(self, packed: PackedMicroBatch, hidden_T1D: Tensor) -> tuple[Tensor, Tensor, dict[str, Any]]:
        """See `StepLoss.micro_batch`."""
        positions_J = packed.trained_slots_J
        assert packed.values_T is not None and packed.value_targets_T is not None
        losses_J, clipped_J = value_losses(
            position_values(self._model, hidden_T1D, positions_J),
            packed.values_T[positions_J],
            packed.value_targets_T[positions_J],
            self._clip,
        )
        loss = self._scale * losses_J.sum(dtype=torch.float64)
        self.sums += torch.stack([loss.detach(), self._scale * clipped_J.sum(dtype=torch.float64)])
        return loss.to(torch.float32), torch.zeros((), dtype=torch.int, device=loss.device), {}


def _refuse_bias(tensors: HFCheckpoint | MegatronWeights, section: CriticSection) -> None:
    """Raise ModelError for a head with a bias that is not 0: the critic's has none."""
    if isinstance(tensors, HFCheckpoint) and _BIAS in tensors and bool(tensors[_BIAS].any()):
        raise ModelError(
            f"algorithm.critic.path: {section.path} has a head with a bias ({_BIAS}); allowed is none, or 0; use a "
            "sequence classifier, or set the bias to 0"
        )
