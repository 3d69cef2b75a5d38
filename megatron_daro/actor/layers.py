"""The layers of the model: Transformer Engine's where it can run, else Megatron's local ones, with parts of ours.

Our parts in local layers are RMSNorms that work under sequence parallelism, and a core attention on torch's
scaled_dot_product_attention that takes packed sequences and context parallelism. Latent, gated and linear attention are
ours in both kinds of layers.

Legend: T packed tokens of this rank, H query heads, G key-value heads, D head size, B sequences, S longest sequence,
C context-parallel ranks, Q tokens of one sequence on this rank, W tokens of a window.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_daro.actor.compat import GatedAttention, LatentAttention
from megatron_daro.actor.linear_attention import GatedDeltaNet
from megatron_daro.actor.megatron import (
    GPTModel,
    IdentityOp,
    MegatronModule,
    ModuleSpec,
    PackedSeqParams,
    TransformerBlockSubmodules,
    TransformerConfig,
    copy_to_tensor_model_parallel_region,
    get_gpt_decoder_block_spec,
    get_transformer_layer_offset,
    is_layer_window_attention,
    make_sharded_tensors_for_checkpoint,
    parallel_state,
    reduce_from_tensor_model_parallel_region,
)

# A padded batch may hold this many times the tokens of the sequences in it.
MAX_PADDING_RATIO = 1.25


class RMSNorm(torch.nn.Module):
    """Root-mean-square norm over the last dimension; its weight is marked for the sequence-parallel all-reduce.

    Statistics are computed in fp32. As in Hugging Face's models, the result is cast back before it is multiplied by the
    weight, or, with a weight that is centred at 0 (`layernorm_zero_centered_gamma`), after that.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_: object) -> None:
        super().__init__()
        self.eps, self.centered = eps, config.layernorm_zero_centered_gamma
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        if self.centered:
            return F.rms_norm(x.float(), (x.shape[-1],), 1 + self.weight.float(), self.eps).to(x.dtype)
        if x.dtype == torch.float32:
            return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)
        normed = F.rms_norm(x.float(), (x.shape[-1],), None, self.eps).to(x.dtype)
        return normed * self.weight

    def sharded_state_dict(
        self, prefix: str, sharded_offsets: tuple[tuple[int, int, int], ...], metadata: dict[str, Any] | None
    ) -> dict[str, Any]:
        """Return the sharded state for a checkpoint, which upstream's MLP asks each of its parts for."""
        return make_sharded_tensors_for_checkpoint(self.state_dict(keep_vars=True), prefix, {}, sharded_offsets)


