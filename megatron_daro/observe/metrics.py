"""One record of metrics per optimizer step: metrics.jsonl, and TensorBoard and Weights & Biases as views of it.

Key names and units: docs/metrics.md. Everything that depends on the clock lives under `timing/` and `throughput/`, so
the rest of two runs of one seed can be compared exactly (`comparable`). Rejects values that are no numbers, steps
that do not increase, and files damaged anywhere but in their last line.

Phases of a step are timed by `PhaseTimes`: they may overlap (generation beside training), and one may run in several
coroutines or threads at once; its time is that during which at least one of them ran, so none exceeds its step.

`DriftWatch` looks at how far the engine's log-probs are from the trainer's and warns when they drift apart. A run stays
healthy with a constant small mismatch (other kernels, another dtype); what precedes a collapse is growth. It warns once
per drift, never about a single step. A resumed run learns its baseline anew from its first steps.
"""

from __future__ import annotations

import json
import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from numbers import Integral
from pathlib import Path
from statistics import median
from types import TracebackType
from typing import Any, Protocol, Self, SupportsFloat

from megatron_daro import durable
from megatron_daro.errors import ConfigError, DataError, disk_fault

_WANDB_ID_FILE = "wandb_run_id"


class Sink(Protocol):
    """A view of the metrics."""

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add one step."""

    def truncate_after(self, step: int) -> None:
        """Hides the steps after `step`; they will be written again."""

    def close(self) -> None:
        """Flushes and closes."""


class TensorBoardSink:
    """Scalars as event files."""

    def __init__(self, directory: Path) -> None:
        """Args: directory: where event files go; created if missing."""
        try:
            from tensorboard.summary.writer.event_file_writer import EventFileWriter
        except ImportError as error:
            raise ConfigError(
                "observe.tensorboard is true but tensorboard cannot be imported "
                f"({error}); install it (pip install tensorboard) or set observe.tensorboard=false"
            ) from error
        self._writer = EventFileWriter(str(directory))

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add one event that holds every scalar of the step."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=key, simple_value=float(value)) for key, value in metrics.items()]
        self._writer.add_event(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))
        self._writer.flush()

    def truncate_after(self, step: int) -> None:
        """Add a session start: TensorBoard then discards what it read of later steps."""
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog

        start = SessionLog(status=SessionLog.START)
        self._writer.add_event(Event(wall_time=time.time(), step=step + 1, session_log=start))
        self._writer.flush()

    def close(self) -> None:
        """Flushes and closes the event file."""
        self._writer.close()


class WandbSink:
    """One Weights & Biases run."""

    def __init__(self, run_dir: Path, settings: Mapping[str, Any]) -> None:
        """Args: run_dir: where wandb keeps its files. settings: arguments of `wandb.init`."""
        try:
            import wandb
        except ImportError as error:
            raise ConfigError(
                "observe.wandb is enabled but the package wandb is not installed; "
                "install the extra (pip install 'megatron-daro[wandb]') or set observe.wandb.enabled=false"
            ) from error
        try:
            self._run = wandb.init(**_wandb_arguments(run_dir, settings))
        except Exception as error:
            raise ConfigError(
                f"observe.wandb: wandb.init({', '.join(sorted(settings))}) failed: {error}; "
                "check the settings and the login, or set observe.wandb.mode=offline"
            ) from error
        (run_dir / _WANDB_ID_FILE).write_text(self._run.id)
        # The step is a metric of its own: wandb's internal step cannot go back, and a resumed run must.
        self._run.define_metric("*", step_metric="step")

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log one step."""
        self._run.log({"step": step, **metrics})

    def truncate_after(self, step: int) -> None:
        """Nothing to do: repeated steps are logged again under the same `step` and the later value is drawn."""

    def close(self) -> None:
        """End the run."""
        self._run.finish()


