"""Runs the tests of a mutant in a fork of this process, in a temporary copy of the tree.

Place in the data flow: mutation.py chooses mutants -> a copy, one changed module, pytest -> killed, hung or
survived. Refuses a verdict where pytest gives none (no tests found, an internal error), and where the tests loaded the
module from elsewhere than the copy: then every mutant would survive.
"""

from __future__ import annotations

import contextlib
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Literal

from mutants import Mutant, changed_lines

ROOT = Path(__file__).resolve().parents[2]
_CHECKOUT = (ROOT, ROOT / "tests", ROOT / "tools/mutation")
MOST_BYTES = 6 << 30
"""Of data a test process may have: a mutant that appends for ever must not take the machine."""

_FAILED = re.compile(r"^(?:FAILED|ERROR) (tests/\S+?\.py(?:::[\w:]+)?)", re.MULTILINE)
_HYPOTHESIS = "_hypothesis_pytestplugin"
_FAILED_TO_START, _FOREIGN = 120, 121
_NO_VERDICT = {
    3: "pytest had an internal error",
    4: "pytest did not understand its arguments",
    5: "pytest found no tests",
    _FAILED_TO_START: "the test process did not start",
    _FOREIGN: "the tests loaded the module from elsewhere than the copy",
}
"""Exit statuses of a test process that are no verdict on a mutant."""

Verdict = Literal["killed", "hung", "survived"]


class MutationError(Exception):
    """The run says nothing about the tests: they fail without a mutant, or do not load the copy."""


@dataclass(frozen=True, slots=True)
class Survivor:
    """A mutant that no test noticed."""

    place: str
    removed: str
    added: str

    def __str__(self) -> str:
        return f"{self.place}\n  - {self.removed}\n  + {self.added}"


@dataclass(slots=True)
class Score:
    """What became of the mutants of one module or package. mutants: all that there are; the rest: of those that were
    looked at. killers: mutants that each test killed."""

    module: str
    mutants: int = 0
    verdicts: dict[Verdict, int] = field(default_factory=lambda: {"killed": 0, "hung": 0, "survived": 0})
    equivalent: int = 0
    survivors: list[Survivor] = field(default_factory=list)
    killers: dict[str, list[Survivor]] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def run(self) -> int:
        """Mutants that were tested."""
        return sum(self.verdicts.values())

    @property
    def percent(self) -> float:
        """Killed or hung, of those that were tested; 100 where none was."""
        return 100.0 * (self.run - self.verdicts["survived"]) / self.run if self.run else 100.0


