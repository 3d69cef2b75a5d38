"""Fixtures that tests/e2e and tests/fault share: the tiny task's files, one unbroken run of it, commands in process.

Both folders' conftest.py import them. The work of the first two is done once, also where pytest runs in several
processes: whoever needs it first does it while the others wait.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

import cli_runs
import pytest
import tiny_task
from filelock import FileLock

MADE_WITHIN_S = 400


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """The tiny task's files (tiny_task.py)."""
    return tiny_task.TinyTask(_once(_shared(tmp_path_factory) / "tiny_task", tiny_task.build))


@pytest.fixture(scope="session")
def reference(tmp_path_factory, tiny):
    """The run directory of one unbroken run of 8 steps, evaluated at 0, 4 and 8; never written to again."""

    def train(directory: Path) -> None:
        options = [f"trainer.run_dir={directory / 'run'}", "trainer.eval_every_steps=4", "observe.tensorboard=true"]
        cli_runs.trained(["train", tiny.config, *options], directory / "log")

    return _once(_shared(tmp_path_factory) / "reference", train) / "run"


@pytest.fixture
def refused(monkeypatch, capsys):
    """Runs `megatron-daro ARGUMENTS` in this process, for what ends before anything starts; Ray may not be started.

    A process of its own costs seconds of imports: one command of each file has it, for exit code and traceback.
    """
    import ray

    from megatron_daro.cli import main

    started: list[object] = []
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(ray, "init", lambda **options: started.append(options))

    def run(arguments: Sequence[object]) -> cli_runs.Finished:
        capsys.readouterr()
        code = main([*map(str, arguments)])
        said = capsys.readouterr()
        assert not started
        return cli_runs.Finished(code, said.out, said.err)

    return run


def _shared(factory: pytest.TempPathFactory) -> Path:
    """The directory of this session; pytest-xdist gives each of its processes one below it."""
    base = factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


def _once(directory: Path, make: Callable[[Path], object]) -> Path:
    """The directory, filled by the first of this session's processes that asks for it; a failure is everybody's own."""
    done = directory.with_name(f"{directory.name}.done")
    with FileLock(directory.with_name(f"{directory.name}.lock"), timeout=MADE_WITHIN_S):
        if not done.exists():
            directory.mkdir()
            make(directory)
            done.touch()
    return directory
