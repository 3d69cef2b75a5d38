"""A rank gets out of a collective call by itself: whether its peer is frozen or goes on, and whichever of the two made
the connection."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading

import pytest

pytestmark = pytest.mark.slow

LIMIT_S = 300
TURNS = 20


def rank_process(rank, store, pipe):
    """Joins, says so, and waits in a sum until it is aborted from another thread; sends what came of it."""
    import torch
    import torch.distributed as dist

    from megatron_daro.actor import parallel

    before = parallel.listening()
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    dist.all_reduce(torch.ones(1))  # connected from here on
    own = parallel.listening() - before
    everybody = parallel.gathered_addresses(own)
    pipe.send((len(own), len(everybody)))
    pipe.recv()  # the other one is frozen

    def wait():
        try:
            dist.all_reduce(torch.ones(1))
        except RuntimeError as error:
            pipe.send(str(error))

    waiting = threading.Thread(target=wait)
    waiting.start()
    waiting.join(1)
    parallel.abort(own, everybody)
    waiting.join(LIMIT_S)
    os._exit(0)  # the group is not left: this is about the call


def busy_rank_process(rank, folder, pipe):
    """Joins, computes sums without a pause until it is aborted from another thread, leaves, and begins anew."""
    import torch
    import torch.distributed as dist

    from megatron_daro.actor import parallel

    for turn in range(TURNS):
        before = parallel.listening()
        dist.init_process_group("gloo", init_method=f"file://{folder}/{turn}", rank=rank, world_size=2)
        own = parallel.listening() - before
        everybody = parallel.gathered_addresses(own)
        aborting = threading.Timer(0.1, parallel.abort, (own, everybody))
        aborting.start()
        try:
            while True:
                dist.all_reduce(torch.ones(4000))
        except RuntimeError as error:
            pipe.send(str(error))
        aborting.join()
        pipe.recv()  # both are out
        parallel.shutdown()


@pytest.mark.timeout(180)
def test_calls_that_are_under_way_end_when_all_ranks_abort_them(tmp_path):
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    for rank in range(2):
        here, there = context.Pipe()
        processes.append(context.Process(target=busy_rank_process, args=(rank, tmp_path, there), daemon=True))
        processes[-1].start()
        pipes.append(here)
    try:
        for _ in range(TURNS):
            for pipe in pipes:
                assert pipe.poll(60), "it still waits"
                assert "onnection closed" in pipe.recv()
            for pipe in pipes:
                pipe.send("leave")
    finally:
        for process in processes:
            process.kill()
            process.join()


@pytest.mark.timeout(180)
@pytest.mark.parametrize("frozen", [0, 1])
def test_a_call_that_waits_for_a_frozen_rank_is_aborted_without_it(tmp_path, frozen):
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    for rank in range(2):
        here, there = context.Pipe()
        process = context.Process(target=rank_process, args=(rank, tmp_path / "store", there), daemon=True)
        process.start()
        pipes.append(here)
        processes.append(process)
    try:
        for pipe in pipes:
            assert pipe.poll(LIMIT_S) and pipe.recv() == (1, 2), "each group listens once on every rank"
        os.kill(processes[frozen].pid, signal.SIGSTOP)
        living = pipes[1 - frozen]
        living.send("go on")
        assert living.poll(LIMIT_S), "it still waits for the frozen one"
        assert "onnection closed" in living.recv()
    finally:
        for process in processes:
            process.kill()
            process.join()
