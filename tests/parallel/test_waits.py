"""How ranks start on GPUs: the environment of their communicators, groups that somebody uses, one rotary table."""

from __future__ import annotations

import os

import policy_tasks
import pytest
from small_models import random_batch, save_model
from test_gradients_exact import layouts

from megatron_daro.config import nccl_environment


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    directory = tmp_path_factory.mktemp("qwen2_waits")
    save_model("qwen2", directory)
    return directory


def test_ranks_have_the_environment_of_a_communicator_with_servers_before_they_join(rank_pool):
    for found in rank_pool.run(policy_tasks.rank_environment, layouts()["dp2"]):
        assert found == nccl_environment.nccl_of_rank(os.environ)
        assert None not in found.values()


def test_ranks_make_no_groups_that_nobody_uses(rank_pool):
    """Gloo's connect by the name of the host, which need not resolve on a node with GPUs."""
    assert rank_pool.run(policy_tasks.gloo_groups, layouts()["dp2"]) == [[], []]


def test_packs_of_all_lengths_share_their_rotary_table(rank_pool, path):
    (found,) = rank_pool.run(policy_tasks.rotary_tables, layouts()["single"], path=path, batch=random_batch())
    assert found == {"tables": 1, "equal": True}