def _wandb_arguments(run_dir: Path, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of `wandb.init`: a run directory that already has a wandb run goes on with it."""
    given = {key: value for key, value in settings.items() if value is not None}
    arguments = {"dir": str(run_dir), "name": run_dir.resolve().name} | given
    id_file = run_dir / _WANDB_ID_FILE
    if id_file.is_file() and "id" not in arguments:
        arguments |= {"id": id_file.read_text().strip(), "resume": "allow"}
    return arguments


FILE_NAME = "metrics.jsonl"
NONFINITE_KEY = "observe/nonfinite_values"
CLOCK_PREFIXES = ("timing/", "throughput/")

Metrics = Mapping[str, float | None]


@dataclass(frozen=True, slots=True)
class _Line:
    """One line of the file: what it says and its very bytes, so that keeping it cannot change it."""

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
            ConfigError: wandb was asked for and is not installed, or cannot start.
            DataError: the file that is there is damaged before its last line, or cannot be written.
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
            DataError: a value is no number, the step does not increase, or the disk refused; the file then still ends
                with the step before.
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
        """Flushes and closes everything; a second call does nothing."""
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
            if error is None:  # else it is what ends the run: the same full disk, said better
                raise

    def _append(self, line: bytes, step: int) -> None:
        size = os.fstat(self._file.fileno()).st_size
        try:
            self.path.stat()  # a removed file that is still open takes lines that nobody can read
            written = self._file.write(line)
            if written != len(line):
                raise OSError(f"only {written} of {len(line)} bytes fitted")
            os.fsync(self._file.fileno())
        except OSError as error:
            os.ftruncate(self._file.fileno(), size)
            cause, advice = disk_fault(error, self.path.parent)
            raise DataError(f"{self.path}: step {step} could not be written, {cause}; {advice}") from error

    def _rewrite(self, lines: list[_Line]) -> int | None:
        """Leaves exactly these lines in the file, atomically, if it holds anything else. Returns the last step."""
        content = b"".join(line.raw + b"\n" for line in lines)
        if content != self.path.read_bytes():
            temporary = self.path.with_suffix(".jsonl.tmp")
            durable.write(temporary, content)
            self._file.close()
            temporary.replace(self.path)
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
    """Return the metrics that two runs of the same seed share exactly: all but the keys under `timing/`, `throughput/`
    and `recovery/`."""
    return {key: value for key, value in metrics.items() if not key.startswith((*CLOCK_PREFIXES, "recovery/"))}


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
    """Sorts paths part by part, numbers by value: difficulty/loss/2 comes before difficulty/loss/10."""
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


ATTEMPT_VARIABLE = "MEGATRON_DARO_ATTEMPT"
"""Set by what starts a run again and again: the number of this start, from 1, which goes into the metrics."""


class _Stopwatch:
    """Adds up the time during which at least one user holds it open."""

    def __init__(self) -> None:
        self.open_count = 0
        self.opened_at = 0.0
        self.total_s = 0.0

    def enter(self, now: float) -> None:
        if self.open_count == 0:
            self.opened_at = now
        self.open_count += 1

    def leave(self, now: float) -> None:
        self.open_count -= 1
        if self.open_count == 0:
            self.total_s += now - self.opened_at

    def take(self, now: float) -> float:
        """Return the total so far; an open measurement is split here and goes on."""
        total = self.total_s
        if self.open_count:
            total += now - self.opened_at
            self.opened_at = now
        self.total_s = 0.0
        return total


class Phases:
    """Wall time by phase since the last `collect`."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Args: clock: returns seconds and never goes back."""
        self._clock = clock
        self._lock = threading.Lock()
        self._watches: dict[str, _Stopwatch] = {}
        self._any = _Stopwatch()
        self._since = clock()

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        """Count the time of the `with` body under `timing/{name}_s`, also when the body raises or is cancelled."""
        with self._lock:
            now = self._clock()
            watch = self._watches.setdefault(name, _Stopwatch())
            watch.enter(now)
            self._any.enter(now)
        try:
            yield
        finally:
            with self._lock:
                now = self._clock()
                watch.leave(now)
                self._any.leave(now)

    def active(self) -> tuple[str, ...]:
        """Names of the phases that run now, in order of first use."""
        with self._lock:
            return tuple(name for name, watch in self._watches.items() if watch.open_count)

    def collect(self) -> dict[str, float]:
        """Close the step and start the next one.

        Returns:
            Seconds: `timing/{name}_s` for every phase ever measured (0.0 where it did not run), `timing/step_s` since
            the last call, and `timing/other_s`, the part of the step in which no phase ran. A phase that is still
            running is split: its time so far counts here, the rest in the next step. `timing/attempt` comes along
            where ATTEMPT_VARIABLE is set.
        """
        with self._lock:
            now = self._clock()
            times = {f"timing/{name}_s": watch.take(now) for name, watch in self._watches.items()}
            step_s = now - self._since
            times["timing/other_s"] = max(0.0, step_s - self._any.take(now))
            times["timing/step_s"] = step_s
            if attempt := os.environ.get(ATTEMPT_VARIABLE):
                times["timing/attempt"] = float(attempt)
            self._since = now
            return times


# The limits below are chosen, not measured on long runs: better a late warning than one that people learn to ignore.
BASELINE_STEPS = 8
"""Finite steps whose median is normal for this run: a median of eight is not moved by two odd steps."""
FACTOR = 3.0
"""Growth over the baseline that is a drift; batches of other lengths and prompts move the mean by less."""
PATIENCE = 3
"""Steps in a row above the limit before a warning, and below it before the drift counts as over."""
LIMITS = {"mismatch/kl": (0.01, 0.1), "mismatch/logprob_abs_mean": (0.05, 0.3)}
"""Metric -> (floor, ceiling) of its limit, in nats per token. Below the floor nothing is wrong, whatever the growth:
the largest difference of any token between a bf16 server and transformers was 0.06, so a mean of 0.05 is no rounding.
Above the ceiling something is wrong, also if the run began like that: the usual ratio is off by a third."""
CORRECTED = "mismatch/corrected_fraction"
CORRECTED_LIMIT = 0.2
"""Share of tokens that a correction may change: it is meant for outliers; beyond a fifth it shapes the gradient."""
_STALENESS = "rollout/staleness_mean"


@dataclass(slots=True)
class DriftWatch:
    """The watch of one run.

    correction: `algorithm.correction.kind`; empty: not known.
    """

    correction: str = ""
    _baseline: dict[str, list[float]] = field(default_factory=dict)
    _above: int = 0
    _below: int = 0
    _warned: bool = False

    def observe(self, step: int, metrics: Mapping[str, float]) -> str | None:
        """Take one step's metrics in.

        Args:
            step: optimizer step. metrics: any; a step without mismatch metrics says nothing.

        Returns:
            A warning with the likely reason, once per drift; None otherwise.
        """
        seen = {key: metrics[key] for key in (*LIMITS, CORRECTED) if key in metrics}
        if not seen:
            return None
        broken = [key for key, value in seen.items() if not math.isfinite(value)]
        high = {key: limit for key, value in seen.items() if value > (limit := self._limit(key))}
        self._learn(seen)
        if not broken and not high:
            self._above, self._below = 0, self._below + 1
            self._warned = self._warned and self._below < PATIENCE
            return None
        self._above, self._below = self._above + 1, 0
        if self._warned or not (broken or self._above >= PATIENCE):
            return None
        self._warned = True
        if broken:
            return f"step {step}: {' and '.join(broken)} not finite. {_NOT_FINITE}"
        measured = ", ".join(f"{key} {seen[key]:.3g} (limit {limit:.3g})" for key, limit in high.items())
        text = f"step {step}: engine and trainer disagree about the same tokens for {self._above} steps: {measured}"
        return f"{text}. {self._reason(high, metrics.get(_STALENESS, 0.0))}"

    def _limit(self, key: str) -> float:
        """Return what the value may be; before the baseline is known, the ceiling."""
        if key == CORRECTED:
            return CORRECTED_LIMIT
        floor, ceiling = LIMITS[key]
        values = self._baseline.get(key, [])
        if len(values) < BASELINE_STEPS:
            return ceiling
        return min(max(floor, FACTOR * median(values)), ceiling)

    def _learn(self, seen: Mapping[str, float]) -> None:
        for key, value in seen.items():
            values = self._baseline.setdefault(key, [])
            if key in LIMITS and math.isfinite(value) and len(values) < BASELINE_STEPS:
                values.append(value)

    def _reason(self, high: Mapping[str, float], staleness: float) -> str:
        """Return the likely cause and what to do, by circumstance."""
        if set(high) == {CORRECTED}:
            return (
                "The correction changes so many tokens that it shapes the gradient: lower rollout.max_staleness or "
                "the learning rate, or widen algorithm.correction (cap, low, high)"
            )
        if staleness > 0 and self.correction in ("", "none"):
            return (
                f"Likely the age of the rollouts ({staleness:.2g} batches) without a correction: set "
                "algorithm.correction.kind=tis, or lower rollout.max_staleness"
            )
        if staleness > 0:
            return (
                f"Likely the age of the rollouts ({staleness:.2g} batches), which the correction {self.correction} "
                "cannot make good: lower rollout.max_staleness or the learning rate"
            )
        return (
            "The rollouts are fresh, so it is not their age: likely the numerics of the engine (dtype, quantization, "
            "attention backend, MoE routing) or weights that did not arrive whole. Compare the dtypes of engine and "
            "actor; algorithm.correction.kind=tis bounds the harm"
        )


_NOT_FINITE = (
    "A log-prob of the engine or of the trainer is NaN or infinite: look at the rollouts of this step, and at the "
    "dtype and temperature of the engine"
)
