"""A trainer that gives its memory away between steps and takes it back trains as one that never does, bit for bit."""

from __future__ import annotations

import megatron_tasks
import numpy as np
import pytest
from small_models import random_batch, save_model
from test_gradients_exact import layouts

STEPS = 3
OVERLAP = {"overlap_grad_reduce": True, "bucket_size": 20_000}


@pytest.mark.parametrize(
    ("layout", "options"),
    [
        ("tp2_dp2", {"precision": "bf16"}),
        pytest.param("tp2_dp2", {"precision": "fp32", "optimizer": {"distributed": False}}, marks=pytest.mark.heavy),
        pytest.param("tp2_dp2", {"precision": "bf16", "megatron": OVERLAP}, marks=pytest.mark.heavy),
        ("tp2_pp2", {"precision": "bf16", "optimizer": {"distributed": False}}),
    ],
    ids=["distributed", "plain_fp32", "overlap", "plain_bf16_pp2"],
)
def test_steps_with_moves_between_equal_steps_without(rank_pool, tmp_path, layout, options):
    save_model("qwen2", tmp_path / "model")
    batches = [random_batch(seed=s) for s in range(STEPS)]
    arguments = {"path": tmp_path / "model", "batches": batches, "num_micro_batches": 2, **options}
    with_moves, without = (
        rank_pool.run(megatron_tasks.train_and_move, layouts()[layout], moves=moves, **arguments)
        for moves in (True, False)
    )
    for moved, stayed in zip(with_moves, without, strict=True):
        assert moved["metrics"] == stayed["metrics"], "loss and gradient norm"
        for what in ("parameters", "state"):
            assert moved[what].keys() == stayed[what].keys()
            for name, value in stayed[what].items():
                np.testing.assert_array_equal(moved[what][name], value, err_msg=name)
        assert moved["refused"] == ["train", "logprobs", "export", "save"], "no work with tensors that are away"
        for first, part_back, second, back in moved["moves"]:
            assert first["left"] < first["before"], "gradients and optimizer state were given back"
            assert part_back["moved"] == first["moved"], "weights that never left are nothing to wait for"
            assert part_back["left"] == first["before"]
            assert second["left"] == 0, "and the weights: nothing is left"
            assert first["moved"] + second["moved"] == first["before"] == back["moved"] == back["left"]


@pytest.mark.parametrize("distributed", [True, False], ids=["distributed", "plain"])
def test_a_save_that_reads_the_tensors_is_waited_for(rank_pool, tmp_path, distributed):
    save_model("qwen2", tmp_path / "model")
    arguments = {"path": tmp_path / "model", "batch": random_batch(seed=0), "directory": tmp_path / "saved"}
    arguments["optimizer"] = {"distributed": distributed}
    (tmp_path / "saved").mkdir()
    results = rank_pool.run(megatron_tasks.save_and_leave, layouts()["dp2"], **arguments)
    assert [result["writes"] for result in results] == [True, distributed]
    for result in results:
        assert result["waited"] == result["writes"], "the file was being written when the policy was told to leave"
        assert result["left"] == 0
        for name, value in result["before"].items():
            np.testing.assert_array_equal(result["loaded"][name], value, err_msg=name)
