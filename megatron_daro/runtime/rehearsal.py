"""A start as far as it needs no process: what `train --dry-run` does beyond the configuration's own checks.

Place in the data flow: checked configuration -> (this) -> what was found, or the error that the start itself would end
with, since both call the same functions. Of training files it reads the first and the last rows only. Starts nothing,
writes nothing.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from megatron_daro import recovery
from megatron_daro.config import Config
from megatron_daro.engine.sglang.environment import check_environments
from megatron_daro.errors import CheckpointError, ConfigError, DataError
from megatron_daro.rollout.replay import ReplaySource
from megatron_daro.runtime.inputs import read_inputs

ENDS = 100
"""Rows that a rehearsal reads at each end of a training file."""


def rehearse(config: Config, *, resume: bool, replay: Path | None) -> list[str]:
    """Everything that a start does before its first process.

    Args:
        config: checked. resume, replay: as of the start.

    Returns:
        What was found, a line each.

    Raises:
        DaroError: what the start would end with.
    """
    found = _Lines()
    if _algorithm_can_be_refused(config):
        from megatron_daro.runtime import parts

        for remark in parts.algorithm_remarks(config, parts.algorithm_of(config)):
            found.warn(remark)
    check_start(config, resume=resume, generates=replay is None)
    if replay:
        ReplaySource(replay, rollouts_per_prompt=config.rollout.rollouts_per_prompt)
        return [*found, f"replay: {replay}"]
    try:
        inputs = _Lines()
        read_inputs(config, inputs, ends=ENDS)
        return [*found, f"the first and last {ENDS} rows of training files were read", *inputs]
    except DataError:
        # What is wrong with some rows need not be wrong with the file.
        read_inputs(config, found)
        return list(found)


def needs_torch(config: Config) -> bool:
    """Whether a rehearsal of this configuration imports modules that import torch, which takes seconds."""
    return _algorithm_can_be_refused(config) or bool(config.actor.megatron) or config.model.trust_remote_code


def _algorithm_can_be_refused(config: Config) -> bool:
    """An algorithm of this package without options has nothing that the checks of the configuration do not see."""
    section = config.algorithm
    own = ":" in section.name or bool(section.options)
    return own or section.std != "auto" or config.rollout.oversampling > 1


def check_start(config: Config, *, resume: bool, generates: bool) -> None:
    """What a start refuses before it reads or writes anything.

    Args:
        config: checked.
        resume: whether the run directory must hold a run; else it must not.
        generates: whether an engine will run.

    Raises:
        ConfigError: a field that cannot work here. CheckpointError: the run directory holds the wrong thing.
    """
    assert config.trainer.run_dir is not None, "the loader fills trainer.run_dir in"
    check_run_directory(config.trainer.run_dir, resume=resume)
    if generates and config.engine.kind == "sglang":
        check_environments(config.engine.sglang)
    if config.actor.megatron:
        # Imports Megatron, which takes seconds; only upstream's own classes know their names.
        from megatron_daro.actor.model import split_megatron_options

        split_megatron_options(config.actor.megatron)


def check_run_directory(run_dir: Path, *, resume: bool) -> None:
    """Whether a run can begin or go on there. Raises ConfigError, CheckpointError."""
    if resume and not run_dir.is_dir():
        raise CheckpointError(f"--resume: {run_dir} does not exist; start without --resume, or check trainer.run_dir")
    there = next(path for path in (run_dir, *run_dir.absolute().parents) if os.access(path, os.F_OK))
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        what = f"{there} is a file" if not there.is_dir() else f"{there} cannot be written"
        raise ConfigError(
            f"trainer.run_dir: got {str(run_dir)!r}, but {what}; allowed: a directory that this user may write; "
            "fix: choose another trainer.run_dir"
        )
    if not resume:
        recovery.require_fresh(run_dir)


@contextmanager
def taken_back_if_it_fails(run_dir: Path) -> Iterator[None]:
    """Removes a run directory that was made in the block, if an error ends the block before anything happened there.

    What servers logged and what was trained stays, and so does a directory that was not empty before.
    """
    made = [path for path in (run_dir, *run_dir.parents) if not path.exists()]
    was_empty = bool(made) or not any(run_dir.iterdir())
    try:
        yield
    except BaseException:
        if was_empty and run_dir.is_dir() and not any(_says_something(run_dir, path) for path in run_dir.rglob("*")):
            for path in run_dir.iterdir():
                shutil.rmtree(path) if path.is_dir() else path.unlink()
            with suppress(OSError):
                for path in made:
                    path.rmdir()
        raise


def _says_something(run_dir: Path, path: Path) -> bool:
    """Whether a file is more than what every start writes first: configuration, lock, header of the events."""
    prepared = path.parent == run_dir and path.name in ("config.yaml", "run.lock")
    events = path.relative_to(run_dir).parts[0] == "tensorboard"
    return path.is_file() and path.stat().st_size > 0 and not prepared and not events


class _Lines(list[str]):
    """Takes notices and warnings as lines."""

    def notice(self, message: str) -> None:
        self.append(message)

    def warn(self, message: str) -> None:
        self.append(f"warning: {message}")
