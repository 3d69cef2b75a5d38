"""One rank of a trainer that sends shards and has no model: its parameters are made of a transformers model's."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from sglang_pool import HOST, ModelWeights, named_weights

from megatron_daro.config.model_shape import read_model_shape
from megatron_daro.convert.mapping import hf_to_megatron, shard
from megatron_daro.engine.sglang.client import connect_to_servers
from megatron_daro.sync.shard_layouts import TrainerLayout
from megatron_daro.sync.shard_plan import ShardPlan
from megatron_daro.sync.shard_sender import ShardSender


class ShardedWeights(ModelWeights):
    """The one rank."""

    def __init__(self, model, directory):
        super().__init__(model)
        self._shape = read_model_shape(directory)
        self._shards = ShardSender(HOST, connect_to_servers)

    async def export(self, plan):
        layout = TrainerLayout(parts=((range(self._shape.layers),),), padded_vocab=64, fused_norms=False)
        shards = ShardPlan(self._shape, layout, plan.details["layout"], len(plan.targets), itemsize=1)
        offer, named = self._shards.offer(shards.writes(0), shards.balance().received), dict(named_weights(self.model))
        held = {
            rule.megatron_name: shard(rule, named, 0, 1, padded_vocab=64 if rule.kind == "vocab" else None)
            for rule in hf_to_megatron(self._shape)
        }
        report = await asyncio.to_thread(self._shards.send, held, plan, [offer])
        return replace(report, digests=self.digests(plan))
