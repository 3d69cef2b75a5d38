"""Layouts of trainers and servers, odd ones among them, for tests of the shard-to-shard plan; and the plan carried out
in memory."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_daro.config.model_shape import ModelShape, read_model_shape
from megatron_daro.config.stages import part_layers
from megatron_daro.convert.mapping import hf_tensor_shapes, hf_to_megatron, output_rule, padded_vocab_size, shard
from megatron_daro.sync.shard_layouts import ServerLayout, TrainerLayout, server_layout, server_parts
from megatron_daro.sync.shard_plan import Box, ShardPlan, Write

ARCHITECTURES = {
    "gpt_oss": "GptOssForCausalLM",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "olmo3": "Olmo3ForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}


def tiny_config(family: str, *, kv_heads: int = 2, tie: bool = False, vocab: int = 203) -> dict[str, Any]:
    """config.json of a model of 6 layers whose sizes are all different, and odd where they may be."""
    config = {
        "architectures": [ARCHITECTURES[family]],
        "model_type": family,
        "num_hidden_layers": 6,
        "hidden_size": 40,
        "num_attention_heads": 8,
        "num_key_value_heads": kv_heads,
        "head_dim": 6,
        "intermediate_size": 56,
        "vocab_size": vocab,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": tie,
        "max_position_embeddings": 64,
        "hidden_act": "silu",
        "rope_theta": 1e4,
        "torch_dtype": "float32",
        "attention_bias": False,
    }
    if family == "qwen3_moe":
        config |= {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True}
    if family == "mixtral":
        config |= {"num_local_experts": 4, "num_experts_per_tok": 2}
    if family == "gpt_oss":
        config |= {"num_local_experts": 4, "num_experts_per_tok": 2, "attention_bias": True, "head_dim": 8}
        config |= {"sliding_window": 16, "swiglu_limit": 7.0}
    if family in ("mistral", "mixtral"):
        config["sliding_window"] = None
    if family in ("qwen2", "mistral", "mixtral"):
        config |= {"head_dim": 5}
    return config


@dataclass(frozen=True)
class Case:
    """A model on both sides. trainer: sizes of `TrainerLayout`, with pipeline, virtual and Megatron's stage options."""

    name: str
    config: dict[str, Any]
    trainer: dict[str, Any]
    server: dict[str, Any]
    servers: int = 1
    stages: dict[str, Any] = field(default_factory=dict)

    @property
    def shape(self) -> ModelShape:
        return read_model_shape(self.config)

    @property
    def trainer_layout(self) -> TrainerLayout:
        sizes = dict(self.trainer)
        parts = part_layers(self.shape.layers, sizes.pop("pipeline", 1), sizes.pop("virtual", 1), self.stages)
        assert parts is not None
        padded = padded_vocab_size(self.shape.vocab, sizes.get("tensor", 1), multiple=16)
        return TrainerLayout(parts=tuple(map(tuple, parts)), padded_vocab=padded, **sizes)

    @property
    def server_layout(self) -> ServerLayout:
        return server_layout(self.shape, self.server)

    def plan(self, itemsize: int = 2) -> ShardPlan:
        return ShardPlan(self.shape, self.trainer_layout, self.server_layout, self.servers, itemsize=itemsize)


UNEVEN = {"num_layers_in_first_pipeline_stage": 1, "num_layers_in_last_pipeline_stage": 2}
CASES = [
    Case("one_to_one", tiny_config("qwen2"), {}, {}),
    Case("tied_stages", tiny_config("qwen2", tie=True), {"pipeline": 3, "tensor": 2}, {"tp_size": 4}, 2),
    Case("fewer_groups_than_both", tiny_config("qwen2"), {"tensor": 4, "data": 2}, {"tp_size": 8}, 3),
    Case("wider_trainer", tiny_config("llama"), {"tensor": 8, "pipeline": 2}, {"tp_size": 2}, 2),
    Case("wider_server", tiny_config("mistral"), {"tensor": 2, "data": 3}, {"tp_size": 8}, 2),
    Case("uneven_stages", tiny_config("llama", kv_heads=4), {"tensor": 2, "pipeline": 3}, {"tp_size": 4}, 1, UNEVEN),
    Case("virtual_stages", tiny_config("qwen3"), {"pipeline": 3, "virtual": 2, "context": 2}, {"tp_size": 2}, 5),
    Case(
        "etp_of_servers",
        tiny_config("qwen3_moe"),
        {"tensor": 2, "data": 4, "expert": 8, "expert_tensor": 1},
        {"tp_size": 8, "ep_size": 4},
        2,
    ),
    Case("etp", tiny_config("qwen3_moe"), {"tensor": 2, "data": 4, "expert": 2, "expert_tensor": 4}, {"tp_size": 4}, 3),
    Case("ep", tiny_config("qwen3_moe"), {"pipeline": 2, "data": 4, "expert": 4}, {"tp_size": 8, "ep_size": 8}),
    Case("etp_tp", tiny_config("mixtral"), {"tensor": 4, "pipeline": 2}, {"tp_size": 4, "ep_size": 2}, 2),
    Case("empty_vocabulary_rank", tiny_config("qwen2", vocab=65), {"tensor": 2}, {"tp_size": 8}),
    Case("many_replicas", tiny_config("qwen3", tie=True), {"context": 2, "data": 7}, {"tp_size": 1}, 3),
]


