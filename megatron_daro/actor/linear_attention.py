"""Linear attention by the gated delta rule (arXiv 2412.06464), on packed sequences.

A head keeps a matrix S, from keys to values, 0 before each sequence. A token with query q and key k of length 1, value
v, decay exp(g) and beta turns it into S = exp(g) S + k (beta (v - k' exp(g) S))', and outputs q' S. What the 64 tokens
of a chunk add to S solves a triangular system of their keys, so only one S for each chunk is ever held. Queries, keys
and values go through a short causal convolution first; neither S nor the convolution crosses a sequence's bounds.

Megatron-core's layer (ssm/gated_delta_net.py) takes no packs in 0.16, and does not run on a CPU. Names and layout of
its parameters are kept, except that its `out_norm`, which is stored minus 1, is `gated_norm` here, stored as it is.
Source of the arithmetic: transformers 5.24, models/qwen3_next/modeling_qwen3_next.py.

Legend: T packed tokens, H value heads and G key heads of this rank, K and V entries of a key and of a value, B
sequences, N chunks of all sequences, C tokens of a chunk, R channels of the convolution.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_daro.actor.megatron import (
    ColumnParallelLinear,
    MegatronModule,
    PackedSeqParams,
    RowParallelLinear,
    ShardedTensor,
    ShardedTensorFactory,
    TransformerConfig,
    copy_to_tensor_model_parallel_region,
    make_sharded_tensors_for_checkpoint,
    sharded_state_dict_default,
)
from megatron_daro.data.schedule import LINEAR_CHUNK as _CHUNK

try:  # these kernels have never been run with this package
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule as _fla_kernel
except ImportError:
    _fla_kernel = None

_LENGTH_EPS = 1e-6


class GatedDeltaNet(MegatronModule):
    """A layer's linear attention; each tensor-parallel rank has some key heads, and the value heads that they serve."""

    def __init__(self, config: TransformerConfig, layer_number: int, pg_collection: Any, **_: object) -> None:
        super().__init__(config=config)
        self.layer_number = layer_number
        ranks = pg_collection.tp.size()
        self._tp_rank, self._tp_size = pg_collection.tp.rank(), ranks
        self._key, self._value = config.linear_key_head_dim, config.linear_value_head_dim
        self._key_heads, self._heads = config.linear_num_key_heads // ranks, config.linear_num_value_heads // ranks
        keys, values = self._key_heads * self._key, self._heads * self._value
        self._convolved = [keys, keys, values]
        self._sections = [*self._convolved, values, self._heads, self._heads]
        common = {"config": config, "init_method": config.init_method, "bias": False, "tp_group": pg_collection.tp}
        self.in_proj = ColumnParallelLinear(
            config.hidden_size, ranks * sum(self._sections), gather_output=False, **common
        )
        self.out_proj = RowParallelLinear(
            ranks * values, config.hidden_size, input_is_parallel=True, skip_bias_add=True, **common
        )
        # Without bias or padding; only its weight is used.
        self.conv1d = torch.nn.Conv1d(
            channels := sum(self._convolved),
            channels,
            config.linear_conv_kernel_dim,
            groups=channels,
            bias=False,
            dtype=config.params_dtype,
        )
        self.A_log = torch.nn.Parameter(torch.zeros(self._heads))  # fp32 whatever the model's dtype
        self.dt_bias = torch.nn.Parameter(torch.zeros(self._heads, dtype=config.params_dtype))
        self.gated_norm = GatedNorm(self._value, config.layernorm_epsilon, config.params_dtype)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        **_: object,
    ) -> tuple[Tensor, None]:
        """Map hidden_states [T, 1, D] (this rank's tokens under sequence parallelism) to the same shape, and no
        bias."""
        if packed_seq_params is None:
            raise ValueError("GatedDeltaNet takes packed sequences only: packed_seq_params was None")
        bounds = packed_seq_params.cu_seqlens_q
        lengths = [b - a for a, b in pairwise(bounds.tolist())]
        projected, _ = self.in_proj(hidden_states)
        mixed, gate, beta, decay = projected[:, 0].split([sum(self._convolved), *self._sections[3:]], dim=-1)
        mixed_TR = F.silu(packed_convolution(mixed, self.conv1d.weight, lengths))
        query, key, value = mixed_TR.split(self._convolved, dim=-1)
        query_TGK, key_TGK = (x.unflatten(-1, (self._key_heads, self._key)) for x in (query, key))
        value_THV = value.unflatten(-1, (self._heads, self._value))
        query_THK, key_THK = (x.repeat_interleave(self._heads // self._key_heads, 1) for x in (query_TGK, key_TGK))
        beta_TH = beta.sigmoid()
        decay_TH = -self.A_log.float().exp() * F.softplus(decay.float() + self.dt_bias)
        if _fla_kernel is not None and value.is_cuda and value.dtype != torch.float32:
            own = (x[None] for x in (query_THK, key_THK, value_THV, decay_TH, beta_TH))
            out_THV = _fla_kernel(*own, cu_seqlens=bounds, use_qk_l2norm_in_kernel=True)[0][0]
        else:
            out_THV = packed_delta_rule(query_THK, key_THK, value_THV, decay_TH, beta_TH, lengths)
        normed_THV = self.gated_norm(out_THV, gate.view_as(out_THV))
        output, _ = self.out_proj(normed_THV.flatten(1)[:, None])
        return output, None

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[tuple[int, int, int], ...] = (),
        metadata: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Return the sharded state for a checkpoint: rows of in_proj and conv1d are stored section by section, as a
        single rank would have them."""
        cut = {"A_log": self.A_log, "dt_bias": self.dt_bias, "conv1d.weight": self.conv1d.weight}
        own = cut | {"gated_norm.weight": self.gated_norm.weight}
        state = make_sharded_tensors_for_checkpoint(own, prefix, dict.fromkeys(cut, 0), sharded_offsets)
        for name in ("in_proj", "out_proj"):
            module = self.get_submodule(name)
            state |= sharded_state_dict_default(module, f"{prefix}{name}.", sharded_offsets, metadata)
        for name, weight, sections in (
            ("in_proj.weight", self.in_proj.weight, self._sections),
            ("conv1d.weight", self.conv1d.weight, self._convolved),
        ):
            whole = state[prefix + name]
            state[prefix + name] = in_sections(whole, weight, sections, self._tp_rank, self._tp_size)
        return state


class GatedNorm(torch.nn.Module):
    """RMSNorm over a head's values, in fp32, times SiLU of a gate. Its weight is not centred at 0, and whole on every
    tensor-parallel rank, each of which sees heads of its own."""

    def __init__(self, size: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(size, dtype=dtype))

    def forward(self, x_THV: Tensor, gate_THV: Tensor) -> Tensor:
        """Return [T, H, V] in the dtype of x."""
        weight = copy_to_tensor_model_parallel_region(self.weight)  # its gradient is summed over the ranks' heads
        normed = weight * F.rms_norm(x_THV.float(), x_THV.shape[-1:], None, self.eps).to(x_THV.dtype)
        return (normed * F.silu(gate_THV.float())).to(x_THV.dtype)


def packed_convolution(x_TR: Tensor, weight_R1W: Tensor, lengths: Sequence[int]) -> Tensor:
    """Convolve each channel with its own kernel over a token and those before it in the same sequence.

    Args:
        x_TR: packed tokens. weight_R1W: kernels, the last entry for a token itself. lengths: of the sequences, sum T.

    Returns:
        [T, R].
    """
    before = weight_R1W.shape[-1] - 1
    lengths_B = torch.tensor(lengths)
    room_B = before * torch.arange(1, len(lengths) + 1)  # rows of zeros up to each sequence, its own included
    rows_T = (torch.arange(len(x_TR)) + torch.repeat_interleave(room_B, lengths_B)).to(x_TR.device)
    spread = x_TR.new_zeros(len(x_TR) + before * len(lengths), x_TR.shape[1]).index_copy(0, rows_T, x_TR)
    return F.conv1d(spread.t()[None], weight_R1W, groups=len(weight_R1W))[0].t()[rows_T - before]


def packed_delta_rule(
    query_THK: Tensor, key_THK: Tensor, value_THV: Tensor, decay_TH: Tensor, beta_TH: Tensor, lengths: Sequence[int]
) -> Tensor:
    """Compute each token's output from its sequence up to and including it, in fp32.

    Args:
        query_THK, key_THK: packed tokens; both are scaled to length 1, queries then by 1 / sqrt(K). decay_TH: log of
            the decay, at most 0. beta_TH: between 0 and 1. lengths: of the sequences, sum T.

    Returns:
        [T, H, V] in the dtype of the values.
    """
    rows_T, running = _places(lengths)
    rows_T = rows_T.to(value_THV.device)
    query, key, value, decay, beta = (
        _chunks(x.float(), rows_T, sum(running)) for x in (query_THK, key_THK, value_THV, decay_TH, beta_TH)
    )
    query, key = _of_length_one(query) * query.shape[-1] ** -0.5, _of_length_one(key)
    decay_NHC = decay.cumsum(-1)
    later = torch.ones(_CHUNK, _CHUNK, dtype=torch.bool, device=value.device).triu(1)
    between_NHCC = (decay_NHC[..., None] - decay_NHC[..., None, :]).masked_fill(later, -torch.inf).exp()
    key_beta = key * beta[..., None]
    system = key_beta @ key.mT * between_NHCC
    right = torch.cat([value * beta[..., None], key_beta * decay_NHC.exp()[..., None]], dim=-1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    added, seen = solved.split([value.shape[-1], key.shape[-1]], dim=-1)
    within = query @ key.mT * between_NHCC
    query = query * decay_NHC.exp()[..., None]
    key = key * (decay_NHC[..., -1:] - decay_NHC).exp()[..., None]
    kept_NH11 = decay_NHC[..., -1].exp()[..., None, None]
    state_BHKV = value.new_zeros(running[0], value.shape[1], key.shape[-1], value.shape[-1])
    steps, answers = (x.split(running) for x in (query, key, added, seen, within, kept_NH11)), []
    for q, k, v, s, w, kept in zip(*steps, strict=True):
        state_BHKV = state_BHKV[: len(q)]  # the sequences that have such a chunk
        new = v - s @ state_BHKV
        answers.append(q @ state_BHKV + w @ new)
        state_BHKV = state_BHKV * kept + k.mT @ new
    out_NHCV = torch.cat(answers)
    return out_NHCV.transpose(1, 2).flatten(0, 1)[rows_T].to(value_THV.dtype)


def _places(lengths: Sequence[int]) -> tuple[Tensor, list[int]]:
    """Return the row of each packed token in the chunks of all sequences, and how many sequences have a first chunk, a
    second, and so on. All first chunks come first, then all second ones; among these, those of sequences with more
    chunks come first."""
    lengths_B = torch.tensor(lengths)
    chunks_B = -(-lengths_B // _CHUNK)
    place_B = torch.empty_like(chunks_B)
    place_B[chunks_B.argsort(descending=True, stable=True)] = torch.arange(len(lengths))
    running = [int((chunks_B > step).sum()) for step in range(int(chunks_B.max()))]
    starts = torch.tensor([0, *running]).cumsum(0)
    within_T = torch.cat([torch.arange(length) for length in lengths])
    first_T = torch.repeat_interleave(place_B, lengths_B)
    return (starts[within_T // _CHUNK] + first_T) * _CHUNK + within_T % _CHUNK, running


def _chunks(x_TH: Tensor, rows_T: Tensor, number: int) -> Tensor:
    """Map [T, H, ...] to [N, H, C, ...]; zeros where a sequence has ended."""
    spread = x_TH.new_zeros(number * _CHUNK, *x_TH.shape[1:]).index_copy(0, rows_T, x_TH)
    return spread.unflatten(0, (number, _CHUNK)).transpose(1, 2)


def _of_length_one(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + _LENGTH_EPS)


def in_sections(
    whole: ShardedTensor, weight: Tensor, sections: Sequence[int], rank: int, ranks: int
) -> ShardedTensorFactory:
    """Return the sharded form of a weight of which each rank has rows of every section: runs of rows of the weight that
    a single rank would have."""
    shape = (ranks * sum(sections), *weight.shape[1:])
    offsets = whole.global_offset[: whole.prepend_axis_num]
    sizes = whole.global_shape[: whole.prepend_axis_num]

    def build(key: str, values: Tensor, replica_id: Any, _: object) -> list[ShardedTensor]:
        parts, start = [], 0
        for size, part in zip(sections, values.split(list(sections)), strict=True):
            offset = (*offsets, start + rank * size, *[0] * (len(shape) - 1))
            own = replace(
                whole,
                key=key,
                data=part,
                dtype=values.dtype,
                local_shape=tuple(part.shape),
                global_shape=(*sizes, *shape),
                global_offset=offset,
                axis_fragmentations=None,  # sections differ in size
                replica_id=replica_id,
            )
            parts.append(own)
            start += ranks * size
        return parts

    return ShardedTensorFactory(whole.key, weight, build, torch.cat, whole.replica_id)
