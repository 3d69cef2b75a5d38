"""What every benchmark does: sides that take turns, medians, what a goal asks for, benchmarks/results/NAME.json.

Two sides are compared within one run of one script, alternating: a slow minute of the machine hits both, and the median
of the ratios of neighbours does not see it. A benchmark ends with `conclude`: exit code 1 where a goal is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

ROOT = Path(__file__).resolve().parents[1]
sys.path += map(str, (ROOT / "tests", ROOT / "tests" / "gpu"))  # tiny task, small servers, batches serve here too
RESULTS = ROOT / "benchmarks" / "results"
GIB = 2**30
T = TypeVar("T")


def arguments_of(description: str) -> argparse.ArgumentParser:
    """The parser of a benchmark, with --json. description: the docstring of its module."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="also write the numbers into benchmarks/results")
    return parser


def setup_of(arguments: argparse.Namespace, *left_out: str) -> dict[str, Any]:
    """The options of a run, for its results."""
    options = {name: value for name, value in vars(arguments).items() if name not in ("json", *left_out)}
    return {name: str(value) if isinstance(value, Path) else value for name, value in options.items()}


def machine() -> dict[str, Any]:
    """What the numbers were measured on."""
    import torch

    return {
        "cpu": _cpu_name(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "cpu_count": os.cpu_count(),
        "load": os.getloadavg()[0],
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def _cpu_name() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


@dataclass(frozen=True, slots=True)
class Seconds:
    """Of one call: on the clock, and of this process on a processor, which a busy machine disturbs less."""

    wall: float
    cpu: float


def timed(call: Callable[[], T]) -> tuple[T, Seconds]:
    """What a call returns, and how long it takes."""
    start, cpu_start = time.perf_counter(), time.process_time()
    result = call()
    cpu = time.process_time() - cpu_start
    return result, Seconds(time.perf_counter() - start, cpu)


def turns(sides: Iterable[str], rounds: int, *, warm_up: int = 1) -> Iterator[tuple[str, bool]]:
    """Whose turn it is, and whether it counts; which side begins changes with each round."""
    names = list(sides)
    for number in range(warm_up + rounds):
        for name in names[:: -1 if number % 2 else 1]:
            yield name, number >= warm_up


def in_turns(sides: Mapping[str, Callable[[], T]], rounds: int, *, warm_up: int = 1) -> dict[str, list[T]]:
    """What each side measured in each round that counts."""
    measured: dict[str, list[T]] = {name: [] for name in sides}
    for name, counts in turns(sides, rounds, warm_up=warm_up):
        value = sides[name]()
        if counts:
            measured[name].append(value)
    return measured


def median_of_ratios(one: Sequence[float], other: Sequence[float]) -> float:
    """The median of one over other, neighbour by neighbour."""
    return median(a / b for a, b in zip(one, other, strict=True))


def medians(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The median of each column."""
    return {name: median(row[name] for row in rows) for name in rows[0]}


def cpu_s() -> float:
    """User and system time of this process, all threads."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


class PeakMemory:
    """How far the resident memory of a process rises, by the kernel's own high-water mark."""

    def __init__(self, pid: int | str = "self") -> None:
        self._directory = Path(f"/proc/{pid}")
        self.reset()

    def reset(self) -> None:
        """Count from here on."""
        (self._directory / "clear_refs").write_text("5")
        self._before = self._status("VmRSS")

    def extra_bytes(self) -> int:
        """The most since `reset`, beyond what there was."""
        return self._status("VmHWM") - self._before

    def _status(self, key: str) -> int:
        lines = (self._directory / "status").read_text().splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(key + ":"))


def table(title: str, header: Sequence[str], rows: Mapping[str, Sequence[object]]) -> None:
    """Print a table: the name of each row, then its values; numbers with four digits."""
    from rich.console import Console
    from rich.table import Table

    shown = Table("", *header, title=title)
    for name, values in rows.items():
        shown.add_row(name, *(f"{value:.4g}" if isinstance(value, float) else str(value) for value in values))
    Console(width=180).print(shown)


def at_most(what: str, value: float, goal: float) -> list[str]:
    """Print whether a number is within its goal; as a list with one problem, or none."""
    return _judged(what, value, f"at most {goal:g}", value <= goal)


def at_least(what: str, value: float, goal: float) -> list[str]:
    """Print whether a number reaches its goal; as a list with one problem, or none."""
    return _judged(what, value, f"at least {goal:g}", value >= goal)


def _judged(what: str, value: float, goal: str, holds: bool) -> list[str]:
    line = f"{what}: {value:.4g}, must be {goal}"
    print(f"{'HOLDS' if holds else 'MISSED'}: {line}", flush=True)
    return [] if holds else [line]


def conclude(name: str, result: dict[str, Any], problems: Sequence[str], *, write: bool) -> None:
    """End a benchmark.

    Args:
        name: of the file in benchmarks/results. result: its numbers. problems: goals that were missed; of a soak, all
            that did not hold. write: whether the file is written.

    Raises:
        SystemExit: with code 1 where there are problems.
    """
    if write:
        document = {"machine": machine(), **result, "problems": list(problems)}
        (RESULTS / f"{name}.json").write_text(json.dumps(document, indent=1) + "\n")
    if problems:
        raise SystemExit("MISSED:\n  " + "\n  ".join(problems))
