"""The layers of the model: Transformer Engine's where it can run, else Megatron's local ones with two of ours.

Ours are an RMSNorm that works under sequence parallelism, and a core attention on torch's scaled_dot_product_attention
that takes packed sequences and context parallelism.

Legend: T packed tokens of this rank, H query heads, G key-value heads, D head size, B sequences, S longest sequence,
C context-parallel ranks, Q tokens of one sequence on this rank.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_daro.actor.compat import LatentAttention
from megatron_daro.actor.megatron import (
    MegatronModule,
    PackedSeqParams,
    TransformerBlockSubmodules,
    TransformerConfig,
    get_gpt_decoder_block_spec,
    parallel_state,
)

# A padded batch may hold this many times the tokens of the sequences in it.
MAX_PADDING_RATIO = 1.25


class RMSNorm(torch.nn.Module):
    """Root-mean-square norm over the last dimension; its weight is marked for the sequence-parallel all-reduce.

    Statistics are taken in fp32 and the result is cast back before the weight, as Hugging Face's models do.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_: object) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype == torch.float32:
            return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)
        normed = F.rms_norm(x.float(), (x.shape[-1],), None, self.eps).to(x.dtype)
        return normed * self.weight


class PackedAttention(MegatronModule):
    """Causal attention within each sequence of a pack, on torch SDPA; keys and values gathered under CP."""

    def __init__(
        self, config: TransformerConfig, layer_number: int, *_: object, softmax_scale: float | None = None, **__: object
    ) -> None:
        super().__init__(config=config)
        self.layer_number, self._scale = layer_number, softmax_scale

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
        """query [T, H, D], key and value [T, G, D] -> [T, H * D]; sequence bounds from packed_seq_params (global)."""
        if packed_seq_params is None:
            raise ValueError("PackedAttention takes packed sequences only: packed_seq_params was None")
        query_THD, key_TGD, value_TGD = (x.squeeze(1) if x.dim() == 4 else x for x in (query, key, value))
        bounds = packed_seq_params.cu_seqlens_q.tolist()
        lengths = [b - a for a, b in itertools.pairwise(bounds)]
        if parallel_state.get_context_parallel_world_size() > 1:
            out_THD = _context_parallel_attention(query_THD, key_TGD, value_TGD, lengths, self._scale)
        else:
            out_THD = packed_causal_attention(query_THD, key_TGD, value_TGD, lengths, self._scale)
        return out_THD.reshape(out_THD.shape[0], -1)


def packed_causal_attention(
    query_THD: Tensor, key_TGD: Tensor, value_TGD: Tensor, lengths: Sequence[int], scale: float | None = None
) -> Tensor:
    """Causal attention per sequence. Sequences of similar length share one padded SDPA call.

    Args:
        query_THD, key_TGD, value_TGD: packed tokens; H is a multiple of G.
        lengths: tokens of each sequence, sum T.
        scale: of the scores; None: 1 / sqrt(D).

    Returns:
        [T, H, D], same dtype.
    """
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


def _similar_lengths(lengths: Sequence[int]) -> list[Tensor]:
    """Sequence indices grouped so that padding each group to its longest adds at most MAX_PADDING_RATIO."""
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
    mask_SS: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (query_BSHD, key_BSGD, value_BSGD))
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask_SS, is_causal=is_causal, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
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
    query_THD: Tensor, key_TGD: Tensor, value_TGD: Tensor, lengths: Sequence[int], scale: float | None
) -> Tensor:
    """Each sequence is cut into 2*CP equal chunks and rank r holds chunks r and 2*CP-1-r (Megatron's zigzag layout).

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
        mask = positions_Q[:, None] >= torch.arange(length, device=query_THD.device)[None, :]
        out.append(_sdpa(query_THD[None, span], keys[None], values[None], mask_SS=mask, scale=scale)[0])
        start += local
    return torch.cat(out)


def _in_sequence_order(x_CTGD: Tensor, chunk: int) -> Tensor:
    """Tokens of a sequence from all CP ranks' zigzag halves, in order: [C, 2*chunk, G, D] -> [2*C*chunk, G, D]."""
    first = list(x_CTGD[:, :chunk])
    second = list(x_CTGD[:, chunk:])
    return torch.cat(first + second[::-1])


_LATENT_KEYS = {
    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
    "self_attention.q_layernorm.": "self_attention.linear_q_up_proj.layer_norm_",
    "self_attention.kv_layernorm.": "self_attention.linear_kv_up_proj.layer_norm_",
}
"""What checkpoints call norms of local layers: as of Transformer Engine's. Upstream has it for other attention only."""


def layer_spec(
    config: TransformerConfig, *, transformer_engine: bool, virtual_stage: int | None = None
) -> TransformerBlockSubmodules:
    """Return what Megatron's TransformerBlock builds on this (virtual) stage: TE layers, or local layers with
    PackedAttention and RMSNorm; dense layers, and layers with experts where the configuration has them."""
    block = get_gpt_decoder_block_spec(config, transformer_engine, normalization="RMSNorm", vp_stage=virtual_stage)
    distinct = {id(spec): spec.submodules for spec in block.layer_specs}.values()
    for submodules in distinct if config.multi_latent_attention else ():
        submodules.self_attention.module = LatentAttention
        if not transformer_engine:
            submodules.sharded_state_dict_keys_map = _LATENT_KEYS
    if transformer_engine:
        return block
    for submodules in distinct:
        submodules.input_layernorm = RMSNorm
        submodules.pre_mlp_layernorm = RMSNorm
        attention = submodules.self_attention.submodules
        attention.core_attention = PackedAttention
        if config.qk_layernorm:
            attention.q_layernorm = RMSNorm
            setattr(attention, "kv_layernorm" if config.multi_latent_attention else "k_layernorm", RMSNorm)
    return TransformerBlockSubmodules(layer_specs=block.layer_specs, layer_norm=RMSNorm)
