"""The adapter inside ROLL's actor worker and Megatron strategy, over data-parallel ranks.

Needs a checkout of ROLL, named by MEGATRON_DARO_ROLL, and tensordict and codetiming, which it imports; else skipped.
"""

from __future__ import annotations

import importlib.util
import os

import pytest
import rollout_batches as batches
import torch
from host_ranks import run_ranks, unlike

K = batches.K
HERE = os.environ.get("MEGATRON_DARO_ROLL") and all(importlib.util.find_spec(n) for n in ("tensordict", "codetiming"))
pytestmark = pytest.mark.skipif(
    not HERE, reason="needs a checkout of ROLL named by MEGATRON_DARO_ROLL, tensordict and codetiming"
)


@pytest.mark.parametrize(("size", "mode"), [(1, "cached"), (2, "recompute")])
def test_every_step_of_roll_has_the_reference_gradient(tmp_path, size, mode):
    """Two batches, two epochs of shuffled mini-batches, three micro-batches each; then a resume."""
    ranks = run_ranks("roll_ranks.py", size, tmp_path, mode)
    per_batch = len(ranks[0]["rows"]) // 2
    assert per_batch == 8 // size
    table = batches.start_table().float().double().requires_grad_()
    for step in range(2 * per_batch):
        whole, metrics = batches.samples(step // per_batch), ranks[0]["metrics"][step // per_batch]
        part = [whole[row] for found in ranks for row in found["rows"][step]]
        now = {name: values[step % per_batch] for name, values in metrics.items() if name.startswith("difficulty/w")}
        batches.reference(table, part, whole, [1.0, *(now[f"difficulty/weight/{k}"] for k in range(1, K)), 1.0])
        assert all(unlike(found["gradients"][step], table.grad) < 1e-5 for found in ranks)
        with torch.no_grad():
            table -= batches.LEARNING_RATE * table.grad.float()
    assert now["difficulty/weight/2"] != 1
    for found in ranks:
        assert found["state"] == ranks[0]["state"] == found["resumed"]
        assert "rollouts_per_prompt" in found["other_k"]
        assert "is not there" in found["without"]
