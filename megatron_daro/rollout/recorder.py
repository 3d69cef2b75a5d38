"""Recorded rollouts: one compressed file per optimizer step, enough to train again without engines.

Place in the data flow: the controller writes the groups of each step under RUN/rollouts; the report shows them; replay
and resume read them back. Files are JSON lines under zstandard, written whole or not at all. Numbers come back exactly:
float32 values are written as the float64 of the same value. It refuses damaged files and never unpickles. Log-probs
that are not finite (in RUN/failed only) are written as the NaN and Infinity that Python's JSON reads.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import zstandard

from megatron_daro.errors import DataError
from megatron_daro.rollout.ledger import OUTCOMES, Outcome
from megatron_daro.types import Group, Prompt, Rollout, Verdict

_STEP_FILE = re.compile(r"step_(\d{6,})\.jsonl\.zst")


class Recorder:
    """Writer of a run's rollouts; reopened freely after a crash."""

    def __init__(self, run_dir: Path, *, level: int = 3) -> None:
        """Args: run_dir: the run directory. level: zstandard's compression level."""
        self._run_dir = Path(run_dir)
        self._level = level

    def write_step(self, step: int, groups: Mapping[Outcome, Sequence[Group]]) -> Path:
        """Writes RUN/rollouts/step_{step}.jsonl.zst, replacing one of an earlier try; on disk when this returns.

        Args:
            step: optimizer step.
            groups: outcome -> groups. The trained ones keep their order, which is their order in the batch.

        Raises:
            DataError: the disk refused; no file of that name is left half written.
        """
        return self._write(self._run_dir / "rollouts" / _file_name(step), groups)

    def write_failed(self, step: int, groups: Sequence[Group]) -> Path:
        """Writes the batch of a step that was not finite to RUN/failed, for people to look at."""
        return self._write(self._run_dir / "failed" / _file_name(step), {"dropped": groups})

    def truncate_after(self, step: int) -> int:
        """Removes the files of every later step, and what a crash left half written.

        Returns:
            Number of steps removed.
        """
        later = [path for number, path in _step_files(self._run_dir) if number > step]
        for path in [*later, *(self._run_dir / "rollouts").glob("*.tmp")]:
            path.unlink()
        return len(later)

    def _write(self, path: Path, groups: Mapping[Outcome, Sequence[Group]]) -> Path:
        lines = (
            json.dumps(group_to_json(group, outcome), separators=(",", ":")).encode() + b"\n"
            for outcome in OUTCOMES
            for group in groups.get(outcome, ())
        )
        temporary = path.with_name(path.name + ".tmp")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with temporary.open("wb") as file:
                with zstandard.ZstdCompressor(level=self._level, write_checksum=True).stream_writer(
                    file, closefd=False
                ) as stream:
                    for line in lines:
                        stream.write(line)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
            _sync_directory(path.parent)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            raise DataError(f"{path}: rollouts could not be written: {error}; free disk space and --resume") from error
        return path


def recorded_steps(run_dir: Path) -> list[int]:
    """Steps that have a file under RUN/rollouts, in order."""
    return sorted(number for number, _ in _step_files(Path(run_dir)))


def read_step(run_dir: Path, step: int) -> list[tuple[Group, Outcome]]:
    """The groups of one step with what became of them: trained ones first, in batch order.

    Raises:
        DataError: the file is missing, torn, or not what `Recorder` writes; names the file and the line.
    """
    return read_groups(Path(run_dir) / "rollouts" / _file_name(step))


def read_groups(path: Path) -> list[tuple[Group, Outcome]]:
    """The groups of one recorded file. Raises DataError as `read_step` does."""
    try:
        reader = zstandard.ZstdDecompressor().decompressobj()
        lines = reader.decompress(path.read_bytes()).splitlines()
        if not reader.eof:
            raise zstandard.ZstdError("it ends in the middle of the data")
    except (OSError, zstandard.ZstdError) as error:
        raise DataError(f"{path}: cannot be read: {error}; restore the file or replay another run") from error
    result = []
    for number, line in enumerate(lines, start=1):
        try:
            result.append(group_from_json(json.loads(line)))
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(
                f"{path}: line {number} is no recorded group ({type(error).__name__}: {error}); restore the file"
            ) from error
    return result


def group_to_json(group: Group, outcome: Outcome) -> dict[str, Any]:
    """One group as plain values; `group_from_json` gives exactly the same group back.

    Keys beyond the contract of the run directory appear only where they carry something: `messages` for a chat prompt,
    `alternatives` where several golds are right, `loss_mask` where a response token is not trained.
    """
    prompt = group.prompt
    text = prompt.text if prompt.messages is None else "\n".join(str(m.get("content", "")) for m in prompt.messages)
    record: dict[str, Any] = {
        "group_id": group.group_id,
        "prompt_id": prompt.id,
        "prompt": text,
        "answer": prompt.answer,
        "source": prompt.source,
        "attempt": max((r.attempt for r in group.rollouts), default=0),
        "prompt_tokens": list(prompt.tokens),
        "rollouts": [
            rollout_to_json(r) | {"correct": v.correct, "reward": v.reward, "reason": v.reason}
            for r, v in zip(group.rollouts, group.verdicts, strict=True)
        ],
        "used": outcome,
    }
    if prompt.alternatives:
        record["alternatives"] = list(prompt.alternatives)
    if prompt.messages is not None:
        record["messages"] = [dict(message) for message in prompt.messages]
    return record


def rollout_to_json(rollout: Rollout) -> dict[str, Any]:
    """One rollout as plain values, without its prompt and its verdict."""
    record: dict[str, Any] = {
        "index": rollout.index,
        "attempt": rollout.attempt,
        "text": rollout.text,
        "tokens": rollout.tokens[rollout.prompt_length :].tolist(),
        "logprobs": rollout.logprobs.astype(np.float64).tolist(),
        "finish_reason": rollout.finish_reason,
        "weight_version": rollout.weight_version,
        "version_spans": [list(span) for span in rollout.version_spans],
        "length": rollout.response_length,
    }
    if not rollout.loss_mask.all():
        record["loss_mask"] = rollout.loss_mask.tolist()
    return record


def group_from_json(record: Mapping[str, Any]) -> tuple[Group, Outcome]:
    """The inverse of `group_to_json`. Raises KeyError, TypeError or ValueError for anything else."""
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
    rollouts = tuple(rollout_from_json(r, record["group_id"], prompt) for r in record["rollouts"])
    verdicts = tuple(Verdict(r["correct"], r["reward"], r["reason"]) for r in record["rollouts"])
    return Group(record["group_id"], prompt, rollouts, verdicts), record["used"]


def rollout_from_json(record: Mapping[str, Any], group_id: int, prompt: Prompt) -> Rollout:
    """The inverse of `rollout_to_json`. Raises KeyError, TypeError or ValueError for anything else."""
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


def _file_name(step: int) -> str:
    return f"step_{step:06d}.jsonl.zst"


def _step_files(run_dir: Path) -> Iterable[tuple[int, Path]]:
    for path in (run_dir / "rollouts").glob("step_*.jsonl.zst"):
        match = _STEP_FILE.fullmatch(path.name)
        if match:
            yield int(match.group(1)), path


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
