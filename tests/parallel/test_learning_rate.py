"""The learning rate of every step: warm-up, constant, linear and cosine, as the optimizer used it."""

from __future__ import annotations

import math

import megatron_tasks
import pytest
from small_models import random_batch, save_model

from megatron_daro.actor.parallel import Layout

PEAK, RATIO, WARMUP, TOTAL = 1e-3, 0.1, 3, 10  # TOTAL is the total_steps of megatron_tasks


def expected(schedule: str, step: int) -> float:
    if step <= WARMUP:
        return PEAK * step / WARMUP
    done = (step - WARMUP) / (TOTAL - WARMUP)
    shape = {"constant": 1.0, "linear": 1 - done, "cosine": 0.5 * (1 + math.cos(math.pi * done))}[schedule]
    return PEAK * (RATIO if schedule != "constant" else 1.0) + shape * PEAK * (1 - RATIO) * (schedule != "constant")


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_learning_rates(rank_pool, tmp_path, schedule):
    save_model("qwen2", tmp_path)
    optimizer = {
        "learning_rate": PEAK,
        "min_learning_rate_ratio": RATIO,
        "warmup_steps": WARMUP,
        "schedule": schedule,
    }
    (result,) = rank_pool.run(
        megatron_tasks.train,
        Layout(),
        path=tmp_path,
        batches=[random_batch(seed=s) for s in range(TOTAL)],
        num_micro_batches=1,
        algorithm={"name": "grpo"},
        optimizer=optimizer,
    )
    got = [metrics["optimizer/learning_rate"] for metrics in result["metrics"]]
    assert got == pytest.approx([expected(schedule, step) for step in range(1, TOTAL + 1)])
