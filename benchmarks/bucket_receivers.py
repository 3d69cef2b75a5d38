"""One sender and receivers of weights on this machine, whole and in pieces, for benchmarks/sync_model.py and
shard_model.py.

The sender of buckets is `BroadcastSender`; receivers are processes that do with a bucket what a SGLang server does,
over gloo and TCP, and take shards with the loader that runs inside one. Each piece of a sync can be timed alone.
"""

from __future__ import annotations

import asyncio
import base64
import itertools
import math
import multiprocessing
import os
import pickle
import queue
import socket
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from aiohttp import web
from torch.distributed import distributed_c10d as c10d

from megatron_daro.engine.sglang.client import calls_to_servers
from megatron_daro.engine.sglang.command import CPU_SERVER
from megatron_daro.sync.broadcast import BroadcastSender, SendGroup
from megatron_daro.sync.buckets import bucketize
from megatron_daro.sync.in_server.megatron_daro_shards import checksum_of, read_exactly, receive
from megatron_daro.sync.plan import SendPlan, Target

MIB = 2**20
TENSOR = 2 * MIB
"""Bytes of every tensor of a model here."""
TINY, _TINY_BUCKETS = 4096, 40
Times = tuple[float, float]
"""Seconds, CPU seconds of all processes that take part."""
_LIMIT_S = 60.0


