"""A pool of gloo processes that stay alive: importing Megatron costs seconds, a layout only milliseconds.

`RankPool.run(function, layout, **arguments)` joins the first layout.world_size processes into a world with Megatron's
groups, calls `function(layout=layout, **arguments)` on each and returns what each returned.
`function` must be importable.

With coloured=True the storages of every policy have two colours meanwhile (two_colours.py), and a task fails where a
GPU would refuse an operation, or the host would wait where colour_limits.py does not allow it.
"""

from __future__ import annotations

import multiprocessing
import traceback
from multiprocessing import forkserver
from typing import Any

from megatron_daro.ports import reserve_port

LIMIT_S = 480
PRELOAD = ["torch", "transformers", "megatron_daro.actor.policy", "megatron_daro.actor.parallel"]


class RankPool:
    def __init__(self, size: int, *, coloured: bool = False) -> None:
        context = _context()
        self._pipes, self._processes = [], []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, theirs, coloured), daemon=True)
            process.start()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, function: Any, layout: Any, **arguments: Any) -> list[Any]:
        members = self._pipes[: layout.world_size]
        answers = []
        with reserve_port("127.0.0.1") as reserved:  # pytest's other process may look for one at this moment
            for pipe in members:
                pipe.send((function, layout, reserved.port, arguments))
            for rank, pipe in enumerate(members):  # all of them first: an answer left behind would be the next test's
                assert pipe.poll(LIMIT_S), f"rank {rank} did not answer within {LIMIT_S} s"
                answers.append(pipe.recv())
        results = []
        for rank, (ok, value) in enumerate(answers):
            assert ok, f"rank {rank}:\n{value}"
            results.append(value)
        return results

    def close(self) -> None:
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            process.join(10)


def _context() -> Any:
    """Processes are forked from one that has imported Megatron once, and nothing else: it runs no threads.

    There is one such server in a process, and it imports when it starts: that of a conversion, tested before, has not
    imported what ranks need, and each of them would. It is ended.
    """
    server = forkserver._forkserver
    if server._forkserver_pid is not None and server._preload_modules != PRELOAD:
        server._stop()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    return context


def _serve(rank: int, pipe: Any, coloured: bool) -> None:
    import gc
    import warnings

    import torch

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    from megatron_daro.actor import parallel
    from megatron_daro.actor.compat import forget_rotary_tables

    run = _coloured if coloured else _plain
    gc.freeze()
    while True:
        function, layout, port, arguments = pipe.recv()
        try:
            parallel.initialize(layout, rank=rank, init_method=f"tcp://127.0.0.1:{port}", seed=1, timeout_s=120)
            pipe.send((True, run(function, layout=layout, **arguments)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))
        finally:
            parallel.shutdown()
            # A model that is still there holds groups, and each has threads that wake a hundred times a second.
            forget_rotary_tables()
            gc.collect()


def _plain(function: Any, **arguments: Any) -> Any:
    return function(**arguments)


def _coloured(function: Any, **arguments: Any) -> Any:
    from colour_limits import unexpected
    from two_colours import watched

    with watched() as found:
        value = function(**arguments)
    assert not unexpected(found.calls), "\n".join(unexpected(found.calls))
    return value
