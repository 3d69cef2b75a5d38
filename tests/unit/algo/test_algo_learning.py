"""What of a step reaches those that learn from it: sums of each cell, or of each bin."""

from __future__ import annotations

import torch

from megatron_daro.algo.algorithm import StepStats, StepTotals
from megatron_daro.algo.difficulty_weights import DifficultyWeights
from megatron_daro.algo.weighting import Grpo, make_algorithm


def step_stats_of(*, classes):
    """A step with K = 4: every sum of a cell is another number."""
    cells = torch.arange(1, 5 * classes + 1).reshape(5, classes)
    names = ("loss_sums", "abs_loss_sums", "advantage_sums")
    sums = {name: (cells + 100.0 * place).double() for place, name in enumerate(names)}
    totals = StepTotals(cells + 7, torch.full((5,), 8))
    return StepStats(totals, sums, entropy=1.0)


def test_daro_learns_from_the_sums_that_its_magnitude_reads():
    step_stats = step_stats_of(classes=1)
    for magnitude in ("abs", "signed", "token", "advantage"):
        options = {"magnitude": magnitude, "half_life": 1, "clamp": (1e-4, 1e4)}
        daro = make_algorithm("daro", rollouts_per_prompt=4, max_response_tokens=6, **options)
        plain = DifficultyWeights(4, **options)
        daro.learn(step_stats)
        flat = {name: values.flatten() for name, values in step_stats.sums.items()}
        plain.update(token_counts=step_stats.totals.tokens_per_bin, **flat)
        assert daro.weights.tolist() == plain.weights.tolist()
        assert len(set(plain.weights.tolist())) > 3


class Noting(Grpo):
    """Keeps what it is to learn from."""

    name = "noting"

    def learn(self, step_stats):
        sums = (step_stats.per_bin(name) for name in ("loss_sums", "abs_loss_sums"))
        self.seen = [column.tolist() for column in (step_stats.totals.tokens_per_bin, *sums)]


def test_sums_of_cells_are_there_per_bin_too():
    algorithm = Noting(rollouts_per_prompt=4, max_response_tokens=6)
    algorithm.learn(step_stats_of(classes=2))
    cells = [[1, 2], [3, 4], [5, 6], [7, 8], [9, 10]]
    losses, tokens = [a + b for a, b in cells], [a + b + 14 for a, b in cells]
    assert algorithm.seen == [tokens, losses, [loss + 200 for loss in losses]]
