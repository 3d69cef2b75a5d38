"""Runs of the real command line as child processes, and what they leave behind.

Used by tests/e2e and tests/fault. Every process of a run carries a mark in its environment, which children inherit, so
that also those that were adopted by init are found; one that writes a title over its environment (Ray's helpers do)
is found as a descendant of the driver while that lives, and remembered. Only these are ever signalled.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from megatron_daro.observe.metrics import comparable, read_metrics

_MARK = "MEGATRON_DARO_TEST_RUN"
_SIGNALLED_DRIVER = Path(__file__).parent / "fault" / "killed_driver.py"
_DYING_RANKS = Path(__file__).parent / "fault" / "killed_ranks.py"
GONE_WITHIN_S = 30.0
RUN_LIMIT_S = 480.0


@dataclass(frozen=True)
class Finished:
    """A run that ended. `lines` are the non-empty ones of stderr."""

    code: int
    stdout: str
    stderr: str

    @property
    def lines(self) -> list[str]:
        return [line for line in self.stderr.splitlines() if line.strip()]

    @property
    def last_line(self) -> str:
        return self.lines[-1] if self.lines else ""


class Run:
    """A run that is going on."""

    def __init__(self, command: Sequence[str], log: Path, extra: Mapping[str, str]) -> None:
        self._mark = uuid.uuid4().hex
        self._log = log
        self._seen: set[psutil.Process] = set()
        log.parent.mkdir(parents=True, exist_ok=True)
        environment = {k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"}
        environment |= {_MARK: self._mark, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "COLUMNS": "200", **extra}
        with self._stdout.open("wb") as out, self._stderr.open("wb") as err:
            self.driver = subprocess.Popen(
                command, stdout=out, stderr=err, stdin=subprocess.DEVNULL, env=environment, start_new_session=True
            )

    @property
    def _stdout(self) -> Path:
        return self._log.with_suffix(".out")

    @property
    def _stderr(self) -> Path:
        return self._log.with_suffix(".err")

    def output(self) -> str:
        return self._stdout.read_text(errors="replace")

    def processes(self) -> list[psutil.Process]:
        """Every living process of this run, the driver among them; zombies hold nothing and do not count."""
        self._seen |= {process for process in psutil.process_iter() if self._is_marked(process)} | self._descendants()
        self._seen = {process for process in self._seen if _lives(process)}
        return sorted(self._seen, key=lambda process: process.pid)

    def _is_marked(self, process: psutil.Process) -> bool:
        try:
            return process.environ().get(_MARK) == self._mark
        except psutil.Error:
            return False

    def _descendants(self) -> set[psutil.Process]:
        try:
            return set(psutil.Process(self.driver.pid).children(recursive=True))
        except psutil.Error:
            return set()

    def named(self, title: str) -> list[psutil.Process]:
        """Those whose command line begins with `title`, such as ray::TrainWorker."""
        return [p for p in self.processes() if _command(p).startswith(title)]

    def wait_until(
        self, condition: Callable[[], bool], what: str, limit_s: float = RUN_LIMIT_S, pause_s: float = 0.1
    ) -> None:
        """Looks ten times a second; fails the test when the run ends first or the limit passes."""
        end = time.monotonic() + limit_s
        while not condition():
            assert self.driver.poll() is None, f"the run ended before {what}:\n{self._stderr.read_text()}"
            assert time.monotonic() < end, f"no {what} within {limit_s} s:\n{self._stderr.read_text()}"
            time.sleep(pause_s)

    def interrupt(self) -> None:
        """Ctrl-C as a terminal sends it: to the whole process group."""
        os.killpg(self.driver.pid, signal.SIGINT)

    def finish(self, limit_s: float = RUN_LIMIT_S) -> Finished:
        """Waits for the end of the driver; looks every half second which processes it has."""
        end = time.monotonic() + limit_s
        while (code := self._ended_within(0.5)) is None:
            self._seen |= self._descendants()
            if time.monotonic() >= end:
                if self._says_where_it_stands():
                    self.driver.send_signal(signal.SIGUSR2)
                    time.sleep(2)
                raise AssertionError(
                    f"still running after {limit_s} s:\n{self.output()[-2000:]}\n{self._stderr.read_text()[-20000:]}"
                )
        return Finished(code, self.output(), self._stderr.read_text(errors="replace"))

    def _says_where_it_stands(self) -> bool:
        """Whether the driver has the handler of fault/driver_stacks.py; SIGUSR2 ends it otherwise."""
        status = Path(f"/proc/{self.driver.pid}/status").read_text()
        (caught,) = (int(line.split()[1], 16) for line in status.splitlines() if line.startswith("SigCgt:"))
        return bool(caught >> (signal.SIGUSR2 - 1) & 1)

    def _ended_within(self, seconds: float) -> int | None:
        try:
            return self.driver.wait(seconds)
        except subprocess.TimeoutExpired:
            return None

    def left_behind(self) -> list[str]:
        """Command lines of processes that are still there GONE_WITHIN_S after the end of the driver."""
        psutil.wait_procs(self.processes(), timeout=GONE_WITHIN_S)
        return [_command(p) for p in self.processes()]

    def kill_all(self) -> None:
        """For the end of a test that failed: nothing of the run stays."""
        for process in self.processes():
            process.kill()
        self.driver.wait(30)


@contextmanager
def started(arguments: Sequence[object], log: Path, environment: Mapping[str, str] = {}) -> Iterator[Run]:
    """`megatron-daro ARGUMENTS` as a child; whatever is left of it is killed at the end of the block."""
    run = Run([sys.executable, "-m", "megatron_daro", *map(str, arguments)], log, environment)
    try:
        yield run
    finally:
        run.kill_all()


@contextmanager
def signalled(
    arguments: Sequence[object], log: Path, *, name: str, place: str, after_step: int, run_dir: Path
) -> Iterator[Run]:
    """As `started`, but the driver sends itself signal `name` at `place` (see killed_driver.py)."""
    fired = log.with_suffix(".fired")
    fired.parent.mkdir(parents=True, exist_ok=True)
    plan = [name, place, str(after_step), str(run_dir), str(fired)]
    run = Run([sys.executable, str(_SIGNALLED_DRIVER), *plan, *map(str, arguments)], log, {})
    run.fired = fired
    try:
        yield run
    finally:
        run.kill_all()


@contextmanager
def with_dying_ranks(arguments: Sequence[object], log: Path, plan: str) -> Iterator[Run]:
    """As `started`, but ranks kill themselves as planned (see killed_ranks.py); `run.fired` is where they say so."""
    fired = log.with_suffix(".fired")
    fired.mkdir(parents=True)
    run = Run([sys.executable, str(_DYING_RANKS), plan, str(fired), *map(str, arguments)], log, {})
    run.fired = fired
    try:
        yield run
    finally:
        run.kill_all()


def run_cli(arguments: Sequence[object], log: Path, environment: Mapping[str, str] = {}) -> Finished:
    """A whole run; also asserts that no process outlives it."""
    with started(arguments, log, environment) as run:
        finished = run.finish()
        assert run.left_behind() == []
    return finished


def trained(arguments: Sequence[object], log: Path, environment: Mapping[str, str] = {}) -> Finished:
    """A whole run that must succeed."""
    finished = run_cli(arguments, log, environment)
    assert finished.code == 0, f"exit code {finished.code}:\n{finished.stdout[-2000:]}\n{finished.stderr[-4000:]}"
    return finished


def metric_lines(run_dir: Path, steps: range | None = None) -> list[dict[str, float | None]]:
    """The comparable metrics, of all steps or of some."""
    lines = [comparable(line) for line in read_metrics(run_dir)]
    return [line for line in lines if steps is None or line["step"] in steps]


def last_step(run_dir: Path) -> int:
    """The last step in metrics.jsonl; -1 before the first line."""
    if not (run_dir / "metrics.jsonl").exists():
        return -1
    lines = read_metrics(run_dir)
    return int(lines[-1]["step"]) if lines else -1


def checkpoint(run_dir: Path, step: int) -> Path:
    return run_dir / "checkpoints" / f"step_{step:06d}"


def digests(directory: Path) -> dict[str, str]:
    """SHA-256 of every file below a directory, by relative path."""
    return {
        path.relative_to(directory).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }


def assert_same_run(run_dir: Path, reference: Path, steps: range, *, but: frozenset[str] = frozenset()) -> None:
    """Prompts, rollouts, metrics and the checkpoint after `steps`, without the files `but`, are bit for bit equal."""
    assert metric_lines(run_dir, steps) == metric_lines(reference, steps)
    for step in steps:
        name = f"rollouts/step_{step:06d}.parquet"
        assert (run_dir / name).read_bytes() == (reference / name).read_bytes(), name
    assert different_files(checkpoint(run_dir, steps[-1]), checkpoint(reference, steps[-1])) <= but


def different_files(mine: Path, theirs: Path) -> set[str]:
    """Names of the files of two checkpoints that differ or are in one of them only.

    made_with.json does not count, since it names the run directory; nor does its entry in the manifest.
    """
    found, wanted = _comparable_digests(mine), _comparable_digests(theirs)
    assert sum(name.startswith("shard_") for name in wanted) == 2
    different = {name for name in found.keys() | wanted.keys() if found.get(name) != wanted.get(name)}
    # A pickle also says which of its values were one object in memory; a loaded state differs from a new one in that.
    # The manifest has the hash of common.pt.
    if "common.pt" in different and _scalars(mine) == _scalars(theirs):
        different -= {"common.pt", "manifest.json"}
    return different


def _comparable_digests(directory: Path) -> dict[str, str]:
    found = digests(directory)
    del found["made_with.json"]
    manifest = json.loads((directory / "manifest.json").read_text())
    del manifest["files"]["made_with.json"]
    return {**found, "manifest.json": json.dumps(manifest)}


def _scalars(directory: Path) -> dict[str, Any]:
    """What common.pt holds: plain values of optimizer and schedule."""
    import torch

    return torch.load(directory / "common.pt", weights_only=True)


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline()).strip()
    except psutil.NoSuchProcess:
        return ""


def servers(run):
    """The processes that serve: not their watchdogs, whose command line ends with that of the server."""
    found = []
    for process in run.processes():
        try:
            words = process.cmdline()
        except psutil.NoSuchProcess:
            continue
        if words[1:3] == ["-m", "sglang.launch_server"]:
            found.append(process)
    return found
