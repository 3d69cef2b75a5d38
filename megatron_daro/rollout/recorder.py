"""Recorded rollouts: one Parquet file per optimizer step, enough to train again without engines.

The controller writes the groups of each step under RUN/rollouts, and the sampler those of an untrainable batch; the
report shows them, and a replay reads them back. A checkpoint has such a file with the groups that wait, which a resume
reads. Files are written whole or not at all, and are on disk when a call returns. group_columns.py defines their
content. Damaged files are refused, and nothing is unpickled.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from megatron_daro import durable
from megatron_daro.errors import DataError, disk_fault
from megatron_daro.rollout.group_columns import FORMAT, SCHEMA, WRITER_OPTIONS, RecordedGroup, blocks, decode
from megatron_daro.rollout.ledger import OUTCOMES, Outcome
from megatron_daro.types import Group

WAITING_FILE = "waiting.parquet"
"""In a checkpoint: the groups that wait for the next batch; absent if none does."""
MINIBATCH = "megatron_daro.minibatch"
"""In the metadata of a step's file: its `RecordedMiniBatch` as JSON."""
_STEP_FILE = re.compile(r"step_(\d{6,})\.parquet")
_UNTRAINABLE_FILE = re.compile(r"untrainable_(\d{6,})\.parquet")


@dataclass(frozen=True, slots=True)
class RecordedMiniBatch:
    """What a recorded optimizer step was made of.

    step: its number. first_step: the number of its batch's first step. epoch: of the batch, from 1. group_ids: of its
    mini-batch, in order; each group is in the file of the first step that trained it, or of its last step if none did.
    applied: whether the step was taken, and not skipped.
    """

    step: int
    first_step: int
    epoch: int
    group_ids: tuple[int, ...]
    applied: bool


class Recorder:
    """Writes a run's rollouts. After a crash it can simply be created again."""

    def __init__(self, run_dir: Path) -> None:
        """Args: run_dir: the run directory."""
        self._run_dir = Path(run_dir).absolute()

    def write_step(self, step: int, groups: Mapping[Outcome, Sequence[Group]], minibatch: RecordedMiniBatch) -> Path:
        """Write RUN/rollouts/step_{step}.parquet, replacing the file of an earlier try; on disk when this returns.

        Groups of untrainable batches that were sampled on the way to this step are among its groups, so the files of
        these batches are removed.

        Args:
            step: optimizer step.
            groups: outcome -> groups that no earlier step has written. The trained ones keep their order.
            minibatch: what the step was made of.

        Raises:
            DataError: the disk refused; no file of that name is left half written.
        """
        path = self._write("rollouts", _file_name(step), groups, minibatch)
        for number, untrainable in _numbered(self._run_dir / "rollouts", _UNTRAINABLE_FILE):
            if number <= step:
                untrainable.unlink()
        return path

    def write_untrainable(self, step: int, groups: Mapping[Outcome, Sequence[Group]]) -> Path:
        """Write what was sampled for `step` so far, none of it trainable, to rollouts/untrainable_{step}.parquet."""
        return self._write("rollouts", f"untrainable_{step:06d}.parquet", groups)

    def write_failed(self, step: int, groups: Sequence[Group]) -> Path:
        """Write the groups of a step that was not finite to RUN/failed, for people to look at."""
        return self._write("failed", _file_name(step), {"dropped": groups})

    def _write(
        self,
        folder: str,
        name: str,
        groups: Mapping[Outcome, Sequence[Group]],
        minibatch: RecordedMiniBatch | None = None,
    ) -> Path:
        metadata = {MINIBATCH: json.dumps(asdict(minibatch))} if minibatch else {}
        path = self._run_dir / folder / name
        return write_groups(path, _recorded(groups), run_dir=self._run_dir, metadata=metadata)

    def truncate_after(self, step: int) -> int:
        """Remove the files of every later step, and what a crash left half written.

        Returns:
            Number of steps removed.
        """
        folder = self._run_dir / "rollouts"
        later = [path for number, path in _step_files(self._run_dir) if number > step]
        untrainable = [path for number, path in _numbered(folder, _UNTRAINABLE_FILE) if number > step]
        for path in [*later, *untrainable, *folder.glob("*.tmp")]:
            path.unlink()
        return len(later)


def recorded_steps(run_dir: Path) -> list[int]:
    """Return the steps that have a file under RUN/rollouts, in order."""
    return sorted(number for number, _ in _step_files(Path(run_dir)))


def step_file(run_dir: Path, step: int) -> Path:
    """Return the file of a recorded step."""
    return Path(run_dir) / "rollouts" / _file_name(step)


def read_step(run_dir: Path, step: int) -> list[tuple[Group, Outcome]]:
    """Return the groups of one step with what became of them: trained ones first, in batch order.

    Raises:
        DataError: the file is missing, torn, or not what `Recorder` writes; names the file and the row.
    """
    return read_groups(step_file(run_dir, step))


