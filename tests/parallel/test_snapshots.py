"""A rank that goes back to its snapshot trains on as if nothing had been in between, bit for bit."""

from __future__ import annotations

import megatron_tasks
import numpy as np
import pytest
from equal_checkpoints import assert_same_tensors
from small_models import random_batch, save_model
from test_gradients_exact import layouts

from megatron_daro.actor.parallel import Layout
from megatron_daro.actor.snapshot_files import FIELDS_FILE
from megatron_daro.convert.daro_format import write_index

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
            assert len(result["bytes"]) == len(once["bytes"])
            for got, expected in zip(result["bytes"], once["bytes"], strict=True):
                np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize(
    ("layout", "smaller", "family", "algorithm", "options"),
    [
        (Layout(tensor=2, data=2), Layout(tensor=2), "qwen2", {"name": "daro"}, {"precision": "bf16"}),
        (Layout(data=3), Layout(data=2), "qwen2", PPO, {"optimizer": {"schedule": "cosine", "warmup_steps": 2}}),
        pytest.param(Layout(data=4, expert=2), Layout(data=2, expert=2), "qwen3_moe", {"name": "daro"}, {},
                     marks=pytest.mark.heavy),
    ],
    ids=["bf16", "critic", "experts"],
)  # fmt: skip
def test_files_of_snapshots_are_the_checkpoint(rank_pool, tmp_path, layout, smaller, family, algorithm, options):
    """Each tensor of a snapshot's files equals that of a checkpoint of the same moment, bit for bit, and a smaller
    layout goes on from the files as from the checkpoint."""
    save_model(family, tmp_path / "hf")
    (tmp_path / "saved").mkdir()
    batches = [random_batch(seed=s) for s in range(2)]
    common = {"path": tmp_path / "hf", "algorithm": algorithm, **options}
    ranks = rank_pool.run(megatron_tasks.snapshot_as_files, layout, batches=batches, to=tmp_path, **common)
    folders = list(ranks[0])
    assert folders == [".", "critic"][: len(folders)]
    for folder in folders:
        write_index(tmp_path / "moved" / folder, [shard for rank in ranks for shard in rank[folder]])
        assert_same_tensors(tmp_path / "moved" / folder, tmp_path / "saved" / folder)
    moved = rank_pool.run(megatron_tasks.load_moved, smaller, batch=batches[1], moved=tmp_path / "moved", **common)
    for folder, fields in zip(folders, ('{"begun": false}', "{}"), strict=False):
        (tmp_path / "saved" / folder / FIELDS_FILE).write_text(fields)
    saved = rank_pool.run(megatron_tasks.load_moved, smaller, batch=batches[1], moved=tmp_path / "saved", **common)
    for (began, after), (not_begun, expected) in zip(moved, saved, strict=True):
        assert (began, not_begun) == (True, False)
        for got, wanted in zip(after["bytes"], expected["bytes"], strict=True):
            np.testing.assert_array_equal(got, wanted)
