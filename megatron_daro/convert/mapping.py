"""Which Hugging Face tensors make up which Megatron-core parameter, and how tensor parallelism slices them.

Place in the data flow: ModelShape -> rules; HF tensors -> `shard` -> actor; its shards -> `merge` -> HF tensors.
A rule names a parameter by its GLOBAL layer index: a pipeline stage translates with `global_name`. Only moves numbers:
never changes a dtype or a value. Refuses tensors of the wrong shape and tensor-parallel sizes that do not divide.

Layouts (Megatron-core 0.16.1): linear_qkv holds, for each key/value group, [its query heads | key | value], and tensor
parallelism cuts these rows into equal runs (transformer/attention.py, `get_query_key_value_tensors`); linear_fc1
holds [gate rows; up rows] per rank (transformer/mlp.py, `glu`); linear_proj and linear_fc2 are cut along their columns.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from megatron_daro.config.model_shape import ModelShape
from megatron_daro.errors import ModelError

Kind = Literal["copy", "vocab", "qkv", "gate_up", "columns"]

_LAYER = re.compile(r"^(.*decoder\.layers\.)(\d+)(\..*)$")


@dataclass(frozen=True, slots=True)
class TensorRule:
    """One Megatron parameter and the HF tensors it is made of.

    kind: copy (whole on every rank), vocab (rows, padded), qkv (interleaved by group, rows), gate_up (both, rows of
    each), columns. groups: key/value groups, for qkv. vocab rows are those of the HF tensor, unpadded.
    """

    megatron_name: str
    hf_names: tuple[str, ...]
    hf_shapes: tuple[tuple[int, ...], ...]
    kind: Kind
    groups: int = 1

    def local_shape(self, tp_size: int, *, padded_vocab: int | None = None) -> tuple[int, ...]:
        """Shape of the parameter on one of `tp_size` ranks. Raises ModelError where it does not divide."""
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
        if self.kind == "gate_up":
            return (2 * self._divide(rows, tp_size, "rows of gate"), *rest)
        return (self._divide(sum(shape[0] for shape in self.hf_shapes), tp_size, "rows"), *rest)

    def _divide(self, size: int, tp_size: int, what: str) -> int:
        if size % tp_size:
            raise ModelError(
                f"{self.megatron_name}: {size} {what} cannot be divided over actor.tensor_parallel {tp_size}. "
                "Choose a tensor_parallel that divides it."
            )
        return size // tp_size


def hf_to_megatron(shape: ModelShape, *, fused_norms: bool = False) -> list[TensorRule]:
    """Return the rules of every parameter of the whole model, in forward order.

    Args:
        shape: the model.
        fused_norms: False for Megatron's local layers; True for Transformer Engine's, whose linear layers hold the
            weight of the norm before them (`linear_qkv.layer_norm_weight`, `mlp.linear_fc1.layer_norm_weight`).

    Returns:
        One rule per parameter. A tied model has no `output_layer.weight` here; see `output_rule`.
    """
    rules = [_vocab_rule("embedding.word_embeddings.weight", "model.embed_tokens.weight", shape)]
    for layer in range(shape.layers):
        rules += _attention_rules(shape, layer, fused_norms) + _mlp_rules(shape, layer, fused_norms)
    rules.append(_copy("decoder.final_layernorm.weight", "model.norm.weight", shape.hidden))
    return rules if shape.tie else [*rules, output_rule(shape)]


def output_rule(shape: ModelShape) -> TensorRule:
    """Return the rule of `output_layer.weight`; for a tied model its source is the embedding.

    A tied model needs it on the last of several pipeline stages, which holds a copy of the embedding.
    """
    return _vocab_rule("output_layer.weight", "model.embed_tokens.weight" if shape.tie else "lm_head.weight", shape)


def hf_tensor_shapes(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """HF name -> shape of every tensor that the model's checkpoint must hold, in forward order."""
    return {
        name: dims for rule in hf_to_megatron(shape) for name, dims in zip(rule.hf_names, rule.hf_shapes, strict=True)
    }


