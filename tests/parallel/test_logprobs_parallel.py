"""Vocabulary-parallel log-probabilities over gloo: two ranks equal one, in values and summed gradients."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from test_gradients_exact import layouts

from megatron_daro.actor.logprobs import vocab_parallel_logprobs

RANKS, ROWS, D, T = 2, 40, 16, 29
CHUNKS = {"chunk_tokens": 8, "chunk_vocab": 16}


def make_case(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(T, D, generator=generator, dtype=torch.float64).to(dtype)
    weight = torch.randn(RANKS * ROWS, D, generator=generator, dtype=torch.float64).to(dtype)
    return hidden, weight, torch.randint(0, 2**31, (T,), generator=generator)


def run(hidden, weight, labels, **options):
    """Values and gradients of a loss over both outputs."""
    hidden, weight = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    logprobs, entropy = vocab_parallel_logprobs(hidden, weight, labels, temperature=0.7, **CHUNKS, **options)
    ramp = torch.linspace(-1.0, 2.0, len(labels), dtype=logprobs.dtype)
    grads = torch.autograd.grad((logprobs * ramp).sum() + (entropy * ramp.flip(0)).sum(), (hidden, weight))
    return logprobs.detach(), entropy.detach(), *grads


def of_a_rank(layout, vocab_size: int, dtype: torch.dtype, num_tokens: int) -> tuple[torch.Tensor, ...]:
    """On a rank: values, the summed gradient of the hidden states, and this rank's gradient of the weights."""
    rank = dist.get_rank()
    hidden, weight, ids = make_case(dtype)
    labels = (ids % vocab_size)[:num_tokens]
    part = weight[rank * ROWS : (rank + 1) * ROWS]
    logprobs, entropy, hidden_grad, weight_grad = run(
        hidden[:num_tokens], part, labels, group=dist.group.WORLD, vocab_start=rank * ROWS, vocab_size=vocab_size
    )
    if num_tokens:
        dist.all_reduce(hidden_grad)  # what the copy-to-region of the caller does
    return logprobs, entropy, hidden_grad, weight_grad


# 80 rows over two ranks: no padding; padding on the last rank; a last rank of padding only.
@pytest.mark.parametrize(
    ("vocab_size", "dtype", "num_tokens"),
    [
        (80, torch.float32, T),
        (71, torch.float32, T),
        (40, torch.float64, T),
        (33, torch.float64, T),
        (71, torch.float32, 0),
    ],
)
def test_two_ranks_equal_one(rank_pool, vocab_size, dtype, num_tokens):
    options = {"vocab_size": vocab_size, "dtype": dtype, "num_tokens": num_tokens}
    parts = rank_pool.run(of_a_rank, layouts()["tp2"], **options)
    hidden, weight, ids = make_case(dtype)
    labels = (ids % vocab_size)[:num_tokens]
    logprobs, entropy, hidden_grad, weight_grad = run(hidden[:num_tokens], weight, labels, vocab_size=vocab_size)
    for part in parts:
        torch.testing.assert_close(part[0], logprobs, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(part[1], entropy, rtol=1e-6, atol=1e-6)
        assert (part[2] - hidden_grad).norm() <= 1e-6 * hidden_grad.norm()
    both = torch.cat([part[3] for part in parts])
    assert (both - weight_grad).norm() <= 1e-6 * weight_grad.norm()
    assert torch.equal(parts[0][0], parts[1][0]), "ranks disagree on the outputs"
