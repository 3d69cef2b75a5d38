"""What of a step reaches those that learn from it: sums of each cell, or of each bin."""

from __future__ import annotations

import pytest
import torch

from megatron_daro.algo.algorithm import BatchTotals, StepStats
from megatron_daro.algo.difficulty_weights import DifficultyWeights
from megatron_daro.algo.weighting import Grpo, make_algorithm


def step_stats_of(*, classes):
    """A step with K = 4: every sum of a cell is another number."""
    cells = torch.arange(1, 5 * classes + 1).reshape(5, classes)
    names = ("loss_sums", "abs_loss_sums", "advantage_sums", "gradient_squares")
    sums = {name: (cells + 100.0 * place).double() for place, name in enumerate(names)}
    totals = BatchTotals(cells + 7, torch.full((5,), 8))
    return StepStats(totals, sums, torch.zeros(0, dtype=torch.float64), entropy=1.0)


@pytest.mark.parametrize("magnitude", ["abs", "signed", "token", "gradient", "advantage"])
def test_daro_learns_from_each_cell_of_pass_rate_and_length(magnitude):
    step_stats = step_stats_of(classes=3)
    options = {"magnitude": magnitude, "half_life": 1, "clamp": (1e-4, 1e4)}  # Adam's first step is as long everywhere
    daro = make_algorithm("daro", rollouts_per_prompt=4, max_response_tokens=6, length_edges=(3, 5), **options)
    plain = DifficultyWeights(4, length_classes=3, **options)
    daro.learn(step_stats)
    plain.update(
        step_stats.sums["loss_sums"].flatten(), step_stats.totals.tokens_per_cell.flatten(),
        step_stats.sums["abs_loss_sums"].flatten(), advantage_sums=step_stats.sums["advantage_sums"].flatten(),
        gradient_squares=step_stats.sums["gradient_squares"].flatten(),
    )  # fmt: skip
    assert daro.difficulty.weights.tolist() == plain.weights.tolist()
    assert len(set(plain.weights.tolist())) > 9


class Noting(Grpo):
    """Keeps what it is to learn from."""

    name = "noting"

    def update(self, *sums):
        self.seen = [column.tolist() for column in sums]


def test_an_algorithm_that_does_not_ask_for_more_learns_from_sums_per_bin():
    algorithm = Noting(rollouts_per_prompt=4, max_response_tokens=6)
    algorithm.learn(step_stats_of(classes=2))
    cells = [[1, 2], [3, 4], [5, 6], [7, 8], [9, 10]]
    losses, tokens = [a + b for a, b in cells], [a + b + 14 for a, b in cells]
    assert algorithm.seen == [losses, tokens, [loss + 200 for loss in losses]]