class WholeQueryNorm(RMSNorm):
    """RMSNorm over all query heads at once, of which a tensor-parallel rank has some; the weight is whole on each.

    Ranks have the same number of heads, so the mean square is the mean of the ranks' mean squares, even where two ranks
    have the same key head.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float) -> None:
        self._heads = self._all_heads(config)
        super().__init__(config, self._heads * hidden_size, eps)

    @staticmethod
    def _all_heads(config: TransformerConfig) -> int:
        return config.num_attention_heads

    def forward(self, x_T1HD: Tensor) -> Tensor:
        rank = parallel_state.get_tensor_model_parallel_rank()
        size = parallel_state.get_tensor_model_parallel_world_size()
        square = x_T1HD.float().pow(2).mean((-2, -1), keepdim=True)
        # Summed over the ranks forward, and its gradient backward.
        square = copy_to_tensor_model_parallel_region(reduce_from_tensor_model_parallel_region(square)) / size
        weight_HD = self.weight.unflatten(0, (self._heads, -1))
        own_HD = weight_HD.narrow(0, rank * self._heads // size, x_T1HD.shape[-2])
        return (x_T1HD.float() * torch.rsqrt(square + self.eps)).to(x_T1HD.dtype) * own_HD


class WholeKeyNorm(WholeQueryNorm):
    """The same over all key-value heads."""

    @staticmethod
    def _all_heads(config: TransformerConfig) -> int:
        return config.num_query_groups


def norm_outputs(model: GPTModel) -> None:
    """Put a norm behind attention and MLP of each layer, before the residual is added."""
    for layer in model.decoder.layers:
        for part in (layer.self_attention, layer.mlp):
            part.post_layernorm = RMSNorm(model.config, model.config.hidden_size, model.config.layernorm_epsilon)
            part.register_forward_hook(_with_norm)


def _with_norm(part: Any, inputs: object, output: tuple[Tensor, Tensor | None]) -> tuple[Tensor, Tensor | None]:
    return part.post_layernorm(output[0]), output[1]


class PackedAttention(MegatronModule):
    """Causal attention within each sequence of a pack, on torch SDPA; keys and values gathered under CP.

    In a layer with a window a token sees the last W tokens only. With sinks (`softmax_offset`, [H]) each head's softmax
    has one more logit, to which no value belongs.
    """

    def __init__(
        self, config: TransformerConfig, layer_number: int, *_: object, softmax_scale: float | None = None, **__: object
    ) -> None:
        super().__init__(config=config)
        self.layer_number = layer_number
        self.scale = 1 / math.sqrt(config.kv_channels) if softmax_scale is None else softmax_scale
        windowed = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number)
        self._window = config.window_size[0] + 1 if windowed and config.window_size else None
        if config.softmax_type == "learnable":
            heads = config.num_attention_heads // config.tensor_model_parallel_size
            self.softmax_offset = torch.nn.Parameter(torch.empty(heads, dtype=config.params_dtype))

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        attn_mask_type: object = None,
        attention_bias: object = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """Map query [T, H, D], key and value [T, G, D] to [T, H * D]; packed_seq_params has the bounds of whole
        sequences."""
        if packed_seq_params is None:
            raise ValueError("PackedAttention takes packed sequences only: packed_seq_params was None")
        query_THD, key_TGD, value_TGD = (x.squeeze(1) if x.dim() == 4 else x for x in (query, key, value))
        bounds = packed_seq_params.cu_seqlens_q.tolist()
        lengths = [b - a for a, b in itertools.pairwise(bounds)]
        head, sinks_H = query_THD.shape[-1], getattr(self, "softmax_offset", None)
        if sinks_H is not None:
            query_THD, key_TGD, value_TGD = _with_room_for_sinks(query_THD, key_TGD, value_TGD, sinks_H)
        sink_D = None if sinks_H is None else _sink_key(query_THD, head, self.scale)
        if parallel_state.get_context_parallel_world_size() > 1:
            out_THD = _context_parallel_attention(
                query_THD, key_TGD, value_TGD, lengths, self.scale, window=self._window, sink_D=sink_D
            )
        else:
            out_THD = packed_causal_attention(
                query_THD, key_TGD, value_TGD, lengths, self.scale, window=self._window, sink_D=sink_D
            )
        return out_THD[..., :head].reshape(out_THD.shape[0], -1)

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[tuple[int, int, int], ...] = (),
        metadata: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Return the sharded state for a checkpoint; sinks are cut over tensor-parallel ranks."""
        own, cut = self.state_dict(prefix="", keep_vars=True), {"softmax_offset": 0}
        return make_sharded_tensors_for_checkpoint(own, prefix, cut, sharded_offsets)


_ROOM = 8
"""Entries that are added to a head's own; fused kernels want multiples of 8."""


