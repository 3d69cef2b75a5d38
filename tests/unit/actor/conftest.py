"""A world of this process alone, with Megatron's groups, and small models of random weights for it."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "parallel"))  # its models and batches, and what its ranks do


@pytest.fixture(scope="module")
def world():
    """This process as the only rank."""
    from megatron_daro.actor import parallel

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        parallel.initialize(parallel.Layout(), seed=1, timeout_s=60)
        yield
        parallel.shutdown()


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    """A Qwen2 of two layers."""
    from single_rank import save_random_model

    return save_random_model(tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="session")
def critic_model(tmp_path_factory):
    """The same with other weights, and a head whose values are not 0."""
    from single_rank import save_random_model

    return save_random_model(tmp_path_factory.mktemp("critic"), seed=1, head=True)
