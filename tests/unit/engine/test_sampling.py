"""Choosing tokens: the nucleus, the log-probs, the distribution, and whose randomness it is."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_daro.engine.decoding import choose_tokens, keep_nucleus, row_uniforms

# Upper 0.1 % point of chi-square with 9 degrees of freedom; the seeds are fixed, so the outcome is too.
CHI_SQUARE_9 = 27.88


def test_uniforms_repeat_belong_to_their_key_and_a_longer_call_begins_alike():
    base = row_uniforms(1, 2, 3, 4, 50)
    assert base.dtype == np.float32 and base.min() >= 0 and base.max() < 1
    assert np.array_equal(base, row_uniforms(1, 2, 3, 4, 80)[:50])
    others = [(0, 2, 3, 4), (1, 0, 3, 4), (1, 2, 0, 4), (1, 2, 3, 0), (2, 1, 3, 4), (1, 2, 4, 3), (1, -2, 3, 4)]
    for key in others:
        assert not np.array_equal(base, row_uniforms(*key, 50)), key
    # As words of varying width these two keys would be the same: 0, 1, 5, 6, 7.
    assert not np.array_equal(row_uniforms(2**32, 5, 6, 7, 20), row_uniforms(0, 1, 5, 6 + 7 * 2**32, 20))


def test_rows_are_uncorrelated_and_uniform():
    table = np.stack([row_uniforms(0, group, 0, index, 100) for group in range(40) for index in range(25)])
    assert abs(table.mean() - 0.5) < 4 * np.sqrt(1 / 12 / table.size)
    assert abs(table.mean(axis=1).std() - np.sqrt(1 / 12 / 100)) < 0.003
    counts = np.bincount((table.ravel() * 10).astype(int), minlength=10)
    assert ((counts - 1e4) ** 2 / 1e4).sum() < CHI_SQUARE_9


def sample(logits_V, *, temperature=1.0, top_p=1.0, rows=20_000):
    uniforms = torch.from_numpy(row_uniforms(7, 0, 0, 0, rows))
    return choose_tokens(
        logits_V.expand(rows, -1), uniforms, torch.full((rows,), temperature), torch.full((rows,), top_p)
    )


@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.7, 1.0), (1.5, 1.0), (1.0, 0.8), (0.7, 0.9)])
def test_frequencies_follow_the_distribution(temperature, top_p):
    logits = torch.tensor([0.3, -1.0, 2.0, 0.0, 1.2, -0.5, 0.9, 1.9, -2.0, 0.1])
    tokens, logprobs = sample(logits, temperature=temperature, top_p=top_p)
    probs = torch.softmax(logits.double() / temperature, dim=-1)
    assert torch.allclose(logprobs.double(), probs.log()[tokens], atol=1e-6)  # top-p not applied
    ranked = sorted(range(10), key=lambda v: -probs[v])
    nucleus, mass = [], 0.0
    for v in ranked:
        if mass < top_p:
            nucleus.append(v)
            mass += float(probs[v])
    expected = torch.zeros(10, dtype=torch.double)
    expected[nucleus] = probs[nucleus] / probs[nucleus].sum() * len(tokens)
    counts = torch.bincount(tokens, minlength=10).double()
    assert not counts[expected == 0].any()
    inside = expected > 0
    assert ((counts - expected)[inside] ** 2 / expected[inside]).sum() < CHI_SQUARE_9


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 2**31), vocab=st.integers(1, 40), top_p=st.floats(0.001, 1.0), spread=st.floats(0, 20))
def test_the_nucleus_is_the_smallest_that_reaches_top_p(seed, vocab, top_p, spread):
    generator = torch.Generator().manual_seed(seed)
    probs = torch.softmax(torch.randn(1, vocab, generator=generator) * spread, dim=-1)
    kept = keep_nucleus(probs, torch.tensor([top_p]))[0]
    inside, outside = probs[0][kept > 0], probs[0][kept == 0]
    assert len(inside) >= 1
    assert inside.sum() >= top_p - 1e-5 or not outside.any()
    if outside.any():
        assert inside.min() >= outside.max()
    if len(inside) > 1:
        assert inside.sum() - inside.min() < top_p + 1e-5


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**31), uniform=st.floats(0, 1, exclude_max=True, width=32), top_p=st.sampled_from([1.0, 0.6])
)
def test_never_a_token_of_probability_zero_even_at_the_ends_of_the_unit_interval(seed, uniform, top_p):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(1, 12, generator=generator)
    logits[0, torch.randperm(12, generator=generator)[:6]] = -torch.inf
    logits[0, -1] = -torch.inf
    token, logprob = choose_tokens(logits, torch.tensor([uniform]), torch.ones(1), torch.tensor([top_p]))
    assert torch.isfinite(logits[0, token]) and torch.isfinite(logprob)


def test_the_most_likely_token_stays_however_small_top_p_is():
    probs = torch.tensor([[0.5, 0.25, 0.25], [0.2, 0.4, 0.4]])
    kept = keep_nucleus(probs, torch.tensor([1e-30, 1e-30]))
    assert kept.tolist() == [[0.5, 0.0, 0.0], [0.0, pytest.approx(0.4), 0.0]], "of two alike the first"
    assert keep_nucleus(probs, torch.tensor([0.5, 0.8])).gt(0).tolist() == [[True, False, False], [False, True, True]]


def test_the_largest_uniform_stays_inside():
    largest = torch.tensor([1 - 2**-24])
    for vocab in (1, 3, 1000, 100_003):
        token, _ = choose_tokens(torch.zeros(1, vocab), largest, torch.ones(1), torch.ones(1))
        assert 0 <= token < vocab


def test_greedy_rows_take_the_best_token_and_report_temperature_1():
    logits = torch.tensor([[0.0, 2.0, 1.0], [0.0, 2.0, 1.0]])
    tokens, logprobs = choose_tokens(logits, torch.tensor([0.99, 0.99]), torch.tensor([0.0, 1.0]), torch.ones(2))
    assert tokens.tolist() == [1, 2]
    assert torch.allclose(logprobs, torch.log_softmax(logits[0], -1)[[1, 2]])


def test_a_row_does_not_depend_on_the_settings_of_its_neighbours():
    logits = torch.randn(6, 20, generator=torch.Generator().manual_seed(0))
    uniforms = torch.linspace(0.05, 0.95, 6)
    temperatures, top_p = torch.tensor([1, 0, 0.5, 1, 2, 1.0]), torch.tensor([1, 1, 0.9, 0.5, 1, 0.99])
    together = choose_tokens(logits, uniforms, temperatures, top_p)
    for row in range(6):
        one = slice(row, row + 1)
        alone = choose_tokens(logits[one], uniforms[one], temperatures[one], top_p[one])
        assert alone[0] == together[0][row] and torch.equal(alone[1][0], together[1][row])
