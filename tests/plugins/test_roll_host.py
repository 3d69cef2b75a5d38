"""The adapter inside ROLL's actor worker and Megatron strategy, over data-parallel ranks.

Needs a checkout of ROLL, named by MEGATRON_DARO_ROLL, and tensordict and codetiming, which it imports; else skipped.
"""

from __future__ import annotations

import importlib.util
import math
import os

import pytest
import rollout_batches as batches
import torch
from algo_reference import AdamWeight
from host_ranks import run_ranks, unlike

K = batches.K
HERE = os.environ.get("MEGATRON_DARO_ROLL") and all(importlib.util.find_spec(n) for n in ("tensordict", "codetiming"))
pytestmark = pytest.mark.skipif(
    not HERE, reason="needs a checkout of ROLL named by MEGATRON_DARO_ROLL, tensordict and codetiming"
)


def old_log_probs(table, sample):
    """Those of the table before a step: ROLL's "old" policy is its own train engine's, not the generator's."""
    context = [sample.prompt[-1], *sample.response[:-1]]
    with torch.no_grad():
        return [float(torch.log_softmax(table[c], -1)[t]) for c, t in zip(context, sample.response, strict=True)]


def learn(weights, bin_losses, bins):
    """Adam on the log of each weight of a bin that has tokens."""
    for k in set(bins) - {0, K}:
        weights[k].update(abs(bin_losses[k]))


@pytest.mark.parametrize(("size", "mode"), [(1, "cached"), (2, "recompute")])
def test_every_step_of_rolls_pipeline_has_the_reference_gradient(tmp_path, size, mode):
    """Two batches of two domains through `RLVRPipeline.run`, two epochs of shuffled mini-batches; then a resume."""
    ranks = run_ranks("roll_ranks.py", size, tmp_path, mode)
    per_batch = len(ranks[0]["rows"]) // 2
    assert per_batch == 8 // size
    table, worst, old = batches.start_table().float().double().requires_grad_(), 0.0, {}
    weights = [AdamWeight() for _ in range(K + 1)]
    for step in range(2 * per_batch):
        batch = step // per_batch
        if step % per_batch == 0:
            whole = batches.samples(batch)
            old = dict(enumerate(old_log_probs(table, s) for s in whole)) if mode == "recompute" else {}
        rows = [row for found in ranks for row in found["rows"][step]]
        for row in rows:  # without a pass of its own: those of the row's first mini-batch
            whole[row].old = old.setdefault(row, old_log_probs(table, whole[row]))
        part = [whole[row] for row in rows]
        bin_losses = batches.reference(table, part, whole, [weight.w for weight in weights])
        learn(weights, bin_losses, batches.bins_of([s for s in part if any(s.mask)], whole))
        worst = max(worst, *(unlike(found["gradients"][step], table.grad) for found in ranks))
        with torch.no_grad():
            table -= batches.LEARNING_RATE * table.grad.float()
    assert worst < 1e-5, worst
    print(f"largest error of {2 * per_batch} steps: {worst:.1e}")
    learnt = [math.exp(value) for value in ranks[0]["state"]["algorithm"]["difficulty"]["values"]]
    assert learnt == pytest.approx([weight.w for weight in weights], rel=1e-4) and learnt[2] != 1
    assert all("difficulty/weight/2" in logged for logged in ranks[0]["logged"])
    for found in ranks:
        assert found["state"] == ranks[0]["state"] == found["resumed"]
        assert "rollouts_per_prompt" in found["other_k"]
        assert "is not there" in found["without"]
