"""A whole conversion: the plan's files written by several processes, then index, check and card, then one rename.

Place in the data flow: `megatron-daro convert` calls `convert`; the files are written by `convert.jobs`. A target
appears whole or not at all; what an interrupted run wrote is kept beside it and taken up by the next run of the same
plan, which compares the files that it finds with the source before it trusts them.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TypeVar

import torch

from megatron_daro import durable
from megatron_daro.convert import daro_format, torch_dist
from megatron_daro.convert.card import CARD_FILE, Card, make_card
from megatron_daro.convert.compare import compare_file
from megatron_daro.convert.hf_writer import copy_model_files, write_index
from megatron_daro.convert.jobs import FileRecord, StopFlag, joined, write_file
from megatron_daro.convert.plan import PART_BYTES, Job, Plan
from megatron_daro.convert.progress_files import Partial
from megatron_daro.errors import ModelError, disk_fault

HF_FOLDER = "hf"
"""In a converted Megatron checkpoint: config.json and the tokenizer of the model."""
_POLL_S = 0.2

R = TypeVar("R")

Progress = Callable[[str, int], None]
"""Told of what is being done ("converting" or "verifying") and of how many bytes of it are done."""


def convert(plan: Plan, target: Path, *, processes: int, verify: bool, progress: Progress) -> Card:
    """Carry out a plan.

    Args:
        plan: from `convert.plan`. target: a directory that does not exist or is empty. processes: at least 1; 1: this
            one. verify: read everything again and compare it with the source. progress: called a few times a second.

    Returns:
        The card, which is also in the target (`conversion.json`).

    Raises:
        ModelError, CheckpointError: the source is torn or the target cannot be made; its name does not exist then.
        KeyboardInterrupt: what is complete stays for the next run.
    """
    _check_space(plan, target)
    try:
        with Partial(target, plan) as partial:
            found = sorted(partial.done)
            folder = weights_folder(partial.folder, plan)
            folder.mkdir(exist_ok=True)
            _run(plan, [job for job in plan.jobs if job.file not in partial.done], folder, processes, progress, partial)
            records = [partial.done[job.file] for job in plan.jobs]
            _finish(plan, records, partial.folder)
            again = [job.file for job in plan.jobs if verify or job.file in found]
            if again:
                _verify(plan, again, partial.folder, processes, progress)
            card = make_card(plan, records, verified=again)
            durable.write(partial.folder / CARD_FILE, json.dumps(card.as_json(), indent=1))
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
    parent = next(path for path in (target, *target.parents) if path.is_dir())
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
    found: dict[str, list[FileRecord]] = {}
    with closing(_each(write_file, tasks, processes, lambda: progress("converting", done_bytes()))) as records:
        for record in records:
            found.setdefault(record.file, []).append(record)
            if len(found[record.file]) == len(parts[record.file]):
                partial.note(joined(found[record.file], (folder / record.file).stat().st_size))
    progress("converting", plan.num_bytes)


def _verify(plan: Plan, files: Sequence[str], root: Path, processes: int, progress: Progress) -> None:
    """Compare files with the source. Raises CheckpointError that names the first tensor that differs."""
    sizes = {job.file: job.num_bytes for job in plan.jobs}
    chosen = [job for job in plan.jobs if job.file in set(files)]
    done: list[int] = []
    tasks = [(plan, job, root) for job in chosen]
    with closing(_each(compare_file, tasks, processes, lambda: progress("verifying", sum(done)))) as compared:
        for file in compared:
            done.append(sizes[file])
    progress("verifying", sum(done))


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
    found = {tensor.dtype for record in records for tensor in record.hf}
    return found.pop() if len(found) == 1 else None


def _each(
    function: Callable[..., R], tasks: Sequence[tuple[Plan, Job, Path]], processes: int, tick: Callable[[], None]
) -> Generator[R, None, None]:
    """Return the results as they come. With one process, in this one."""
    if processes == 1 or len(tasks) < 2:
        for task in tasks:
            tick()
            yield function(*task)
        return
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
    except BrokenProcessPool:
        raise ModelError("a conversion process was killed (out of memory?); run again with fewer --processes") from None
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