def global_name(local_name: str, first_layer: int) -> str:
    """Return a stage's parameter name with the layer index of the whole model.

    Args:
        local_name: as `named_parameters()` of the stage gives it, without wrapper prefixes such as `module.`.
        first_layer: global index of the stage's first layer.
    """
    return _LAYER.sub(lambda found: f"{found[1]}{int(found[2]) + first_layer}{found[3]}", local_name)


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
    """Return what tensor-parallel rank `tp_rank` holds of a parameter.

    Args:
        rule: from `hf_to_megatron`.
        hf_tensors: at least the rule's HF tensors, whole, any dtype.
        tp_rank, tp_size: 0 <= tp_rank < tp_size.
        padded_vocab: rows of the padded vocabulary; None: the next multiple of tp_size. Padding rows are zero.

    Returns:
        Contiguous tensor of `rule.local_shape(tp_size)`; may share memory with its source.

    Raises:
        ModelError: a tensor is missing or has the wrong shape, or the size does not divide.
    """
    if not 0 <= tp_rank < tp_size:
        raise ModelError(f"tensor-parallel rank {tp_rank} of {tp_size} does not exist.")
    rule.local_shape(tp_size, padded_vocab=padded_vocab)
    parts = [_take(rule, hf_tensors, i) for i in range(len(rule.hf_names))]
    if rule.kind == "copy":
        return parts[0].contiguous()
    if rule.kind == "columns":
        return parts[0].chunk(tp_size, dim=1)[tp_rank].contiguous()
    if rule.kind == "vocab":
        return _vocab_rows(parts[0], tp_rank, tp_size, _padded(rule, tp_size, padded_vocab))
    if rule.kind == "gate_up":
        return torch.cat([part.chunk(tp_size)[tp_rank] for part in parts])
    return _interleave(parts, rule.groups).chunk(tp_size)[tp_rank].contiguous()


def merge(rule: TensorRule, shards: Sequence[Tensor]) -> dict[str, Tensor]:
    """Return the HF tensors of a parameter; the inverse of `shard`.

    Args:
        rule: from `hf_to_megatron`.
        shards: what every tensor-parallel rank holds, in rank order. Of a copied parameter the first is used.

    Returns:
        HF name -> whole tensor, contiguous, padding rows dropped; may share memory with the shards.

    Raises:
        ModelError: the shards do not have the shape that the rule gives them.
    """
    tp_size = len(shards)
    if tp_size == 0:
        raise ModelError(f"{rule.megatron_name}: no shards to merge.")
    padded = shards[0].shape[0] * tp_size if rule.kind == "vocab" else None
    expected = rule.local_shape(tp_size, padded_vocab=padded)
    wrong = [tuple(s.shape) for s in shards if tuple(s.shape) != expected]
    if wrong:
        raise ModelError(f"{rule.megatron_name}: a shard of {tp_size} has shape {wrong[0]}, expected {expected}.")
    return dict(zip(rule.hf_names, _MERGE[rule.kind](rule, shards), strict=True))


def _merge_vocab(rule: TensorRule, shards: Sequence[Tensor]) -> list[Tensor]:
    return [_joined(shards)[: rule.hf_shapes[0][0]].contiguous()]


