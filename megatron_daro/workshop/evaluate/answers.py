"""The answers of an evaluation on disk.

Verified answers -> OUT/answers/part_N.parquet (rollout/group_columns.py says what a row holds; `source` is the set) ->
what is still to be asked, scores, the comparison page. The first part is written after a few seconds and later parts at
longer intervals, so that a long evaluation has hundreds of parts and not thousands.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from megatron_daro.errors import DataError
from megatron_daro.rollout.group_columns import RecordedGroup
from megatron_daro.rollout.recorder import write_groups
from megatron_daro.types import Group, Prompt, Rollout, Verdict

FOLDER = "answers"
_FIRST_FLUSH_S = 2.0
_FLUSHES = 100
_ROWS_AT_ONCE = 256

Key = tuple[int, int]
"""(group id, index): one answer."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer with its verdict."""

    prompt: Prompt
    rollout: Rollout
    verdict: Verdict


class AnswerStore:
    """Writes the answers of one evaluation. `write` may run in any thread, all else in that of the event loop."""

    def __init__(self, out: Path) -> None:
        """Continue after the parts that exist, and remove files that a crash left half written. Args: out: directory of
        the evaluation, which no other process writes to."""
        self._folder = out / FOLDER
        for torn in self._folder.glob("*.tmp"):
            torn.unlink()
        self._parts = 1 + max((int(path.stem.partition("_")[2]) for path in part_files(out)), default=-1)
        self._waiting: list[Answer] = []
        self._one_part = threading.Lock()
        self._began = self._flushed = time.monotonic()
        self.written = 0

    def add(self, answer: Answer) -> None:
        """Keep an answer; it is on disk after the next `flush`."""
        self._waiting.append(answer)

    @property
    def due(self) -> bool:
        """Whether it is time to flush: at first every two seconds, later at intervals of 1 % of the time so far."""
        now = time.monotonic()
        pause_s = max(_FIRST_FLUSH_S, (now - self._began) / _FLUSHES)
        return bool(self._waiting) and now - self._flushed >= pause_s

    def take(self) -> list[Answer]:
        """Remove and return the waiting answers, to be passed to `write`, which may run in another thread."""
        waiting, self._waiting = self._waiting, []
        self._flushed = time.monotonic()
        return waiting

    def write(self, answers: Sequence[Answer]) -> None:
        """Write one part, which is on disk when this returns. Raises DataError if the disk refuses it."""
        if not answers:
            return
        of_group: dict[int, list[Answer]] = defaultdict(list)
        for answer in answers:
            of_group[answer.rollout.group_id].append(answer)
        groups = (
            RecordedGroup(
                Group(group_id, some[0].prompt, tuple(a.rollout for a in some), tuple(a.verdict for a in some))
            )
            for group_id, some in of_group.items()
        )
        with self._one_part:
            write_groups(self._folder / f"part_{self._parts:06d}.parquet", groups)
            self._parts += 1
            self.written += len(answers)

    def flush(self) -> None:
        """Write the waiting answers."""
        self.write(self.take())


def part_files(out: Path) -> list[Path]:
    """Return the parts in order."""
    return sorted((out / FOLDER).glob("part_*.parquet"))


def kept(out: Path) -> set[Key]:
    """Return which answers are on disk. Raises DataError if a part cannot be read."""
    return {(row["group_id"], row["index"]) for row in rows(out, ("group_id", "index"))}


def rows(out: Path, columns: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield every answer once, in the order in which they were written, as a mapping of these columns.

    Raises:
        DataError: a part is torn or is no file of answers; the message names it.
    """
    seen: set[Key] = set()
    wanted = list(dict.fromkeys((*columns, "group_id", "index")))
    for path in part_files(out):
        try:
            with pq.ParquetFile(path, page_checksum_verification=True) as file:
                for batch in file.iter_batches(_ROWS_AT_ONCE, columns=wanted):
                    for row in batch.to_pylist():
                        key = (row["group_id"], row["index"])
                        if key not in seen:
                            seen.add(key)
                            yield row
        except (OSError, pa.ArrowException, ValueError, KeyError) as error:
            raise DataError(
                f"{path}: the answers cannot be read ({error}); remove this file: the same command asks again for what "
                "it held"
            ) from error
