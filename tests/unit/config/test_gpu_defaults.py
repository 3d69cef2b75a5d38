"""What ranks on GPUs add to Megatron's options."""

from __future__ import annotations

import pytest

from megatron_daro.config.actor import ActorSection
from megatron_daro.config.megatron_options import gpu_defaults

EXPERTS = {"moe_permute_fusion": True, "moe_router_fusion": True}


@pytest.mark.parametrize(
    ("actor", "experts", "transformer_engine", "chosen"),
    [
        ({}, False, True, {}),
        ({"data_parallel": 2}, False, True, {"overlap_grad_reduce": True}),
        ({"context_parallel": 2}, False, False, {"overlap_grad_reduce": True}),
        ({}, True, True, EXPERTS),
        ({}, True, False, {}),
        ({"routing_replay": True}, True, True, {"moe_permute_fusion": True}),
        ({"data_parallel": 2, "megatron": {"overlap_grad_reduce": False}}, False, True, {}),
    ],
    ids=["alone", "DP", "CP", "experts", "experts in local layers", "replayed routing", "as a person says"],
)
def test_by_what_the_run_has(actor, experts, transformer_engine, chosen):
    found = gpu_defaults(ActorSection(**actor), experts=experts, transformer_engine=transformer_engine)
    assert found == chosen
