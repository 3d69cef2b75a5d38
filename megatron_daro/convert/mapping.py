"""Which Hugging Face tensors make up which Megatron-core parameter, and how tensor parallelism slices them.

`shard` cuts HF tensors for a rank and `merge` is its inverse. The table of the decoder's parameters
(convert/parameters.py) is joined with the family's names (families/table.py) by role. A rule names a parameter by its
GLOBAL layer and expert; a rank translates with `global_name`. Values and dtypes never change. Refuses tensors of the
wrong shape and tensor-parallel sizes that do not divide a parameter.

Layouts (Megatron-core 0.16.1): linear_qkv holds, for each key/value group, [its query heads | key | value], and
tensor parallelism cuts these rows into equal runs, even if there are fewer groups than ranks
(transformer/attention.py, `get_query_key_value_tensors`); linear_fc1 holds [gate rows; up rows] per rank
(transformer/mlp.py, `glu`); linear_proj and linear_fc2 are cut along their columns. Experts are cut over the
expert-tensor-parallel ranks. If attention's output has a gate, a group of linear_qkv is [its query heads | their gates
| key | value]; in_proj of linear attention holds per rank [queries; keys; values; gates; betas; decays], and conv1d the
first three (ssm/gated_delta_net.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from megatron_daro.config.model_shape import ModelShape
from megatron_daro.convert.parameters import (
    ATTENTION,
    DENSE_MLP,
    EMBEDDING,
    EXPERT,
    FINAL_NORM,
    LATENT_ATTENTION,
    LINEAR_ATTENTION,
    OUTPUT,
    ROUTER,
    Kind,
    Parameter,
    dimensions,
)
from megatron_daro.errors import ModelError
from megatron_daro.families import families
from megatron_daro.families.table import Names

if TYPE_CHECKING:
    from torch import Tensor


VALUE_HEAD = "score.weight"
"""Hugging Face's name of a layer with one output that replaces the output layer (`...ForSequenceClassification`)."""

_LAYER = re.compile(r"^(.*decoder\.layers\.)(\d+)(\..*)$")
_EXPERT = re.compile(r"^(.*\.mlp\.experts\.(?:local_experts\.|linear_fc[12]\.(?:weight|bias)))(\d+)(.*)$")


