"""Processes that run cases: four ranks that join one layout after another, and one more for cases of one process.

`search` asks for cases, one at a time; each rank that takes part runs the case and answers. If a rank fails or does not
answer in time, all processes are replaced, and the case counts as failed.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import multiprocessing
import sys
import time
import traceback
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

from torch import Tensor

from megatron_daro.errors import AlgorithmError
from megatron_daro.ports import reserve_port
from megatron_daro.temporary import use_own_sockets
from megatron_daro.workshop.check_loss.cases import Case
from megatron_daro.workshop.check_loss.outcomes import Outcome, Trace
from megatron_daro.workshop.check_loss.records import LossFunction

RANKS, ANSWER_S = 4, 120
_Answer = tuple[dict[str, Tensor], list[Trace]]
"""Gradients and traces of a rank."""
_SETTLE_S = 2.0
"""How long the other ranks may still answer once one has failed."""


def find_function(name: str) -> LossFunction:
    """Return the function `module:function`; the current folder is on the import path.

    Raises:
        AlgorithmError: it cannot be imported, or is no function.
    """
    module, _, attribute = name.partition(":")
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        function = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise AlgorithmError(
            f"loss function: got {name!r}, which cannot be imported ({error}), allowed is module:function that Python "
            "can import from here; start in its folder, or put that into PYTHONPATH"
        ) from error
    if not callable(function):
        raise AlgorithmError(f"loss function: got {name!r}, which is no function, allowed is module:function")
    return function


class CasePool:
    """Runs cases. Use as a context manager."""

    def __init__(self) -> None:
        """Start nothing yet; `with` starts the processes."""
        self._pipes: list[Connection] = []
        self._processes: list[BaseProcess] = []
        self._layout: tuple[int, ...] | None = None

    def __enter__(self) -> CasePool:
        """Start the processes."""
        self._start()
        return self

    def __exit__(self, *failure: object) -> None:
        """End the processes."""
        self._stop()

    def _start(self) -> None:
        # Forked from a process that has only imported Megatron, and therefore runs no threads.
        use_own_sockets()
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["megatron_daro.workshop.check_loss.rank"])
        for _ in range(RANKS + 1):
            ours, theirs = context.Pipe()
            process = context.Process(target=serve, args=(theirs, list(sys.path)), daemon=True)
            process.start()
            self._pipes.append(ours)
            self._processes.append(process)

    def _stop(self) -> None:
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            process.join(10)
        self._pipes, self._processes, self._layout = [], [], None

    def run(self, case: Case, function: str) -> Outcome:
        """Run a case under `module:function`, and return its gradients and traces, or the error of a rank."""
        from megatron_daro.workshop.check_loss.rank import joined

        # Cases of one process have a process of their own, so that the ranks keep their groups between references.
        members = self._pipes[: case.world_size] if case.world_size > 1 else self._pipes[-1:]
        layout = (case.tensor, case.pipeline, case.context, case.data, max(case.expert, 1))
        changed = case.world_size > 1 and layout != self._layout
        self._layout = layout if changed else self._layout
        with contextlib.ExitStack() as held:
            meeting = f"tcp://127.0.0.1:{held.enter_context(reserve_port('127.0.0.1')).port}" if changed else None
            for rank, pipe in enumerate(members):
                pipe.send((case, function, rank, meeting))
            answers, failure = self._answers(members)
        if failure:
            self._stop()  # the neighbours of a rank that failed wait in a collective
            self._start()
            return failure
        gradients, traces = zip(*answers, strict=True)
        return Outcome(joined(case, list(gradients)), [trace for rank in traces for trace in rank])

    def _answers(self, members: list[Connection]) -> tuple[list[_Answer], Outcome | None]:
        """Return the answers of all ranks, or how the case failed. If a process ended, that is the failure, since its
        neighbours only report a broken connection; else it is the first error that a rank reports."""
        answers: dict[int, _Answer] = {}
        waiting, deadline, lost, error = dict(enumerate(members)), time.monotonic() + ANSWER_S, "", ""
        while waiting and (ready := wait(list(waiting.values()), deadline - time.monotonic())):
            for rank, pipe in [(rank, pipe) for rank, pipe in waiting.items() if pipe in ready]:
                del waiting[rank]
                try:
                    good, value = pipe.recv()
                except (EOFError, OSError):
                    lost = lost or f"rank {rank}: {self._ended(pipe)}"
                    good = False
                else:
                    error = error or ("" if good else str(value))
                    answers[rank] = value
                if not good:
                    deadline = min(deadline, time.monotonic() + _SETTLE_S)
        if error and not lost:
            return [], Outcome(error=error)
        if waiting:
            ranks = ", ".join(map(str, waiting))
            lost = lost or f"ranks {ranks} did not answer within {ANSWER_S} s: they wait for other ranks"
        return [answers[rank] for rank in sorted(answers)], Outcome(error=lost, lost=True) if lost else None

    def _ended(self, pipe: Connection) -> str:
        process = self._processes[self._pipes.index(pipe)]
        process.join(_SETTLE_S)
        code = process.exitcode
        return f"its process ended by signal {-code}" if code and code < 0 else f"its process ended with status {code}"


def serve(pipe: Connection, path: list[str]) -> None:
    """Run the requested cases until the other end closes. This is the main function of a rank."""
    import warnings

    warnings.simplefilter("ignore")
    sys.path[:] = path
    import torch

    from megatron_daro.actor.parallel import shutdown
    from megatron_daro.workshop.check_loss.rank import join, run_case

    torch.set_num_threads(1)
    gc.freeze()  # later collections skip what is imported
    alone = False
    while True:
        try:
            case, name, rank, meeting = pipe.recv()
        except EOFError:
            return
        try:
            function = find_function(name)
            if meeting or (case.world_size == 1 and not alone):
                shutdown()
                gc.collect()  # the last case's model holds its groups, and so gloo's threads, in a reference cycle
                join(case, rank, meeting)
                alone = case.world_size == 1
            traces: list[Trace] = []
            pipe.send((True, (run_case(case, function, traces), traces)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))
