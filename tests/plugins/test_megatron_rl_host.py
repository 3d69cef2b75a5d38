"""The adapter around functions of Megatron-LM's RL script, over data-parallel ranks.

Needs a checkout of Megatron-LM, named by MEGATRON_DARO_MEGATRON_LM; skipped without.
"""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import rollout_batches as batches
import torch
from host_ranks import run_ranks, unlike

K, FAILED = batches.K, 4
pytestmark = pytest.mark.skipif(
    not os.environ.get("MEGATRON_DARO_MEGATRON_LM"),
    reason="needs a checkout of Megatron-LM named by MEGATRON_DARO_MEGATRON_LM",
)


@pytest.mark.parametrize("size", [1, 2])
def test_every_step_of_the_script_has_the_reference_gradient(tmp_path, size):
    """Two collections of two optimizer steps, packed by Megatron; a group with a failed rollout has no signal."""
    ranks = run_ranks("megatron_rl_ranks.py", size, tmp_path)
    table = batches.start_table().float().double().requires_grad_()
    for step, metrics in enumerate(ranks[0]["logged"]):
        whole = [replace(s, reward=0.0) if s.group == FAILED else s for s in batches.samples(step // 2)]
        part = [sample for found in ranks for _, sample in found["rows"][step]]
        part = [replace(s, reward=0.0) if s.group == FAILED else s for s in part]
        weights = [1.0, *(metrics.get(f"difficulty/weight/{k}", 1.0) for k in range(1, K)), 1.0]
        losses = batches.reference(table, part, whole, weights)
        assert all(unlike(found["gradients"][step], table.grad) < 1e-5 for found in ranks)
        for k in range(1, K):
            if metrics[f"difficulty/tokens/{k}"]:
                assert metrics[f"difficulty/loss/{k}"] == pytest.approx(losses[k], rel=1e-4, abs=1e-6)
        with torch.no_grad():
            table -= batches.LEARNING_RATE * table.grad.float()
    assert len(ranks[0]["logged"]) == 4
    assert {row for found in ranks for row, _ in found["rows"][0]} < set(range(batches.GROUPS * K - 1))
    assert ranks[0]["logged"][-1]["difficulty/weight/2"] != 1
    for found in ranks:
        assert found["state"] == ranks[0]["state"] == found["resumed"]
