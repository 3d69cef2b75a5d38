"""Experts that a server chose for the tokens of an answer (routing replay), kept in files of the run directory.

The process that takes an answer from a server writes them to RUN/experts; a rollout, its record and the batch carry
only a reference, a hundred bytes; a rank reads the experts of a micro-batch when it packs it. So they never pass
through the driver: for 48 layers with 8 experts per token they take 384 bytes per token, a hundred times as much as the
token itself.

A file is one answer's array in numpy's own format, one byte per expert if all are below 256. It is never unpickled.
"""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from megatron_daro import durable
from megatron_daro.errors import DataError, disk_fault

FOLDER = "experts"
"""Below the run directory; it has a folder for each group of rollouts, a thousand of these per parent folder."""
_GROUPS_OF_A_FOLDER = 1000


@dataclass(frozen=True, slots=True)
class Part:
    """Rows [first, first + rows) of a file."""

    path: str
    first: int
    rows: int


@dataclass(frozen=True, slots=True)
class StoredExperts:
    """References to the files that hold the experts of one rollout's tokens.

    parts: the rows of the first tokens, in order. shape: (tokens, layers, experts per token). The experts of tokens
    beyond the parts are not known: of the last one, which no server reads, and of an environment's tokens after the
    last answer.
    """

    parts: tuple[Part, ...]
    shape: tuple[int, int, int]

    def __len__(self) -> int:
        return self.shape[0]

    def read(self) -> np.ndarray:
        """Return int16 `shape`, -1 where experts are not known. Raises DataError: a file is gone, or does not fit."""
        out = np.full(self.shape, -1, dtype=np.int16)
        at = 0
        for part in self.parts:
            out[at : at + part.rows] = _rows(part, self.shape[1:])
            at += part.rows
        return out

    @property
    def is_there(self) -> bool:
        """Whether all of its files exist."""
        return all(Path(part.path).is_file() for part in self.parts)

    def longer(self, tokens: int) -> StoredExperts:
        """Return the same with `tokens` more tokens at the end, whose experts are not known."""
        return replace(self, shape=(self.shape[0] + tokens, *self.shape[1:]))

    def cut(self, tokens: int) -> StoredExperts:
        """Return the experts of the first `tokens` tokens; those of the last one are not known."""
        kept, room = [], tokens - 1
        for part in self.parts:
            rows = min(part.rows, room)
            room -= rows
            kept += [replace(part, rows=rows)] if rows else []
        return StoredExperts(tuple(kept), (tokens, *self.shape[1:]))

    def continued(self, later: StoredExperts) -> StoredExperts:
        """Return the experts of a continued rollout: each token keeps those chosen when it was first read.

        Args:
            later: the experts of all tokens, the first of which were read again.
        """
        known = sum(part.rows for part in self.parts)
        return replace(later, parts=(*self.parts, *_after(later.parts, known)))


def _after(parts: Iterable[Part], rows: int) -> tuple[Part, ...]:
    """Return the parts without their first rows."""
    kept = []
    for part in parts:
        left_out = min(rows, part.rows)
        rows -= left_out
        if left_out < part.rows:
            kept.append(Part(part.path, part.first + left_out, part.rows - left_out))
    return tuple(kept)


def _rows(part: Part, shape: tuple[int, int]) -> np.ndarray:
    try:
        stored = np.load(part.path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise DataError(
            f"{part.path}: routed experts cannot be read: {error}; allowed: a file that this run wrote, which every "
            "rank sees; put trainer.run_dir on a disk that all nodes share, or bring the file back"
        ) from error
    rows = stored[part.first : part.first + part.rows]
    if rows.dtype not in (np.uint8, np.int16) or rows.shape != (part.rows, *shape):
        raise DataError(
            f"{part.path}: routed experts are {stored.dtype} {stored.shape}; wanted: rows {part.first} to "
            f"{part.first + part.rows} of (layers, experts of a token) {shape} as uint8 or int16; it is another file"
        )
    return rows


class ExpertsFolder:
    """RUN/experts of a run, which answer workers of all nodes write to."""

    def __init__(self, run_dir: Path) -> None:
        """Make nothing. Args: run_dir: the run directory, on a disk that every node sees."""
        self.path = Path(run_dir).absolute() / FOLDER

    def store(self, key: tuple[int, int, int], experts_TLK: np.ndarray, tokens: int) -> StoredExperts:
        """Write the experts of an answer; they are on the disk when this returns.

        Args:
            key: group id, attempt and index of the rollout. Each call writes a file of its own: an answer that comes
                late cannot change those of another one.
            experts_TLK: integers [rows, layers, experts per token], of the first tokens of the rollout.
            tokens: number of tokens of the whole rollout.

        Raises:
            DataError: the disk refused.
        """
        group_id, attempt, index = key
        folder = self._group(group_id)
        path = folder / f"{attempt}_{index}_{uuid.uuid4().hex[:12]}.npy"
        one_byte = experts_TLK.size == 0 or 0 <= int(experts_TLK.min()) <= int(experts_TLK.max()) <= 255
        try:
            folder.mkdir(parents=True, exist_ok=True)
            np.save(path, experts_TLK.astype(np.uint8 if one_byte else np.int16), allow_pickle=False)
            durable.sync(path)
            durable.sync(folder)
        except OSError as error:
            path.unlink(missing_ok=True)
            cause, advice = disk_fault(error, self.path.parent)
            raise DataError(f"{path}: routed experts could not be written: {cause}; {advice}") from error
        rows, layers, chosen = experts_TLK.shape
        return StoredExperts((Part(str(path), 0, rows),), (tokens, layers, chosen))

    def settle(self, groups: Mapping[int, tuple[StoredExperts | None, ...]]) -> None:
        """Remove the files of groups that will not be trained any more.

        Args:
            groups: group id -> the experts of the group that are kept: those of its recorded rollouts, or none.
        """
        for group_id, kept in groups.items():
            folder = self._group(group_id)
            names = {part.path for experts in kept if experts for part in experts.parts}
            if not names:
                shutil.rmtree(folder, ignore_errors=True)
                continue
            for path in folder.glob("*"):
                if str(path) not in names:
                    path.unlink(missing_ok=True)

    def _group(self, group_id: int) -> Path:
        return self.path / f"{group_id // _GROUPS_OF_A_FOLDER:06d}" / str(group_id)
