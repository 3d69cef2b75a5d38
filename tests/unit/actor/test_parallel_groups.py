"""Groups of ranks: layouts that are no layout of this world, and the seed of a run."""

from __future__ import annotations

import pytest
import torch

from megatron_daro.actor import parallel
from megatron_daro.actor.parallel import Layout
from megatron_daro.errors import ConfigError

pytestmark = pytest.mark.usefixtures("world")


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        (Layout(data=2), r"DP 2 .*actor\.\*_parallel"),
        (Layout(expert=2), r"ETP x EP = 2"),
        (Layout(virtual_pipeline=2), r"2 virtual stages"),
    ],
)
def test_a_layout_that_is_not_this_world_is_refused(layout, words):
    with pytest.raises(ConfigError, match=words):
        parallel.build_groups(layout, seed=1)


def test_random_numbers_are_those_of_the_seed():
    drawn = []
    for seed in (5, 5, 6):
        parallel.seed_everything(seed)
        drawn.append(torch.rand(2))
    assert torch.equal(drawn[0], drawn[1]) and not torch.equal(drawn[0], drawn[2])
