"""The adapter inside slime's own train loop, over data- and context-parallel ranks.

Needs checkouts of slime and of the Megatron-LM that slime's Docker file names, in MEGATRON_DARO_SLIME and
MEGATRON_DARO_MEGATRON_LM_OF_SLIME, and triton, which Megatron-LM imports (no GPU is needed); skipped without.
"""

from __future__ import annotations

import importlib.util
import json
import os

import pytest
import rollout_batches as batches
from host_ranks import check_steps, run_ranks

K = batches.K
MEGATRON_LM = os.environ.get("MEGATRON_DARO_MEGATRON_LM_OF_SLIME")
pytestmark = pytest.mark.skipif(
    not os.environ.get("MEGATRON_DARO_SLIME") or not MEGATRON_LM or importlib.util.find_spec("triton") is None,
    reason="needs checkouts named by MEGATRON_DARO_SLIME and MEGATRON_DARO_MEGATRON_LM_OF_SLIME, and triton",
)


def train(out, size, cp, *options):
    options = (*options, "--no-save-optim")
    return run_ranks("slime_ranks.py", size, out, cp, *options, MEGATRON_DARO_MEGATRON_LM=MEGATRON_LM)


@pytest.mark.parametrize(("dp", "cp", "per_token"), [(1, 1, False), (2, 1, True), (1, 2, True), (2, 2, False)])
def test_every_step_of_slime_has_the_reference_gradient(tmp_path, dp, cp, per_token):
    """Three rollouts of two optimizer steps, each with the weights that the steps before it left."""
    ranks = train(tmp_path, dp * cp, cp, "--use-rollout-logprobs", *["--calculate-per-token-loss"] * per_token)
    logged = check_steps(ranks)
    assert len(logged) == 3 * batches.STEPS
    assert logged[-1]["difficulty/weight/2"] != 1
    for found in ranks:
        assert found["state"] == ranks[0]["state"]
    own = [metrics for metrics in ranks[0]["logged"] if "train/grad_norm" in metrics]
    assert len(own) == 3 * batches.STEPS
    names = {"train/loss", "train/pg_loss", "train/pg_clipfrac", "train/ppo_kl", "train/train_rollout_logprob_abs_diff"}
    assert names <= set(own[0])


def test_the_weights_outlive_a_start_without_the_optimizers_state(tmp_path):
    """Nothing of the optimizer is saved or loaded: DARO's weights go on where they were."""
    whole = train(tmp_path, 1, 1, "--use-rollout-logprobs")[0]
    saved = tmp_path / "saved"
    (saved / "latest_checkpointed_iteration.txt").write_text("1")
    resumed = train(tmp_path, 1, 1, "--use-rollout-logprobs", "--load", saved, "--no-load-optim")
    assert resumed[0]["first"] == 2
    assert resumed[0]["begins"]["steps"] == 2 * batches.STEPS
    assert resumed[0]["begins"] == json.loads((saved / "iter_0000001" / "daro.json").read_text())
    last = check_steps(resumed, first=2 * batches.STEPS)[0]
    before = [metrics for metrics in whole["logged"] if "difficulty/weight/1" in metrics][2 * batches.STEPS]
    assert last["difficulty/weight/2"] == before["difficulty/weight/2"] != 1


def test_analyze_reads_what_slime_writes(tmp_path, monkeypatch):
    pytest.importorskip("httpx")
    monkeypatch.syspath_prepend(os.environ["MEGATRON_DARO_SLIME"])
    data = pytest.importorskip("slime.observability.rollout_data_utils", reason="another place in slime 0.3.1")
    from slime.utils.types import Sample

    from megatron_daro.cli import main

    samples = [
        Sample(group_index=s.group, index=i, reward=s.reward, tokens=s.response, response_length=len(s.response))
        for i, s in enumerate(batches.samples(0))
    ]
    data.save_debug_rollout_data(str(tmp_path / "{rollout_id}.pt"), samples, rollout_id=3, evaluation=False)
    page = tmp_path / "page.html"
    assert main(["analyze", str(tmp_path), "--html", str(page)]) == 0
    assert f"24 rollouts in 1 files, {batches.GROUPS} whole groups of {K}" in page.read_text()
