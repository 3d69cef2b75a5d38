"""What a step must not do on a GPU: wait for it in every micro-batch, or keep a table for each length."""

from __future__ import annotations

import os

import policy_tasks
import pytest
from small_models import random_batch, save_model
from test_gradients_exact import layouts
from test_loss_terms import TERMS, batch_with_reference

from megatron_daro.config import hardware


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    directory = tmp_path_factory.mktemp("qwen2_waits")
    save_model("qwen2", directory)
    return directory


def test_ranks_have_the_environment_of_a_communicator_with_servers_before_they_join(rank_pool):
    for found in rank_pool.run(policy_tasks.rank_environment, layouts()["dp2"]):
        assert found == hardware.nccl_of_rank(os.environ)
        assert None not in found.values()


def test_ranks_make_no_groups_that_nobody_uses(rank_pool):
    """Gloo's connect by the name of the host, which need not resolve on a node with GPUs."""
    assert rank_pool.run(policy_tasks.gloo_groups, layouts()["dp2"]) == [[], []]


@pytest.mark.parametrize("term", ["all", "all_gspo"])
def test_the_loss_of_a_micro_batch_reads_nothing_back(rank_pool, path, term):
    batch = batch_with_reference()
    (waits,) = rank_pool.run(
        policy_tasks.values_read_by_the_host, layouts()["single"], path=path, batch=batch, algorithm=TERMS[term]
    )
    assert waits == []


def test_packs_of_all_lengths_share_their_rotary_table(rank_pool, path):
    (found,) = rank_pool.run(policy_tasks.rotary_tables, layouts()["single"], path=path, batch=random_batch())
    assert found == {"tables": 1, "equal": True}


def test_a_token_outside_the_vocabulary_is_found_before_the_pack_goes_to_the_device(rank_pool, path):
    batch = random_batch()
    batch.tokens_T[-1] = policy_tasks.VOCAB
    options = {"batch": batch, "sequence_parallel": False, "fp8_recipe": None}
    with pytest.raises(AssertionError, match=r"DataError: labels: got ids from \d+ to 50, allowed 0 to 49"):
        rank_pool.run(policy_tasks.pack_lengths, layouts()["single"], **options)
