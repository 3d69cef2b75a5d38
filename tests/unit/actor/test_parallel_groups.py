"""Groups of ranks: layouts that are no layout of this world, limits of collective calls, seeds, and who a rank is."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
from single_rank import ranks

from megatron_daro.actor import parallel
from megatron_daro.actor.parallel import Layout
from megatron_daro.errors import ConfigError

pytestmark = pytest.mark.usefixtures("world")


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        (Layout(data=2), r"TP 1 x PP 1 x CP 1 x DP 2 = 2 processes, but 1 were started; change actor\.\*_parallel"),
        (
            Layout(expert=2),
            r"expert groups of ETP x EP = 2 processes do not divide the 1 processes of a pipeline",
        ),
        (Layout(virtual_pipeline=2), r"2 virtual stages on a pipeline of one stage"),
    ],
)
def test_a_layout_that_is_not_this_world_is_refused(layout, words):
    with pytest.raises(ConfigError, match=words):
        parallel.build_groups(layout, seed=1)


def test_sizes_of_a_layout():
    layout = Layout(tensor=2, pipeline=3, context=5, data=7, expert=4)
    assert (layout.world_size, layout.expert_tensor_size, layout.expert_group_size) == (210, 1, 4)
    assert Layout(tensor=2, expert=4, expert_tensor=2).expert_group_size == 8
    assert Layout(tensor=2).expert_tensor_size == 2


def test_a_collective_call_ends_with_an_error_after_the_limit_and_the_seed_is_the_runs():
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    group = torch.distributed.distributed_c10d._get_default_group()
    assert group._get_backend(torch.device("cpu")).options._timeout == timedelta(seconds=60)
    for seed in (5, 6):
        parallel.seed_everything(seed)
        assert torch.initial_seed() != 1 and get_cuda_rng_tracker().get_states()
        first = torch.rand(2), get_cuda_rng_tracker().get_states()["model-parallel-rng"]
        parallel.seed_everything(seed)
        assert torch.equal(torch.rand(2), first[0])
        assert torch.equal(get_cuda_rng_tracker().get_states()["model-parallel-rng"], first[1])
    parallel.seed_everything(7)
    assert not torch.equal(torch.rand(2), first[0])


def test_who_a_rank_is(monkeypatch):
    numbers = {"pipeline_model": 3, "tensor_model": 4, "expert_model": 5, "expert_tensor": 6}
    ranks(monkeypatch, parallel, **{f"{name}_parallel_rank": number for name, number in numbers.items()})
    ranks(monkeypatch, parallel, data_parallel_rank=7)
    assert parallel.weights_key() == (3, 4, 5, 6)
    assert (parallel.data_parallel_rank(), parallel.pipeline_parallel_rank()) == (7, 3)


@pytest.mark.parametrize(
    ("tensor", "context", "last", "answers"),
    [(0, 0, True, True), (1, 0, True, False), (0, 1, True, False), (0, 0, False, False)],
)
def test_one_rank_answers_for_a_shard(monkeypatch, tensor, context, last, answers):
    ranks(monkeypatch, parallel, tensor_model_parallel_rank=tensor, context_parallel_rank=context)
    monkeypatch.setattr(parallel.parallel_state, "is_pipeline_last_stage", lambda: last)
    assert parallel.answers_for_shard() is answers
