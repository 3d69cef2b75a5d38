"""pass@k against subsets counted one by one, maj@k against all subsets, intervals that repeat and that cover."""

from __future__ import annotations

from itertools import combinations
from statistics import fmean

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_daro.errors import DataError
from megatron_daro.rollout.summary import pass_at_k
from megatron_daro.workshop.evaluate.intervals import bootstrap_means, estimate, estimate_of_sets, interval
from megatron_daro.workshop.evaluate.votes import majority_at_k


@pytest.mark.parametrize("samples", range(1, 8))
def test_pass_at_k_is_the_share_of_subsets_with_a_right_answer(samples):
    for correct in range(samples + 1):
        verdicts = [i < correct for i in range(samples)]
        for k in range(1, samples + 1):
            counted = fmean(any(chosen) for chosen in combinations(verdicts, k))
            assert pass_at_k(samples, correct, k) == pytest.approx(counted, abs=1e-15)


@given(st.integers(1, 4096), st.data())
@settings(max_examples=50, deadline=None)
def test_pass_at_k_keeps_its_order_where_factorials_overflow(samples, data):
    correct = data.draw(st.integers(0, samples))
    k = data.draw(st.integers(1, samples))
    value = pass_at_k(samples, correct, k)
    assert 0 <= value <= 1 and (value == 0) == (correct == 0)
    assert pass_at_k(samples, correct, 1) == correct / samples
    assert k == samples or value <= pass_at_k(samples, correct, k + 1)


def test_pass_at_k_of_a_large_number_is_exact():
    # 1 - (1 - c/n)(1 - c/(n-1)) by hand: c = 1, n = 1,000,000, k = 2 -> 2/n
    assert pass_at_k(10**6, 1, 2) == 2e-6


@pytest.mark.parametrize(("samples", "correct", "k"), [(4, 2, 5), (4, 2, 0), (4, 5, 2), (4, -1, 2)])
def test_what_cannot_be_is_refused(samples, correct, k):
    with pytest.raises(DataError):
        pass_at_k(samples, correct, k)
    if k in (0, 5):
        with pytest.raises(DataError, match=f"maj@{k}"):
            majority_at_k([0] * samples, 0, k, seed=0)


@pytest.mark.parametrize(
    ("votes", "right", "value"),
    [
        ([0, 0, 1], 0, 1.0),
        ([1, 1, 0], 0, 0.0),
        ([0, 1], 0, 0.5),  # a tie of two
        ([0, 1, 2, 2, 1, 0], 0, 1 / 3),  # a tie of three
        ([-1, -1, -1, 0], 0, 1.0),  # who has no answer has no vote
        ([-1, -1], None, 0.0),
        ([0, 0], None, 0.0),
    ],
)
def test_the_majority_of_all_samples(votes, right, value):
    assert majority_at_k(votes, right, len(votes), seed=0) == pytest.approx(value)


def test_the_majority_of_fewer_is_the_mean_over_subsets():
    votes = [0, 0, 0, 1, 1, 2, -1]
    counted = fmean(majority_at_k(list(chosen), 0, 3, seed=0) for chosen in combinations(votes, 3))
    assert majority_at_k(votes, 0, 3, seed=1, draws=20_000) == pytest.approx(counted, abs=0.01)
    assert majority_at_k(votes, 0, 3, seed=1) == majority_at_k(votes, 0, 3, seed=1)


def test_intervals_repeat_and_belong_to_the_set():
    values = np.random.default_rng(0).random(50)
    one, again, other = (estimate(values, seed=3, name=name) for name in ("a", "a", "b"))
    assert one == again != other
    assert one.low < one.mean < one.high and one.mean == pytest.approx(values.mean())


def test_the_interval_covers_the_truth_about_as_often_as_it_says():
    rng, covered = np.random.default_rng(1), 0
    for trial in range(150):
        low, high = interval(bootstrap_means(rng.binomial(8, 0.4, 80) / 8, seed=trial, name="x", resamples=400))
        covered += low <= 0.4 <= high
    assert 0.90 <= covered / 150 <= 0.99


def test_the_mean_of_sets_counts_each_set_once():
    sets = {"small": [1.0, 0.0], "large": [1.0] * 100}
    found = estimate_of_sets(sets, seed=0)
    assert found.mean == pytest.approx(0.75)
    # The large set adds nothing to the spread: resampled means of the small one are 0, 1/2 and 1.
    assert (found.low, found.high) == (0.5, 1.0)


def test_subsets_in_which_nobody_votes_are_lost():
    """One of four samples has an answer, the right one: half of the pairs hold it."""
    assert majority_at_k([0, -1, -1, -1], 0, 2, seed=0, draws=20_000) == pytest.approx(0.5, abs=0.02)
    assert majority_at_k([0, -1, -1, -1], 0, 4, seed=0) == 1.0
