"""Fixtures that tests/e2e and tests/fault share: the tiny task's files, and one unbroken run of it.

Both folders' conftest.py import them. The work is cached by function, so that it is done once for both.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import cli_runs
import pytest
import tiny_task


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """The tiny task's files (tiny_task.py)."""
    return _task(tmp_path_factory.getbasetemp())


@pytest.fixture(scope="session")
def reference(tmp_path_factory):
    """The run directory of one unbroken run of 8 steps, evaluated at 0, 4 and 8; never written to again."""
    return _reference(tmp_path_factory.getbasetemp())


@cache
def _task(base: Path) -> tiny_task.TinyTask:
    directory = base / "tiny_task"
    directory.mkdir()
    return tiny_task.build(directory)


@cache
def _reference(base: Path) -> Path:
    directory = base / "reference"
    run_dir = directory / "run"
    options = [f"trainer.run_dir={run_dir}", "trainer.eval_every_steps=4", "observe.tensorboard=true"]
    cli_runs.trained(["train", _task(base).config, *options], directory / "log")
    return run_dir