def read_minibatch(run_dir: Path, step: int) -> RecordedMiniBatch:
    """Return what a recorded step was made of, from the end of its file alone.

    Raises:
        DataError: as `read_step`.
    """
    path = step_file(run_dir, step)
    with _reading(path):
        text = (pq.read_metadata(path).metadata or {}).get(MINIBATCH.encode())
        if text is None:
            raise ValueError(f"its metadata has no {MINIBATCH}")
        return _minibatch(json.loads(text), step)


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Turn what reading raises into a DataError that names the file: missing, torn or not what `Recorder` writes."""
    try:
        yield
    except (OSError, pa.ArrowException, ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{path}: cannot be read: {error}; restore the file, or use another run or checkpoint"
        ) from error


def _minibatch(values: Mapping[str, Any], step: int) -> RecordedMiniBatch:
    minibatch = RecordedMiniBatch(**{**values, "group_ids": tuple(values["group_ids"])})
    numbers = (minibatch.step, minibatch.first_step, minibatch.epoch, *minibatch.group_ids)
    if (
        minibatch.step != step
        or any(type(number) is not int for number in numbers)
        or type(minibatch.applied) is not bool
    ):
        raise ValueError(f"its metadata {MINIBATCH} is {dict(values)}, which is no record of step {step}")
    return minibatch


def read_groups(path: Path) -> list[tuple[Group, Outcome]]:
    """Return the groups of one recorded file. Raises DataError as `read_step` does."""
    entries = read_recorded(path)
    if any(entry.used is None or entry.partial for entry in entries):
        raise DataError(f"{path}: holds groups that still wait, as a checkpoint does; give a file of RUN/rollouts")
    return [(entry.group, entry.used) for entry in entries if entry.used is not None]


def read_recorded(path: Path) -> list[RecordedGroup]:
    """Return what `write_groups` wrote. Raises DataError as `read_step` does."""
    path = Path(path).absolute()
    run_dir = path.parent.parent if path.name != WAITING_FILE else _run_of(path.parent)
    with _reading(path), pq.ParquetFile(path, page_checksum_verification=True) as file:
        _check_format(file.metadata.metadata, file.schema_arrow)
        tables = (file.read_row_group(i, columns=SCHEMA.names) for i in range(file.num_row_groups))
        return list(decode((batch for table in tables for batch in table.to_batches()), run_dir))


def read_waiting(checkpoint: Path) -> list[RecordedGroup]:
    """Return the groups that wait in a checkpoint. Raises DataError as `read_step` does."""
    path = checkpoint / WAITING_FILE
    return read_recorded(path) if path.exists() else []


def write_waiting(checkpoint: Path, groups: Sequence[RecordedGroup]) -> None:
    """Write the groups that wait into a checkpoint, if there are any. Raises DataError as `write_groups` does."""
    if groups:
        write_groups(checkpoint / WAITING_FILE, groups, run_dir=_run_of(checkpoint))


def _run_of(checkpoint: Path) -> Path:
    """Return the run directory of RUN/checkpoints/NAME."""
    return checkpoint.absolute().parent.parent


def write_groups(
    path: Path,
    groups: Iterable[RecordedGroup],
    *,
    run_dir: Path | None = None,
    metadata: Mapping[str, str] | None = None,
) -> Path:
    """Write groups as one Parquet file: to a temporary file beside it, synced, then renamed.

    Args:
        run_dir: files of experts inside it are named relative to it. metadata: of the file, besides FORMAT.

    Raises:
        DataError: the disk refused; what stood at `path` before is untouched.
    """
    temporary = path.with_name(path.name + ".tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            _write(temporary, groups, run_dir, metadata or {})
            temporary.replace(path)
            durable.sync(path.parent)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
    except OSError as error:
        cause, advice = disk_fault(error, run_dir or path.parent)
        raise DataError(f"{path}: rollouts could not be written: {cause}; {advice}") from error
    return path


def _write(path: Path, groups: Iterable[RecordedGroup], run_dir: Path | None, metadata: Mapping[str, str]) -> None:
    """Write through a file of pyarrow's, not of Python's, since that writes without the interpreter's lock."""
    with pa.OSFile(str(path), "wb") as sink:
        writer = pq.ParquetWriter(sink, SCHEMA, **WRITER_OPTIONS)
        try:
            for block in blocks(groups, run_dir=run_dir):
                writer.write_batch(block)
            writer.add_key_value_metadata({**FORMAT, **metadata})
        except BaseException:
            with suppress(OSError):  # Closing writes the footer, which the same full disk refuses again.
                writer.close()
            raise
        writer.close()
    durable.sync(path)


def _check_format(metadata: Mapping[bytes, bytes] | None, schema: pa.Schema) -> None:
    recorded_format = {
        name: (metadata or {}).get(name.encode(), b"nothing").decode(errors="replace") for name in FORMAT
    }
    if recorded_format != FORMAT:
        raise ValueError(f"it is no file of recorded rollouts: its metadata says {recorded_format}, expected {FORMAT}")
    for field in SCHEMA:
        number = schema.get_field_index(field.name)
        if number < 0 or schema.field(number).type != field.type:
            got = "is missing" if number < 0 else f"is {schema.field(number).type}"
            raise ValueError(f"column {field.name} {got}; expected {field.type}")


def _recorded(groups: Mapping[Outcome, Sequence[Group]]) -> Iterator[RecordedGroup]:
    return (RecordedGroup(group, outcome) for outcome in OUTCOMES for group in groups.get(outcome, ()))


def _file_name(step: int) -> str:
    return f"step_{step:06d}.parquet"


def _step_files(run_dir: Path) -> list[tuple[int, Path]]:
    return _numbered(run_dir / "rollouts", _STEP_FILE)


def _numbered(folder: Path, name: re.Pattern[str]) -> list[tuple[int, Path]]:
    """Return the files of a folder whose names match, with their numbers, in order."""
    matches = ((name.fullmatch(path.name), path) for path in folder.glob("*"))
    return sorted((int(match.group(1)), path) for match, path in matches if match)
