"""A start as far as it needs no process: what `train --dry-run` does beyond the configuration's own checks.

Place in the data flow: checked configuration -> (this) -> what was found, or the error that the start itself would end
with, since both call the same functions. Of training files it reads the first and the last rows only. Starts nothing,
writes nothing.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from megatron_daro import recovery
from megatron_daro.config import Config
from megatron_daro.config.base import Section, filled
from megatron_daro.engine.sglang.environment import check_environments
from megatron_daro.errors import DataError
from megatron_daro.observe import logs
from megatron_daro.rollout.replay import ReplaySource
from megatron_daro.runtime import hf_export
from megatron_daro.runtime.inputs import read_inputs
from megatron_daro.runtime.restart_audit import made_with
from megatron_daro.runtime.run_directory import LOCK_FILE, require_usable
from megatron_daro.runtime.start import CONFIG_FILE, compared

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
        found.notice(f"replay: {replay}")
    else:
        _read_inputs(config, found)
    if resume:
        _rehearse_restart(config, found)
    return list(found)


def _read_inputs(config: Config, found: _Lines) -> None:
    inputs = _Lines()
    try:
        read_inputs(config, inputs, ends=ENDS)
        found += [f"the first and last {ENDS} rows of training files were read", *inputs]
    except DataError:
        # What is wrong with some rows need not be wrong with the file.
        read_inputs(config, found)


def _rehearse_restart(config: Config, found: _Lines) -> None:
    newest = recovery.find_latest_valid(filled(config.trainer.run_dir), found)
    audit = compared(newest[0], made_with(config), found) if newest else None
    if audit:
        audit.raise_refused()
        found += audit.text().splitlines()


def needs_torch(config: Config) -> bool:
    """Whether a rehearsal of this configuration imports modules that import torch, which takes seconds."""
    return _algorithm_can_be_refused(config) or config.model.trust_remote_code


def _algorithm_can_be_refused(config: Config) -> bool:
    """Return whether the algorithm may refuse what the checks of the configuration let pass."""
    section = config.algorithm
    part = getattr(section, section.name, None)  # options of daro are in algorithm.daro, and so on
    own = ":" in section.name or bool(section.options) or (isinstance(part, Section) and part != type(part)())
    return own or section.std != "auto" or config.rollout.oversampling > 1


def check_start(config: Config, *, resume: bool, generates: bool) -> None:
    """Refuse what a start refuses before it reads or writes anything.

    Args:
        config: checked.
        resume: whether the run directory must hold a run; else it must not.
        generates: whether an engine will run.

    Raises:
        ConfigError: a field that cannot work here. CheckpointError: the run directory holds the wrong thing.
    """
    require_usable(filled(config.trainer.run_dir), resume=resume)
    hf_export.require_replaceable(config.trainer)
    if generates and config.engine.kind == "sglang":
        check_environments(config.engine.sglang)


@contextmanager
def taken_back_if_it_fails(run_dir: Path) -> Iterator[None]:
    """Remove a run directory that was made in the block, if an error ends the block before anything happened there.

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
    """Whether a file is more than what every start writes first: configuration, lock, header of the events, logs in
    which nothing failed that the start's own error does not say."""
    if not path.is_file() or not path.stat().st_size:
        return False
    folder = path.relative_to(run_dir).parts[0]
    if folder == logs.FOLDER and not path.name.startswith("server_"):
        return path.name != logs.file_name("driver") and b" ERROR " in path.read_bytes()
    return not (path.parent == run_dir and path.name in (CONFIG_FILE, LOCK_FILE)) and folder != "tensorboard"


class _Lines(list[str]):
    """Takes notices and warnings as lines."""

    def notice(self, message: str) -> None:
        self.append(message)

    def warn(self, message: str) -> None:
        self.append(f"warning: {message}")
