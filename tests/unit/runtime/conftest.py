"""Makes the batches of tests/unit/data and the fakes of the loop importable when this folder is tested alone."""

import sys
from pathlib import Path

import pytest

sys.path += [str(Path(__file__).parents[1] / "data"), str(Path(__file__).parents[1] / "rollout")]


@pytest.fixture
def world(monkeypatch, tmp_path):
    """Makes a policy over processes that are objects (rank_processes.py)."""
    from rank_processes import World

    def make(limits=None, **options):
        return World(monkeypatch, tmp_path, limits=limits, **options)

    return make
