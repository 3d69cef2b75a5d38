"""Which entries of which Hugging Face tensor are where in the parameters of a trainer's ranks, and of a server's.

Both sides describe a parameter as `Part`s in the coordinates of Hugging Face tensors, so sync/shard_plan.py can find
which rank has what another needs. The trainer's side is convert/mapping.py, with the ranks that hold a shard. The
server's side is SGLang 0.5.23 without quantization, with the names of `named_parameters()`:

* `self_attn.qkv_proj`: [query heads | key heads | value heads] of the rank; with more ranks than key-value heads, each
  of these heads is replicated on (ranks / heads) consecutive ranks (sglang/srt/layers/linear.py,
  `QKVParallelLinear.__init__` and `weight_loader`).
* `mlp.gate_up_proj`: [gate | up] (`MergedColumnParallelLinear.weight_loader`); `o_proj` and `down_proj` along their
  columns (`RowParallelLinear.weight_loader`).
* `experts.w13_weight` [experts of the rank, gate then up, hidden] and `experts.w2_weight` [experts, hidden, columns];
  experts go to the ranks of EP in runs (layers/moe/fused_moe_triton/layer.py, `FusedMoE.weight_loader`,
  `_map_global_expert_id_to_local_expert_id`, `_load_w13`; layers/quantization/unquant.py,
  `UnquantizedFusedMoEMethod.create_weights`).
* `embed_tokens` and `lm_head`: rows in runs, the vocabulary padded to a multiple of 64, or of 64 x TP if TP does not
  divide that; SGLang zeroes the padding when it loads, and no weight update touches it
  (layers/vocab_parallel_embedding.py, `VocabParallelEmbedding.__init__` and `weight_loader`).
* On a CPU the columns of an MLP and of an expert are padded to a multiple of 32 times the ranks, gate and up separately
  (configs/update_config.py, `adjust_config_with_unaligned_cpu_tp`).
The ranks of a server: runtime_context.py, `derive_spawn_ranks`. No server here has DP attention or a pipeline, which
engine/sglang/command.py refuses.

If kernels need another order, SGLang reorders after an update: between /begin_weight_update and /end_weight_update
parameters are laid out as described here, for writers that bypass its loaders (layers/quantization/unquant.py,
`restore_weights_before_loading`; managers/scheduler_components/weight_updater.py, `end_weight_update`).

Refuses layouts with which SGLang would not start, and those whose weights it keeps in another order.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from megatron_daro.config.actor import resolved_expert_tensor
from megatron_daro.config.model_shape import ModelShape
from megatron_daro.convert.mapping import TensorRule, hf_to_megatron, output_rule
from megatron_daro.errors import ModelError


@dataclass(frozen=True, slots=True)
class Part:
    """Entries [start, stop) along `dim` of a Hugging Face tensor, all of the other dimensions, in a parameter, where
    they begin at entry `at`.

    parameter, shape: of the parameter on its rank. lead: index along the parameter's axes before those of the Hugging
    Face tensor (the expert's, in a parameter of several experts).
    """

    parameter: str
    shape: tuple[int, ...]
    hf_name: str
    dim: int
    start: int
    stop: int
    at: int
    lead: tuple[int, ...] = ()

    @property
    def width(self) -> int:
        """Entries of the Hugging Face tensor for each index along `dim`."""
        own = self.shape[len(self.lead) :]
        return own[0] if self.dim == 1 else math.prod(own[1:])

    def box(self, start: int, stop: int, rows: range) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return (offset, shape), within the parameter, of entries [start, stop) of the Hugging Face tensor; if they
        are columns (`dim` 1), of these rows of them only."""
        at = self.at + start - self.start
        own = self.shape[len(self.lead) :]
        if self.dim == 1:
            return (*self.lead, rows.start, at), (*(1,) * len(self.lead), len(rows), stop - start)
        return (*self.lead, at, *(0,) * (len(own) - 1)), (*(1,) * len(self.lead), stop - start, *own[1:])


@dataclass(frozen=True, slots=True)
class HeldPart:
    """A part, and the trainer's ranks that have it, ascending."""

    part: Part
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerLayout:
    """How the trainer's model is laid out on its ranks. Megatron numbers them in the order TP, CP, DP, PP, the fastest
    first; for experts ETP, EP, replicas, PP (megatron/core/parallel_state.py, `RankGenerator`, 0.16.1).

    parts: for each pipeline stage the layers of each of its virtual parts (config/stages.py, `part_layers`).
    expert_tensor: None: 1 with EP > 1, else TP. padded_vocab: rows of the padded vocabulary.
    fused_norms: parameters have the names of Transformer Engine's layers; grouped_experts: experts have the names of
    grouped ones (None: as fused_norms).
    """

    parts: tuple[tuple[range, ...], ...]
    padded_vocab: int
    tensor: int = 1
    context: int = 1
    data: int = 1
    expert: int = 1
    expert_tensor: int | None = None
    fused_norms: bool = True
    grouped_experts: bool | None = None

    def __post_init__(self) -> None:
        if self.stage_ranks % (self.expert * self.expert_tensor_size):
            raise ModelError(
                f"trainer: {self.stage_ranks} ranks of a stage (TP x CP x DP), which EP {self.expert} x ETP "
                f"{self.expert_tensor_size} does not divide; change actor.expert_parallel"
            )

    @property
    def expert_tensor_size(self) -> int:
        """ETP, with its default resolved."""
        return resolved_expert_tensor(self.expert_tensor, self.tensor, self.expert)

    @property
    def stage_ranks(self) -> int:
        """Ranks of a pipeline stage."""
        return self.tensor * self.context * self.data

    @property
    def world_size(self) -> int:
        """All ranks."""
        return self.stage_ranks * len(self.parts)

    def stage_of(self, rank: int) -> int:
        """Return the pipeline stage of a rank."""
        return rank // self.stage_ranks

    def holders(self, stage: int, tensor_rank: int) -> tuple[int, ...]:
        """Return the ranks of a stage with this shard of a parameter outside experts: replicas over CP and DP."""
        first = stage * self.stage_ranks
        return tuple(range(first + tensor_rank, first + self.stage_ranks, self.tensor))

    def expert_holders(self, stage: int, expert_rank: int, tensor_rank: int) -> tuple[int, ...]:
        """Return the ranks of a stage with shard `tensor_rank` of the experts of expert-parallel rank `expert_rank`."""
        first, group = stage * self.stage_ranks, self.expert * self.expert_tensor_size
        place = expert_rank * self.expert_tensor_size + tensor_rank
        return tuple(range(first + place, first + self.stage_ranks, group))


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLayout:
    """How a server's model is laid out on its ranks. tensor, expert: SGLang's `tp_size` and `ep_size`. on_cpu: its
    `device` is a CPU."""

    tensor: int = 1
    expert: int = 1
    on_cpu: bool = False

    @property
    def expert_tensor(self) -> int:
        """Over how many ranks each expert is cut."""
        return self.tensor // self.expert

    def columns(self, width: int, ranks: int) -> int:
        """Return how many of the `width` columns of an MLP or an expert each of `ranks` ranks has, padding included."""
        multiple = self.tensor * _CPU_COLUMNS if self.on_cpu else 1
        return -(-width // multiple) * multiple // ranks


_CPU_COLUMNS = 32
"""DEFAULT_MOE_PADDING_SIZE of configs/update_config.py."""
_SAME_ORDER: Mapping[str, frozenset[object]] = {
    "moe_runner_backend": frozenset(("auto", "triton", "flashinfer_trtllm", "flashinfer_trtllm_routed")),
    # flashinfer_cutlass has up before gate (unquant.py, `load_up_proj_weight_first`), triton_kernels transposes them
    "moe_a2a_backend": frozenset(("none",)),
    "ep_num_redundant_experts": frozenset((0,)),
    "enable_eplb": frozenset((False,)),
    "moe_dp_size": frozenset((1,)),
    "attn_cp_size": frozenset((1,)),
    "quantization": frozenset((None,)),
    "rl_on_policy_target": frozenset((None,)),  # fp32 norms and embeddings (qwen2.py)
    "enable_lora": frozenset((False,)),
    "speculative_algorithm": frozenset((None,)),  # a draft model has parameters of its own
    "cpu_offload_gb": frozenset((0,)),
    "torchao_config": frozenset(("", None)),
    "weight_cache_mode": frozenset(("off",)),  # refuses weight updates (weight_updater.py)
}
"""Arguments of a server -> the values with which each parameter keeps the order in which it was loaded."""
_ALIASES = {"expert_parallel_size": "ep_size", "ep": "ep_size"}


def server_layout(shape: ModelShape, arguments: Mapping[str, Any]) -> ServerLayout:
    """Return the layout of a server with these arguments (names with underscores; absent ones have their defaults).

    Raises:
        ModelError: the server would not start, or keeps its weights in an order that is not known here.
    """
    arguments = {_ALIASES.get(name, name): value for name, value in arguments.items()}
    for name, known in _SAME_ORDER.items():
        if name in arguments and arguments[name] not in known:
            allowed = ", ".join(sorted(map(repr, known)))
            raise ModelError(
                f"shard-to-shard sync: {name} {arguments[name]!r}: where SGLang then keeps its weights is not known; "
                f"allowed: {allowed}. Remove the argument, or use engine.sglang.sync=distributed"
            )
    layout = ServerLayout(
        tensor=arguments.get("tp_size", 1),
        expert=arguments.get("ep_size", 1),
        on_cpu=arguments.get("device") == "cpu",
    )
    _check(shape, layout)
    return layout


def _check(shape: ModelShape, layout: ServerLayout) -> None:
    """Raise ModelError if SGLang would refuse the sizes, or cut them in a way that is not known here."""

    def refuse(got: str, allowed: str) -> ModelError:
        return ModelError(f"shard-to-shard sync: a server of {got}; allowed: {allowed}. Change engine.sglang")

    if layout.tensor % layout.expert:
        raise refuse(f"tp_size {layout.tensor} and ep_size {layout.expert}", "an ep_size that divides tp_size")
    ranks, groups = layout.tensor, shape.kv_heads
    # On a CPU, SGLang pads heads that the ranks do not divide, a layout that is not known here.
    if shape.heads % ranks or (groups % ranks and (layout.on_cpu or ranks % groups)):
        raise refuse(
            f"tp_size {ranks}, {shape.heads} heads and {groups} key-value heads",
            "a tp_size that divides the heads, and that divides or is a multiple of the key-value heads",
        )
    if shape.expert_layers < shape.layers and shape.ffn % layout.tensor and not layout.on_cpu:
        raise refuse(f"tp_size {layout.tensor} and an MLP of {shape.ffn} columns", "a tp_size that divides it")
    experts = shape.experts
    if experts is None and layout.expert > 1:
        raise refuse("ep_size without experts", "ep_size 1")
    if experts and (experts.number % layout.expert or experts.ffn % layout.expert_tensor):
        raise refuse(
            f"ep_size {layout.expert}, {experts.number} experts of {experts.ffn} columns and {layout.expert_tensor} "
            "ranks for each",
            "an ep_size that divides the experts, and whose ranks for each divide its columns",
        )
    if shape.local_layers or shape.linear:
        allowed = (
            "models without sinks, norms behind their layers and linear attention, or engine.sglang.sync distributed"
        )
        raise refuse(f"model type {shape.family}", f"{allowed}, disk or tensor")
    if experts and (experts.dense_layers or experts.shared_ffn):
        got = "a mixture of experts with dense layers or shared experts"
        raise refuse(got, "experts in each layer and no others, as qwen3_moe.py makes them")


def trainer_parts(shape: ModelShape, layout: TrainerLayout) -> Iterator[HeldPart]:
    """Yield every part of every parameter of the trainer, with the ranks that hold it; padding is left out.

    Raises:
        ModelError: sizes do not divide, or a layer is in no stage or in two.
    """
    stages = len(layout.parts)
    stage_of = {layer: p for p, parts in enumerate(layout.parts) for layers in parts for layer in layers}
    counted = sum(len(layers) for parts in layout.parts for layers in parts)
    if sorted(stage_of) != list(range(shape.layers)) or counted != shape.layers:
        raise ModelError(f"trainer: {counted} layers in {stages} stages, the model has {shape.layers}, once each")
    rules = [*hf_to_megatron(shape, fused_norms=layout.fused_norms, grouped_experts=layout.grouped_experts)]
    if shape.tie and stages > 1:
        rules.append(output_rule(shape))  # the last stage's copy of the embedding
    for rule in rules:
        if rule.layer is not None:
            stage = stage_of[rule.layer]
        else:
            stage = 0 if rule.megatron_name.startswith("embedding.") else stages - 1
        yield from _held_parts(rule, shape, layout, stage)


def _held_parts(rule: TensorRule, shape: ModelShape, layout: TrainerLayout, stage: int) -> Iterator[HeldPart]:
    """Yield the parts of one parameter of a stage."""
    padded = layout.padded_vocab if rule.kind == "vocab" else None
    size = layout.tensor if rule.expert is None else layout.expert_tensor_size
    if not rule.is_cut and rule.expert is None:
        ranks = tuple(range(stage * layout.stage_ranks, (stage + 1) * layout.stage_ranks))
        part = Part(rule.megatron_name, rule.hf_shapes[0], rule.hf_names[0], 0, 0, rule.hf_shapes[0][0], 0)
        yield HeldPart(part, ranks)
        return
    for tensor_rank in range(size):
        if rule.expert is None:
            ranks = layout.holders(stage, tensor_rank)
        else:
            assert shape.experts is not None
            own = rule.expert // (shape.experts.number // layout.expert)
            ranks = layout.expert_holders(stage, own, tensor_rank)
        at, local = 0, rule.local_shape(size, padded_vocab=padded)
        for piece in rule.slices(tensor_rank, size, padded_vocab=padded):
            name = rule.hf_names[piece.source]
            yield HeldPart(Part(rule.megatron_name, local, name, rule.dim, piece.start, piece.stop, at), ranks)
            at += piece.stop - piece.start


def server_parts(shape: ModelShape, layout: ServerLayout, rank: int) -> Iterator[Part]:
    """Yield every part of every parameter of one rank of a server. Padding is in no part; if a rank has only padding of
    a tensor, its part is empty.

    Args:
        rank: 0 <= rank < layout.tensor.
    """
    for rule in _server_rules(shape):
        if rule.kind == "copy":
            yield Part(rule.hf_names[0], rule.hf_shapes[0], rule.hf_names[0], 0, 0, rule.hf_shapes[0][0], 0)
        elif rule.kind == "vocab":
            yield from _vocab_part(rule, layout, rank)
        elif rule.expert is not None:
            yield from _expert_parts(rule, shape, layout, rank)
        else:
            yield from _cut_parts(rule, layout, rank)


@lru_cache(maxsize=4)
def _server_rules(shape: ModelShape) -> tuple[TensorRule, ...]:
    return tuple(hf_to_megatron(shape))


def _vocab_part(rule: TensorRule, layout: ServerLayout, rank: int) -> Iterator[Part]:
    size, vocab, rest = layout.tensor, rule.hf_shapes[0][0], rule.hf_shapes[0][1:]
    padded = -(-vocab // 64) * 64
    if padded % size:
        padded = -(-vocab // (64 * size)) * 64 * size
    rows = padded // size
    start, stop = min(rank * rows, vocab), min((rank + 1) * rows, vocab)
    yield Part(rule.hf_names[0], (rows, *rest), rule.hf_names[0], 0, start, stop, 0)


def _cut_parts(rule: TensorRule, layout: ServerLayout, rank: int) -> Iterator[Part]:
    """Yield the parts of a parameter of attention or of a dense MLP."""
    is_attention = ".self_attn." in rule.hf_names[0]
    size, dim = layout.tensor, rule.dim
    starts, lengths = [], []
    for source, dims in enumerate(rule.hf_shapes):
        cut, own = size, rank
        if rule.kind == "qkv" and source > 0 and rule.groups < size:
            cut, own = rule.groups, rank // (size // rule.groups)
        lengths.append(dims[dim] // cut if is_attention else layout.columns(dims[dim], size))
        starts.append(own * lengths[-1])
    total = sum(lengths)
    shape = (rule.hf_shapes[0][0], total) if dim == 1 else (total, *rule.hf_shapes[0][1:])
    parameter, at = _fused_name(rule.hf_names[0]), 0
    for name, dims, start, length in zip(rule.hf_names, rule.hf_shapes, starts, lengths, strict=True):
        yield Part(parameter, shape, name, dim, min(start, dims[dim]), min(start + length, dims[dim]), at)
        at += length


def _expert_parts(rule: TensorRule, shape: ModelShape, layout: ServerLayout, rank: int) -> Iterator[Part]:
    assert shape.experts is not None and rule.expert is not None
    own, place = divmod(rank, layout.expert_tensor)
    number = shape.experts.number // layout.expert
    if rule.expert // number != own:
        return
    ffn = shape.experts.ffn
    length, lead = layout.columns(ffn, layout.expert_tensor), (rule.expert % number,)
    prefix = re.sub(rf"\.{rule.expert}\.[a-z0-9_]+\.weight$", ".", rule.hf_names[0])
    down = rule.kind == "columns"
    dims = (number, shape.hidden, length) if down else (number, 2 * length, shape.hidden)
    parameter = prefix + ("w2_weight" if down else "w13_weight")
    for source, name in enumerate(rule.hf_names):
        start, stop = min(place * length, ffn), min((place + 1) * length, ffn)
        yield Part(parameter, dims, name, rule.dim, start, stop, source * length, lead)


def _fused_name(hf_name: str) -> str:
    """Return the name of the server's parameter for a tensor: fused if it is the first of several, else its own."""
    return hf_name.replace(".q_proj.", ".qkv_proj.").replace(".gate_proj.", ".gate_up_proj.")
