"""Shards: what reaches each rank, and what ranks answer back in the batch's order. The object store is a list here."""

from __future__ import annotations

import numpy as np
import pytest
from test_packing import make_batch

from megatron_daro.config import ActorSection
from megatron_daro.data.schedule import CostModel
from megatron_daro.runtime import step_shards as module


@pytest.fixture
def store(monkeypatch):
    """Every object that was put."""
    put = []
    monkeypatch.setattr(module.ray, "put", lambda value: put.append(value) or len(put) - 1)
    return put


def test_columns_come_back_in_the_batchs_order(store):
    batch = make_batch([(2, 5), (1, 7), (3, 4), (2, 9), (1, 1), (4, 6)], seed=1)
    shards = module.shards_of(batch, ActorSection(data_parallel=2, micro_batch_tokens=24), CostModel())
    assert len(store) == 2
    parts = {rank: store[shard.reference].rollout_logprobs_R for rank, shard in enumerate(shards)}
    np.testing.assert_array_equal(module.joined_column(batch, shards, parts), batch.rollout_logprobs_R)


def test_a_shard_holds_its_rows_in_the_order_of_its_micro_batches(store):
    batch = make_batch([(2, 5), (1, 7), (3, 4), (2, 9), (1, 1), (4, 6)], seed=1)
    shards = module.shards_of(batch, ActorSection(data_parallel=2, micro_batch_tokens=12), CostModel())
    assert sorted(row for shard in shards for row in shard.rows) == list(range(6))
    for shard in shards:
        mine = store[shard.reference]
        assert [row for part in shard.micro_batches for row in part] == list(range(len(shard.rows)))
        np.testing.assert_array_equal(mine.lengths_N, batch.lengths_N[list(shard.rows)])
        assert all(mine.lengths_N[list(part)].sum() <= 12 for part in shard.micro_batches)


def test_with_fp8_micro_batches_fit_with_the_tokens_they_are_padded_to(store):
    actor = ActorSection(precision="fp8", fp8_recipe="blockwise", micro_batch_tokens=200)
    [shard] = module.shards_of(make_batch([(20, 60), (20, 60)]), actor, CostModel())
    assert len(shard.micro_batches) == 2, "160 tokens together would be padded to 256"
