"""Buckets of weights on ranks of other hosts: every server gets every tensor, and nobody waits for one that failed."""

from __future__ import annotations

import pytest
import relay_tasks

from megatron_daro.actor.parallel import Layout


@pytest.mark.parametrize("fails_on", [None, 0, 2])
def test_every_host_gets_every_bucket_whoever_fails(rank_pool, fails_on):
    found = rank_pool.run(relay_tasks.hand_out, Layout(data=3), fails_on=fails_on)
    assert [rank["whole"] for rank in found] == [rank != fails_on for rank in range(3)]
    assert [rank["failures"] for rank in found] == [[f"s{r}"] if r == fails_on else [] for r in range(3)]
    total = sum(tensor.nbytes for _, tensor in relay_tasks.TENSORS)
    assert all(rank["bytes"] == total for r, rank in enumerate(found) if r != fails_on)
