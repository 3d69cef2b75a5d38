"""A whole conversion: files written by several processes, then index, verification and card, then one rename.

`megatron-daro convert` calls `convert`; `jobs` writes the files. The target appears whole or not at all. An
interrupted run leaves its folder beside the target; the next run of the same plan compares the files in it with the
source before it trusts them, and continues. `--verify` reads every HF tensor back from both sides and compares bytes;
a Megatron checkpoint is read by the same code that starts a run from it, so a wrong slice, name or cast shows,
whoever wrote it. Rejects a target that is not empty or cannot be replaced by a rename, and a second conversion into
the same target.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import multiprocessing
import os
import shutil
import signal
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing, contextmanager
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import torch

from megatron_daro import durable
from megatron_daro.config.model_shape import read_model_shape
from megatron_daro.convert import daro_format, torch_dist
from megatron_daro.convert.daro_format import StoredShard
from megatron_daro.convert.hf_files import HFCheckpoint, copy_model_files, write_index
from megatron_daro.convert.megatron_weights import MegatronWeights
from megatron_daro.convert.pieces import RowReader
from megatron_daro.convert.plan import PART_BYTES, Job, Parameter, Plan
from megatron_daro.convert.torch_dist import WrittenBlob
from megatron_daro.errors import CheckpointError, ModelError, disk_fault
from megatron_daro.temporary import use_own_sockets
from megatron_daro.workshop.convert.jobs import (
    CARD_FILE,
    Card,
    FileRecord,
    StopFlag,
    StoppedError,
    TensorRecord,
    joined,
    make_card,
    windows,
    write_file,
)

_PLAN, _DONE, _LOCK = "plan.json", "done", "lock"


def replaceable(out: Path) -> Path:
    """Return the absolute path of a target, links followed, after a look at whether a rename can put it there.

    Raises:
        ModelError: it holds something, is a mount point or the current directory, or its parent cannot be written.
    """
    target = out.resolve()
    advice = "choose another --out; nothing was written"
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ModelError(f"{out} exists and is not empty. Remove it or {advice}.")
    if target.is_mount() or target == Path.cwd():
        what = "a mount point" if target.is_mount() else "the current directory"
        raise ModelError(
            f"{out} is {what}, which cannot be replaced when the conversion is complete; give a directory in it, such "
            f"as --out {out / 'converted'}; nothing was written."
        )
    above = next(path for path in target.parents if path.exists())
    if not above.is_dir():
        raise ModelError(f"{out} cannot be made: {above} is a file; {advice}.")
    if not os.access(above, os.W_OK | os.X_OK):
        raise ModelError(f"{out} cannot be made: {above} is not writable; make it so, or {advice}.")
    return target


class Partial:
    """The folder of an unfinished conversion. A context manager: it is locked while in use.

    Attributes:
        folder: where the files of the target are written; done: records of the files that are complete.
    """

    def __init__(self, target: Path, plan: Plan) -> None:
        """Make the folder, or take up one of the same plan; one of another plan is removed.

        Args:
            target: from `replaceable`.

        Raises:
            ModelError: another process converts into it, or it cannot be replaced.
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
        durable.write(path.with_suffix(".tmp"), json.dumps(asdict(record)))
        path.with_suffix(".tmp").rename(path)
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
                raise ModelError(
                    f"{self._target} cannot be replaced by a directory beside it ({error.strerror}); give a directory "
                    "in it, or remove it; nothing was written."
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
    """Return what must not change if files of an earlier run are to count: the plan; the source's sizes and times."""
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


def compare_file(plan: Plan, job: Job, root: Path, stop: StopFlag | None = None) -> str:
    """Compare what one file holds with what it was made of; returns the file's name.

    Args:
        plan, job: that were carried out. root: of the target. stop: ends it early.

    Raises:
        CheckpointError: names the first tensor that differs. StoppedError: the flag was raised.
    """
    folder = root / torch_dist.RELEASE if plan.format == torch_dist.BACKEND else root
    _forget(folder / job.file)
    target: HFCheckpoint | MegatronWeights = (
        HFCheckpoint(root) if plan.format == "hf" else MegatronWeights(root, read_model_shape(plan.config))
    )
    with target, plan.open_source() as source:
        for item in job.items:
            for name in item.rule.hf_names if isinstance(item, Parameter) else (item.name,):
                _compare(name, source, target, plan.piece_bytes, stop)
    return job.file


def _compare(name: str, source: RowReader, target: RowReader, most_bytes: int, stop: StopFlag | None) -> None:
    if source.shape(name) != target.shape(name):
        raise CheckpointError(f"{name}: shape {target.shape(name)} was written, {source.shape(name)} is the source's")
    dtype = target.dtype(name)
    for start, end in windows(source.shape(name), source.dtype(name), most_bytes):
        if stop is not None and stop.is_set():
            raise StoppedError
        expected, actual = source.read(name, start, end).to(dtype), target.read(name, start, end)
        if not torch.equal(expected.reshape(-1).view(torch.uint8), actual.reshape(-1).view(torch.uint8)):
            raise CheckpointError(
                f"{name}: rows {start} to {end} are not what the source has; a disk or a memory fault, or the source "
                "changed meanwhile. Convert again"
            )


def _forget(path: Path) -> None:
    """Let the system drop its copy of a file, so that the disk is read."""
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


HF_FOLDER = "hf"
"""In a converted Megatron checkpoint: config.json and the tokenizer of the model."""
_POLL_S = 0.2

R = TypeVar("R")

Progress = Callable[[str, int], None]
"""Told of what is being done ("converting" or "verifying") and of how many bytes of it are done."""


def convert(
    plan: Plan,
    out: Path,
    *,
    processes: int,
    verify: bool,
    progress: Progress,
    last_check: Callable[[Path], None] | None = None,
) -> Card:
    """Carry out a plan.

    Args:
        plan: from `convert.plan`. out: a directory that does not exist or is empty. processes: at least 1; 1: this
            one. verify: read everything again and compare it with the source. progress: called a few times a second.
        last_check: called with the folder of the complete checkpoint before it gets the name `out`; what it raises
            passes through, and there is no `out` then.

    Returns:
        The card, which is also in the target (`conversion.json`).

    Raises:
        ModelError, CheckpointError: the source is torn, the target cannot be made or is not what the source is; its
            name does not exist then.
        KeyboardInterrupt: what is complete stays for the next run.
    """
    target = replaceable(out)
    _check_space(plan, target)
    try:
        with Partial(target, plan) as partial:
            earlier = sorted(partial.done)
            folder = weights_folder(partial.folder, plan)
            folder.mkdir(exist_ok=True)
            _run(plan, [job for job in plan.jobs if job.file not in partial.done], folder, processes, progress, partial)
            records = [partial.done[job.file] for job in plan.jobs]
            _finish(plan, records, partial.folder)
            again = [job.file for job in plan.jobs if verify or job.file in earlier]
            if again:
                _verify(plan, again, partial, processes, progress)
            card = make_card(plan, records, verified=again)
            durable.write(partial.folder / CARD_FILE, json.dumps(card.as_json(), indent=1))
            if last_check is not None:
                last_check(partial.folder)
            partial.publish()
    except OSError as error:
        cause, advice = disk_fault(error, target.parent)
        advice = advice.replace("and --resume", "and run the same command again: what is complete is kept beside it")
        raise ModelError(f"{target} was not written: {cause}; {advice}") from error
    return card


def weights_folder(root: Path, plan: Plan) -> Path:
    """Return where in a target the files with tensors are."""
    return root / torch_dist.RELEASE if plan.format == torch_dist.BACKEND else root


def _check_space(plan: Plan, target: Path) -> None:
    parent = next(path for path in target.parents if path.is_dir())  # the files are written beside the target
    space = os.statvfs(parent)
    free = space.f_bavail * space.f_frsize
    kept = sum(p.stat().st_size for p in target.parent.glob(f".{target.name}.partial/**/*") if p.is_file())
    if plan.num_bytes > free + kept:
        raise ModelError(
            f"{target} needs {plan.num_bytes / 1e9:.1f} GB, and {parent} has {free / 1e9:.1f} GB free. Free disk "
            "space or choose another --out; nothing was written."
        )


def _run(plan: Plan, jobs: Sequence[Job], folder: Path, processes: int, progress: Progress, partial: Partial) -> None:
    def done_bytes() -> int:
        stats = [path.stat() for path in folder.iterdir() if path.is_file()]
        return sum(min(stat.st_size, stat.st_blocks * 512) for stat in stats)  # parts of a file come in any order

    parts = {job.file: job.parts(PART_BYTES) for job in jobs}
    tasks = [(plan, part, folder) for job in jobs for part in parts[job.file]]
    written: dict[str, list[FileRecord]] = {}
    with closing(_each(write_file, tasks, processes, lambda: progress("converting", done_bytes()))) as records:
        for record in records:
            written.setdefault(record.file, []).append(record)
            if len(written[record.file]) == len(parts[record.file]):
                partial.note(joined(written[record.file], (folder / record.file).stat().st_size))
    progress("converting", plan.num_bytes)


def _verify(plan: Plan, files: Sequence[str], partial: Partial, processes: int, progress: Progress) -> None:
    """Compare files with the source. Raises CheckpointError that names the first tensor that differs; the next run
    writes every file again that was not found equal."""
    left = {job.file: job for job in plan.jobs if job.file in set(files)}
    all_bytes = sum(job.num_bytes for job in left.values())

    def tick() -> None:
        progress("verifying", all_bytes - sum(job.num_bytes for job in left.values()))

    tasks = [(plan, job, partial.folder) for job in left.values()]
    try:
        with closing(_each(compare_file, tasks, processes, tick)) as compared:
            for file in compared:
                del left[file]
    except CheckpointError:
        for file in left:
            partial.forget(file)
        raise
    tick()


def _finish(plan: Plan, records: Sequence[FileRecord], root: Path) -> None:
    """Write what makes the files a checkpoint: the index, and the model's own small files."""
    folder = weights_folder(root, plan)
    if plan.format == "hf":
        weight_map = {tensor.name: record.file for record in records for tensor in record.hf}
        write_index(folder, weight_map, plan.num_bytes)
        copy_model_files(plan.config, root, _written_dtype(records))
        durable.sync_folder(folder)
        return
    if plan.format == "daro":
        daro_format.write_index(folder, [shard for record in records for shard in record.shards])
        daro_format.write_metadata(folder)
        torch.save({}, folder / daro_format.COMMON_FILE)
    else:
        blobs = [blob for record in records for blob in record.blobs]
        torch_dist.write_metadata(folder, [*blobs, *torch_dist.write_extra_states(folder, blobs)])
        (root / torch_dist.TRACKER_FILE).write_text(torch_dist.RELEASE)
    (root / HF_FOLDER).mkdir(exist_ok=True)
    copy_model_files(plan.config, root / HF_FOLDER, None)
    for path in {folder, root, root / HF_FOLDER}:
        for file in path.iterdir():
            if file.is_file():
                durable.sync(file)


def _written_dtype(records: Iterable[FileRecord]) -> str | None:
    """Return the dtype of all tensors; None where they have several."""
    dtypes = {tensor.dtype for record in records for tensor in record.hf}
    return dtypes.pop() if len(dtypes) == 1 else None


def _each(
    function: Callable[..., R], tasks: Sequence[tuple[Plan, Job, Path]], processes: int, tick: Callable[[], None]
) -> Generator[R, None, None]:
    """Return the results as they come. With one process, in this one."""
    if processes == 1 or len(tasks) < 2:
        for task in tasks:
            tick()
            yield function(*task)
        return
    use_own_sockets()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    stop = context.Event()
    pool = ProcessPoolExecutor(min(processes, len(tasks)), context, initializer=_start_worker, initargs=(stop,))
    try:
        with _interruptible() as interrupted:
            waiting: set[Future[R]] = {pool.submit(_call, function, task) for task in tasks}
            while waiting and not interrupted.is_set():
                done, waiting = wait(waiting, timeout=_POLL_S, return_when=FIRST_COMPLETED)
                tick()
                for future in done:
                    yield future.result()
        if interrupted.is_set():
            raise KeyboardInterrupt
    except (BrokenProcessPool, EOFError, ConnectionError):  # the last two where the process that starts them is gone
        raise ModelError(
            "a conversion process, or the fork server that starts them, was killed (out of memory?); run again with "
            "fewer --processes: what is complete is kept"
        ) from None
    finally:
        stop.set()
        pool.shutdown(wait=True, cancel_futures=True)


@contextmanager
def _interruptible() -> Iterator[threading.Event]:
    """Turn the first Ctrl-C into a flag: an exception in the middle of the pool's own code could leave it locked."""
    flag = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield flag
        return
    before = signal.getsignal(signal.SIGINT)

    def note(*_: object) -> None:
        flag.set()
        signal.signal(signal.SIGINT, before)  # the second one ends at once

    signal.signal(signal.SIGINT, note)
    try:
        yield flag
    finally:
        signal.signal(signal.SIGINT, before)


class _Worker:
    """What a worker process was started with."""

    stop: StopFlag | None = None


def _start_worker(stop: StopFlag) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the first process decides
    torch.set_num_threads(1)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _Worker.stop = stop


def _end_with_parent() -> None:
    """End this worker when its first process was killed: it would wait for work for ever."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _call(function: Callable[..., R], task: tuple[object, ...]) -> R:
    return function(*task, _Worker.stop)