def made_model(num_bytes: int) -> dict[str, torch.Tensor]:
    """Weights in bf16, all ones."""
    return {f"layers.{i}.weight": torch.ones(TENSOR // 2, dtype=torch.bfloat16) for i in range(num_bytes // TENSOR)}


class Receiver:
    """Does with a bucket what a server does: in the main thread of a process, whose freed memory is used again, as that
    of SGLang's scheduler; another thread answers calls.

    Source: sglang/srt/model_executor/model_runner_components/weight_updater.py (0.5.23),
    `_receive_bucketed_weights_from_distributed`: `FlattenedTensorBucket.empty(...)`, `torch.distributed.broadcast(
    flattened_tensor, src=0, group=...)`, `bucket.reconstruct_tensors()`; then `load_weights(named_tensors)`, which ends
    in `param_data.copy_(loaded_weight)` for each tensor. The answer follows. managers/communicator.py,
    FanOutCommunicator: one request at a time.
    """

    def __init__(self) -> None:
        self._group: Any = None
        self._weights: dict[str, torch.Tensor] = {}
        self._requests: queue.Queue[tuple[str, Mapping[str, Any], Future[Times]]] = queue.Queue()

    async def answer(self, request: web.Request) -> web.Response:
        """Answer when the main thread is done."""
        done: Future[Times] = Future()
        self._requests.put((request.path.strip("/"), await request.json(), done))
        wall, cpu = await asyncio.wrap_future(done)
        return web.json_response({"success": True, "wall_s": wall, "cpu_s": cpu, "process_s": time.process_time()})

    def work(self) -> None:
        """Do what is asked, for ever."""
        while True:
            name, body, done = self._requests.get()
            started, cpu = time.perf_counter(), time.process_time()
            getattr(self, name)(body)
            done.set_result((time.perf_counter() - started, time.process_time() - cpu))

    def init_weights_update_group(self, body: Mapping[str, Any]) -> None:
        limit, world = timedelta(seconds=_LIMIT_S), body["world_size"]
        store = dist.TCPStore(body["master_address"], body["master_port"], world, is_master=False, timeout=limit)
        prefixed = c10d.PrefixStore(body["group_name"], store)
        helper: Callable[..., Any] = c10d._new_process_group_helper
        options = {"group_name": body["group_name"], "timeout": limit}
        self._group, _ = helper(world, body["rank_offset"], [], dist.Backend("gloo"), prefixed, **options)
        c10d._world.pg_group_ranks[self._group] = {rank: rank for rank in range(world)}

    def destroy_weights_update_group(self, body: Mapping[str, Any]) -> None:
        dist.destroy_process_group(self._group)

    def update_weights_from_distributed(self, body: Mapping[str, Any]) -> None:
        sizes = [math.prod(shape) for shape in body["shapes"]]
        flat = torch.empty(sum(sizes) * 2, dtype=torch.uint8)
        self._group.broadcast(flat, 0).wait()
        self._load(body["names"], flat.view(torch.bfloat16).split(sizes))

    def update_weights_from_tensor(self, body: Mapping[str, Any]) -> None:
        """Take shards. Source: `update_weights_from_tensor` of the same file calls the loader that load_format names
        with the model and the unpickled tensors."""
        model: Any = self  # named_parameters is all that it asks a module for
        receive(model, pickle.loads(base64.b64decode(body["serialized_named_tensors"][0])))

    def named_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """As a module has it."""
        return iter(self._weights.items())

    def hold(self, body: Mapping[str, Any]) -> None:
        """Have parameters in bf16 of so many bytes each."""
        self._weights = {name: torch.ones(body["bytes"] // 2, dtype=torch.bfloat16) for name in body["names"]}

    def read(self, body: Mapping[str, Any]) -> None:
        """Only read what a connection brings, piece by piece."""
        window = memoryview(bytearray(body["bytes"]))
        with socket.create_connection(("127.0.0.1", body["port"]), _LIMIT_S) as connection:
            for _ in range(body["count"]):
                read_exactly(connection, window)

    def place(self, body: Mapping[str, Any]) -> None:
        """Only what follows the reading of a shard's piece: its checksum and the copy."""
        piece, checksum = torch.ones(body["bytes"] // 2, dtype=torch.bfloat16), 0
        window = memoryview(piece.view(torch.uint8).numpy().data)
        for parameter in itertools.islice(itertools.cycle(self._weights.values()), body["count"]):
            checksum = checksum_of(window, checksum)
            parameter.copy_(piece)

    def nothing(self, body: Mapping[str, Any]) -> None:
        """Only an answer."""

    def receive(self, body: Mapping[str, Any]) -> None:
        """Only the broadcasts."""
        for _ in range(body["count"]):
            self._group.broadcast(torch.empty(body["bytes"], dtype=torch.uint8), 0).wait()

    def load(self, body: Mapping[str, Any]) -> None:
        """Only the loading."""
        per_bucket = body["bytes"] // TENSOR
        flat = torch.zeros(body["bytes"], dtype=torch.uint8).view(torch.bfloat16).split(TENSOR // 2)
        for i in range(body["count"]):
            self._load([str(i * per_bucket + k) for k in range(per_bucket)], flat)

    def _load(self, names: Sequence[str], tensors: Sequence[torch.Tensor]) -> None:
        for name, tensor in zip(names, tensors, strict=True):
            if name not in self._weights:
                self._weights[name] = torch.zeros_like(tensor)
            self._weights[name].copy_(tensor)


def _serve(pipe: Any) -> None:
    """A receiver's process."""
    torch.set_num_threads(1)
    receiver = Receiver()

    async def serve() -> None:
        application = web.Application(client_max_size=2**26)
        application.router.add_route("*", "/{path:.*}", receiver.answer)
        runner = web.AppRunner(application, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        pipe.send(f"http://127.0.0.1:{runner.addresses[0][1]}")
        await asyncio.Event().wait()

    threading.Thread(target=lambda: asyncio.run(serve()), daemon=True).start()
    receiver.work()


@contextmanager
def receivers(count: int) -> Iterator[list[str]]:
    """Their URLs."""
    # As the run starts a CPU server; the C library reads its own when a process starts.
    os.environ.update(CPU_SERVER, GLOO_SOCKET_IFNAME="lo")
    context, processes, urls = multiprocessing.get_context("spawn"), [], []
    try:
        for _ in range(count):
            ours, theirs = context.Pipe()
            processes.append(context.Process(target=_serve, args=(theirs,), daemon=True))
            processes[-1].start()
            urls.append(ours)
        yield [pipe.recv() for pipe in urls]
    finally:
        for process in processes:
            process.kill()
            process.join()


class Receivers:
    """All of them, as their sender has them."""

    def __init__(self, urls: Sequence[str]) -> None:
        self._targets = tuple(Target(url, url, 1 + i) for i, url in enumerate(urls))

    def _cpu_s(self) -> float:
        """Of all processes since they began."""
        return time.process_time() + sum(answer["process_s"] for answer in asyncio.run(self._asked("/nothing", {})))

    async def _asked(self, path: str, body: Mapping[str, Any]) -> list[Any]:
        async with calls_to_servers() as post:
            return await asyncio.gather(*(post(target.url, path, body, _LIMIT_S) for target in self._targets))


class Wire(Receivers):
    """One sender and its receivers."""

    def __init__(self, urls: Sequence[str], model: Mapping[str, torch.Tensor], largest_bucket: int) -> None:
        super().__init__(urls)
        self._model = model
        self._sender = BroadcastSender("127.0.0.1", "gloo", calls_to_servers)
        self._room = [torch.ones(largest_bucket, dtype=torch.uint8) for _ in range(2)]

    def send(self, tensors: Mapping[str, torch.Tensor], bucket: int) -> Times:
        """A sync, for real."""
        plan = SendPlan(transport="distributed", targets=self._targets, bucket_bytes=bucket, timeout_s=_LIMIT_S)
        cpu, started = self._cpu_s(), time.perf_counter()
        report = self._sender.send(iter(tensors.items()), plan)
        seconds = time.perf_counter() - started
        if report.failures:
            raise SystemExit(f"a receiver failed: {dict(report.failures)}")
        return seconds, self._cpu_s() - cpu

    def _group(self) -> SendGroup:
        group = self._sender._group
        assert group, "joined by a sync before"
        return group

    def model(self, num_bytes: int) -> dict[str, torch.Tensor]:
        return dict(itertools.islice(self._model.items(), num_bytes // TENSOR))

    def broadcasts(self, num_bytes: int) -> Times:
        """The collective alone."""
        count = max(5, min(_TINY_BUCKETS, 256 * MIB // num_bytes))
        group = self._group()

        def ours() -> Times:
            started, cpu = time.perf_counter(), time.process_time()
            for i in range(count):
                group.broadcast(self._room[i % 2][:num_bytes], _LIMIT_S)
            return time.perf_counter() - started, time.process_time() - cpu

        async def both() -> tuple[Times, list[Any]]:
            body = {"bytes": num_bytes, "count": count}
            return await asyncio.gather(asyncio.to_thread(ours), self._asked("/receive", body))

        (wall, cpu), theirs = asyncio.run(both())
        return wall / count, (cpu + sum(times["cpu_s"] for times in theirs)) / count

    def beside(self, num_bytes: int) -> Times:
        """A broadcast and the packing of another bucket that begin at once, until both are done."""
        group, room = self._group(), self._room[0][:num_bytes]
        buckets = bucketize(itertools.cycle(self._model.items()), num_bytes, reuse=True)
        for _ in range(2):
            next(buckets)  # new pages

        async def both() -> list[float]:
            count, seconds = max(5, 256 * MIB // num_bytes), list[float]()
            receiving = asyncio.ensure_future(self._asked("/receive", {"bytes": num_bytes, "count": count + 1}))
            await asyncio.to_thread(group.broadcast, room, _LIMIT_S)  # all are there
            for _ in range(count):
                started = time.perf_counter()
                await asyncio.gather(
                    asyncio.to_thread(group.broadcast, room, _LIMIT_S), asyncio.to_thread(next, buckets)
                )
                seconds.append(time.perf_counter() - started)
            await receiving
            return seconds

        return statistics.median(asyncio.run(both())), 0.0

    def tiny(self) -> Times:
        """A bucket of almost nothing."""
        tensors = {f"tiny {i}": torch.zeros(TINY // 2, dtype=torch.bfloat16) for i in range(_TINY_BUCKETS)}
        wall, cpu = self.send(tensors, TINY)
        return wall / _TINY_BUCKETS, cpu / _TINY_BUCKETS

    def loading(self, num_bytes: int) -> Times:
        """In all receivers at once."""
        count = len(self._model) * TENSOR // num_bytes
        times = asyncio.run(self._asked("/load", {"bytes": num_bytes, "count": count}))
        return max(each["wall_s"] for each in times) / count, sum(each["cpu_s"] for each in times) / count

    def packing(self, num_bytes: int) -> tuple[Times, float]:
        """Of the sender; and how many seconds more one of the first two buckets takes, whose pages are new."""
        at, cpu = [time.perf_counter()], time.process_time()
        for _ in bucketize(iter(self._model.items()), num_bytes, reuse=True):
            at.append(time.perf_counter())
        each = [after - before for before, after in itertools.pairwise(at)]
        share = (time.process_time() - cpu) / sum(each)
        later = statistics.median(each[2:])
        return (later, later * share), max(statistics.mean(each[:2]) - later, 0.0)

    def close(self) -> None:
        self._sender.close()
