"""What holds for every test: one thread per process, cheap folders first.

Place in the data flow: pytest reads it before any test file. Fixtures live beside the tests that use
them.
"""

from __future__ import annotations

import argparse
import gc
import math
import os
import signal
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

# Before torch is imported anywhere, here or in a child process: the suite is meant for two cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Ray runs its workers as background jobs (nice 15): beside the other process of pytest they would stand still.
os.environ.setdefault("RAY_worker_niceness", "0")

# A shell starts background jobs with Ctrl-C ignored, and children inherit that; some tests press it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# How long an example takes says something of the machine only.
hypothesis.settings.register_profile("suite", deadline=None)
hypothesis.settings.load_profile("suite")

_STARTED = time.monotonic()
HERE = Path(__file__).parent
FOLDERS = ("unit", "golden", "contract", "plugins", "sglang", "simulation", "fault", "e2e", "slurm", "parallel")
"""In the order in which they run: a wrong formula shows in seconds, before anything slow begins; many short files come
last, those with most tests first, so that the processes end at about the same time."""
_LAST = "parallel"
_SERVERS = "sglang"
_LAST_WITH_SERVERS = Path("sglang") / "test_sglang_streamed_answers.py"
"""It kills a server, which the next file would have to start again."""
_FIRST = Path("slurm") / "test_slurm_signals.py"
"""Begins before all others: the minutes in which heavy tests begin must not be over before a job is signalled."""


def folder_of(path: Path) -> str:
    """The folder of tests/ that a test file lies in."""
    return path.relative_to(HERE).parts[0] if path.is_relative_to(HERE) else ""


def pytest_addoption(parser: pytest.Parser) -> None:
    """--heavy, which of them, and for how long; --colours."""
    parser.addoption("--heavy", action="store_true", help="also run the tests that are marked heavy")
    parser.addoption("--heavy-turn", type=_turn, default=(1, 1), help="K/N: one Nth of the heavy tests, the Kth")
    parser.addoption("--colours", action="store_true", help="run all of tests/parallel with storages of two colours")
    parser.addoption(
        "--heavy-minutes", type=float, default=math.inf, help="heavy tests that would begin later than this are skipped"
    )


def _turn(text: str) -> tuple[int, int]:
    turn, _, turns = text.partition("/")
    if not (turn.isdecimal() and turns.isdecimal() and 1 <= int(turn) <= int(turns)):
        raise argparse.ArgumentTypeError(f"got {text!r}; allowed: K/N with 1 <= K <= N, such as 2/3")
    return int(turn), int(turns)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a heavy test whose time is over, before its fixtures are made: on a slow machine the others still run."""
    minutes = item.config.getoption("--heavy-minutes")
    if item.get_closest_marker("heavy") and time.monotonic() - _STARTED > 60 * minutes:
        pytest.skip(f"heavy: the {minutes:g} minutes in which such tests begin are over")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Leaves what is imported and collected to Python's garbage collector neither now nor later: none of it is garbage,
    and every process of pytest has all of it."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Orders the tests by folder; skips heavy ones that nobody asked for."""
    _skip_heavy(config, [item for item in items if item.get_closest_marker("heavy")])
    tests = Counter(item.path for item in items if not item.get_closest_marker("skip"))
    items.sort(key=lambda item: (*_place(item), -tests[item.path] if folder_of(item.path) == _LAST else 0))


def _skip_heavy(config: pytest.Config, heavy: list[pytest.Item]) -> None:
    """Those that nobody asked for, or that have their turn another time; cases alike, which last alike, are spread."""
    turn, turns = config.getoption("--heavy-turn")
    due = sorted(heavy, key=lambda item: item.nodeid)[turn - 1 :: turns] if config.getoption("--heavy") else []
    why = f"another turn's than {turn} of {turns}" if due else "bash tests/run.sh --all runs it, or pytest --heavy"
    for item in {*heavy} - {*due}:
        item.add_marker(pytest.mark.skip(reason=f"heavy: {why}"))


def _place(item: pytest.Item) -> tuple[int, bool]:
    """Where a test runs: tests are sorted by this, and stay in their order where it is the same."""
    folder = folder_of(item.path)
    number = -1 if item.path == HERE / _FIRST else FOLDERS.index(folder) if folder in FOLDERS else len(FOLDERS)
    return number, item.path == HERE / _LAST_WITH_SERVERS


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """For `pytest -n 2`: one process runs all tests of a file, in order, all that share the SGLang servers, and all of
    Slurm but the file that comes first.

    Its own --dist loadgroup does not work with pytest 9.2, where a test's id cannot be changed (pytest-xdist 3.8.0).
    """
    from xdist.scheduler import LoadScopeScheduling

    class Together(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            path = nodeid.split("::")[0]
            folder = folder_of(HERE.parent / path)
            if HERE.parent / path == HERE / _FIRST:
                return path
            if folder in ("slurm", _SERVERS):
                return folder
            return _SERVERS if nodeid.endswith(f"[{_SERVERS}]") else path

    return Together(config, log)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What tests measured, and seconds per folder, where more than one ran: says what makes the suite long."""
    _print_properties(terminalreporter)
    seconds: dict[str, float] = defaultdict(float)
    for report in _reports(terminalreporter.stats.values()):
        seconds[folder_of(HERE.parent / report.nodeid.split("::")[0])] += report.duration
    if len(seconds) > 1:
        terminalreporter.section("seconds per folder", sep="-")
        for folder, total in sorted(seconds.items(), key=lambda entry: -entry[1]):
            terminalreporter.write_line(f"{total:8.1f} s  {folder}")


def _print_properties(terminalreporter: pytest.TerminalReporter) -> None:
    """What tests said with `record_property`; a print would be lost in the processes of pytest-xdist."""
    said = {(r.nodeid, *entry) for r in _reports(terminalreporter.stats.values()) for entry in r.user_properties}
    if said:
        terminalreporter.section("what tests measured", sep="-")
        for nodeid, name, value in sorted(said, key=str):
            terminalreporter.write_line(f"{name}: {value}  ({nodeid.split('::')[-1]})")


def _reports(stats: Iterable[list[object]]) -> Iterable[pytest.TestReport]:
    return (report for reports in stats for report in reports if isinstance(report, pytest.TestReport))