def _merge_qkv(rule: TensorRule, shards: Sequence[Tensor]) -> list[Tensor]:
    whole = _joined(shards)
    grouped = whole.view(rule.groups, -1, *whole.shape[1:])
    sizes = [dims[0] // rule.groups for dims in rule.hf_shapes]
    return [part.reshape(dims) for part, dims in zip(grouped.split(sizes, dim=1), rule.hf_shapes, strict=True)]


def _merge_gate_up(rule: TensorRule, shards: Sequence[Tensor]) -> list[Tensor]:
    halves = [piece.chunk(2) for piece in shards]
    return [_joined([half[i] for half in halves]) for i in range(2)]


def _joined(parts: Sequence[Tensor], dim: int = 0) -> Tensor:
    """All parts as one contiguous tensor; a single one is not copied."""
    return parts[0].contiguous() if len(parts) == 1 else torch.cat(tuple(parts), dim=dim)


_MERGE: Mapping[Kind, Callable[[TensorRule, Sequence[Tensor]], list[Tensor]]] = {
    "copy": lambda rule, shards: [shards[0].contiguous()],
    "columns": lambda rule, shards: [_joined(shards, dim=1)],
    "vocab": _merge_vocab,
    "qkv": _merge_qkv,
    "gate_up": _merge_gate_up,
}


def _interleave(parts: Sequence[Tensor], groups: int) -> Tensor:
    """[q rows], [k rows], [v rows] -> rows ordered by group, each group's q, k, v together."""
    grouped = [part.reshape(groups, -1, *part.shape[1:]) for part in parts]
    return torch.cat(grouped, dim=1).reshape(-1, *parts[0].shape[1:])


def _vocab_rows(whole: Tensor, tp_rank: int, tp_size: int, padded: int) -> Tensor:
    rows = padded // tp_size
    own = whole[tp_rank * rows : (tp_rank + 1) * rows]
    if len(own) == rows:
        return own.contiguous()
    return torch.cat([own, own.new_zeros(rows - len(own), *whole.shape[1:])])


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


def _copy(megatron_name: str, hf_name: str, size: int) -> TensorRule:
    return TensorRule(megatron_name, (hf_name,), ((size,),), "copy")


def _vocab_rule(megatron_name: str, hf_name: str, shape: ModelShape) -> TensorRule:
    return TensorRule(megatron_name, (hf_name,), ((shape.vocab, shape.hidden),), "vocab")


def _attention_rules(shape: ModelShape, layer: int, fused_norms: bool) -> list[TensorRule]:
    own, hf = f"decoder.layers.{layer}.", f"model.layers.{layer}."
    query, key = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    names = tuple(f"{hf}self_attn.{part}_proj." for part in "qkv")
    weights, biases = tuple(n + "weight" for n in names), tuple(n + "bias" for n in names)
    norm = "self_attention.linear_qkv.layer_norm_weight" if fused_norms else "input_layernorm.weight"
    qkv = f"{own}self_attention.linear_qkv."
    rules = [
        _copy(own + norm, hf + "input_layernorm.weight", shape.hidden),
        TensorRule(qkv + "weight", weights, tuple((n, shape.hidden) for n in (query, key, key)), "qkv", shape.kv_heads),
    ]
    if shape.qkv_bias:
        rules.append(TensorRule(qkv + "bias", biases, ((query,), (key,), (key,)), "qkv", shape.kv_heads))
    if shape.qk_norm:
        for part in "qk":
            inner = f"self_attention.{part}_layernorm.weight"
            rules.append(_copy(own + inner, f"{hf}self_attn.{part}_norm.weight", shape.head_dim))
    proj = (f"{own}self_attention.linear_proj.weight", (f"{hf}self_attn.o_proj.weight",), ((shape.hidden, query),))
    return [*rules, TensorRule(*proj, "columns")]


def _mlp_rules(shape: ModelShape, layer: int, fused_norms: bool) -> list[TensorRule]:
    own, hf = f"decoder.layers.{layer}.", f"model.layers.{layer}."
    norm = "mlp.linear_fc1.layer_norm_weight" if fused_norms else "pre_mlp_layernorm.weight"
    gate_up = tuple(f"{hf}mlp.{part}_proj.weight" for part in ("gate", "up"))
    down = (f"{own}mlp.linear_fc2.weight", (f"{hf}mlp.down_proj.weight",), ((shape.hidden, shape.ffn),))
    return [
        _copy(own + norm, hf + "post_attention_layernorm.weight", shape.hidden),
        TensorRule(f"{own}mlp.linear_fc1.weight", gate_up, ((shape.ffn, shape.hidden),) * 2, "gate_up"),
        TensorRule(*down, "columns"),
    ]
