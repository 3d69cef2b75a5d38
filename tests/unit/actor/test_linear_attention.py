"""Linear attention of a pack against transformers' own functions, one sequence at a time."""

from __future__ import annotations

import pytest
import torch
from transformers.models.qwen3_next.modeling_qwen3_next import causal_conv1d_fn, torch_chunk_gated_delta_rule

from megatron_daro.actor.linear_attention import packed_convolution, packed_delta_rule

LENGTHS = [1, 200, 64, 3, 65, 128]
HEADS, KEY, VALUE = 3, 8, 6


@pytest.mark.parametrize("decay", [0.01, 3.0])
def test_the_delta_rule_of_a_pack_is_that_of_each_sequence(decay):
    generator = torch.Generator().manual_seed(0)
    sizes = [(HEADS, KEY), (HEADS, KEY), (HEADS, VALUE), (HEADS,), (HEADS,)]
    query, key, value, rate, beta = (torch.randn(sum(LENGTHS), *size, generator=generator) for size in sizes)
    inputs = [query, key, value, -decay * rate.exp(), beta.sigmoid()]
    packed, single = ([x.clone().requires_grad_() for x in inputs] for _ in range(2))
    got = packed_delta_rule(*packed, LENGTHS)
    parts = zip(*(x.split(LENGTHS) for x in single), strict=True)
    want = torch.cat(
        [
            torch_chunk_gated_delta_rule(
                *(x[None] for x in part[:3]), g=part[3][None], beta=part[4][None], use_qk_l2norm_in_kernel=True
            )[0][0]
            for part in parts
        ]
    )
    torch.testing.assert_close(got, want, rtol=0, atol=1e-6)
    weights = torch.randn(want.shape, generator=generator)
    for output in (got, want):
        (output * weights).sum().backward()
    for ours, theirs in zip(packed, single, strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=0, atol=1e-5 * float(theirs.grad.abs().max()))


def test_the_convolution_of_a_pack_is_that_of_each_sequence():
    generator = torch.Generator().manual_seed(0)
    x_TR, weight = torch.randn(sum(LENGTHS), 5, generator=generator), torch.randn(5, 1, 4, generator=generator)
    want = torch.cat([causal_conv1d_fn(part.t()[None], weight[:, 0])[0].t() for part in x_TR.split(LENGTHS)])
    torch.testing.assert_close(packed_convolution(x_TR, weight, LENGTHS), want, rtol=0, atol=1e-6)
