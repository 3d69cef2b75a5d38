"""The Megatron policy of one process: model, optimizer and algorithm, and the operations on them.

A worker process (runtime/) holds one; every rank of the layout makes the same calls in the same
order, since most of them are collective.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from megatron_daro.actor import checkpoint, communicators, critic, device, lora, snapshot
from megatron_daro.actor.building import first_weights, trained_parts
from megatron_daro.actor.double_buffer import Slot, num_bytes
from megatron_daro.actor.forward import MicroBatches, OutputSettings, response_logprobs
from megatron_daro.actor.host_memory import HostCopy, HostMemory, TakingTurns
from megatron_daro.actor.model import LocalParameter, build_model, local_parameters
from megatron_daro.actor.objective_settings import objective_settings
from megatron_daro.actor.precision import remarks, uses_transformer_engine
from megatron_daro.actor.routing_replay import check_routed_experts
from megatron_daro.actor.settings import PolicySettings
from megatron_daro.actor.step import TrainedModel, TrainState, train_step
from megatron_daro.actor.translation import megatron_options, transformer_config_of
from megatron_daro.actor.weights import export_hf_weights, load_hf_weights
from megatron_daro.algo.weighting import make_algorithm
from megatron_daro.config.actor import ActorSection
from megatron_daro.config.algorithm import AlgorithmSection
from megatron_daro.config.model_shape import ModelShape, read_model_shape
from megatron_daro.errors import CheckpointError, WorkerError
from megatron_daro.types import (
    KINDS_OF_MEMORY,
    MemoryKind,
    MemoryMove,
    Sequences,
    StepBatch,
    StepResult,
    TrainedName,
)

AnySequences = TypeVar("AnySequences", bound=Sequences)


class MegatronPolicy:
    """One rank's part of the policy. Process groups must exist already (actor/parallel.py)."""

    def __init__(
        self,
        settings: PolicySettings,
        actor: ActorSection,
        algorithm: AlgorithmSection,
        *,
        to_be_restored: bool = False,
        reference: HostCopy | None = None,
    ) -> None:
        """Build the model with its first weights, optimizer and schedule, and a critic if one is needed. Collective.

        Args:
            settings, actor, algorithm: of the run.
            to_be_restored: `restore` will be called next, so weights are read only if adapters are trained beside them,
                or if the reference needs them and is not given.
            reference: the `reference` of the policy that this one replaces in the same process.

        Raises:
            ModelError: the model directory cannot be used. ConfigError: an option of actor.megatron is unknown.
        """
        self._pending_saves: list[checkpoint.PendingSave] = []
        self._pending_snapshot: snapshot.PendingSnapshot | None = None
        self.shape: ModelShape = read_model_shape(settings.model_path)
        self._routing_replay = actor.routing_replay
        self._output = OutputSettings(
            self.shape.vocab,
            settings.temperature,
            actor.logprob_chunk_tokens,
            actor.logprob_kernel,
        )
        options = megatron_options(actor, self.shape)
        transformer_engine = uses_transformer_engine(actor, self.shape)
        self.remarks = remarks(actor, self.shape, transformer_engine)
        config = transformer_config_of(self.shape, actor, options["transformer"])
        self.chunks = build_model(self.shape, config, transformer_engine=transformer_engine)
        own = make_algorithm(
            **algorithm.arguments(
                rollouts_per_prompt=settings.rollouts_per_prompt,
                max_response_tokens=settings.max_response_tokens,
                environments=settings.environments,
            )
        )
        self._objective = objective_settings(algorithm, own)
        passes = algorithm.passes(own.token_columns or ())
        needs_reference = "ref_logprobs" in passes
        if not to_be_restored or settings.lora.rank or (needs_reference and reference is None):
            with first_weights(settings, self.shape) as tensors:
                load_hf_weights(self.chunks, self.shape, tensors)
        if settings.lora.rank:
            lora.attach(self.chunks, self.shape, settings.lora, seed=settings.seed)
        self.reference = (reference or HostCopy(self._trained_parameters())) if needs_reference else None
        without = algorithm.critic.pretrain_steps if "values" in passes else 0  # steps that do not update the policy
        total_steps = max(settings.total_steps - without, 1)
        parts = trained_parts(
            self.chunks, config, actor.optimizer, dtype=actor.dtype, options=options, total_steps=total_steps
        )
        self.train_state = TrainState(*parts, algorithm=own)
        self.critic: critic.Critic | None = None
        own_memory = HostMemory(self.train_state)
        self._memory: HostMemory | TakingTurns = own_memory
        if "values" not in passes:
            return
        if algorithm.critic.offload:
            own_memory.offload(KINDS_OF_MEMORY)  # room to build the critic
        self.critic = critic.Critic(
            settings,
            actor,
            algorithm.critic,
            to_be_restored=to_be_restored,
        )
        if algorithm.critic.offload:
            self._memory = TakingTurns(own_memory, HostMemory(self.critic.state))
        else:
            self._memory = HostMemory(self.train_state, self.critic.state)

    def _models(self) -> dict[TrainedName, TrainedModel]:
        return {"policy": self.train_state, **({"critic": self.critic.state} if self.critic else {})}

    def _give_device(self, model: TrainedName, *, keep_gradients: bool = False) -> None:
        """Give this model the device if policy and critic take turns; wait first for saves that read the other one."""
        if isinstance(self._memory, TakingTurns):
            if model != self._memory.whose:
                self._wait_for_pending_saves()
            self._memory.take(model, keep_gradients=keep_gradients)

    def offload(self, kinds: Collection[MemoryKind]) -> MemoryMove:
        """Move these kinds of memory to the host, so that others can use the device; wait first for a save or snapshot
        in progress. NCCL's communicators give up their memory together with the weights. Collective over all ranks."""
        self._wait_for_pending_saves()
        leaves = "weights" in kinds and "weights" not in self._memory.away
        move = self._memory.offload(kinds)
        return replace(move, left=move.left + communicators.suspend()) if leaves else move

    def onload(self, kinds: Collection[MemoryKind]) -> MemoryMove:
        """Move these kinds back to the device, bit for bit, but gradients as zeros. Collective over all ranks."""
        if "weights" in kinds and "weights" in self._memory.away:
            communicators.resume()
        return self._memory.onload(kinds)

    def _needs(self, *kinds: MemoryKind) -> None:
        """Raise RuntimeError if one of these kinds of memory is on the host."""
        if lacking := self._memory.away.intersection(kinds):
            raise RuntimeError(f"{', '.join(sorted(lacking))}: on the host while servers have the device")

    def train_step(self, batch: StepBatch, micro_batches: MicroBatches, *, step: int) -> StepResult:
        """Do one optimizer step on this data-parallel shard. Collective; results differ between ranks in times only."""
        self._needs(*KINDS_OF_MEMORY)
        batch = self._routed(batch)
        result = train_step(
            self.train_state,
            batch,
            micro_batches,
            self._objective,
            self._output,
            step=step,
            before_update=self._wait_for_pending_saves,
            critic=self.critic,
            give_device=self._give_device,
        )
        if not isinstance(self._memory, TakingTurns):
            return result
        return replace(result, metrics={**result.metrics, "timing/critic_turns_s": self._memory.pop_seconds()})

    def run_pass(self, name: str, batch: Sequences, micro_batches: MicroBatches) -> np.ndarray | None:
        """Compute the column `name`, one of `AlgorithmSection.passes`: float32 [R] over the shard's response tokens;
        None before the last stage. Collective over the ranks that share the shard, and those that share experts with
        them."""
        passes = {"old_logprobs": self.logprobs, "ref_logprobs": self.reference_logprobs, "values": self.values}
        return passes[name](batch, micro_batches)

    def logprobs(
        self, batch: Sequences, micro_batches: MicroBatches, *, temperature: float | None = None, base: bool = False
    ) -> np.ndarray | None:
        """Return log-probabilities of the shard's response tokens under the current weights, float32 [R]; None before
        the last stage.

        Args:
            batch: the shard. micro_batches: its rows, by micro-batch. temperature: logits are divided by it; None: the
                configured one. base: leave adapters out.
        """
        self._needs("weights")
        self._give_device("policy")
        batch = self._routed(batch)
        output = self._output if temperature is None else replace(self._output, temperature=temperature)
        with lora.without_adapters(self.chunks) if base else nullcontext():
            return response_logprobs(self.train_state.chunks, batch, micro_batches, output)

    def reference_logprobs(self, batch: Sequences, micro_batches: MicroBatches) -> np.ndarray | None:
        """Return the same as `logprobs`, but under the weights that the run started from; only if
        `AlgorithmSection.passes` includes "ref_logprobs"."""
        self._needs("weights")
        self._give_device("policy")
        batch = self._routed(batch)
        with self._reference_weights():
            return response_logprobs(self.train_state.chunks, batch, micro_batches, self._output)

    def values(self, batch: Sequences, micro_batches: MicroBatches) -> np.ndarray | None:
        """Return the critic's value before each response token; only if `AlgorithmSection.passes` includes "values"."""
        self._needs("weights")
        own = self._own_critic()
        self._give_device("critic")
        return own.values(batch, micro_batches)

    def _own_critic(self) -> critic.Critic:
        if self.critic is None:
            raise RuntimeError("values or weights of a critic were asked for, but the algorithm has no critic")
        return self.critic

    def _routed(self, batch: AnySequences) -> AnySequences:
        """Return the batch with its recorded experts, or without them if the routers are to choose."""
        if not self._routing_replay:
            return replace(batch, routed_experts_N=None)
        check_routed_experts(batch, self.shape)
        return batch

    def export(self) -> Iterator[tuple[str, Tensor]]:
        """Yield this stage's weights under Hugging Face names, with adapters merged into them. Every rank for which
        `exports_weights` holds must iterate to the end."""
        self._needs("weights")
        self._give_device("policy")
        return export_hf_weights(self.chunks, self.shape)

    def weight_shards(self) -> list[tuple[LocalParameter, Tensor]]:
        """Return this rank's parameters, each with its own shard of the values. Not collective."""
        self._needs("weights")
        self._give_device("policy")
        parameters = local_parameters(self.chunks, self.shape)
        return [(local, device.shown(local.values)) for local in parameters]

    def export_adapter(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the adapters of all stages; see `lora.export_adapters`."""
        self._needs("weights")
        self._give_device("policy")
        return lora.export_adapters(self.chunks)

    def export_critic(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the critic's weights as `export` does the policy's; only if `AlgorithmSection.passes` includes
        "values"."""
        self._needs("weights")
        own = self._own_critic()
        self._give_device("critic")
        return export_hf_weights(own.chunks, own.shape)

    def start_save(self, directory: Path) -> None:
        """Begin to write policy and critic (model, optimizer, schedule), and what the algorithm has learned, into an
        existing directory. Collective.

        Training may go on; before its next update it waits until everything is written that was not copied.

        Raises:
            CheckpointError: the disk refused.
        """
        self._needs("weights", "optimizer")
        for pending in self._pending_saves:
            pending.join()
        self._pending_saves = []
        for name, model in self._models().items():
            folder = directory / critic.FOLDER if name == "critic" else directory
            folder.mkdir(exist_ok=True)
            self._give_device(name)  # waits first for the other model's save
            self._pending_saves.append(checkpoint.start_save(model, folder, directory))

    def finish_save(self) -> None:
        """Wait until this rank's part is on the disk; may be called from another thread. Raises CheckpointError."""
        for pending in self._pending_saves:
            pending.wait()

    def _wait_for_pending_saves(self) -> None:
        """Wait until weights and optimizer state may change: no save or snapshot reads them any more."""
        for pending in self._pending_saves:
            pending.release()
        if self._pending_snapshot is not None:
            self._pending_snapshot.wait()

    def start_snapshot(self, slot: Slot, serial: int) -> snapshot.PendingSnapshot:
        """Begin to copy everything that training changes to the host. Training may go on; its next update waits for
        the copy. Not collective. Raises WorkerError: the previous snapshot failed.

        Args:
            slot: is filled. serial: number of the snapshot.
        """
        self._needs("weights", "optimizer")
        if self._pending_snapshot is not None:
            self._pending_snapshot.wait()
        self._pending_snapshot = snapshot.begin(*self._for_snapshots(), slot, serial)
        return self._pending_snapshot

    def restore(self, slot: Slot) -> None:
        """Go back to a snapshot, bit for bit. Not collective. Raises WorkerError: it is not whole, or does not fit."""
        self._needs("weights", "optimizer")
        self._wait_for_pending_saves()
        snapshot.restore(*self._for_snapshots(), slot)

    @property
    def snapshot_bytes(self) -> dict[MemoryKind, int]:
        """Bytes of a snapshot by kind."""
        return num_bytes(snapshot.layout_of(snapshot.storages_of(*self._for_snapshots())))

    def _for_snapshots(self) -> tuple[HostMemory, list[TrainedModel]]:
        if isinstance(self._memory, TakingTurns):
            raise RuntimeError("algorithm.critic.offload: a snapshot needs both models on the device")
        return self._memory, list(self._models().values())

    def end_background_work(self) -> None:
        """Wait until no save or snapshot reads a tensor any more, even if it failed."""
        for pending in self._pending_saves:
            pending.join()
        with suppress(WorkerError):
            if self._pending_snapshot is not None:
                self._pending_snapshot.wait()

    def load(self, directory: Path) -> None:
        """Load what `start_save` wrote on this or another layout. Collective. Raises CheckpointError."""
        self._needs("weights", "optimizer")
        self._wait_for_pending_saves()
        folder = directory / critic.FOLDER
        if self.critic is not None and not folder.is_dir():
            raise CheckpointError(
                f"{directory}: it has no critic, which algorithm.name={self.train_state.algorithm.name} trains; resume "
                "with the algorithm that wrote it, or export its weights and start a new run from them, with "
                "algorithm.critic.pretrain_steps for the critic to learn before the policy moves"
            )
        self._give_device("policy")
        checkpoint.load(self.train_state, directory)
        if self.critic is not None:
            self._give_device("critic")
            checkpoint.load(self.critic.state, folder)

    def _trained_parameters(self) -> list[torch.nn.Parameter]:
        return [p for chunk in self.chunks for p in chunk.parameters() if p.requires_grad]

    @contextmanager
    def _reference_weights(self) -> Iterator[None]:
        """Compute with a copy of the reference weights on the device, beside the current ones: there is room, since no
        activations are kept meanwhile."""
        if self.reference is None:
            raise RuntimeError(
                "reference log-probs were asked for, but neither algorithm.kl.coefficient nor token_columns do"
            )
        parameters = self._trained_parameters()
        current = [parameter.data for parameter in parameters]
        try:
            for parameter, value in zip(parameters, self.reference.on_device(), strict=True):
                parameter.data = value
            yield
        finally:
            for parameter, value in zip(parameters, current, strict=True):
                parameter.data = value