@dataclass(frozen=True, slots=True)
class Slice:
    """Entries [start, stop) of HF tensor number `source` of the rule, along the rule's dimension."""

    source: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class TensorRule:
    """One Megatron parameter and the HF tensors from which it is made.

    hf_shapes: of the HF tensors; those of vocab are not padded.
    kind: see `Kind`. groups: number of key/value groups for qkv, of key heads for heads.
    sections: slices of the whole parameter; each rank holds a run of every section. Empty if kind and groups determine
        the layout.
    layer, expert: numbers in the whole model, from 0; None outside the layers, and for parameters of no expert. For an
        expert's rule the tensor-parallel rank and size are those of expert tensor parallelism.
    fp32: see `Parameter`.
    """

    megatron_name: str
    hf_names: tuple[str, ...]
    hf_shapes: tuple[tuple[int, ...], ...]
    kind: Kind
    groups: int = 1
    sections: tuple[tuple[Slice, ...], ...] = ()
    layer: int | None = None
    expert: int | None = None
    fp32: bool = False

    @property
    def dim(self) -> int:
        """The dimension that tensor parallelism cuts, and along which the slices are concatenated."""
        return 1 if self.kind == "columns" else 0

    @property
    def is_cut(self) -> bool:
        """Whether tensor-parallel ranks hold different parts."""
        return self.kind != "copy"

    def local_shape(self, tp_size: int, *, padded_vocab: int | None = None) -> tuple[int, ...]:
        """Return the shape of the parameter on one of `tp_size` ranks. Raises ModelError if it does not divide."""
        rows, rest = self.hf_shapes[0][0], self.hf_shapes[0][1:]
        if self.kind == "copy":
            return self.hf_shapes[0]
        if self.kind == "columns":
            return (rows, self._divide(rest[0], tp_size, "columns"))
        if self.kind == "vocab":
            return (self._divide(_padded(self, tp_size, padded_vocab), tp_size, "padded vocabulary rows"), *rest)
        if self.kind == "qkv" and self.groups % tp_size and tp_size % self.groups:
            raise ModelError(
                f"{self.megatron_name}: {self.groups} key/value heads and actor.tensor_parallel {tp_size}: "
                "one must be a multiple of the other. Choose another tensor_parallel."
            )
        if self.kind == "heads":
            self._divide(self.groups, tp_size, "key heads of linear attention")
        if self.kind == "gate_up":
            return (2 * self._divide(rows, tp_size, "rows of gate"), *rest)
        return (self._divide(sum(shape[0] for shape in self.hf_shapes), tp_size, "rows"), *rest)

    def slices(self, tp_rank: int, tp_size: int, *, padded_vocab: int | None = None) -> tuple[Slice, ...]:
        """Return the slices of the HF tensors that make up a shard.

        Args:
            tp_rank, tp_size: 0 <= tp_rank < tp_size.
            padded_vocab: as for `shard`.

        Returns:
            Slices that form the shard if they are concatenated along `dim` in this order; for a vocabulary, zero rows
            follow up to `local_shape`. Over all ranks every entry of every tensor occurs once (with kind copy, once on
            each rank).

        Raises:
            ModelError: there is no such rank, or the parameter does not divide over tp_size ranks.
        """
        if not 0 <= tp_rank < tp_size:
            raise ModelError(f"tensor-parallel rank {tp_rank} of {tp_size} does not exist.")
        size = self.local_shape(tp_size, padded_vocab=padded_vocab)[self.dim]
        if self.kind == "copy":
            return (Slice(0, 0, size),)
        if self.kind == "gate_up":
            half = size // 2
            return tuple(Slice(i, tp_rank * half, (tp_rank + 1) * half) for i in range(2))
        if self.kind == "heads":
            lengths = [sum(run.stop - run.start for run in runs) // tp_size for runs in self.sections]
            own = zip(self.sections, lengths, strict=True)
            return tuple(s for runs, size in own for s in _window(runs, tp_rank * size, (tp_rank + 1) * size))
        return tuple(_window(self._runs(), tp_rank * size, (tp_rank + 1) * size))

    def _runs(self) -> Iterator[Slice]:
        """Yield the slices of the whole parameter in order."""
        if self.sections:
            yield from self.sections[0]
            return
        sizes = [shape[self.dim] // self.groups for shape in self.hf_shapes]
        for group in range(self.groups):
            for i, size in enumerate(sizes):
                yield Slice(i, group * size, (group + 1) * size)

    def _divide(self, size: int, tp_size: int, what: str) -> int:
        if size % tp_size:
            option = "tensor_parallel" if self.expert is None else "expert_tensor_parallel"
            raise ModelError(
                f"{self.megatron_name}: {size} {what} cannot be divided over actor.{option} {tp_size}. "
                f"Choose a {option} that divides it."
            )
        return size // tp_size


def _window(runs: Iterable[Slice], start: int, stop: int) -> Iterator[Slice]:
    """Yield the part [start, stop) of the concatenated runs."""
    position = 0
    for run in runs:
        first, last = max(start, position), min(stop, position + run.stop - run.start)
        if first < last:
            yield Slice(run.source, run.start + first - position, run.start + last - position)
        position += run.stop - run.start


def naming_of(names: Sequence[str]) -> tuple[bool, bool]:
    """Return (fused_norms, grouped_experts), as in `hf_to_megatron`, of a model with parameters of these names."""
    fused_norms = any(name.endswith("layer_norm_weight") for name in names)
    return fused_norms, any(".mlp.experts.linear_fc" in name for name in names)


def hf_to_megatron(
    shape: ModelShape, *, fused_norms: bool = False, grouped_experts: bool | None = None
) -> list[TensorRule]:
    """Return the rules of every parameter of the whole model, in forward order.

    Args:
        shape: the model.
        fused_norms: False for Megatron's local layers; True for Transformer Engine's, whose linear layers hold the
            weight of the norm before them (`linear_qkv.layer_norm_weight`, `mlp.linear_fc1.layer_norm_weight`).
        grouped_experts: True: experts are numbered weights of one grouped layer (`experts.linear_fc1.weight3`); False:
            separate modules (`experts.local_experts.3.linear_fc1.weight`); None: the same as fused_norms.

    Returns:
        One rule per parameter. A tied model has no `output_layer.weight` here; see `output_rule`.
    """
    grouped = fused_norms if grouped_experts is None else grouped_experts
    rules = [_Rules(shape).of(EMBEDDING)]
    for layer in range(shape.layers):
        rules += _layer_rules(_Rules(shape, layer), fused_norms, grouped)
    rules.append(_Rules(shape).of(FINAL_NORM))
    return rules if shape.tie else [*rules, output_rule(shape)]


def output_rule(shape: ModelShape) -> TensorRule:
    """Return the rule of `output_layer.weight`; for a tied model its source is the embedding.

    A tied model needs it on the last of several pipeline stages, which holds a copy of the embedding.
    """
    return _Rules(shape).of(OUTPUT, role="embedding" if shape.tie else "output")


def value_head_rule(shape: ModelShape) -> TensorRule:
    """Return the rule of `output_layer.weight` of a model that outputs one number for each token."""
    return TensorRule(OUTPUT.name, (VALUE_HEAD,), ((1, shape.hidden),), "copy")


def critic_config(family: str) -> dict[str, Any]:
    """Return the entries of config.json that an exported critic has in place of the policy's: transformers then loads
    it, head included, as AutoModelForSequenceClassification with one label, whose `score` is one row without bias.

    Source: the convention of TRL's `value_model`; 0.19.1, trl/scripts/utils.py and trainer/utils.py, `get_reward`.
    """
    architecture = families()[family].with_head("ForSequenceClassification")
    return {"architectures": [architecture], "id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}


def hf_tensor_shapes(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Return HF name -> shape of every tensor that the model's checkpoint must hold, in forward order."""
    return {
        name: dims for rule in hf_to_megatron(shape) for name, dims in zip(rule.hf_names, rule.hf_shapes, strict=True)
    }


_COMPUTED = ("rotary_emb.inv_freq", "attn.bias", "attn.masked_bias")
"""Endings of buffers that old checkpoints of these families contain and that the model computes itself."""


def unknown_tensors(shape: ModelShape, names: Iterable[str]) -> list[str]:
    """Return which of a checkpoint's tensors are no parameters of the model. A tied output layer, and layers that
    predict tokens after the next, count as known."""
    known = {*hf_tensor_shapes(shape), *(output_rule(replace(shape, tie=False)).hf_names if shape.tie else ())}
    rest = [name for name in names if name not in known and not name.endswith(_COMPUTED)]
    further = set(further_tensors(shape, rest))
    return [name for name in rest if name not in further]


def further_tensors(shape: ModelShape, names: Iterable[str]) -> list[str]:
    """Return which tensors belong to layers that predict tokens after the next, or to other parts that are not
    trained."""
    layers = range(shape.layers, shape.layers + shape.further_layers)
    starts = (*(f"model.layers.{layer}." for layer in layers), *families()[shape.family].untrained)
    return [name for name in names if name.startswith(starts)]


def global_name(local_name: str, first_layer: int, first_expert: int = 0) -> str:
    """Return a rank's parameter name with the numbers that layer and expert have in the whole model.

    Args:
        local_name: from `named_parameters()` of the stage, without wrapper prefixes such as `module.`.
        first_layer, first_expert: numbers in the whole model of the rank's first layer and first expert.
    """
    name = _LAYER.sub(lambda match: f"{match[1]}{int(match[2]) + first_layer}{match[3]}", local_name)
    return _EXPERT.sub(lambda match: f"{match[1]}{int(match[2]) + first_expert}{match[3]}", name)


def padded_vocab_size(vocab: int, tp_size: int, *, multiple: int = 1) -> int:
    """Return the vocabulary rounded up to a multiple of tp_size * multiple."""
    step = tp_size * multiple
    return -(-vocab // step) * step


def shard(
    rule: TensorRule,
    hf_tensors: Mapping[str, Tensor],
    tp_rank: int,
    tp_size: int,
    *,
    padded_vocab: int | None = None,
) -> Tensor:
    """Return the shard of a parameter that tensor-parallel rank `tp_rank` holds.

    Args:
        rule: from `hf_to_megatron`.
        hf_tensors: at least the rule's HF tensors, whole, any dtype.
        tp_rank, tp_size: 0 <= tp_rank < tp_size.
        padded_vocab: rows of the padded vocabulary; None: the next multiple of tp_size. Padding rows are zero.

    Returns:
        Contiguous tensor of `rule.local_shape(tp_size)`; may share memory with its source.

    Raises:
        ModelError: a tensor is missing or has the wrong shape, or the parameter does not divide over tp_size ranks.
    """
    slices = rule.slices(tp_rank, tp_size, padded_vocab=padded_vocab)
    wholes = [_take(rule, hf_tensors, i) for i in range(len(rule.hf_names))]
    parts = [wholes[p.source].narrow(rule.dim, p.start, p.stop - p.start) for p in slices]
    local_shape = rule.local_shape(tp_size, padded_vocab=padded_vocab)
    missing = local_shape[rule.dim] - sum(p.stop - p.start for p in slices)
    if missing:
        parts.append(wholes[0].new_zeros(missing, *local_shape[1:]))
    return _joined(parts, rule.dim)


def merge(rule: TensorRule, shards: Sequence[Tensor]) -> dict[str, Tensor]:
    """Return the HF tensors of a parameter; the inverse of `shard`.

    Args:
        rule: from `hf_to_megatron`.
        shards: of all tensor-parallel ranks, in rank order. For kind copy only the first is read.

    Returns:
        HF name -> whole tensor, contiguous, without padding rows; may share memory with the shards.

    Raises:
        ModelError: the shards do not have the shape that the rule requires.
    """
    tp_size = len(shards)
    if tp_size == 0:
        raise ModelError(f"{rule.megatron_name}: no shards to merge.")
    padded = shards[0].shape[0] * tp_size if rule.kind == "vocab" else None
    expected = rule.local_shape(tp_size, padded_vocab=padded)
    wrong = [tuple(s.shape) for s in shards if tuple(s.shape) != expected]
    if wrong:
        raise ModelError(f"{rule.megatron_name}: a shard of {tp_size} has shape {wrong[0]}, expected {expected}.")
    parts_of_source: list[list[tuple[int, Tensor]]] = [[] for _ in rule.hf_names]
    for rank, shard_of_rank in enumerate(shards if rule.is_cut else shards[:1]):
        position = 0
        for one in rule.slices(rank, tp_size, padded_vocab=padded):
            length = one.stop - one.start
            parts_of_source[one.source].append((one.start, shard_of_rank.narrow(rule.dim, position, length)))
            position += length
    in_order = ([part for _, part in sorted(parts, key=lambda part: part[0])] for parts in parts_of_source)
    return {name: _joined(parts, rule.dim) for name, parts in zip(rule.hf_names, in_order, strict=True)}


def _joined(parts: Sequence[Tensor], dim: int) -> Tensor:
    """Return all parts as one contiguous tensor; a single contiguous part is not copied."""
    import torch  # not at the top: a dry run uses this module without torch

    return parts[0].contiguous() if len(parts) == 1 else torch.cat(tuple(parts), dim=dim)


def _padded(rule: TensorRule, tp_size: int, padded_vocab: int | None) -> int:
    vocab = rule.hf_shapes[0][0]
    padded = padded_vocab_size(vocab, tp_size) if padded_vocab is None else padded_vocab
    if padded < vocab:
        raise ModelError(f"{rule.megatron_name}: padded vocabulary {padded} is smaller than the vocabulary {vocab}.")
    return padded


def _take(rule: TensorRule, hf_tensors: Mapping[str, Tensor], i: int) -> Tensor:
    name, dims = rule.hf_names[i], rule.hf_shapes[i]
    if name not in hf_tensors:
        raise ModelError(f"{name}, which {rule.megatron_name} is made of, is missing from the checkpoint.")
    tensor = hf_tensors[name]
    if tuple(tensor.shape) != dims:
        raise ModelError(f"{name} has shape {tuple(tensor.shape)}; config.json of the model asks for {dims}.")
    return tensor


def _sections(role: str, shape: ModelShape) -> tuple[tuple[Slice, ...], ...]:
    """Return `TensorRule.sections` of the parameter of a role."""
    linear, head = shape.linear, shape.head_dim
    if role == "gated_qkv":
        number, runs = shape.heads // shape.kv_heads, []
        for group in range(shape.kv_heads):
            query_and_gate = [2 * head * i for i in range(group * number, (group + 1) * number)]
            runs += [Slice(0, start + part, start + part + head) for part in (0, head) for start in query_and_gate]
            runs += [Slice(source, group * head, (group + 1) * head) for source in (1, 2)]
        return (tuple(runs),)
    if linear is None:
        return ()
    serves, convolved = linear.value_heads // linear.key_heads, (linear.keys, linear.keys, linear.values)
    by_role: dict[str, list[tuple[int, int, tuple[int, ...]]]] = {
        "linear_in": [(0, 1, convolved), (1, 1, (linear.values,)), *((i, 1, (linear.value_heads,)) for i in (2, 3))],
        "linear_in_by_head": [
            (0, linear.key_heads, (linear.key, linear.key, serves * linear.value, serves * linear.value)),
            (1, linear.key_heads, (serves, serves)),
        ],
        "linear_conv": [(0, 1, convolved)],
    }
    return tuple(section for of_tensor in by_role.get(role, ()) for section in _striped(*of_tensor))


def _striped(source: int, heads: int, sizes: Sequence[int]) -> Iterator[tuple[Slice, ...]]:
    """Yield the sections of a tensor whose rows are ordered by head: for each head, `sizes[0]` rows of the first
    section, then `sizes[1]` rows of the second, and so on."""
    start = 0
    for size in sizes:
        first = range(start, heads * sum(sizes), sum(sizes))
        yield tuple(Slice(source, row, row + size) for row in first)
        start += size


def _attention(shape: ModelShape, layer: int | None) -> tuple[Parameter, ...]:
    if layer in shape.linear_layers:
        return LINEAR_ATTENTION
    return LATENT_ATTENTION if shape.latent else ATTENTION


def _layer_rules(rules: _Rules, fused_norms: bool, grouped: bool) -> Iterator[TensorRule]:
    yield from rules.all_of(_attention(rules.shape, rules.layer), fused_norms)
    experts = rules.shape.experts
    if experts is None or not rules.shape.has_experts(rules.layer or 0):
        yield from rules.all_of(DENSE_MLP, fused_norms)
        return
    yield from rules.all_of(ROUTER, fused_norms)
    if grouped:
        for parameter in rules.known(EXPERT):
            for expert in range(experts.number):
                yield rules.of(parameter, fused=True, expert=expert)
    else:
        for expert in range(experts.number):
            for parameter in rules.known(EXPERT):
                yield rules.of(parameter, expert=expert)


class _Rules:
    """Makes the rules of one layer, or of parameters outside the layers, from Megatron's table and the family's."""

    def __init__(self, shape: ModelShape, layer: int | None = None) -> None:
        self.shape, self.layer = shape, layer
        self._prefix = "" if layer is None else f"decoder.layers.{layer}."
        self._names: Names = families()[shape.family].tensors
        self._sizes = dimensions(shape)

    def _groups(self, kind: Kind) -> int:
        by_head = self.shape.linear.key_heads if self.shape.linear else 1
        return {"qkv": self.shape.kv_heads, "heads": by_head}.get(kind, 1)

    def all_of(self, table: Iterable[Parameter], fused: bool) -> Iterator[TensorRule]:
        """Yield the rules of those parameters of a table that the model has."""
        return (self.of(one, fused=fused) for one in self.known(table))

    def known(self, table: Iterable[Parameter]) -> list[Parameter]:
        """Return those parameters of a table that the model has."""
        return [one for one in table if one.role in self._names and self.shape.has_role(one.role)]

    def of(
        self, parameter: Parameter, *, fused: bool = False, expert: int | None = None, role: str | None = None
    ) -> TensorRule:
        """Return the rule of one parameter. Args: role: the role whose Hugging Face tensors it is made from; None: the
        parameter's own."""
        own = parameter.fused_name if fused and parameter.fused_name else parameter.name
        hf_names = self._names[role or parameter.role]
        return TensorRule(
            megatron_name=self._prefix + own.format(expert=expert),
            hf_names=tuple(name.format(layer=self.layer, expert=expert) for name in hf_names),
            hf_shapes=tuple(tuple(self._sizes[size] for size in sizes) for sizes in parameter.sizes),
            kind=parameter.kind,
            groups=self._groups(parameter.kind),
            sections=_sections(parameter.role, self.shape),
            layer=self.layer,
            expert=expert,
            fp32=parameter.fp32,
        )
