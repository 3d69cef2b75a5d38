"""What a resumed run may change of its optimizer: the new value is the one that is used, not the saved one."""

from __future__ import annotations

import megatron_tasks
import pytest
from small_models import random_batch, save_model
from test_gradients_exact import layouts

SAVED = {"learning_rate": 1e-2, "weight_decay": 0.01, "schedule": "cosine", "min_learning_rate_ratio": 0.1}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    directory = tmp_path_factory.mktemp("qwen2_changed")
    save_model("qwen2_tied", directory)
    return directory


def train(pool, model, *, seeds=(0, 1), **extra):
    (first, *_) = pool.run(
        megatron_tasks.train,
        layouts()["single"],
        path=model,
        batches=[random_batch(seed=s) for s in seeds],
        num_micro_batches=2,
        algorithm={"name": "grpo"},
        **extra,
    )
    return first


@pytest.fixture(scope="module", params=[True, False], ids=["distributed_optimizer", "plain_optimizer"])
def saved(request, rank_pool, model, tmp_path_factory):
    """A checkpoint after two steps, and whether its optimizer is the distributed one."""
    directory = tmp_path_factory.mktemp("saved")
    train(rank_pool, model, optimizer={**SAVED, "distributed": request.param}, save_to=directory)
    return directory, request.param


CHANGES = [
    ({"learning_rate": 1e-9}, "lr"),
    ({"min_learning_rate_ratio": 0.5}, "lr"),
    ({"schedule": "constant"}, "lr"),
    ({"warmup_steps": 8}, "lr"),
    ({"weight_decay": 0.5}, "weight_decay"),
    ({"betas": [0.5, 0.6]}, "betas"),
    ({"eps": 1e-2}, "eps"),
]


@pytest.mark.parametrize(("change", "key"), CHANGES, ids=[next(iter(change)) for change, _ in CHANGES])
def test_a_changed_option_of_the_optimizer_is_the_one_that_is_used(rank_pool, model, saved, change, key):
    directory, distributed = saved
    options = {**SAVED, "distributed": distributed}
    kept = train(rank_pool, model, optimizer=options, seeds=[2], load_from=directory)["groups"]
    asked = {**options, **change}
    changed = train(rank_pool, model, optimizer=asked, seeds=[2], load_from=directory)["groups"]
    fresh = train(rank_pool, model, optimizer=asked, seeds=range(3))["groups"]
    assert [group[key] for group in changed] == [group[key] for group in fresh]
    assert [group[key] for group in changed] != [group[key] for group in kept]
