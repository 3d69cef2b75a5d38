"""Settings of a run for its ranks: segments of memory."""

from __future__ import annotations

import pytest
from run_configuration import configured

from megatron_daro.runtime.parts import policy_settings


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
