"""The checks of gpu_checks.py on a real GPU; tests/conftest.py skips this folder where there is none."""

from __future__ import annotations

import pytest
import torch
from gpu_checks import CHECKS
from gpu_outcomes import NotHereError


@pytest.fixture(scope="module")
def device():
    """A world of this process alone, on its GPU."""
    from megatron_daro.actor import parallel
    from megatron_daro.actor.device import prepare

    assert torch.cuda.is_available(), "tests/conftest.py let a test through that needs a GPU"
    parallel.initialize(parallel.Layout(), seed=1, timeout_s=120)
    yield prepare()
    parallel.shutdown()


@pytest.mark.parametrize("name", CHECKS)
def test_check(device, tmp_path, name):
    try:
        outcome = CHECKS[name](device, tmp_path)
    except NotHereError as reason:
        pytest.skip(str(reason))
    assert outcome.passed, f"{outcome.difference} {outcome.of}, allowed is {outcome.tolerance}"
