"""The unfinished target of a conversion: a locked folder beside it, which a later run of the same plan continues."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any

from megatron_daro import durable
from megatron_daro.convert.daro_format import StoredShard
from megatron_daro.convert.plan import Plan
from megatron_daro.convert.torch_dist import WrittenBlob
from megatron_daro.errors import ConfigError, ModelError
from megatron_daro.workshop.convert.records import FileRecord, TensorRecord

_PLAN, _DONE, _LOCK = "plan.json", "done", "lock"


def replaceable(out: Path) -> Path:
    """Return the absolute path of a target, links followed, after checking that a rename can put a directory there.

    Raises:
        ConfigError: it holds something, is a mount point or the current directory, or its parent cannot be written.
    """
    target = out.resolve()
    advice = "choose another --out; nothing was written"
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"--out: {out} exists and is not empty. Remove it or {advice}.")
    if target.is_mount() or target == Path.cwd():
        what = "a mount point" if target.is_mount() else "the current directory"
        raise ConfigError(
            f"--out: {out} is {what}, which cannot be replaced when the conversion is complete; give a directory in "
            f"it, such as --out {out / 'converted'}; nothing was written."
        )
    above = next(path for path in target.parents if path.exists())
    if not above.is_dir():
        raise ConfigError(f"--out: {out} cannot be made: {above} is a file; {advice}.")
    if not os.access(above, os.W_OK | os.X_OK):
        raise ConfigError(f"--out: {out} cannot be made: {above} is not writable; make it so, or {advice}.")
    return target


class Partial:
    """The folder of an unfinished conversion. A context manager: it is locked while in use.

    Attributes:
        folder: where the files of the target are written; done: records of the files that are complete.
    """

    def __init__(self, target: Path, plan: Plan) -> None:
        """Name the folder. Entering it keeps the files of the same plan, and removes those of another plan.

        Args:
            target: from `replaceable`.

        Raises:
            ModelError: on entering: another process converts into it. ConfigError: on entering: it cannot be replaced.
        """
        self._target = target
        self.root = target.with_name(f".{target.name}.partial")
        self.folder = self.root / "files"
        self.done: dict[str, FileRecord] = {}
        self._identity = _identity(plan)
        self._lock = -1

    def __enter__(self) -> Partial:
        self.root.mkdir(parents=True, exist_ok=True)
        self._lock = os.open(self.root / _LOCK, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._lock)
            raise ModelError(f"another conversion is writing {self._target}; wait for it or stop it") from None
        self._try_rename()
        self._take_up()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        os.close(self._lock)

    def note(self, record: FileRecord) -> None:
        """Remember that a file is complete; on the disk when this returns. Raises OSError."""
        path = self.root / _DONE / f"{record.file}.json"
        durable.replace(path, json.dumps(asdict(record)))
        self.done[record.file] = record

    def forget(self, file: str) -> None:
        """Have the next run write a file again. Raises OSError."""
        (self.root / _DONE / f"{file}.json").unlink(missing_ok=True)

    def publish(self) -> None:
        """Give the folder the target's name. Raises OSError."""
        for path in [*(p for p in self.folder.rglob("*") if p.is_dir()), self.folder]:
            durable.sync(path)
        self.folder.rename(self._target)  # an empty directory of that name is replaced
        durable.sync(self._target.parent)
        shutil.rmtree(self.root)

    def _try_rename(self) -> None:
        """Replace an empty target by another empty directory, as `publish` will with the complete one."""
        if self._target.exists():
            trial = self.root / "trial"
            trial.mkdir(exist_ok=True)
            try:
                trial.rename(self._target)
            except OSError as error:
                raise ConfigError(
                    f"--out: {self._target} cannot be replaced by a directory beside it ({error.strerror}); give a "
                    "directory in it, or remove it; nothing was written."
                ) from None

    def _take_up(self) -> None:
        plan = self.root / _PLAN
        if not plan.is_file() or plan.read_text() != self._identity:
            for name in ("files", _DONE):
                shutil.rmtree(self.root / name, ignore_errors=True)
        self.folder.mkdir(exist_ok=True)
        (self.root / _DONE).mkdir(exist_ok=True)
        durable.write(plan, self._identity)
        for path in (self.root / _DONE).glob("*.json"):
            record = _record(path)
            if record is not None and self._size_of(record.file) == record.num_bytes:
                self.done[record.file] = record

    def _size_of(self, file: str) -> int:
        paths = [path for path in (self.folder / file, self.folder / "release" / file) if path.is_file()]
        return paths[0].stat().st_size if paths else -1


def _identity(plan: Plan) -> str:
    """Return a hash that must be equal for an earlier run's files to count: of the plan, the source's sizes and
    times."""
    files = sorted(p for p in plan.source.iterdir() if p.is_file())
    stats = [(p.name, p.stat().st_size, p.stat().st_mtime_ns) for p in files]
    return hashlib.sha256(repr((plan, stats)).encode()).hexdigest()


def _record(path: Path) -> FileRecord | None:
    """Return a record of an earlier run; None where it cannot be read, so that its file is written again."""
    try:
        row = json.loads(path.read_text())
        return FileRecord(
            row["file"],
            row["num_bytes"],
            [TensorRecord(**_tuples(r)) for r in row["megatron"]],
            [TensorRecord(**_tuples(r)) for r in row["hf"]],
            [StoredShard(**_tuples(r)) for r in row["shards"]],
            [WrittenBlob(**_tuples(r)) for r in row["blobs"]],
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _tuples(row: dict[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in row.items()}
