"""The adapter inside slime's real data path and loss function, over data- and context-parallel ranks.

Needs a checkout of slime, named by MEGATRON_DARO_SLIME, and what its loss imports (httpx); skipped without.
"""

from __future__ import annotations

import importlib.util
import os

import pytest
import rollout_batches as batches
import torch
from host_ranks import run_ranks, unlike

K = batches.K
pytestmark = pytest.mark.skipif(
    not os.environ.get("MEGATRON_DARO_SLIME") or importlib.util.find_spec("httpx") is None,
    reason="needs a checkout of slime named by MEGATRON_DARO_SLIME, and httpx, which slime imports",
)


@pytest.mark.parametrize("mode", ["default", "per_token"])
@pytest.mark.parametrize(("dp", "cp"), [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_every_step_of_slime_has_the_reference_gradient(tmp_path, dp, cp, mode):
    """Four optimizer steps, each with the weights that the steps before it left; uneven micro-batches of slime's."""
    ranks = run_ranks("slime_ranks.py", dp * cp, tmp_path, cp, mode)
    assert max(max(numbers) for numbers in ranks[0]["num_microbatches"]) > 1
    table = batches.start_table().float().double().requires_grad_()
    for step, metrics in enumerate(ranks[0]["logged"]):
        whole = batches.samples(step // batches.STEPS)
        size = len(whole) // batches.STEPS
        part = whole[step % batches.STEPS * size :][:size]
        weights = [1.0, *(metrics.get(f"difficulty/weight/{k}", 1.0) for k in range(1, K)), 1.0]
        losses = batches.reference(table, part, whole, weights)
        for found in ranks:
            assert unlike(found["gradients"][step], table.grad) < 1e-5
        for k in range(K + 1):
            if metrics[f"difficulty/tokens/{k}"]:
                assert metrics[f"difficulty/loss/{k}"] == pytest.approx(losses[k], rel=1e-4, abs=1e-6)
        with torch.no_grad():
            table -= batches.LEARNING_RATE * table.grad.float()
    assert len(ranks[0]["logged"]) == 2 * batches.STEPS
    assert ranks[0]["logged"][-1]["difficulty/weight/2"] != 1
    for found in ranks:
        assert found["state"] == ranks[0]["state"]
        assert found["resumed"] == found["state"]


def test_analyze_reads_what_slime_writes(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(os.environ["MEGATRON_DARO_SLIME"])
    from slime.observability.rollout_data_utils import save_debug_rollout_data
    from slime.utils.types import Sample

    from megatron_daro.cli import main

    samples = [
        Sample(group_index=s.group, index=i, reward=s.reward, tokens=s.response, response_length=len(s.response))
        for i, s in enumerate(batches.samples(0))
    ]
    save_debug_rollout_data(str(tmp_path / "{rollout_id}.pt"), samples, rollout_id=3, evaluation=False)
    page = tmp_path / "page.html"
    assert main(["analyze", str(tmp_path), "--html", str(page)]) == 0
    assert f"24 rollouts in 1 files, {batches.GROUPS} whole groups of {K}" in page.read_text()
