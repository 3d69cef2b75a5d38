"""The run directory: one owner at a time, never overwritten; and the exports in it, trained models for others to load.

`owned` is entered before a start writes anything, and held until the end. It refuses a directory that holds a run
(without --resume), one that another process uses, and one that cannot be written.

RUN/hf is a Hugging Face directory that transformers, vLLM and SGLang load, RUN/hf_critic one of a critic, for
transformers, RUN/adapter the adapters, for PEFT, vLLM and SGLang. When a run finishes, or a finished run is resumed,
`PolicyGroup.write` (also the writer of `sync: disk`) writes each of them, whole or not at all. `ORIGIN_FILE` in it
names its step. A directory that is not an earlier export is never replaced.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import socket
import subprocess
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import psutil

from megatron_daro.checkpoints import require_fresh
from megatron_daro.config.sections import TrainerSection
from megatron_daro.errors import CheckpointError, ConfigError, SyncError
from megatron_daro.observe import logs
from megatron_daro.rollout.protocol import Notices
from megatron_daro.sync.plan import ORIGIN_FILE, Exported, WeightFiles

if TYPE_CHECKING:
    from megatron_daro.runtime.policy_group import PolicyGroup


LOCK_FILE = "run.lock"
_OPTION = "trainer.run_dir"
_FILES = ("config.yaml", "metrics.jsonl", "restarts.txt")
_FOLDERS = ("checkpoints", "engine_weights", "experts", "failed", logs.FOLDER, "rollouts", "sync", "tensorboard")
"""What a run writes into its directory."""
_JOB = "SLURM_JOB_ID"
_SQUEUE_TIMEOUT_S = 30
_PSEUDO_FILE_SYSTEMS = {
    *("proc", "sysfs", "cgroup", "cgroup2", "devpts", "mqueue", "securityfs", "debugfs", "tracefs", "configfs"),
    *("pstore", "bpf", "efivarfs", "binfmt_misc", "fusectl", "selinuxfs", "nsfs", "rpc_pipefs"),
}


@contextmanager
def owned(run_dir: Path, *, resume: bool, option: str = _OPTION) -> Iterator[Path]:
    """Return the directory, made if it is new, and locked against other runs until the end of the block.

    Args:
        run_dir: trainer.run_dir.
        resume: whether it may hold a run already.
        option: with which the user named it.

    Raises:
        CheckpointError: another process uses it.
        ConfigError: it holds a run without `resume`, or it cannot be made or written.
    """
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        _require_own_files(run_dir, option)
        lock = (run_dir / LOCK_FILE).open("a+", encoding="utf-8")
    except OSError as error:
        raise _not_writable(run_dir, error.strerror, option) from error
    with lock:
        _take(lock, run_dir, option)
        if not resume:
            require_fresh(run_dir)
        _write_owner(lock)
        try:
            yield run_dir
        finally:
            with suppress(OSError):  # the directory may be gone, or its disk full
                lock.truncate(0)


def require_usable(run_dir: Path, *, resume: bool) -> None:
    """Refuse what `owned` would refuse, without making anything; the lock is held only for a moment.

    Raises:
        CheckpointError: another process uses the directory.
        ConfigError: it holds a run without `resume`, it is not there to resume, or it cannot be made or written.
    """
    if resume and not run_dir.is_dir():
        raise ConfigError(f"--resume: {run_dir} does not exist; start without --resume, or check trainer.run_dir")
    there = next(path for path in (run_dir, *run_dir.absolute().parents) if os.path.lexists(path))
    if not there.is_dir():
        raise _not_writable(run_dir, f"{there} is a {'file' if there.exists() else 'link to what is not there'}")
    if not os.access(there, os.W_OK | os.X_OK):
        raise _not_writable(run_dir, f"{there} is closed to this user")
    if kind := _pseudo_file_system(there):
        raise _not_writable(run_dir, f"{there} is of the file system {kind}, which holds no files")
    _require_own_files(run_dir)
    with suppress(OSError), (run_dir / LOCK_FILE).open("r+", encoding="utf-8") as lock:
        _take(lock, run_dir)  # given back at the end of the block
    if not resume:
        require_fresh(run_dir)


def _require_own_files(run_dir: Path, option: str = _OPTION) -> None:
    """Refuse a file where the run has a folder, a folder or a pipe where it has a file, and a lock file that is a link:
    its content is discarded."""
    lock = run_dir / LOCK_FILE
    if lock.is_symlink() or (lock.exists() and not lock.is_file()):
        what = "a link" if lock.is_symlink() else "no file"
        raise _not_writable(run_dir, f"{LOCK_FILE} in it is {what}", option)
    for name in _FOLDERS:
        if os.path.lexists(run_dir / name) and not (run_dir / name).is_dir():
            raise _not_writable(run_dir, f"{name} in it is no directory", option)
    for name in _FILES:
        if (run_dir / name).exists() and not (run_dir / name).is_file():
            raise _not_writable(run_dir, f"{name} in it is no file", option)


def _pseudo_file_system(path: Path) -> str:
    """Return the kind of the path's file system if it is not read-only, yet even root cannot make files in it, like
    /proc; else empty."""
    around = [path.resolve(), *path.resolve().parents]
    kinds = {Path(mount.mountpoint): mount.fstype for mount in psutil.disk_partitions(all=True)}
    kind = next((kinds[place] for place in around if place in kinds), "")
    return kind if kind in _PSEUDO_FILE_SYSTEMS else ""


def _not_writable(run_dir: Path, why: str | None, option: str = _OPTION) -> ConfigError:
    return ConfigError(
        f"{option}: got {str(run_dir)!r}, which cannot be written ({why}); allowed: a directory "
        f"that this user may write; fix: choose another {option}, or change its permissions"
    )


def _take(lock: IO[str], run_dir: Path, option: str = _OPTION) -> None:
    """Lock the file. The kernel releases the lock when its owner ends, however it ends.

    On a file system without locks, only what the owner wrote into the file counts: while its process lives, if that is
    on this host; else while its Slurm job may run, or until the file is removed.
    """
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise _in_use(run_dir, _owner(lock), option) from None
    except OSError:
        owner = _owner(lock)
        if owner and not _is_dead(owner):
            raise _in_use(run_dir, owner, option, f"; if it is gone, remove {run_dir / LOCK_FILE}") from None


def _in_use(run_dir: Path, owner: dict[str, Any], option: str, hint: str = "") -> CheckpointError:
    who = "another process"
    if owner:
        who = f"process {owner.get('pid')} on host {owner.get('host')} since {owner.get('started')}"
    return CheckpointError(
        f"{option}: {run_dir} is in use by {who}; allowed: one run in a directory. Wait for it or end it, or "
        f"use another {option.rpartition('.')[2]}{hint}"
    )


def _owner(lock: IO[str]) -> dict[str, Any]:
    """Return what the last owner wrote; empty if it gave the directory back."""
    lock.seek(0)
    try:
        owner = json.loads(lock.read() or "{}")
    except ValueError:
        return {}
    return owner if isinstance(owner, dict) else {}


def _write_owner(lock: IO[str]) -> None:
    lock.truncate(0)
    started = datetime.now().astimezone().isoformat(timespec="seconds")
    owner = {"pid": os.getpid(), "host": socket.gethostname(), "started": started}
    json.dump(owner | {"slurm_job": os.environ.get(_JOB)} if _JOB in os.environ else owner, lock)
    lock.flush()


def _is_dead(owner: dict[str, Any]) -> bool:
    pid, job = owner.get("pid"), str(owner.get("slurm_job") or "")
    if owner.get("host") == socket.gethostname():
        return isinstance(pid, int) and not psutil.pid_exists(pid)
    # A Slurm job is tried again only when its previous attempt has ended on all nodes, or was given up with a lost
    # node.
    return bool(job) and (job == os.environ.get(_JOB) or _is_over(job))


def _is_over(job: str) -> bool:
    """Return whether Slurm says that a job no longer runs; False if Slurm cannot be asked."""
    command = ["squeue", "--noheader", f"--jobs={job}", "--format=%T"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SQUEUE_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    if done.returncode:
        return "Invalid job id" in done.stderr  # forgotten: it ended long ago
    return not any(word in done.stdout for word in ("RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING"))


_FILE_BYTES = 2 * 1000**3
"""Size limit of a file. A rank holds two files in host memory while it writes."""
_UNKNOWN = -1


def export_writer(
    section: TrainerSection, policy: PolicyGroup, notices: Notices
) -> Callable[[int], Coroutine[Any, Any, None]] | None:
    """Return the function that exports the models at the end of a run, given its number of steps; None if no export is
    asked for."""
    return partial(_write_exports, section, policy, notices) if _exports(section) else None


@dataclass(frozen=True, slots=True)
class _Export:
    """The export of one model. option: the `trainer` option that asks for it. what: the model in words."""

    option: str
    directory: Path
    what: str
    exported: Exported


def _exports(section: TrainerSection) -> list[_Export]:
    """Return the exports that are asked for."""
    policy = _Export("export_hf", section.hf_dir, "model", "policy")
    critic = _Export("export_critic", section.critic_dir, "critic", "critic")
    adapter = _Export("export_adapter", section.adapter_dir, "adapters", "adapter")
    return [export for export in (policy, critic, adapter) if getattr(section, export.option)]


async def _write_exports(section: TrainerSection, policy: PolicyGroup, notices: Notices, step: int) -> None:
    for export in _exports(section):
        await _write_export(export, policy, notices, step)


async def _write_export(export: _Export, policy: PolicyGroup, notices: Notices, step: int) -> None:
    """Write a model's weights as they are now, unless the directory has the export of this step.

    Args:
        policy: with all ranks running. notices: told when it is written. step: of the weights.

    Raises:
        SyncError: the disk refused, or the directory is not an export; it is as it was.
    """
    written_step = exported_step(export.directory)
    if written_step == step:
        return
    if written_step == _UNKNOWN:
        raise SyncError(_no_export(export))
    files = WeightFiles(
        directory=export.directory,
        file_bytes=_FILE_BYTES,
        remedy="the run is finished and its checkpoint is whole: free space, or make the directory writable; then "
        "--resume with the same options writes the model",
        what=export.exported,
        step=step,
    )
    async with policy.hold():
        report = await policy.write(files)
    notices.notice(f"wrote the {export.what} of step {step} to {export.directory}: {report.num_bytes / 1e6:,.1f} MB")


def exports_due(section: TrainerSection, step: int) -> list[Path]:
    """Return the exports that a run which has all of its steps still lacks."""
    return [export.directory for export in _exports(section) if exported_step(export.directory) != step]


def exported_step(directory: Path) -> int | None:
    """Return the step of an export; None if the directory does not exist, -1 if it is something else."""
    try:
        return int(json.loads((directory / ORIGIN_FILE).read_text())["step"])
    except (OSError, ValueError, KeyError, TypeError):
        return _UNKNOWN if directory.exists() else None


def require_replaceable_export(section: TrainerSection) -> None:
    """Raise ConfigError if an export would replace something that is not an export."""
    for export in _exports(section):
        if exported_step(export.directory) == _UNKNOWN:
            raise ConfigError(_no_export(export))


def remove_unfinished_export(section: TrainerSection) -> None:
    """Remove what an unfinished export left behind; call it when nothing writes any more."""
    for directory in (section.hf_dir, section.critic_dir, section.adapter_dir):
        for name in ("partial", "replaced"):
            shutil.rmtree(directory.with_name(f".{directory.name}.{name}"), ignore_errors=True)


def _no_export(export: _Export) -> str:
    return (
        f"trainer.{export.option}: got true, but {export.directory} is there and is no export of a run (it has no "
        f"{ORIGIN_FILE}); allowed: nothing, or an earlier export; fix: move it away, or set trainer.{export.option}="
        "false"
    )