def checkpoint(case: Case) -> dict[str, Tensor]:
    """HF name -> fp32 tensor; no number comes twice in the checkpoint, and none is 0 or 1."""
    tensors, at = {}, 2
    for name, dims in hf_tensor_shapes(case.shape).items():
        count = int(np.prod(dims))
        tensors[name] = torch.arange(at, at + count, dtype=torch.float32).view(dims)
        at += count
    assert at < 2**24, "each integer must have a float of its own"
    return tensors


def shards(case: Case, tensors: Mapping[str, Tensor]) -> Callable[[int, str], Tensor]:
    """Return what gives the parameter of a name on a rank of the trainer, as Megatron holds it."""
    layout = case.trainer_layout
    rules = {
        rule.megatron_name: rule for rule in [*hf_to_megatron(case.shape, fused_norms=True), output_rule(case.shape)]
    }

    @functools.cache
    def shard_of(name: str, place: int, size: int) -> Tensor:
        padded = layout.padded_vocab if rules[name].kind == "vocab" else None
        return shard(rules[name], tensors, place, size, padded_vocab=padded)

    def parameter(rank: int, name: str) -> Tensor:
        size = layout.tensor if rules[name].expert is None else layout.expert_tensor_size
        return shard_of(name, rank % size, size)

    return parameter


def all_writes(case: Case, plan: ShardPlan) -> Iterator[tuple[int, Write]]:
    for sender in range(case.trainer_layout.world_size):
        for write in plan.writes(sender):
            yield sender, write


def region(box: Box) -> tuple[slice, ...]:
    offset, size = box
    return tuple(slice(start, start + length) for start, length in zip(offset, size, strict=True))


def server_shapes(case: Case, rank: int) -> dict[str, tuple[int, ...]]:
    return {part.parameter: part.shape for part in server_parts(case.shape, case.server_layout, rank)}


def carried_out(case: Case, tensors: Mapping[str, Tensor]) -> dict[tuple[int, int], dict[str, Tensor]]:
    """(server, rank) -> its parameters after all writes; entries that none wrote are NaN."""
    parameter = shards(case, tensors)
    received = {
        (server, rank): {n: torch.full(s, float("nan")) for n, s in server_shapes(case, rank).items()}
        for server in range(case.servers)
        for rank in range(case.server_layout.tensor)
    }
    for sender, write in all_writes(case, case.plan(4)):
        target = received[write.server, write.rank][write.target][region(write.target_box)]
        assert target.isnan().all(), f"{write.target} is written twice at {write.target_box}"
        target.copy_(parameter(sender, write.source)[region(write.source_box)].view(target.shape))
    return received


def times_written(shape: tuple[int, ...], boxes: list[Box]) -> dict[int, int]:
    """How many entries of a parameter are in how many boxes: counted on the grid of all their edges."""
    if boxes == [((0,) * len(shape), tuple(shape))]:
        return {1: math.prod(shape)}
    ends = [(offset, tuple(map(operator.add, offset, size))) for offset, size in boxes]
    edges = [sorted({0, size, *(e[axis] for end in ends for e in end)}) for axis, size in enumerate(shape)]
    places = [{entry: place for place, entry in enumerate(own)} for own in edges]
    counts = np.zeros([len(own) - 1 for own in edges], np.int64)
    for first, last in ends:
        counts[tuple(slice(p[a], p[b]) for p, a, b in zip(places, first, last, strict=True))] += 1
    volume = functools.reduce(np.multiply.outer, [np.diff(own) for own in edges])
    return {int(times): int(volume[counts == times].sum()) for times in np.unique(counts)}


def padding(case: Case, rank: int) -> dict[str, int]:
    """Entries of the rank's parameters that are in no part: rows of a padded vocabulary."""
    left = {name: int(np.prod(shape)) for name, shape in server_shapes(case, rank).items()}
    for part in server_parts(case.shape, case.server_layout, rank):
        left[part.parameter] -= (part.stop - part.start) * part.width
    return left
