"""Long-to-short data from recorded rollouts: the shortest right answer of a group, and pairs of it with longer ones.

Rollouts of a run or answers of an evaluation -> one file in TRL's forms: prompt and completion for SFTTrainer
("shortest rejection sampling"), prompt, chosen and rejected for DPOTrainer. Source: Kimi k1.5, arXiv 2501.12599,
section 2.4.

Two passes over the files: the first reads lengths and verdicts, the second the texts that were chosen. Memory holds a
few numbers for each answer, and the texts of groups whose answers have not all been read yet. Rejects files that are
not recorded rollouts, and a target that exists.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

import pyarrow as pa
import pyarrow.parquet as pq

from megatron_daro import durable
from megatron_daro.config.data_file import why_no_file
from megatron_daro.errors import ConfigError, DataError

Kind = Literal["sft", "dpo"]
LONGER = 1.5
"""How many times as long as the shortest right answer another right one must be to be rejected. Source: section 2.4."""
SUFFIXES = (".parquet", ".jsonl")
_LIGHT = ("group_id", "index", "used", "length", "finish_reason", "correct", "turns")
_TEXTS = ("group_id", "index", "prompt_id", "prompt", "messages", "prompt_tokens", "text")
_ROWS_AT_ONCE = 512


@dataclass(frozen=True, slots=True)
class Rules:
    """What is written. kind: sft or dpo. longer: as LONGER. most: pairs of a group; None: all.
    prompt_text: prompt token ids -> the prompt as the policy read it; None: prompts are written as chat messages."""

    kind: Kind = "dpo"
    longer: float = LONGER
    most: int | None = None
    prompt_text: Callable[[Sequence[int]], str] | None = None


@dataclass(slots=True)
class Counts:
    """What was read and written. groups: with answers; without_right: no right answer that ended by itself;
    without_longer: no answer to reject. rows: written. skipped: answers of several turns, or without a verdict.
    chosen_tokens, rejected_tokens: of the answers in the rows."""

    groups: int = 0
    without_right: int = 0
    without_longer: int = 0
    rows: int = 0
    skipped: int = 0
    chosen_tokens: int = 0
    rejected_tokens: int = 0


@dataclass(frozen=True, slots=True)
class _Answer:
    index: int
    length: int
    right: bool
    stopped: bool


def recorded_files(path: Path) -> list[Path]:
    """Return the files of recorded rollouts: of a run (RUN/rollouts), an evaluation (OUT/answers), a folder, or a file.

    Raises:
        DataError: there are none.
    """
    if path.is_file():
        return [path]
    folder = next((path / name for name in ("rollouts", "answers") if (path / name).is_dir()), path)
    files = sorted(folder.glob("*.parquet"))
    if not files:
        raise DataError(
            f"{path}: has no recorded rollouts; allowed: a run directory, one of an evaluation, a folder of their "
            "Parquet files, or one file"
        )
    return files


def shorten(files: Sequence[Path], out: Path, rules: Rules) -> Counts:
    """Write the data.

    Args:
        files: from `recorded_files`. out: not there yet; its suffix chooses the file format. rules: what is written.

    Raises:
        ConfigError: `out` is there, or has another suffix. DataError: a file is torn or of another kind, or there is
            nothing to write.
    """
    if out.suffix not in SUFFIXES:
        raise ConfigError(f"--out: got {str(out)!r}; allowed: a file that ends in {' or '.join(SUFFIXES)}")
    if out.exists():
        raise ConfigError(f"--out: {out} is there already; allowed: a new file; fix: remove it, or name another")
    counts = Counts()
    chosen = _choose(files, rules, counts)
    if not chosen:
        raise DataError(
            f"nothing to write: of {counts.groups} groups {counts.without_right} have no right answer that ended by "
            f"itself, and {counts.without_longer} no longer one that would be rejected"
        )
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary = out.with_name(out.name + ".tmp")
    try:
        with closing(_writer(temporary, out.suffix)) as writer:
            for row in _rows(files, chosen, rules):
                writer.write(row)
                counts.rows += 1
        durable.sync(temporary)
        temporary.replace(out)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return counts


def _choose(files: Sequence[Path], rules: Rules, counts: Counts) -> dict[int, tuple[int, tuple[int, ...]]]:
    """Return group -> (index of the shortest right answer, indices of those it is preferred to; none for sft)."""
    groups: dict[int, list[_Answer]] = defaultdict(list)
    for row in _read(files, _LIGHT):
        if row["used"] == "dropped":
            continue
        if row["correct"] is None or len(row["turns"] or ()) > 1:
            counts.skipped += 1
            continue
        answer = _Answer(row["index"], row["length"], row["correct"], row["finish_reason"] == "stop")
        groups[row["group_id"]].append(answer)
    counts.groups = len(groups)
    chosen = {}
    for group_id, answers in groups.items():
        right = [one for one in answers if one.right and one.stopped]
        if not right:
            counts.without_right += 1
            continue
        best = min(right, key=lambda one: (one.length, one.index))
        longer = _longer(answers, best, rules)
        if rules.kind == "dpo" and not longer:
            counts.without_longer += 1
            continue
        counts.chosen_tokens += best.length * (len(longer) if rules.kind == "dpo" else 1)
        counts.rejected_tokens += sum(one.length for one in longer)
        chosen[group_id] = best.index, tuple(one.index for one in longer)
    return chosen


def _longer(answers: Sequence[_Answer], best: _Answer, rules: Rules) -> list[_Answer]:
    """Return the answers that are rejected: wrong ones that are longer, right ones longer by `rules.longer`."""
    if rules.kind == "sft":
        return []
    longer = [
        one
        for one in answers
        if one.length > best.length and (not one.right or one.length >= rules.longer * best.length)
    ]
    longer.sort(key=lambda one: (-one.length, one.index))
    return longer[: rules.most]


@dataclass(slots=True)
class _Texts:
    """What has been read of a group: its prompt and the texts of the chosen answers."""

    prompt: object = None
    prompt_id: str = ""
    answers: dict[int, str] = field(default_factory=dict)


def _rows(
    files: Sequence[Path], chosen: Mapping[int, tuple[int, tuple[int, ...]]], rules: Rules
) -> Iterator[dict[str, Any]]:
    waiting: dict[int, _Texts] = {}
    for row in _read(files, _TEXTS):
        group_id, index = row["group_id"], row["index"]
        best, longer = chosen.get(group_id, (None, ()))
        if best is None or index not in (best, *longer):
            continue
        texts = waiting.setdefault(group_id, _Texts(_prompt(row, rules), row["prompt_id"]))
        texts.answers[index] = row["text"]
        if len(texts.answers) <= len(longer):
            continue
        del waiting[group_id]
        right = _completion(texts.answers[best], rules)
        if rules.kind == "sft":
            yield {"prompt": texts.prompt, "completion": right, "prompt_id": texts.prompt_id}
        for other in longer:
            wrong = _completion(texts.answers[other], rules)
            yield {"prompt": texts.prompt, "chosen": right, "rejected": wrong, "prompt_id": texts.prompt_id}


def _prompt(row: Mapping[str, Any], rules: Rules) -> object:
    if rules.prompt_text is not None:
        return rules.prompt_text(row["prompt_tokens"])
    return json.loads(row["messages"]) if row["messages"] else [{"role": "user", "content": row["prompt"]}]


def _completion(text: str, rules: Rules) -> object:
    return text if rules.prompt_text is not None else [{"role": "assistant", "content": text}]


def _read(files: Sequence[Path], columns: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield every answer of every file once."""
    for path in files:
        if why := why_no_file(path):
            raise DataError(f"{path}: {why}; restore the file or leave it out")
        try:
            with pq.ParquetFile(path, page_checksum_verification=True) as file:
                missing = [name for name in columns if name not in file.schema_arrow.names]
                if missing:
                    raise DataError(f"{path}: is no file of recorded rollouts: it has no column {', '.join(missing)}")
                for batch in file.iter_batches(_ROWS_AT_ONCE, columns=columns):
                    yield from (row for row in batch.to_pylist() if row["index"] is not None)
        except (OSError, pa.ArrowException) as error:
            raise DataError(f"{path}: cannot be read: {error}; restore the file or leave it out") from error