def _with_room_for_sinks(
    query_THD: Tensor, key_TGD: Tensor, value_TGD: Tensor, sinks_H: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values with `_ROOM` more entries: a query's first two are its head's sink, all others 0.

    The scaled product of a query with `_sink_key` is then the sink, and that with any other key is unchanged. So the
    sinks become one more key of each sequence, with value 0, which every kernel of SDPA takes, with their gradient.
    """
    key_TGD, value_TGD = F.pad(key_TGD, (0, _ROOM)), F.pad(value_TGD, (0, _ROOM))
    said_TH2 = sinks_H.to(query_THD.dtype)[None, :, None].expand(len(query_THD), -1, 2)
    return F.pad(torch.cat([query_THD, said_TH2], dim=-1), (0, _ROOM - 2)), key_TGD, value_TGD


def _sink_key(query_THD: Tensor, head: int, scale: float) -> Tensor:
    """Return the key of the sinks, [D]: 1 / scale in two entries, the second of which is the first one's rounding
    error."""
    key_D = torch.zeros(query_THD.shape[-1], dtype=query_THD.dtype)
    key_D[head] = 1 / scale
    key_D[head + 1] = 1 / scale - float(key_D[head])
    return key_D.to(query_THD.device)


def packed_causal_attention(
    query_THD: Tensor,
    key_TGD: Tensor,
    value_TGD: Tensor,
    lengths: Sequence[int],
    scale: float | None = None,
    *,
    window: int | None = None,
    sink_D: Tensor | None = None,
) -> Tensor:
    """Compute causal attention within each sequence. Sequences of similar length share one padded SDPA call.

    Args:
        query_THD, key_TGD, value_TGD: packed tokens; H is a multiple of G.
        lengths: tokens of each sequence, sum T.
        scale: of the scores; None: 1 / sqrt(D).
        window: tokens that each token sees, itself included; None: itself and all before it. sink_D: a key that every
            token sees, with value 0.

    Returns:
        [T, H, D], same dtype.
    """
    if window is not None:
        return _windowed_attention(query_THD, key_TGD, value_TGD, lengths, scale, window=window, sink_D=sink_D)
    if sink_D is not None:  # it becomes the first token of each sequence
        firsts = list(itertools.accumulate(lengths[:-1], initial=0))
        query_THD, key_TGD, value_TGD = (
            _before_each(x, firsts, row) for x, row in ((query_THD, None), (key_TGD, sink_D), (value_TGD, None))
        )
        longer = [length + 1 for length in lengths]
        out_THD = packed_causal_attention(query_THD, key_TGD, value_TGD, longer, scale)
        is_token_T = torch.ones(len(out_THD), dtype=torch.bool)
        is_token_T[[first + i for i, first in enumerate(firsts)]] = False
        return out_THD[is_token_T.to(out_THD.device)]
    if len(lengths) == 1:
        return _sdpa(query_THD[None], key_TGD[None], value_TGD[None], is_causal=True, scale=scale)[0]
    lengths_B = torch.tensor(lengths)
    starts_B = torch.cumsum(lengths_B, 0) - lengths_B
    chunks, order = [], []
    for members in _similar_lengths(lengths):
        rows_BS = starts_B[members, None] + torch.arange(int(lengths_B[members].max()))
        real_BS = rows_BS < (starts_B + lengths_B)[members, None]
        rows_BS = torch.where(real_BS, rows_BS, starts_B[members, None]).to(query_THD.device)
        q, k, v = (x[rows_BS] for x in (query_THD, key_TGD, value_TGD))
        chunks.append(_sdpa(q, k, v, is_causal=True, scale=scale)[real_BS.to(query_THD.device)])
        order.append(rows_BS[real_BS.to(query_THD.device)])
    positions_T = torch.cat(order)
    inverse_T = torch.empty_like(positions_T)
    inverse_T[positions_T] = torch.arange(len(positions_T), device=positions_T.device)
    return torch.cat(chunks)[inverse_T]


def _before_each(x_THD: Tensor, firsts: Sequence[int], row_D: Tensor | None) -> Tensor:
    """Insert a token before each sequence, with these entries in each head, or zeros."""
    row_1HD = (x_THD.new_zeros(x_THD.shape[-1]) if row_D is None else row_D).expand(1, *x_THD.shape[1:])
    parts = torch.tensor_split(x_THD, list(firsts)[1:])
    return torch.cat([one for part in parts for one in (row_1HD, part)])


def _windowed_attention(
    query_THD: Tensor,
    key_TGD: Tensor,
    value_TGD: Tensor,
    lengths: Sequence[int],
    scale: float | None,
    *,
    window: int,
    sink_D: Tensor | None,
) -> Tensor:
    """Attend to the last `window` tokens of the same sequence, in blocks of W tokens of the pack, each of which sees
    itself and the block before it, so that work and memory grow with T * W."""
    tokens, window = len(query_THD), min(window, max(lengths))
    blocks = -(-tokens // window)
    sequence_T = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    sequence_T = F.pad(sequence_T, (0, blocks * window - tokens), value=-1).to(query_THD.device)
    place_T = torch.arange(len(sequence_T), device=query_THD.device)

    def with_block_before(x_T: Tensor, before_first: int = 0) -> Tensor:
        x_BW = x_T.unflatten(0, (blocks, window))
        return torch.cat([torch.cat([x_BW.new_full(x_BW[:1].shape, before_first), x_BW[:-1]]), x_BW], dim=1)

    query, key, value = (F.pad(x, (0, 0, 0, 0, 0, len(sequence_T) - tokens)) for x in (query_THD, key_TGD, value_TGD))
    behind = place_T.view(blocks, window, 1) - with_block_before(place_T)[:, None]
    mask = (sequence_T.view(blocks, window, 1) == with_block_before(sequence_T, -2)[:, None]) & (behind >= 0)
    mask &= behind < window
    out = _sdpa(
        query.unflatten(0, (blocks, window)),
        *(with_block_before(x) for x in (key, value)),
        mask=mask,
        scale=scale,
        sink_D=sink_D,
    )
    return out.flatten(0, 1)[:tokens]


def _similar_lengths(lengths: Sequence[int]) -> list[Tensor]:
    """Return sequence indices in groups; padded to its longest sequence, a group has at most MAX_PADDING_RATIO times
    its tokens."""
    by_length = sorted((i for i in range(len(lengths)) if lengths[i] > 0), key=lambda i: lengths[i], reverse=True)
    groups: list[list[int]] = []
    longest = real = 0
    for i in by_length:
        if groups and longest * (len(groups[-1]) + 1) <= MAX_PADDING_RATIO * (real + lengths[i]):
            groups[-1].append(i)
            real += lengths[i]
        else:
            groups.append([i])
            longest = real = lengths[i]
    return [torch.tensor(group) for group in groups]


def _sdpa(
    query_BSHD: Tensor,
    key_BSGD: Tensor,
    value_BSGD: Tensor,
    *,
    is_causal: bool = False,
    mask: Tensor | None = None,
    scale: float | None = None,
    sink_D: Tensor | None = None,
) -> Tensor:
    """Call SDPA. Args: mask: [S, S], or [B, S, S]. sink_D: one more key, with value 0, that no mask hides."""
    if sink_D is not None:
        assert mask is not None, "where nothing is masked the sink is a token"
        batch, _, groups, head = key_BSGD.shape
        key_BSGD = torch.cat([sink_D.expand(batch, 1, groups, head), key_BSGD], dim=1)
        value_BSGD = F.pad(value_BSGD, (0, 0, 0, 0, 1, 0))
        mask = F.pad(mask, (1, 0), value=True)
    q, k, v = (x.transpose(1, 2) for x in (query_BSHD, key_BSGD, value_BSGD))
    mask = mask[:, None] if mask is not None and mask.dim() > 2 else mask
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=is_causal, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )
    return out.transpose(1, 2)


class _GatherOverContext(torch.autograd.Function):
    """All-gather along tokens over the CP group; the gradient is summed over ranks and scattered back."""

    @staticmethod
    def forward(ctx: object, x_TGD: Tensor) -> Tensor:
        group = parallel_state.get_context_parallel_group()
        parts = [torch.empty_like(x_TGD) for _ in range(group.size())]
        torch.distributed.all_gather(parts, x_TGD.contiguous(), group=group)
        return torch.stack(parts)

    @staticmethod
    def backward(ctx: object, grad_CTGD: Tensor) -> Tensor:
        group = parallel_state.get_context_parallel_group()
        grad = grad_CTGD.contiguous()
        torch.distributed.all_reduce(grad, group=group)
        return grad[group.rank()]


def _context_parallel_attention(
    query_THD: Tensor,
    key_TGD: Tensor,
    value_TGD: Tensor,
    lengths: Sequence[int],
    scale: float | None,
    *,
    window: int | None,
    sink_D: Tensor | None,
) -> Tensor:
    """Attend where each sequence is cut into 2*CP equal chunks, of which rank r holds r and 2*CP-1-r (Megatron's
    zigzag layout).

    `lengths` are the whole sequences; this rank holds length / CP tokens of each.
    """
    group = parallel_state.get_context_parallel_group()
    size, rank = group.size(), group.rank()
    key_CTGD, value_CTGD = _GatherOverContext.apply(key_TGD), _GatherOverContext.apply(value_TGD)
    out, start = [], 0
    for length in lengths:
        local = length // size
        chunk = local // 2
        span = slice(start, start + local)
        keys, values = (_in_sequence_order(x[:, span], chunk) for x in (key_CTGD, value_CTGD))
        positions_Q = torch.cat(
            [torch.arange(chunk) + rank * chunk, torch.arange(chunk) + (2 * size - 1 - rank) * chunk]
        ).to(query_THD.device)
        behind = positions_Q[:, None] - torch.arange(length, device=query_THD.device)[None, :]
        mask = (behind >= 0) & (behind < (window or length))
        out.append(_sdpa(query_THD[None, span], keys[None], values[None], mask=mask, scale=scale, sink_D=sink_D)[0])
        start += local
    return torch.cat(out)


def _in_sequence_order(x_CTGD: Tensor, chunk: int) -> Tensor:
    """Put a sequence's tokens from all CP ranks' zigzag halves in order: [C, 2*chunk, G, D] -> [2*C*chunk, G, D]."""
    first = list(x_CTGD[:, :chunk])
    second = list(x_CTGD[:, chunk:])
    return torch.cat(first + second[::-1])


_LATENT_KEYS = {
    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
    "self_attention.q_layernorm.": "self_attention.linear_q_up_proj.layer_norm_",
    "self_attention.kv_layernorm.": "self_attention.linear_kv_up_proj.layer_norm_",
}
"""Renames norms of local layers in checkpoints to Transformer Engine's names. Upstream does it for other attention
only."""


def layer_spec(
    config: TransformerConfig,
    *,
    transformer_engine: bool,
    virtual_stage: int | None = None,
    post_norm: bool = False,
    whole_qk_norm: bool = False,
) -> TransformerBlockSubmodules:
    """Return what Megatron's TransformerBlock builds on this (virtual) stage: TE layers, or local layers with
    PackedAttention and RMSNorm; with either, latent, gated and linear attention of ours; dense layers, and layers with
    experts where the configuration has them. post_norm: there is no norm before attention and MLP. whole_qk_norm: norms
    of queries and keys run over all heads at once."""
    block = get_gpt_decoder_block_spec(config, transformer_engine, normalization="RMSNorm", vp_stage=virtual_stage)
    distinct = {id(spec): spec.submodules for spec in block.layer_specs}.values()
    for submodules in distinct if config.multi_latent_attention else ():
        submodules.self_attention.module = LatentAttention
        if not transformer_engine:
            submodules.sharded_state_dict_keys_map = _LATENT_KEYS
    for submodules in distinct if config.attention_output_gate else ():
        submodules.self_attention.module = GatedAttention
    for submodules in () if transformer_engine else distinct:
        submodules.input_layernorm = submodules.pre_mlp_layernorm = IdentityOp if post_norm else RMSNorm
        attention = submodules.self_attention.submodules
        attention.core_attention = PackedAttention
        if config.qk_layernorm:
            attention.q_layernorm = WholeQueryNorm if whole_qk_norm else RMSNorm
            key_norm = WholeKeyNorm if whole_qk_norm else RMSNorm
            setattr(attention, "kv_layernorm" if config.multi_latent_attention else "k_layernorm", key_norm)
    if config.linear_attention_freq:
        first = get_transformer_layer_offset(config, vp_stage=virtual_stage)
        block.layer_specs = [
            _with_linear_attention(spec) if config.linear_attention_freq[first + place] else spec
            for place, spec in enumerate(block.layer_specs)
        ]
    if transformer_engine:
        return block
    return TransformerBlockSubmodules(layer_specs=block.layer_specs, layer_norm=RMSNorm)


def _with_linear_attention(spec: ModuleSpec) -> ModuleSpec:
    """Return a layer with linear attention in place of its own, and before it a norm that is a module of its own."""
    submodules = copy(spec.submodules)
    submodules.input_layernorm, submodules.self_attention = RMSNorm, ModuleSpec(module=GatedDeltaNet)
    keys = submodules.sharded_state_dict_keys_map
    submodules.sharded_state_dict_keys_map = {k: v for k, v in keys.items() if not k.startswith("input_layernorm")}
    return replace(spec, submodules=submodules)
