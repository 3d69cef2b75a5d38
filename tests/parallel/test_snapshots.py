"""A rank that goes back to its snapshot trains on as if nothing had been in between, bit for bit."""

from __future__ import annotations

import megatron_tasks
import numpy as np
import pytest
from small_models import random_batch, save_model
from test_gradients_exact import layouts

PPO = {"name": "ppo", "kl": {"coefficient": 0.1, "estimator": "k1", "place": "token_reward"}}


@pytest.mark.parametrize(
    ("layout", "family", "algorithm", "options"),
    [
        ("tp2_dp2", "qwen2", {"name": "daro"}, {"precision": "bf16"}),
        ("dp2", "qwen2", {"name": "ha_dw"}, {"optimizer": {"distributed": False}}),
        ("tp2", "qwen2", PPO, {"optimizer": {"schedule": "cosine", "warmup_steps": 2}}),
        pytest.param("tp2_dp2", "qwen3_moe", {"name": "daro"}, {}, marks=pytest.mark.heavy),
    ],
    ids=["distributed_bf16", "plain_fp32", "critic_and_reference", "experts"],
)
def test_a_step_after_going_back_is_the_step(rank_pool, tmp_path, layout, family, algorithm, options):
    save_model(family, tmp_path)
    batches = [random_batch(seed=s) for s in range(2)]
    ranks = rank_pool.run(
        megatron_tasks.go_back, layouts()[layout], path=tmp_path, batches=batches, algorithm=algorithm, **options
    )
    for rank in ranks:
        assert rank["numbers"] == [(), (1,)], "the update waited for the snapshot, and what is before it did not"
        once, *again = rank["results"]
        for result in again:
            for what in ("metrics", "options", "scheduler", "algorithm", "random"):
                assert result[what] == once[what], what
            assert result["numbers"].keys() == once["numbers"].keys()
            for name, expected in once["numbers"].items():
                np.testing.assert_array_equal(result["numbers"][name], expected, err_msg=name)
