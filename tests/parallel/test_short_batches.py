"""Batches that do not split evenly: a rank with no sample, or fewer micro-batches, changes nothing of the step."""

from __future__ import annotations

import megatron_tasks
import pytest
from small_models import ROLLOUTS, random_batch, save_model
from test_gradients_exact import layouts, merged, reference_gradients, relative_difference

KL = {"coefficient": 0.1, "estimator": "k3"}
SPLITS = {
    "a rank without a sample": ({"data": 4}, 3, 64),
    "a micro-batch more on one rank": ({"data": 2}, 3, 36),
    "parts of sequences": ({"data": 2, "context": 2}, 1, 64),
    "parts of layers": ({"data": 2, "pipeline": 2}, 1, 64),
    "parts of layers, a micro-batch more": ({"data": 2, "pipeline": 2, "virtual_pipeline": 2}, 3, 36),
    "parts of layers in turns": ({"data": 2, "pipeline": 2, "virtual_pipeline": 2}, 1, 64),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    directory = tmp_path_factory.mktemp("qwen2")
    return directory, save_model("qwen2", directory)


def short_batch(samples):
    """The longest samples of groups with right and wrong answers."""
    batch = random_batch()
    mixed = [i for i in range(len(batch)) if 0 < batch.bins_N[i] < ROLLOUTS]
    return batch.select(sorted(mixed, key=lambda i: -batch.trained_tokens_N[i])[:samples])


@pytest.mark.parametrize("split", SPLITS)
def test_the_gradients_are_exact(rank_pool, model, split):
    from megatron_daro.actor.parallel import Layout

    sizes, samples, budget = SPLITS[split]
    directory, hf = model
    batch, arguments = short_batch(samples), {"path": directory, "token_budget": budget, "algorithm": {"name": "daro"}}
    loss, _, want = reference_gradients(hf, batch, "daro")
    results = rank_pool.run(megatron_tasks.short_step, Layout(**sizes), batch=batch, **arguments)
    assert any(0 in result["samples"] for result in results), "every micro-batch has a sample, so this shows nothing"
    assert relative_difference(merged(results), want) < 1e-5
    assert all(result["policy_loss"] == pytest.approx(loss, rel=1e-5, abs=1e-7) for result in results)


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_a_rank_without_a_sample_reports_what_one_process_does(rank_pool, model, algorithm):
    """With log-probs of a reference in reward or loss, and with a critic."""
    directory, _ = model
    place = "token_reward" if algorithm == "ppo" else "reward"
    arguments = {"batch": short_batch(1), "token_budget": 64, "path": directory}
    arguments["algorithm"] = {"name": algorithm, "kl": {**KL, "place": place}}
    (alone,), results = (
        rank_pool.run(megatron_tasks.short_step, layouts()[layout], **arguments) for layout in ("single", "dp2")
    )
    for result in results:
        assert result["metrics"].keys() == alone["metrics"].keys()
        assert result["metrics"] == pytest.approx(alone["metrics"], rel=1e-4, abs=1e-6)
