"""Off-policy corrections: what they hand on, ends of ranges, and samples without tokens."""

from __future__ import annotations

import pytest
import torch

from megatron_daro.algo.corrections import (
    masked_importance_weights,
    sample_means,
    sample_totals,
    sequence_log_ratio,
    truncated_importance_weights,
)


def test_a_ratio_of_exactly_the_cap_is_not_changed():
    result = truncated_importance_weights(torch.tensor([1.9, 2.0, 2.1]), 2.0)
    assert result.weight_T.tolist() == pytest.approx([1.9, 2.0, 2.0])
    assert result.changed_T.tolist() == [False, False, True]


def test_the_mean_of_a_sample_without_tokens_is_zero():
    mask_T = torch.tensor([False, True, True, False])
    means_T = sample_means(torch.tensor([9.0, 2.0, 4.0, 9.0]), mask_T, torch.tensor([0, 1, 1, 0]), 2)
    assert means_T.tolist() == [0.0, 3.0, 3.0, 0.0]
    assert sample_means(torch.tensor([5.0, 7.0]), torch.tensor([True, False]), torch.tensor([0, -1]), 1)[0] == 5.0


def test_both_ends_of_the_masked_range_are_inside():
    """MIS keeps [low, high]; a ratio just beyond either end is dropped."""
    ratio_T = torch.tensor([0.4999, 0.5, 1.0, 2.0, 2.0001])
    result = masked_importance_weights(ratio_T, 0.5, 2.0)
    assert result.changed_T.tolist() == [True, False, False, False, True]
    assert result.weight_T.tolist() == [0, 0.5, 1.0, 2.0, 0]


def test_sequence_ratio_and_sample_means_by_hand():
    values_T, mask_T = torch.tensor([1.0, 3.0, 9.0, 5.0]), torch.tensor([True, True, False, True])
    means = sample_means(values_T, mask_T, torch.tensor([0, 0, 0, 2]), 3)
    assert means[mask_T].tolist() == [2.0, 2.0, 5.0]
    log_ratio = sequence_log_ratio(values_T, torch.zeros(4), mask_T, torch.tensor([0, 0, 0, 2]), 3)
    assert log_ratio[mask_T].tolist() == [2.0, 2.0, 5.0]


def test_totals_of_no_sample_are_zero_on_every_token():
    values_T, none_T = torch.tensor([1.0, 2.0]), torch.zeros(2, dtype=torch.bool)
    assert sample_totals(values_T, none_T, torch.zeros(2, dtype=torch.long), 0).tolist() == [0.0, 0.0]
    totals_T = sample_totals(values_T, ~none_T, torch.tensor([0, 0]), 1, lambda sums_M: 10 * sums_M)
    assert totals_T.tolist() == [30.0, 30.0] and totals_T.dtype == torch.float32