class Copy:
    """A temporary copy of the tree, in which one module at a time is changed."""

    def __init__(self, folder: Path) -> None:
        self.tree = folder / "tree"
        self._folder = folder

    @classmethod
    def of(cls, root: Path, folder: Path) -> Copy:
        """A copy of what git knows of a checkout, and of new files that it does not ignore."""
        copy = cls(folder)
        listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        names = subprocess.run(listed, cwd=root, capture_output=True, check=True, timeout=60).stdout.decode()
        for name in filter(None, names.split("\0")):
            if (root / name).is_file():
                (copy.tree / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(root / name, copy.tree / name)
        return copy

    def last_words(self) -> str:
        """The end of what pytest said when it ran last."""
        return self._log.read_text(errors="replace")[-3000:]

    def timed_out(self) -> bool:
        """Whether a test reached its own limit, at which pytest-timeout ends the process."""
        return "+ Timeout +" in self._log.read_text(errors="replace")

    def broke_pytest(self) -> bool:
        """Whether a conftest could not be imported, the module ended the process that imported it, or Python 3.11 could
        not parse what pytest shows of a failed test (github.com/python/cpython/issues/106905): as good as a failed
        test, but pytest calls the first wrong usage and the others an internal error."""
        log = self._log.read_text(errors="replace")
        signs = ("while loading conftest", "caught unexpected SystemExit", "AST constructor recursion depth mismatch")
        return any(sign in log for sign in signs)

    def failed_tests(self) -> set[str]:
        """What failed, as arguments for pytest: tests with all their parameters, files that it could not collect."""
        return set(_FAILED.findall(self._log.read_text(errors="replace")))

    @property
    def _log(self) -> Path:
        return self._folder / "pytest.log"

    def write(self, module: str, text: str) -> None:
        """Puts a text in a module's place; its compiled form goes: changed within a second, it may look new."""
        path = self.tree / module
        path.write_text(text, encoding="utf-8")
        for compiled in path.parent.glob(f"__pycache__/{path.stem}.*.pyc"):
            compiled.unlink()

    def start(self, module: str, tests: Sequence[str], *, stop: bool = True) -> int:
        """Starts the tests in a fork of this process, which leads a process group; returns its id. stop: at the first
        that fails."""
        shutil.rmtree(self._folder / "tmp", ignore_errors=True)
        sys.stdout.flush()
        child = os.fork()
        if child:
            return child
        try:
            os.setsid()
            output = os.open(self._log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(output, 1), os.dup2(output, 2), os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            resource.setrlimit(resource.RLIMIT_DATA, (MOST_BYTES, MOST_BYTES))
            code = self._pytest(module, tests, stop=stop)
        except SystemExit as error:  # the changed module ends the process that imports it
            print(f"FAILED: SystemExit: {error}", flush=True)
            code = 1
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", flush=True)
            code = _FAILED_TO_START
        os._exit(code)

    def _pytest(self, module: str, tests: Sequence[str], *, stop: bool) -> int:
        import pytest

        os.chdir(self.tree)
        os.environ["PYTHONPATH"] = str(self.tree)
        os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
        own = (str(self.tree), str(self.tree / "tests"))
        sys.path[:] = [*own, *(p for p in sys.path if Path(p or ".").resolve() not in _CHECKOUT)]
        for name in ("mutants", "mutation", "mutation_runs"):
            sys.modules.pop(name, None)
        # Workers that a test spawns import the main module again, and this one is not on their path.
        sys.modules["__main__"] = ModuleType("__main__")
        quiet = [
            "-q",
            *(["-x"] if stop else []),
            "--tb=short",
            "-p",
            "pytest_timeout",
            "-p",
            _HYPOTHESIS,
            "--hypothesis-seed=0",
        ]
        code = int(pytest.main([*quiet, f"--basetemp={self._folder / 'tmp'}", *tests]))
        sys.stdout.flush()
        loaded = sys.modules.get(module.removesuffix(".py").replace("/", "."))
        where = Path(getattr(loaded, "__file__", None) or "/")
        return code if code != 0 or loaded is None or where.is_relative_to(self.tree) else _FOREIGN


@dataclass(slots=True)
class Running:
    """A test process under way."""

    copy: Copy
    score: Score
    module: str
    mutant: Mutant
    source: str
    changed: str
    limit_s: float
    started: float = field(default_factory=time.monotonic)


class Runner:
    """Tests mutants, as many at a time as there are copies."""

    def __init__(self, copies: Sequence[Copy], modules: Mapping[str, Sequence[str]]) -> None:
        self._free, self._modules = list(copies), modules
        self._running: dict[int, Running] = {}

    def usual_seconds(self, module: str) -> float:
        """How long the tests of a module take without a mutant.

        Raises:
            MutationError: they fail, or do not load the copy.
        """
        return self.seconds_of(self._modules[module], module)

    def seconds_of(self, tests: Sequence[str], module: str = "") -> float:
        """How long tests take without a mutant. Raises as `usual_seconds` does."""
        copy, started = self._free_copy(), time.monotonic()
        child = copy.start(module, tests)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        _end(child, reaped=True)
        self._free.append(copy)
        if status != 0:
            why = _NO_VERDICT.get(status, f"exit status {status}")
            what = module or " ".join(tests)
            raise MutationError(f"{what}: its tests do not pass without a mutant ({why}):\n{copy.last_words()}")
        return time.monotonic() - started

    def failing(self, tests: Sequence[str]) -> set[str]:
        """Which of these tests fail without a mutant: what they killed says nothing."""
        if not tests:
            return set()
        copy = self._free_copy()
        child = copy.start("", tests, stop=False)
        os.waitpid(child, 0)
        _end(child, reaped=True)
        self._free.append(copy)
        return copy.failed_tests()

    def submit(self, score: Score, mutant: Mutant, source: str, changed: str, limit_s: float, module: str = "") -> None:
        """Waits for a free copy and starts the mutant's tests in it. module: where the score is not of one module."""
        copy, module = self._free_copy(), module or score.module
        copy.write(module, changed)
        child = copy.start(module, self._modules[module])
        self._running[child] = Running(copy, score, module, mutant, source, changed, limit_s)

    def drain(self) -> None:
        """Waits for all that run."""
        while self._running:
            self._poll()

    def close(self) -> None:
        """Ends all that run."""
        for child in self._running:
            _end(child)
        self._running.clear()

    def _free_copy(self) -> Copy:
        while not self._free:
            self._poll()
        return self._free.pop()

    def _poll(self) -> None:
        for child, running in list(self._running.items()):
            done, status = os.waitpid(child, os.WNOHANG)
            hung = not done and time.monotonic() - running.started > running.limit_s
            if done or hung:
                del self._running[child]
                _end(child, reaped=bool(done))
                self._settle(running, None if hung else os.waitstatus_to_exitcode(status))
                self._free.append(running.copy)
        time.sleep(0.02)

    def _settle(self, running: Running, status: int | None) -> None:
        score, place = running.score, f"{running.module}:{running.mutant.line}"
        if status in _NO_VERDICT and not running.copy.broke_pytest():
            raise MutationError(f"{place}: {_NO_VERDICT[status]}\n{running.copy.last_words()}")
        if status is None or (status and running.copy.timed_out()):
            verdict: Verdict = "hung"
        else:
            verdict = "killed" if status else "survived"
        score.verdicts[verdict] += 1
        score.seconds += time.monotonic() - running.started
        tested = Survivor(place, *changed_lines(running.source, running.changed))
        for test in running.copy.failed_tests() if verdict == "killed" else ():
            score.killers.setdefault(test, []).append(tested)
        if verdict != "killed" or running.module != score.module:
            print(f"{verdict}: {tested}", flush=True)
        if verdict == "survived":
            score.survivors.append(tested)
        running.copy.write(running.module, running.source)


def _end(child: int, reaped: bool = False) -> None:
    """Ends what is left of a test process and of all that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    if not reaped:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
