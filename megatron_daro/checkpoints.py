"""Checkpoints that survive a crash: written whole or not at all, verified before use, pruned only when safe.

Controller -> `Checkpoints.save` -> RUN/checkpoints/step_000020/ = what the policy wrote, waiting.parquet (groups that
wait, if any), state.json (the controller's state), made_with.json (what the run was made of), manifest.json (size and
SHA-256 of every file, written last); then RUN/checkpoints/latest. A checkpoint is written beside its final place,
synced and renamed, so no reader ever sees half of one. `find_latest_valid` returns the newest one that is whole; it
refuses torn and edited checkpoints, and reads JSON only.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
import shutil
from collections.abc import Awaitable, Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, ValidationError

from megatron_daro import durable
from megatron_daro.config.data_file import why_no_file
from megatron_daro.errors import CheckpointError, ConfigError, LostSaveError, disk_fault
from megatron_daro.rollout.protocol import Notices
from megatron_daro.rollout.recorder import recorded_steps

MANIFEST = "manifest.json"
STATE = "state.json"
PROVENANCE = "made_with.json"
LATEST = "latest"
STATE_FORMAT = 3
"""Format of state.json and made_with.json; goes up when one of their keys is added, removed or changes its meaning."""
_STEP_DIRECTORY = re.compile(r"step_(\d{6,})")
_HASH_THREADS = 4


class _Strict(BaseModel):
    """Accept values of exactly these types: "3" is not a number."""

    model_config = ConfigDict(strict=True, frozen=True)


class _FileEntry(_Strict):
    bytes: NonNegativeInt
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class _Manifest(_Strict):
    """manifest.json. The other files are verified against it; the manifest itself is not verified."""

    format: Literal[1]
    files: dict[str, _FileEntry]


class Checkpoints:
    """The checkpoints of one run; the only writer of RUN/checkpoints."""

    def __init__(
        self, run_dir: Path, *, keep: int, keep_every: int = 0, provenance: Mapping[str, Any] | None = None
    ) -> None:
        """The checkpoints under RUN/checkpoints.

        Args:
            run_dir: the run directory.
            keep: how many of the newest checkpoints stay, at least 1.
            keep_every: the first checkpoint at or after each multiple of this many steps stays as well; 0: none.
            provenance: what the run is made of (runtime/provenance.py), written into every checkpoint.
        """
        self._directory = Path(run_dir) / "checkpoints"
        self._keep = keep
        self._keep_every = keep_every
        self._provenance = provenance

    async def save(
        self, step: int, write: Callable[[Path], Awaitable[None]], state: Mapping[str, Any], notices: Notices
    ) -> Path:
        """Make a durable checkpoint, point `latest` at it, and then remove the oldest ones beyond `keep`.

        Args:
            step: optimizer step, which names it.
            write: fills an existing, empty directory (the policy's own checkpoint, and groups that wait).
            state: JSON-able; becomes state.json.
            notices: told what was removed, and what could not be.

        Returns:
            The checkpoint's directory.

        Raises:
            CheckpointError: it could not be written (a full disk is named). If it was not in its final place yet,
                nothing of it is left, and earlier checkpoints are as they were. Other errors of `write` pass through,
                after the same clean-up.
        """
        final = self._directory / _name(step)
        temporary = final.with_name(final.name + ".tmp")
        with _named_disk_errors(final):
            try:
                await asyncio.to_thread(_make_empty, temporary)
                await write(temporary)
                if self._provenance is not None:
                    await asyncio.to_thread(
                        durable.write, temporary / PROVENANCE, json.dumps(self._provenance, indent=1)
                    )
                await asyncio.to_thread(_seal, temporary, step, state)
                await asyncio.to_thread(self._publish, temporary, final)
            except Exception:  # Not on cancellation: a thread may still be writing; the next save clears it away.
                shutil.rmtree(temporary, ignore_errors=True)
                (self._directory / (LATEST + ".tmp")).unlink(missing_ok=True)
                raise
            await asyncio.to_thread(verify, final, hashes=False)
        await asyncio.to_thread(self._prune, final, notices)
        return final

    def _publish(self, temporary: Path, final: Path) -> None:
        """Rename the checkpoint into place, and then `latest`, which is written before: the renames need no disk
        space."""
        pointer = self._directory / (LATEST + ".tmp")
        durable.write(pointer, final.name + "\n")
        if final.exists():
            shutil.rmtree(final)
        temporary.rename(final)
        try:
            durable.sync(self._directory)
            pointer.replace(self._directory / LATEST)
            durable.sync(self._directory)
        except OSError as error:
            cause, advice = disk_fault(error, self._directory.parent)
            raise CheckpointError(
                f"{final}: whole, but it may not outlive a crash of the machine, {cause}; {advice}"
            ) from error

    def _prune(self, newest: Path, notices: Notices) -> None:
        """Remove the oldest checkpoints beyond `keep`, and unfinished ones that crashes left behind."""
        directories = step_directories(self._directory)
        kept = [newest, *(path for path in directories if path != newest)][: self._keep]
        if self._keep_every:  # a batch of several steps may pass a multiple: the first at or after each stays
            first = {_step_of(path) // self._keep_every: path for path in directories}  # the oldest comes last
            kept += [path for number, path in first.items() if number]
        old = [path for path in directories if path not in kept]
        for path in [*old, *self._directory.glob("step_*.tmp")]:
            try:
                shutil.rmtree(path)
            except OSError as error:
                notices.warn(f"{path} could not be removed, which is tried again after the next checkpoint: {error}")
                continue
            if path in old:
                notices.notice(f"removed checkpoint {path.name} (trainer.keep_checkpoints={self._keep})")


class BackgroundSave:
    """Writes one checkpoint at a time while training goes on, and knows the step of the newest."""

    def __init__(self, notices: Notices) -> None:
        """Begin without a checkpoint. Args: notices: warned of one that was lost."""
        self._notices = notices
        self._written_step = 0
        self._writing_step = 0
        self._task: asyncio.Future[object] | None = None

    @property
    def step(self) -> int:
        """Step of the newest checkpoint, also while it is being written; 0: there is none."""
        return self._written_step if self._task is None else self._writing_step

    def go_on_from(self, step: int) -> None:
        """Continue from the checkpoint of this step."""
        self._written_step = step

    async def begin(self, step: int, save: Callable[[Callable[[], None]], Awaitable[object]]) -> None:
        """Wait for the previous save, start `save(captured)`, and return when it has called `captured` or is done.

        Raises:
            CheckpointError: one of the two could not be written.
        """
        await self.finished()
        captured = asyncio.Event()
        self._writing_step, self._task = step, asyncio.ensure_future(save(captured.set))
        waiting = asyncio.ensure_future(captured.wait())
        try:
            await asyncio.wait({self._task, waiting}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            waiting.cancel()
        self.check()

    def check(self) -> None:
        """Note how the save ended, if it has. If it was lost with a rank, only warn; `step` is again that of the
        checkpoint before. Raises CheckpointError: the checkpoint could not be written."""
        if self._task is None or not self._task.done():
            return
        task, self._task = self._task, None
        try:
            task.result()
        except LostSaveError as error:
            self._notices.warn(f"{error}; another one takes its place, at the latest after the next batch")
        else:
            self._written_step = self._writing_step

    async def finished(self) -> None:
        """Wait until nothing is being written. Raises CheckpointError: the checkpoint could not be written."""
        if self._task is not None:
            await asyncio.wait({self._task})
            self.check()

    async def end(self, *, at_once: bool) -> None:
        """Wait until nothing is being written, and only warn of an error; `at_once`: cancel the save first."""
        task, self._task = self._task, None
        if task is not None:
            if at_once:
                task.cancel()
            await asyncio.wait({task})
            if not task.cancelled() and task.exception() is not None:
                self._notices.warn(str(task.exception()))


def find_latest_valid(run_dir: Path, notices: Notices) -> tuple[Path, dict[str, Any]] | None:
    """Return the newest checkpoint that is whole, with its state.

    Args:
        run_dir: the run directory. notices: warned of each checkpoint that is refused, with the file and the reason.

    Returns:
        (directory, the content of state.json), or None when there is no checkpoint at all.

    Raises:
        CheckpointError: there are checkpoints, but none is whole.
    """
    directory = Path(run_dir) / "checkpoints"
    candidates = step_directories(directory)
    for path in candidates:
        try:
            verify(path)
            state = read_state(path)
            _check_name(path, state)
        except CheckpointError as error:
            notices.warn(f"checkpoint refused: {error}")
            continue
        _check_pointer(directory, path, notices)
        return path, state
    if candidates:
        raise CheckpointError(
            f"{directory}: none of {len(candidates)} checkpoints is whole (see the warnings above); restore one of "
            "them, or start again in a new run_dir"
        )
    return None


def set_newer_aside(checkpoint: Path) -> None:
    """Rename the checkpoints after this one, which were refused, to step_N.refused.

    They would otherwise count as newer ones when old checkpoints are removed.
    """
    for path in step_directories(checkpoint.parent):
        if _step_of(path) > _step_of(checkpoint):
            aside = path.with_name(path.name + ".refused")
            shutil.rmtree(aside, ignore_errors=True)
            path.rename(aside)


def verify(checkpoint: Path, *, hashes: bool = True) -> None:
    """Compare every file with the manifest; extra hidden files, which file systems and desktops leave, are ignored.

    Args:
        checkpoint: its directory. hashes: also compare SHA-256, not only sizes.

    Raises:
        CheckpointError: names the first file that is missing, of another size, of other content, or not in the
            manifest.
    """
    path, files = checkpoint / MANIFEST, _read_manifest(checkpoint).files
    if STATE not in files:
        raise CheckpointError(f"{path}: does not name {STATE}: torn or edited; use another checkpoint")
    for name, entry in files.items():
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            raise CheckpointError(f"{path}: names {name!r}, outside the checkpoint; it was edited")
        size = _file_size(checkpoint / name)
        if size is None:
            raise CheckpointError(f"{checkpoint / name}: missing; use another checkpoint")
        if size != entry.bytes:
            raise CheckpointError(
                f"{checkpoint / name}: {size} bytes, but the manifest says {entry.bytes}: torn or edited"
            )
    for name in _file_names(checkpoint):
        is_hidden = any(part.startswith(".") for part in PurePosixPath(name).parts)
        if name not in files and name != MANIFEST and not is_hidden:
            raise CheckpointError(
                f"{path}: does not name {name}, which is there: torn or edited; use another checkpoint, or remove the "
                "file if it was put there by hand"
            )
    if hashes:
        for name, digest in _digests(checkpoint, list(files)).items():
            if digest != files[name].sha256:
                raise CheckpointError(f"{checkpoint / name}: its SHA-256 is not that of the manifest: torn or edited")


def read_state(checkpoint: Path) -> dict[str, Any]:
    """Return the controller's state in a checkpoint that `verify` accepted."""
    state: dict[str, Any] = json.loads((checkpoint / STATE).read_bytes())
    return state


def read_provenance(checkpoint: Path) -> dict[str, Any] | None:
    """Return what the run was made of when it wrote this checkpoint, which `verify` accepted; None if it does not say.
    Call `check_format` first."""
    path = checkpoint / PROVENANCE
    return json.loads(path.read_bytes()) if path.exists() else None


def check_format(checkpoint: Path, state: Mapping[str, Any]) -> None:
    """Refuse a state, and the provenance beside it, that another version of the package wrote. Args: checkpoint: its
    directory, for the message. state: its state.json. Raises CheckpointError."""
    if state.get("format") != STATE_FORMAT:
        raise CheckpointError(
            f"{checkpoint}/state.json: format {state.get('format')!r}; allowed: {STATE_FORMAT}. "
            "Use the version of the package that wrote it"
        )


def step_directories(directory: Path) -> list[Path]:
    """Return the checkpoints in RUN/checkpoints by name, newest first, whole or not."""
    directories = [path for path in directory.glob("step_*") if path.is_dir() and _STEP_DIRECTORY.fullmatch(path.name)]
    return sorted(directories, key=_step_of, reverse=True)


def require_fresh(run_dir: Path) -> None:
    """Refuse to start a new run over an old one.

    Raises:
        ConfigError: the directory holds checkpoints or metrics.
    """
    run_dir = Path(run_dir)
    metrics = run_dir / "metrics.jsonl"
    if step_directories(run_dir / "checkpoints") or (metrics.exists() and metrics.stat().st_size):
        raise ConfigError(
            f"trainer.run_dir: {run_dir} already holds a run; allowed: an empty directory. "
            "Use --resume to continue it, or another run_dir"
        )


def _check_name(checkpoint: Path, state: Mapping[str, Any]) -> None:
    if state["step"] != _step_of(checkpoint):
        raise CheckpointError(f"{checkpoint / STATE}: step {state['step']} in {checkpoint.name}: it was renamed")


def _check_pointer(directory: Path, newest: Path, notices: Notices) -> None:
    pointer = directory / LATEST
    try:
        named = pointer.read_text(errors="replace").strip() if pointer.is_file() else "(missing)"
    except OSError as error:
        named = f"(not readable: {error.strerror})"
    if named != newest.name:
        notices.warn(f"{pointer} names {named!r}; the newest whole checkpoint is {newest.name}, which is used")


def _seal(directory: Path, step: int, state: Mapping[str, Any]) -> None:
    """Add state.json, sync everything, and write the manifest last."""
    try:
        text = json.dumps(state, indent=1, sort_keys=True)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"state of step {step} is not plain JSON: {error}") from error
    durable.write(directory / STATE, text)
    known_digests = {
        path.relative_to(directory).as_posix(): digest for path, digest in durable.take_hashes(directory).items()
    }
    names = _file_names(directory)
    for name in names:
        durable.sync(directory / name)
    digests = known_digests | _digests(directory, [name for name in names if name not in known_digests])
    files = {name: {"bytes": (directory / name).stat().st_size, "sha256": digests[name]} for name in names}
    durable.write(directory / MANIFEST, json.dumps({"format": 1, "step": step, "files": files}, indent=1))
    for path in [*(p for p in directory.rglob("*") if p.is_dir()), directory]:
        durable.sync(path)


