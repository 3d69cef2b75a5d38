"""Rollouts of the older format (JSON lines under zstandard): read once more, to become Parquet.

Place in the data flow: `megatron-daro convert-rollouts RUN` -> RUN/rollouts and RUN/failed, file by file. A file is
removed only when its Parquet file has been read back and is equal bit for bit. It writes no JSON, and refuses files
that are damaged.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import astuple
from pathlib import Path
from typing import Any

import numpy as np
import zstandard

from megatron_daro.errors import DataError
from megatron_daro.rollout.group_columns import RecordedGroup
from megatron_daro.rollout.ledger import OUTCOMES
from megatron_daro.rollout.recorder import OLDER_SUFFIX, read_recorded, write_groups
from megatron_daro.types import Group, Prompt, Rollout, Verdict


def convert_run(run_dir: Path) -> Iterator[tuple[Path, Path]]:
    """Convert every file of the older format of a run, one after the other.

    Args:
        run_dir: the run directory.

    Yields:
        (what was read and is gone now, what was written).

    Raises:
        DataError: a file is damaged, or cannot be written; it stays, and those before it are converted.
    """
    for path in sorted(p for folder in ("rollouts", "failed") for p in (run_dir / folder).glob(f"*{OLDER_SUFFIX}")):
        groups = read_jsonl(path)
        target = write_groups(path.with_name(path.name.removesuffix(OLDER_SUFFIX) + ".parquet"), groups)
        if [_plain(entry) for entry in read_recorded(target)] != [_plain(entry) for entry in groups]:
            target.unlink()
            raise DataError(f"{path}: does not come back equal from Parquet, so it was left as it is; report this file")
        path.unlink()
        yield path, target


def read_jsonl(path: Path) -> list[RecordedGroup]:
    """Return the groups of one file of the older format. Raises DataError that names the file and the line."""
    try:
        reader = zstandard.ZstdDecompressor().decompressobj()
        lines = reader.decompress(path.read_bytes()).splitlines()
        if not reader.eof:
            raise zstandard.ZstdError("it ends in the middle of the data")
    except (OSError, zstandard.ZstdError) as error:
        raise DataError(f"{path}: cannot be read: {error}; restore the file") from error
    result = []
    for number, line in enumerate(lines, start=1):
        try:
            result.append(_group(json.loads(line)))
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(
                f"{path}: line {number} is no recorded group ({type(error).__name__}: {error}); restore the file"
            ) from error
    return result


def _group(record: Mapping[str, Any]) -> RecordedGroup:
    messages = record.get("messages")
    prompt = Prompt(
        id=record["prompt_id"],
        answer=record["answer"],
        source=record["source"],
        text=record["prompt"] if messages is None else None,
        messages=None if messages is None else tuple(dict(message) for message in messages),
        tokens=tuple(record["prompt_tokens"]),
        alternatives=tuple(record.get("alternatives", ())),
    )
    if record["used"] not in OUTCOMES:
        raise ValueError(f"used is {record['used']!r}; allowed: {', '.join(OUTCOMES)}")
    rollouts = tuple(_rollout(r, record["group_id"], prompt) for r in record["rollouts"])
    verdicts = tuple(Verdict(r["correct"], float(r["reward"]), r["reason"]) for r in record["rollouts"])
    return RecordedGroup(Group(record["group_id"], prompt, rollouts, verdicts), record["used"])


def _rollout(record: Mapping[str, Any], group_id: int, prompt: Prompt) -> Rollout:
    length = record["length"]
    loss_mask = record.get("loss_mask", [1] * length)
    if not length == len(record["tokens"]) == len(record["logprobs"]) == len(loss_mask):
        raise ValueError(f"rollout {record['index']}: tokens, logprobs or loss_mask are not {length} long")
    return Rollout(
        prompt_id=prompt.id,
        group_id=group_id,
        attempt=record["attempt"],
        index=record["index"],
        tokens=np.asarray([*prompt.tokens, *record["tokens"]], dtype=np.int32),
        prompt_length=len(prompt.tokens),
        loss_mask=np.asarray(loss_mask, dtype=np.uint8),
        logprobs=np.asarray(record["logprobs"], dtype=np.float32),
        finish_reason=record["finish_reason"],
        weight_version=record["weight_version"],
        text=record["text"],
        version_spans=tuple((int(version), int(count)) for version, count in record["version_spans"]),
    )


def _plain(entry: RecordedGroup) -> tuple[Any, ...]:
    """Values that compare equal only where every bit is equal."""
    group = entry.group
    rollouts = [
        [(v.dtype.str, v.tobytes()) if isinstance(v, np.ndarray) else v for v in (getattr(r, n) for n in r.__slots__)]
        for r in group.rollouts
    ]
    verdicts = [astuple(verdict) for verdict in group.verdicts]
    return group.group_id, group.prompt, rollouts, verdicts, entry.used
