"""Kimi's reset: the optimizer's moments are zero again at the first step of each batch, on every rank."""

from __future__ import annotations

import policy_tasks
import pytest
from small_models import random_batch, save_model
from test_gradients_exact import layouts


@pytest.mark.parametrize(
    ("layout", "reset", "spoiled"),
    [("dp2", True, ()), ("dp2", False, ()), ("single", True, (4,))],
)
def test_moments_begin_anew_with_each_batch(rank_pool, tmp_path, layout, reset, spoiled):
    """With the first step that is applied: a replay leaves out those that were not finite."""
    save_model("qwen2", tmp_path)
    results = rank_pool.run(
        policy_tasks.moments,
        layouts()[layout],
        path=tmp_path,
        batch=random_batch(with_old=True),
        opens=[True, False, False, True, *[False] * len(spoiled)],
        spoiled=spoiled,
        algorithm={"name": "kimi", "options": {"tau": 0.3, "reset_optimizer": reset}},
    )
    for found in results:
        found = [one for step, one in enumerate(found, 1) if step not in spoiled]
        assert [counts for counts, _ in found] == [{1.0}, {2.0}, {3.0}, {1.0 if reset else 4.0}]
        assert [of_one for _, of_one in found] == [True, False, False, reset]
