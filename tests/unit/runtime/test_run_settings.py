"""Settings of a run for its ranks: the critic and segments of memory."""

from __future__ import annotations

import pytest
from run_configuration import configured, run_context

from megatron_daro.errors import ConfigError
from megatron_daro.runtime.parts import policy_group, policy_settings


@pytest.mark.parametrize(
    ("sections", "grow"),
    [
        ({"engine": {"kind": "sglang", "sglang": {"sync": "distributed"}}}, True),
        ({"engine": {"kind": "sglang", "sglang": {"sync": "tensor"}}}, False),  # CUDA IPC
        ({"engine": {"kind": "sglang", "colocate": True, "sglang": {"sync": "disk"}}}, False),
        ({"engine": {"kind": "embedded", "sglang": {"sync": "tensor"}}}, True),
        ({"actor": {"megatron": {"nccl_ub": True}}}, False),  # a pool of NCCL's
    ],
)
def test_segments_of_the_ranks_grow_where_nobody_else_opens_their_memory(sections, grow):
    assert policy_settings(configured(**sections)).expandable_segments is grow


def test_the_critic_of_an_algorithm_of_your_own_that_has_none_cannot_be_exported():
    context = run_context(
        algorithm={"name": "toy_algorithm:Toy", "options": {"baseline": 0.5}}, trainer={"export_critic": True}
    )
    with pytest.raises(ConfigError, match=r"trainer\.export_critic"):
        policy_group(context, placement=None, trains=True)
