"""Settings of a run for its waits and its ranks: limits, seeds and folders, the critic, segments of memory."""

from __future__ import annotations

from pathlib import Path

import pytest
from run_configuration import configured

from megatron_daro.rollout.deadlines import Deadlines
from megatron_daro.runtime import parts
from megatron_daro.runtime.parts import deadlines, policy_group, policy_settings


@pytest.fixture
def ranks(monkeypatch) -> None:
    """In place of the ranks: what they are made with."""
    monkeypatch.setattr(parts, "PolicyGroup", lambda *sections, **options: (sections, options))


def test_every_limit_is_scaled():
    scaled = deadlines(configured(trainer={"deadline_scale": 3.0}))
    assert scaled == Deadlines().scaled(3.0) != Deadlines() == deadlines(configured())


def test_the_ranks_get_the_settings_of_the_run(ranks, tmp_path):
    config = configured(trainer={"run_dir": str(tmp_path / "run"), "seed": 5, "updates_per_batch": 2})
    made = policy_group(config, "where")
    assert made[0] == (policy_settings(config), config.actor, config.algorithm)
    assert made[1] == {
        "seed": 5, "updates_per_batch": 2, "placement": "where", "logs": tmp_path / "run/logs", "token_columns": ()
    }  # fmt: skip


def test_the_ranks_find_a_critic_from_any_working_directory(ranks):
    config = configured(algorithm={"name": "ppo", "critic": {"path": "models/critic"}}, trainer={"run_dir": "run"})
    sections, options = policy_group(config, "where")
    assert sections[2].critic.path == Path("models/critic").absolute()
    assert options["token_columns"] == ("values",) and sections[2].passes(("values",)) == ("values",)


@pytest.mark.parametrize(
    ("sections", "grow"),
    [
        ({}, True),
        ({"engine": {"kind": "sglang", "sglang": {"sync": "distributed"}}}, True),
        ({"engine": {"kind": "sglang", "sglang": {"sync": "tensor"}}}, False),  # CUDA IPC
        ({"engine": {"kind": "sglang", "colocate": True, "sglang": {"sync": "disk"}}}, False),
        ({"engine": {"kind": "embedded", "sglang": {"sync": "tensor"}}}, True),
        ({"actor": {"megatron": {"nccl_ub": True}}}, False),  # a pool of NCCL's
    ],
)
def test_segments_of_the_ranks_grow_where_nobody_else_opens_their_memory(sections, grow):
    assert policy_settings(configured(**sections)).expandable_segments is grow
