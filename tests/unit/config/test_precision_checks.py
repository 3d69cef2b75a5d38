"""Which fp8 recipe can run where, and the nearest recipe that can."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_daro.config import precision
from megatron_daro.config.hardware import capability_of, torch_cuda, version_of
from megatron_daro.config.precision import Surroundings

HOPPER = Surroundings(9.0, (13, 0), (2, 20, 2), (9, 19, 0))
BLACKWELL = replace(HOPPER, capability=10.0)


@pytest.mark.parametrize(
    ("recipe", "found", "missing", "nearest"),
    [
        ("tensorwise", HOPPER, "", None),
        ("blockwise", HOPPER, "", None),
        ("mxfp8", BLACKWELL, "", None),
        ("tensorwise", Surroundings(), "", None),  # nothing is known, so nothing is refused
        ("tensorwise", Surroundings(capability=0), "GPU", None),
        ("tensorwise", replace(HOPPER, capability=8.0), "8.9", None),
        ("tensorwise", replace(HOPPER, transformer_engine=()), "Transformer Engine", None),
        ("tensorwise", replace(HOPPER, transformer_engine=(2, 1)), "2.2", None),
        ("tensorwise", replace(HOPPER, cudnn=(9, 3, 0)), "9.12", None),
        ("blockwise", replace(HOPPER, capability=8.9), "9.0", "tensorwise"),
        ("blockwise", replace(HOPPER, cuda=(12, 8)), "12.9", "tensorwise"),
        ("blockwise", replace(BLACKWELL, cuda=(12, 8)), "12.9", "mxfp8"),
        ("mxfp8", HOPPER, "10.0", "blockwise"),
        ("mxfp8", replace(HOPPER, cuda=(12, 4)), "10.0", "tensorwise"),
        ("mxfp8", replace(HOPPER, capability=12.0), "12.0", "blockwise"),
    ],
)
def test_a_recipe_that_cannot_run_is_refused_with_what_it_lacks_and_the_nearest_that_can(
    recipe, found, missing, nearest
):
    problem = precision.problem(recipe, found)
    if not missing:
        assert problem is None
        return
    assert missing in problem.got
    instead = f"actor.fp8_recipe={nearest}" if nearest else "actor.precision=bf16"
    assert problem.field == instead.partition("=")[0] and instead in problem.fix


def test_gpus_by_name_and_versions_by_text():
    names = {"H100": 9.0, "A100-80G": 8.0, "A10G": 8.6, "L40S": 8.9, "b200": 10.0, "X1": None, None: None}
    assert {name: capability_of(name) for name in names} == names
    assert version_of("2.20.2+cu13") == (2, 20, 2) and version_of("dev") == ()
    assert torch_cuda() is None or torch_cuda() > (11,)