def _file_names(directory: Path) -> list[str]:
    """Return the files of a folder and of all below it, relative to it, sorted."""
    return [path.relative_to(directory).as_posix() for path in sorted(directory.rglob("*")) if path.is_file()]


def _digests(directory: Path, names: list[str]) -> dict[str, str]:
    def digest(name: str) -> str:
        try:
            with (directory / name).open("rb") as file:
                return hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise CheckpointError(f"{directory / name}: cannot be read: {error}") from error

    with ThreadPoolExecutor(_HASH_THREADS) as pool:
        return dict(zip(names, pool.map(digest, names), strict=True))


def _read_manifest(checkpoint: Path) -> _Manifest:
    """Return the manifest. Raises CheckpointError: names the first entry that is wrong, and its value."""
    path = checkpoint / MANIFEST
    if why := why_no_file(path):
        raise CheckpointError(f"{path}: {why}; use another checkpoint")
    try:
        return _Manifest.model_validate_json(path.read_bytes())
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error}; use another checkpoint") from error
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) or "the file"
        raise CheckpointError(
            f"{path}: {place}: {first['msg']}, got {first['input']!r:.80}: torn, edited, or of another version; use "
            "another checkpoint"
        ) from error


def _file_size(path: Path) -> int | None:
    """Return the bytes of a file; None if there is no such file, or no file can have that name."""
    try:
        return path.stat().st_size if path.is_file() else None
    except OSError:
        return None


@contextmanager
def _named_disk_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        run_dir = path.parent.parent
        cause, advice = disk_fault(error, run_dir)
        if step_directories(path.parent):
            rest = f"earlier checkpoints are untouched; {advice}; trainer.keep_checkpoints says how many stay"
        elif recorded_steps(run_dir):
            _, advice = disk_fault(error, run_dir, f"train with another trainer.run_dir and --replay {run_dir}")
            rest = (
                f"there is no earlier one, so --resume would begin again at step 0 and discard {run_dir}/rollouts. To "
                f"use them: {advice}"
            )
        else:
            raise CheckpointError(f"{path}: checkpoint not saved, {cause}; {advice}") from error
        raise CheckpointError(f"{path}: checkpoint not saved, {cause}. Nothing of it was kept and {rest}") from error


def _make_empty(directory: Path) -> None:
    if directory.exists():
        shutil.rmtree(directory)
    directory.mkdir(parents=True)


def _name(step: int) -> str:
    return f"step_{step:06d}"


def _step_of(path: Path) -> int:
    match = _STEP_DIRECTORY.fullmatch(path.name)
    return int(match.group(1)) if match else -1
