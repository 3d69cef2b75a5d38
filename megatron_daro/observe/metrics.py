"""One record of metrics per optimizer step: RUN/metrics.jsonl, which TensorBoard and Weights & Biases show too.

Key names and units: docs/metrics.md. Metrics that depend on the clock are under `timing/`, `throughput/` and
`recovery/`, so that the others of runs that repeat can be compared (`comparable`). Refuses values that are not numbers,
steps that do not increase, and files that are damaged anywhere but in their last line.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path
from types import TracebackType
from typing import Any, Self, SupportsFloat

from megatron_daro import durable
from megatron_daro.errors import DataError, disk_fault
from megatron_daro.observe.sinks import Sink, TensorBoardSink, WandbSink

FILE_NAME = "metrics.jsonl"
NONFINITE_KEY = "observe/nonfinite_values"

Metrics = Mapping[str, float | None]


@dataclass(frozen=True, slots=True)
class _Line:
    """One line of the file: its content and its exact bytes, so that writing it again does not change it."""

    record: dict[str, Any]
    raw: bytes

    @property
    def step(self) -> int:
        return self.record["step"]


class MetricsLog:
    """The writer of a run's metrics. One process writes; it can be reopened after a crash."""

    def __init__(self, run_dir: Path, *, tensorboard: bool = True, wandb: Mapping[str, Any] | None = None) -> None:
        """Open (or create) the run's metrics file and drop a torn last line; `remark` then says so.

        Args:
            run_dir: the run directory; created if missing.
            tensorboard: also write events under RUN/tensorboard.
            wandb: arguments of `wandb.init`, such as {"project": "daro"}; None (or {"enabled": False, ...}) is off.

        Raises:
            ConfigError: tensorboard or wandb was asked for and is not installed, or wandb cannot start.
            DataError: an existing file is damaged before its last line. OSError: it cannot be written.
        """
        self.path = Path(run_dir) / FILE_NAME
        run_dir = self.path.parent
        run_dir.mkdir(parents=True, exist_ok=True)
        self._file = self.path.open("a+b", buffering=0)
        lines = _parse(self.path)
        torn = self.path.stat().st_size - sum(len(line.raw) + 1 for line in lines)
        self.last_step = self._rewrite(lines)
        self.remark = ""
        if torn > 0:
            after = f"step {self.last_step}" if lines else "the beginning"
            self.remark = f"{self.path}: the last line, after {after}, was torn ({torn} bytes); it was removed"
        self._sinks: list[Sink] = [TensorBoardSink(run_dir / "tensorboard")] if tensorboard else []
        if wandb is not None and wandb.get("enabled", True):
            self._sinks.append(WandbSink(run_dir, {k: v for k, v in wandb.items() if k != "enabled"}))

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append one step, on disk (fsync) when this returns.

        Args:
            step: optimizer step, greater than every step written before (0 is allowed: evaluation before training).
            metrics: key path -> number. NaN and infinities become null and are counted in `observe/nonfinite_values`.

        Raises:
            DataError: a value is not a number, the step does not increase, or the disk refused. The file then still
                ends with the step before, or with this step if only the charts could not be written.
        """
        if self.last_step is not None and step <= self.last_step:
            raise DataError(
                f"{self.path}: step {step} after step {self.last_step}; steps must increase: write all metrics of "
                "a step at once, or call truncate_after(step) when resuming"
            )
        record = _record(step, metrics)
        self._append(json.dumps(record, allow_nan=False, separators=(", ", ": ")).encode() + b"\n", step)
        self.last_step = step
        try:
            for sink in self._sinks:
                sink.write(step, {k: v for k, v in record.items() if k != "step" and v is not None})
        except OSError as error:
            cause, advice = disk_fault(error, self.path.parent)
            raise DataError(f"{self.path.parent}: charts of step {step} not written, {cause}; {advice}") from error

    def truncate_after(self, step: int) -> int:
        """Drop every line of a later step, so that a resumed run writes them again.

        Args:
            step: the last step to keep (that of the checkpoint).

        Returns:
            Number of lines dropped.
        """
        lines = _parse(self.path)
        kept = [line for line in lines if line.step <= step]
        self.last_step = self._rewrite(kept)
        for sink in self._sinks:
            sink.truncate_after(step)
        return len(lines) - len(kept)

    def close(self) -> None:
        """Flush and close everything. A second call does nothing."""
        for sink in self._sinks:
            sink.close()
        self._sinks = []
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except OSError:
            if error is None:  # else that error ends the run, and names the same full disk more clearly
                raise

    def _append(self, line: bytes, step: int) -> None:
        size = os.fstat(self._file.fileno()).st_size
        try:
            self.path.stat()  # if the file was removed, writing would succeed, but nobody could read the lines
            written = self._file.write(line)
            if written != len(line):
                raise OSError(f"only {written} of {len(line)} bytes fitted")
            os.fsync(self._file.fileno())
        except OSError as error:
            os.ftruncate(self._file.fileno(), size)
            cause, advice = disk_fault(error, self.path.parent)
            raise DataError(f"{self.path}: step {step} could not be written, {cause}; {advice}") from error

    def _rewrite(self, lines: list[_Line]) -> int | None:
        """Make the file hold exactly these lines, atomically. Returns the last step, or None if there are no lines."""
        content = b"".join(line.raw + b"\n" for line in lines)
        if content != self.path.read_bytes():
            durable.replace(self.path, content)
            self._file.close()
            self._file = self.path.open("a+b", buffering=0)
        return lines[-1].step if lines else None


def read_metrics(run_dir: Path) -> list[dict[str, float | None]]:
    """Return the metrics of a run, one dictionary per step in file order, each with its `step`.

    A torn last line (a crash or a run still writing) is left out. A missing file is an empty list.

    Args:
        run_dir: the run directory.

    Raises:
        DataError: a line before the last is damaged, or steps do not increase.
    """
    return [line.record for line in _parse(Path(run_dir) / FILE_NAME)]


def comparable(metrics: Metrics) -> dict[str, float | None]:
    """Return the metrics that are equal in two runs of the same seed whose engine repeats and which do not generate
    while they train: all except the keys under `timing/`, `throughput/` and `recovery/`. Others may differ, too, with
    servers, with overlap, and where the machine made something fail (docs/metrics.md).
    """
    return {key: value for key, value in metrics.items() if not key.startswith(("timing/", "throughput/", "recovery/"))}


def _record(step: int, metrics: Mapping[str, float]) -> dict[str, Any]:
    record: dict[str, Any] = {"step": int(step)}
    values: dict[str, Any] = {}
    nonfinite = 0
    for key in metrics:
        if not isinstance(key, str) or key in ("step", NONFINITE_KEY):
            raise DataError(f"metric key {key!r} is not allowed: use a path such as 'loss/policy'; the log adds 'step'")
        values[key] = _number(key, metrics[key])
        nonfinite += values[key] is None
    values[NONFINITE_KEY] = nonfinite
    return record | {key: values[key] for key in sorted(values, key=_order)}


def _order(key: str) -> list[tuple[int, int, str]]:
    """Return a sort key by path parts, with numbers by value: difficulty/loss/2 comes before difficulty/loss/10."""
    return [(0, int(p), "") if p.isascii() and p.isdigit() else (1, 0, p) for p in key.split("/")]


def _number(key: str, value: SupportsFloat | str | bytes) -> int | float | None:
    if isinstance(value, Integral):
        return int(value)
    try:
        number = None if isinstance(value, str | bytes) else float(value)
    except (TypeError, ValueError):
        number = None
    if number is None:
        raise DataError(f"metric {key!r} is {type(value).__name__}; allowed: one number. Convert it before writing")
    return number if math.isfinite(number) else None


def _parse(path: Path) -> list[_Line]:
    """Return the lines of the file; a last line that is torn is left out."""
    if not path.exists():
        return []
    raw_lines = path.read_bytes().split(b"\n")
    if not raw_lines[-1]:
        raw_lines.pop()
    lines: list[_Line] = []
    for number, raw in enumerate(raw_lines, start=1):
        record = _parse_line(raw)
        if record is None and number == len(raw_lines):
            break
        if record is None:
            raise DataError(
                f"{path}: line {number} is not a JSON object with an integer 'step'; remove it or restore it"
            )
        if lines and record["step"] <= lines[-1].step:
            raise DataError(
                f"{path}: line {number} has step {record['step']} after {lines[-1].step}; remove one of them"
            )
        lines.append(_Line(record, raw))
    return lines


def _parse_line(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    valid = isinstance(record, dict) and isinstance(record.get("step"), int)
    return record if valid else None
