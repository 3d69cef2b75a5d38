"""A rank's part in a shard-to-shard sync: layout and parameters -> the plan's writes -> sync/shard_sender.py.

Each rank makes the plan by itself, from layouts alone, and keeps it while the servers' layout and number stay the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from torch import Tensor

from megatron_daro.config.actor import ActorSection
from megatron_daro.config.model_shape import ModelShape
from megatron_daro.config.stages import part_layers
from megatron_daro.convert.mapping import naming_of
from megatron_daro.errors import ModelError
from megatron_daro.sync.digests import noted
from megatron_daro.sync.plan import Connect, Digest, SendPlan, SendReport, is_compared
from megatron_daro.sync.shard_layouts import TrainerLayout
from megatron_daro.sync.shard_plan import ShardPlan, Write
from megatron_daro.sync.shard_sender import Offer, ShardSender

if TYPE_CHECKING:
    from megatron_daro.actor.policy import MegatronPolicy


class ShardExport:
    """Sends to servers what one rank holds. `close` it with the policy."""

    def __init__(self, policy: MegatronPolicy, actor: ActorSection, rank: int, host: str, connect: Connect) -> None:
        """Send nothing.

        Args:
            policy: of this rank. actor: with the sizes that the policy has now. rank: among all ranks of the policy.
            host: address at which servers reach this rank. connect: connects to servers.
        """
        self._policy, self._actor, self._rank = policy, actor, rank
        self._sender = ShardSender(host, connect)
        self._planned: tuple[object, int] | None = None
        self._writes: list[Write] = []
        self._entries: tuple[int, ...] = ()

    def offer(self, plan: SendPlan) -> Offer:
        """Begin to listen for the servers' ranks. Raises ModelError: there is no plan between the two layouts."""
        wanted = plan.details["layout"], len(plan.targets)
        if self._planned != wanted:
            layout = self._trainer_layout()
            shards = ShardPlan(self._policy.shape, layout, *wanted, itemsize=1)
            self._writes, self._entries = list(shards.writes(self._rank)), shards.balance().received
            self._planned = wanted
        return self._sender.offer(self._writes, self._entries)

    def send(self, plan: SendPlan, offers: Sequence[Offer], *, digests: bool) -> SendReport:
        """Send what was offered to all of the servers' ranks.

        Args:
            plan: as offered. offers: of all ranks, on the rank that calls servers. digests: whether to report digests
                of the tensors that this rank has whole.
        """
        shards = self._policy.weight_shards()
        taken: dict[str, Digest] = {}
        if digests and plan.digest_dtype:
            uncut = self._actor.tensor_parallel == 1
            whole = [(local.rule.hf_names[0], v) for local, v in shards if uncut or not local.rule.is_cut]
            for _ in noted([(n, v) for n, v in whole if is_compared(n)], plan.digest_dtype, taken):
                pass
        tensors: dict[str, Tensor] = {local.rule.megatron_name: values for local, values in shards}
        return replace(self._sender.send(tensors, plan, offers), digests=taken)

    def close(self) -> None:
        """End what is being sent. May be called twice, from any thread."""
        self._sender.close()

    def _trainer_layout(self) -> TrainerLayout:
        fused_norms, grouped = naming_of([local.rule.megatron_name for local, _ in self._policy.weight_shards()])
        return trainer_layout(self._policy.shape, self._actor, fused_norms=fused_norms, grouped_experts=grouped)


def trainer_layout(
    shape: ModelShape, actor: ActorSection, *, fused_norms: bool, grouped_experts: bool
) -> TrainerLayout:
    """Return how a policy of these sizes is laid out on its ranks. Raises ModelError: only Megatron-core knows."""

    stages, virtual = actor.pipeline_parallel, actor.virtual_pipeline_parallel or 1
    parts = part_layers(shape.layers, stages, virtual, actor.megatron)
    if parts is None:
        raise ModelError(
            f"shard-to-shard sync: which of {shape.layers} layers are on which of {stages} stages of {virtual} parts "
            "is not known with these actor.megatron options; set engine.sglang.sync=distributed"
        )
    return TrainerLayout(
        parts=tuple(map(tuple, parts)),
        padded_vocab=shape.padded_vocab(actor.tensor_parallel),
        tensor=actor.tensor_parallel,
        context=actor.context_parallel,
        data=actor.data_parallel,
        expert=actor.expert_parallel,
        expert_tensor=actor.expert_tensor_parallel,
        fused_norms=fused_norms,
        grouped_experts=grouped_experts,
    )
