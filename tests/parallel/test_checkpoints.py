"""Checkpoints: the same run after a restart, bit for bit, and the same numbers in another layout."""

from __future__ import annotations

import hashlib
import itertools
import math

import megatron_tasks
import numpy as np
import pytest
import torch
from heavy_cases import mostly_heavy
from small_models import random_batch, save_model
from test_gradients_exact import layouts

from megatron_daro.convert.daro_format import DaroPieces, read_index

ALGORITHM = {"name": "daro", "daro": {"learning_rate": 0.1}}
OPTIMIZER = {"learning_rate": 1e-2, "eps": 1e-3, "warmup_steps": 3, "weight_decay": 0.01}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    directory = tmp_path_factory.mktemp("qwen2_checkpoints")
    save_model("qwen2_tied", directory)
    return directory


def train(pool, layout, model, *, seeds, distributed=True, learning_rate=OPTIMIZER["learning_rate"], **extra):
    results = pool.run(
        megatron_tasks.train,
        layouts()[layout],
        path=model,
        batches=[random_batch(seed=s) for s in seeds],
        num_micro_batches=2,
        algorithm=ALGORITHM,
        optimizer={**OPTIMIZER, "distributed": distributed, "learning_rate": learning_rate},
        **extra,
    )
    parameters = {}
    for result in results:
        parameters |= result["parameters"]
    return parameters, results[0]


@pytest.mark.parametrize(
    ("layout", "distributed"),
    mostly_heavy(
        itertools.product(["single", "tp2", "pp2", "dp2", "pp2_vpp2"], [True, False]),
        ("dp2", True),
        ("pp2_vpp2", False),
    ),
)
def test_a_restarted_run_is_the_unbroken_one_bit_for_bit(rank_pool, tmp_path, model, layout, distributed):
    whole, last = train(rank_pool, layout, model, seeds=range(4), distributed=distributed)
    saved = tmp_path / "checkpoint"
    saved.mkdir()
    train(rank_pool, layout, model, seeds=range(2), distributed=distributed, save_to=saved)
    resumed, last_resumed = train(rank_pool, layout, model, seeds=range(2, 4), distributed=distributed, load_from=saved)
    for name in whole:
        np.testing.assert_array_equal(resumed[name], whole[name], err_msg=name)
    np.testing.assert_array_equal(last_resumed["weights"], last["weights"])
    assert last_resumed["metrics"] == last["metrics"][2:]


@pytest.mark.parametrize(
    ("saved_by", "loaded_by"),
    mostly_heavy([("tp2_pp2", "single"), ("single", "tp2_dp2"), ("dp2", "pp2_vpp2")], ("dp2", "pp2_vpp2")),
)
def test_another_layout_continues_with_the_same_numbers(rank_pool, tmp_path, model, saved_by, loaded_by):
    whole, last = train(rank_pool, saved_by, model, seeds=range(4))
    saved = tmp_path / "checkpoint"
    saved.mkdir()
    train(rank_pool, saved_by, model, seeds=range(2), save_to=saved)
    resumed, last_resumed = train(rank_pool, loaded_by, model, seeds=range(2, 4), load_from=saved)
    for name in whole:
        np.testing.assert_allclose(resumed[name], whole[name], rtol=0, atol=2e-5, err_msg=name)
    np.testing.assert_allclose(last_resumed["weights"], last["weights"], rtol=1e-5)


@pytest.mark.parametrize(
    ("saved_by", "loaded_by"),
    mostly_heavy(
        [("tp2", "pp2"), ("tp2_dp2", "tp2_pp2"), ("single", "dp2"), ("pp2_vpp2", "pp2"), ("tp2_pp2", "pp2_vpp2")],
        ("tp2_dp2", "tp2_pp2"),
        ("tp2_pp2", "pp2_vpp2"),
    ),
)
def test_optimizer_state_is_the_same_numbers_in_another_layout(rank_pool, tmp_path, model, saved_by, loaded_by):
    """Saved, loaded elsewhere, saved again without a step between: every tensor of both checkpoints is equal."""
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    train(rank_pool, saved_by, model, seeds=range(2), save_to=first)
    train(rank_pool, loaded_by, model, seeds=[], load_from=first, save_to=second)
    one, other = DaroPieces(first), DaroPieces(second)
    keys, others = ([key for key in pieces.keys() if "_extra" not in key] for pieces in (one, other))  # noqa: SIM118
    assert keys == others
    assert sum(key.startswith("optimizer.state.exp_avg_sq.") for key in keys) > 5
    for key in keys:
        shape = one.shape(key)
        tensors = [pieces.read(key, [0] * len(shape), shape) for pieces in (one, other)]
        assert tensors[0].any() and torch.equal(*tensors), key


def test_a_data_parallel_rank_writes_its_own_optimizer_state_and_nobody_gathers_it(rank_pool, tmp_path, model):
    saved = tmp_path / "checkpoint"
    saved.mkdir()
    train(rank_pool, "dp2", model, seeds=[0], save_to=saved, without="get_parameter_state_dp_zero")
    optimizer = dict.fromkeys(("shard_00000.safetensors", "shard_00001.safetensors"), 0)
    for shard in read_index(saved):
        if shard.key.startswith("optimizer.state."):
            optimizer[shard.file] += math.prod(shard.shape)
    assert min(optimizer.values()) > 0.4 * sum(optimizer.values())


def test_no_file_of_a_checkpoint_is_a_pickle_that_runs_code(rank_pool, tmp_path, model):
    saved = tmp_path / "checkpoint"
    saved.mkdir()
    train(rank_pool, "tp2", model, seeds=[0], save_to=saved)
    names = {path.name for path in saved.iterdir()}
    expected = {"common.pt", "metadata.json", "index.json", "algorithm.json"}
    shards = {"shard_00000.safetensors", "shard_00001.safetensors"}
    assert names == expected | shards | {f"{shard}.sha256" for shard in shards}
    for shard in shards:  # taken while it was written, for the manifest
        written = hashlib.sha256((saved / shard).read_bytes()).hexdigest()
        assert (saved / f"{shard}.sha256").read_text() == written
    torch.load(saved / "common.pt", weights_only=True)
