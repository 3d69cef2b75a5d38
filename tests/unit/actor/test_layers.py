"""Packed attention against one call per sequence, RMSNorm against transformers'."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_daro.actor import layers

lengths_lists = st.lists(st.integers(0, 40), min_size=1, max_size=12).filter(lambda lengths: sum(lengths) > 0)


def one_call_per_sequence(query, key, value, lengths):
    """The textbook: softmax(q k / sqrt(d)) with a triangular mask, head by head."""
    groups = query.shape[1] // key.shape[1]
    out, start = [], 0
    for length in lengths:
        rows = slice(start, start + length)
        q, k, v = query[rows], key[rows].repeat_interleave(groups, 1), value[rows].repeat_interleave(groups, 1)
        scores = torch.einsum("qhd,khd->hqk", q, k) * query.shape[2] ** -0.5
        visible = torch.ones(length, length, dtype=torch.bool).tril()
        out.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(~visible, -torch.inf).softmax(-1), v))
        start += length
    return torch.cat(out)


def qkv(num_tokens, heads, kv_heads, head_dim, seed):
    generator = torch.Generator().manual_seed(seed)
    sizes = ((num_tokens, heads, head_dim), (num_tokens, kv_heads, head_dim), (num_tokens, kv_heads, head_dim))
    return [torch.randn(size, generator=generator, dtype=torch.float64).requires_grad_() for size in sizes]


@settings(max_examples=40, deadline=None)
@given(lengths=lengths_lists, heads=st.sampled_from([(4, 4), (4, 2), (6, 1)]), seed=st.integers(0, 99))
def test_packed_attention_equals_one_call_per_sequence(lengths, heads, seed):
    inputs = qkv(sum(lengths), *heads, 8, seed)
    got = layers.packed_causal_attention(*inputs, lengths)
    want = one_call_per_sequence(*inputs, lengths)
    assert got.shape == want.shape
    torch.testing.assert_close(got, want, rtol=0, atol=1e-12)
    ramp = torch.linspace(-1, 1, got.numel(), dtype=torch.float64).view_as(got)
    for ours, theirs in zip(
        torch.autograd.grad((got * ramp).sum(), inputs), torch.autograd.grad((want * ramp).sum(), inputs), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-11)


@pytest.mark.parametrize("lengths", [[7], [0, 7], [7, 0], [3, 0, 0, 5], [1, 1, 1]])
def test_sequences_of_length_zero_and_one(lengths):
    inputs = qkv(sum(lengths), 4, 2, 8, 0)
    got = layers.packed_causal_attention(*inputs, lengths)
    torch.testing.assert_close(got, one_call_per_sequence(*inputs, lengths), rtol=0, atol=1e-12)


def test_a_sequence_does_not_see_its_neighbours():
    """Changing every other sequence leaves this one bit for bit as it was."""
    lengths = [5, 9, 6, 9]
    inputs = [x.detach() for x in qkv(sum(lengths), 4, 2, 8, 1)]
    rows = slice(5, 14)
    before = layers.packed_causal_attention(*inputs, lengths)[rows]
    changed = [x.clone() for x in inputs]
    for x in changed:
        x[:5] += 100.0
        x[14:] -= 100.0
    assert torch.equal(layers.packed_causal_attention(*changed, lengths)[rows], before)


def norm_pair(dtype, eps=1e-6, size=48):
    from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm

    torch.manual_seed(0)
    ours = layers.RMSNorm(
        SimpleNamespace(params_dtype=dtype, sequence_parallel=False, layernorm_zero_centered_gamma=False), size, eps=eps
    )
    theirs = Qwen2RMSNorm(size, eps=eps).to(dtype)
    with torch.no_grad():
        theirs.weight.copy_(1 + 0.3 * torch.randn(size))
        ours.weight.copy_(theirs.weight)
    return ours, theirs


@pytest.mark.parametrize("scale", [1e-4, 1.0, 300.0])
@pytest.mark.parametrize("eps", [1e-6, 1e-2])
def test_rms_norm_fp32_equals_transformers(scale, eps):
    ours, theirs = norm_pair(torch.float32, eps)
    x = (torch.randn(33, 1, 48) * scale).requires_grad_()
    torch.testing.assert_close(ours(x), theirs(x), rtol=1e-6, atol=1e-7)
    ramp = torch.linspace(-1, 1, x.numel()).view_as(x)
    for norm in (ours, theirs):
        norm.zero_grad()
    gradients = [torch.autograd.grad((norm(x) * ramp).sum(), (x, norm.weight)) for norm in (ours, theirs)]
    for mine, other in zip(*gradients, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5 * float(other.abs().max()))


def test_rms_norm_bf16_rounds_where_transformers_rounds():
    """The cast stands before the weight, as in transformers: at most one bf16 digit (2**-8) apart, mostly equal."""
    ours, theirs = norm_pair(torch.bfloat16)
    x = torch.randn(500, 48).bfloat16()
    got, want = ours(x), theirs(x)
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.float(), want.float(), rtol=2**-7, atol=0)
    assert (got == want).float().mean() > 0.99
    late_cast = (F.rms_norm(x.float(), (48,), None, 1e-6) * ours.weight.float()).bfloat16()
    assert (late_cast == want).float().mean() < 0.95, "the two orders of rounding cannot be told apart here"
