"""A whole conversion: files written by several processes, then index, verification and card, then one rename.

    plan -> write_file for each job -> index and the model's small files -> compare_file -> card -> the target's name
            (`jobs`)                                                       (`comparison`)  (`card`)  (`partial`)

The target appears whole or not at all. An interrupted run leaves its folder beside the target; the next run of the same
plan compares the files in it with the source before it trusts them, and continues. `--verify` reads every HF tensor
back from both sides and compares bytes; a Megatron checkpoint is read by the same code that starts a run from it, so a
wrong slice, name or cast shows, whoever wrote it. Rejects a target that is not empty or cannot be replaced by a rename,
and a second conversion into the same target.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from pathlib import Path

import torch

from megatron_daro import durable
from megatron_daro.convert import daro_format, torch_dist
from megatron_daro.convert.hf_files import HFCheckpoint, copy_model_files, write_index
from megatron_daro.convert.plan import FURTHER_FILE, PART_BYTES, HFTensor, Job, Plan
from megatron_daro.convert.safetensors_file import FileWriter
from megatron_daro.errors import CheckpointError, ModelError, disk_fault
from megatron_daro.workshop.convert.card import CARD_FILE, Card, make_card
from megatron_daro.workshop.convert.comparison import compare_file
from megatron_daro.workshop.convert.jobs import write_file
from megatron_daro.workshop.convert.partial import Partial, replaceable
from megatron_daro.workshop.convert.processes import results_of
from megatron_daro.workshop.convert.records import FileRecord, joined
from megatron_daro.workshop.convert.rows import windows

HF_FOLDER = "hf"
"""In a converted Megatron checkpoint: config.json and the tokenizer of the model."""
Progress = Callable[[str, int], None]
"""Called with what is being done ("converting" or "verifying") and how many bytes of it are done."""


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
        plan: from `convert.plan`. out: a directory that does not exist or is empty. processes: at least 1; 1 means this
            one. verify: read everything again and compare it with the source. progress: called a few times a second.
        last_check: called with the folder of the complete checkpoint before it gets the name `out`; what it raises
            passes through, and `out` is then not made.

    Returns:
        The card, which is also in the target (`conversion.json`).

    Raises:
        ConfigError: the target is not empty, or cannot be made there; nothing was written.
        ModelError, CheckpointError: the source is torn, or the target differs from it; `out` then does not exist.
        KeyboardInterrupt: complete files stay for the next run.
    """
    target = replaceable(out)
    _check_space(plan, target)
    try:
        with Partial(target, plan) as partial:
            earlier = sorted(partial.done)
            folder = plan.weights_folder(partial.folder)
            folder.mkdir(exist_ok=True)
            _write_files(
                plan, [job for job in plan.jobs if job.file not in partial.done], folder, processes, progress, partial
            )
            records = [partial.done[job.file] for job in plan.jobs]
            _complete(plan, records, partial.folder)
            again = [job.file for job in plan.jobs if verify or job.file in earlier]
            if again:
                _verify(plan, again, partial, processes, progress)
            card = make_card(plan, records, verified=again)
            durable.write(partial.folder / CARD_FILE, json.dumps(card.as_json(), indent=1))
            if last_check is not None:
                last_check(partial.folder)
            partial.publish()
    except OSError as error:
        then = "run the same command again: what is complete is kept beside it"
        cause, advice = disk_fault(error, target.parent, then)
        raise ModelError(f"{target} was not written: {cause}; {advice}") from error
    return card


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


def _write_files(
    plan: Plan, jobs: Sequence[Job], folder: Path, processes: int, progress: Progress, partial: Partial
) -> None:
    def done_bytes() -> int:
        stats = [path.stat() for path in folder.iterdir() if path.is_file()]
        return sum(min(stat.st_size, stat.st_blocks * 512) for stat in stats)  # a file's parts are written in any order

    parts = {job.file: job.parts(PART_BYTES) for job in jobs}
    tasks = [(part, folder) for job in jobs for part in parts[job.file]]
    written: dict[str, list[FileRecord]] = {}
    with closing(
        results_of(write_file, plan, tasks, processes, lambda: progress("converting", done_bytes()))
    ) as records:
        for record in records:
            written.setdefault(record.file, []).append(record)
            if len(written[record.file]) == len(parts[record.file]):
                partial.note(joined(written[record.file], (folder / record.file).stat().st_size))
    progress("converting", plan.num_bytes)


def _verify(plan: Plan, files: Sequence[str], partial: Partial, processes: int, progress: Progress) -> None:
    """Compare files with the source. Raises CheckpointError that names the first tensor that differs; the next run
    rewrites every file that was not found equal."""
    left = {job.file: job for job in plan.jobs if job.file in set(files)}
    all_bytes = sum(job.num_bytes for job in left.values())

    def tick() -> None:
        progress("verifying", all_bytes - sum(job.num_bytes for job in left.values()))

    tasks = [(job, partial.folder) for job in left.values()]
    try:
        with closing(results_of(compare_file, plan, tasks, processes, tick)) as compared:
            for file in compared:
                del left[file]
    except CheckpointError:
        for file in left:
            partial.forget(file)
        raise
    tick()


def _complete(plan: Plan, records: Sequence[FileRecord], root: Path) -> None:
    """Write what makes the files a checkpoint: the index, and the model's own small files."""
    folder = plan.weights_folder(root)
    if plan.format == "hf":
        weight_map = {item.name: job.file for job in plan.jobs for item in job.items if isinstance(item, HFTensor)}
        further = dict.fromkeys(_keep_further_layers(plan, root), FURTHER_FILE)
        size = (root / FURTHER_FILE).stat().st_size if further else 0
        write_index(folder, weight_map | further, plan.num_bytes + size)
        copy_model_files(plan.config, root, _written_dtype(records), further_layers=bool(further))
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
    _keep_further_layers(plan, root / HF_FOLDER)
    for path in {folder, root, root / HF_FOLDER}:
        for file in path.iterdir():
            if file.is_file():
                durable.sync(file)


def _keep_further_layers(plan: Plan, folder: Path) -> list[str]:
    """Write the tensors of `Plan.further` into a folder, unchanged, and return their names."""
    names = plan.further()
    if names and plan.source_format == "hf":
        with HFCheckpoint(plan.source) as source:
            header = [(name, source.dtype(name), source.shape(name)) for name in names]
            with FileWriter(folder / FURTHER_FILE, header, metadata={"format": "pt"}) as writer:
                for name, dtype, shape in header:
                    for start, stop in windows(shape, dtype, plan.piece_bytes):
                        writer.write(source.read(name, start, stop))
    elif names and isinstance(plan.config, Path):
        shutil.copyfile(plan.config / FURTHER_FILE, folder / FURTHER_FILE)
    return names


def _written_dtype(records: Iterable[FileRecord]) -> str | None:
    """Return the dtype of all matrices; None where they have several. Vectors may differ: a router's bias is fp32."""
    dtypes = {tensor.dtype for record in records for tensor in record.hf if len(tensor.shape) > 1}
    return dtypes.pop() if len(dtypes) == 1 else None
