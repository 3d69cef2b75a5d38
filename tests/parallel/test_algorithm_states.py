"""Algorithms with a state learn the same on every rank and in every layout, and go on bit for bit after a resume."""

from __future__ import annotations

from dataclasses import replace

import megatron_tasks
import pytest
from heavy_cases import mostly_heavy
from lab_names import configured
from small_models import random_batch, save_model
from test_gradients_exact import layouts

STATEFUL = {
    "ha_dw": {"name": "ha_dw", "options": {"window": 2}},
    "fade": {"name": configured("fade"), "options": {"rate": 0.3}},
    "daro_lengths": {
        "name": configured("daro_cells"),
        "options": {"length_edges": [8, 16], "magnitude": "token", "half_life": 3},
    },
    "daro_environments": {"name": "daro", "daro": {"weights_by": "environment_pass_rate", "learning_rate": 0.3}},
    "daro_kernels": {
        "name": configured("daro_cells"),
        "options": {"kernels": 2, "magnitude": "advantage", "learning_rate": 0.3},
    },
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    directory = tmp_path_factory.mktemp("qwen2_states")
    save_model("qwen2", directory)
    return directory


def states(pool, model, name, layout, batches, **options):
    batches = [replace(batch, environments_N=batch.group_ids_N % 2) for batch in batches]
    results = pool.run(
        megatron_tasks.train,
        layouts()[layout],
        path=model,
        batches=batches,
        num_micro_batches=3,
        algorithm=STATEFUL[name],
        **options,
    )
    found = [result["state"] for result in results]
    assert all(state == found[0] for state in found)
    return found[0]


def numbers(state):
    """All numbers of a state, in order."""
    if isinstance(state, dict):
        return [n for key in sorted(state) for n in numbers(state[key])]
    if isinstance(state, list):
        return [n for entry in state for n in numbers(entry)]
    return [state] if isinstance(state, (int, float)) else []


@pytest.mark.parametrize("name", mostly_heavy(sorted(STATEFUL), "daro_environments", "ha_dw"))
def test_every_layout_learns_the_same(rank_pool, model, name):
    batches = [random_batch(seed=s, groups=5 + s) for s in range(4)]
    single = states(rank_pool, model, name, "single", batches)
    for layout in ("pp2", "cp2_dp2"):
        other = states(rank_pool, model, name, layout, batches)
        assert numbers(other) == pytest.approx(numbers(single), rel=1e-4)
    assert numbers(single) != numbers(states(rank_pool, model, name, "single", batches[:2]))


@pytest.mark.parametrize("name", mostly_heavy(sorted(STATEFUL), "daro_lengths", "fade"))
def test_a_resumed_run_goes_on_bit_for_bit(rank_pool, model, tmp_path, name):
    batches = [random_batch(seed=s, groups=5 + s) for s in range(4)]
    whole = states(rank_pool, model, name, "dp2", batches)
    saved = states(rank_pool, model, name, "dp2", batches[:2], save_to=tmp_path)
    resumed = states(rank_pool, model, name, "dp2", batches[2:], load_from=tmp_path)
    assert resumed == whole != saved
