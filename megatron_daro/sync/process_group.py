"""The process group of one sender and the ranks of its servers: made as servers make theirs, ended without harm here.

Place in the data flow: sync/broadcast.py makes one, sends buckets through it, and gives it up after any failure. A
peer that died or hangs must cost this process a group and nothing else: torch's default for NCCL is to end the process
when a collective fails (ProcessGroupNCCL.hpp, ErrorHandlingMode), so for this group alone its watchdog only looks on.
Source: sglang/srt/utils/common.py, init_custom_process_group: both ends must derive the same store keys.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

_Result = TypeVar("_Result")
# Read when a group is made. 0: a failed collective is reported by its own wait, and the process lives.
_NCCL_ERRORS = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
# NCCL's own limit comes after the one that `broadcast` is given, so that its caller is the one who ends it.
_NCCL_MARGIN_S = 60.0


class SendGroup:
    """One group; rank 0 is this process."""

    def __init__(self, backend: str, group: dist.ProcessGroup, store: dist.Store) -> None:
        """Args: backend: "gloo" or "nccl". group, store: of torch; the store is served by this process."""
        self._backend, self._group, self._store = backend, group, store
        self._left = threading.Lock()

    @classmethod
    def join(
        cls, name: str, world_size: int, store: dist.Store, *, backend: str, join_s: float, broadcast_s: float
    ) -> SendGroup:
        """Make this end; blocks until all have joined (gloo), or until nothing (NCCL joins at the first broadcast).

        Args:
            name: of the group, as the servers were told. store: from `listening_store`.
            join_s: longest wait for the others. broadcast_s: longest wait that `broadcast` will be given.
        """
        limit = broadcast_s + _NCCL_MARGIN_S if backend == "nccl" else join_s
        options: dict[str, Any] = {"group_name": name, "timeout": timedelta(seconds=limit)}
        helper: Any = c10d._new_process_group_helper
        with _errors_end_no_process(backend):
            group, _ = helper(world_size, 0, [], dist.Backend(backend), c10d.PrefixStore(name, store), **options)
        c10d._world.pg_group_ranks[group] = {rank: rank for rank in range(world_size)}
        return cls(backend, group, store)

    def broadcast(self, data: Tensor, timeout_s: float) -> None:
        """Send to everyone; blocks. After an error the group is left: that ends the wait of the servers, whose own
        limit is half an hour. Raises RuntimeError when a peer is lost or the time is over."""
        try:
            self._group.broadcast(data, 0).wait(timedelta(seconds=timeout_s))
        except Exception:
            self.close()
            raise

    def break_off(self) -> None:
        """End what is being sent, where that can be done: NCCL's communicator is aborted, gloo's send runs to its
        limit."""
        if self._backend == "nccl":
            self._group.abort()

    def close(self) -> None:
        """Leave the group; with NCCL, in a thread, since an abort can wait for a peer that hangs. Again is nothing."""
        if not self._left.acquire(blocking=False):
            return
        if self._backend == "nccl":
            in_thread(self._abort_and_destroy)
        else:
            dist.destroy_process_group(self._group)

    def _abort_and_destroy(self) -> None:
        self._group.abort()
        dist.destroy_process_group(self._group)


def listening_store(host: str, world_size: int, timeout_s: float) -> tuple[dist.Store, int]:
    """Return a store that listens on this address only (torch's own would listen on every interface), and its port."""
    with socket.create_server((host, 0)) as listener:
        port = listener.getsockname()[1]
        store = dist.TCPStore(
            host,
            port,
            world_size,
            is_master=True,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
    return store, port


def in_thread(call: Callable[[], _Result]) -> Future[_Result]:
    """Return the outcome of a call in a thread of its own, which nobody has to wait for: not even the process's end."""
    future: Future[_Result] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:  # handed to whoever waits
            future.set_exception(error)

    threading.Thread(target=run, name="weight broadcast", daemon=True).start()
    return future


@contextmanager
def _errors_end_no_process(backend: str) -> Iterator[None]:
    """While a group of NCCL is made its errors are left to whoever waits; every other group keeps torch's default."""
    if backend != "nccl":
        yield
        return
    before = os.environ.get(_NCCL_ERRORS)
    os.environ[_NCCL_ERRORS] = "0"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_NCCL_ERRORS]
        else:
            os.environ[_NCCL_ERRORS] = before