class _Writer(Protocol):
    def write(self, row: Mapping[str, Any]) -> None: ...

    def close(self) -> None: ...


def _writer(path: Path, suffix: str) -> _Writer:
    return _JsonLines(path) if suffix == ".jsonl" else _Parquet(path)


class _JsonLines:
    def __init__(self, path: Path) -> None:
        self._file = path.open("w", encoding="utf-8")

    def write(self, row: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(row, ensure_ascii=False) + "\n")

    def close(self) -> None:
        self._file.close()


class _Parquet:
    """Row groups of some hundred rows, with the schema of the first."""

    def __init__(self, path: Path) -> None:
        self._path, self._rows = path, list[Mapping[str, Any]]()
        self._file: pq.ParquetWriter | None = None

    def write(self, row: Mapping[str, Any]) -> None:
        self._rows.append(row)
        if len(self._rows) >= _ROWS_AT_ONCE:
            self._flush()

    def close(self) -> None:
        self._flush()
        if self._file is not None:
            self._file.close()

    def _flush(self) -> None:
        if not self._rows:
            return
        schema = self._file.schema if self._file else None
        table = pa.Table.from_pylist(self._rows, schema=schema)
        self._file = self._file or pq.ParquetWriter(self._path, table.schema, compression="zstd")
        self._file.write_table(table)
        self._rows = []
