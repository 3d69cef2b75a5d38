"""Servers whose ranks are threads, with the loader that runs inside real ones, and trainers that send them weights."""

from __future__ import annotations

import asyncio
import base64
import json
import pickle
import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace

import torch
from shard_cases import CASES, carried_out, checkpoint, server_shapes, shards

from megatron_daro.config.transports import TRANSPORTS
from megatron_daro.sync import shard_sender
from megatron_daro.sync.in_server.megatron_daro_shards import read_frame, receive, send_frame
from megatron_daro.sync.plan import SendPlan, SendReport, Target
from megatron_daro.sync.shard_sender import ShardSender

LOADER = TRANSPORTS["shards"].loader

SECONDS = 20.0


class Module(torch.nn.Module):
    """A rank of a server: parameters by SGLang's names, which have dots."""

    def __init__(self, shapes, dtype=torch.float32, device="cpu"):
        super().__init__()
        nothing = {"fill_value": float("nan"), "dtype": dtype, "device": device}
        self.held = {n: torch.nn.Parameter(torch.full(shape, **nothing)) for n, shape in shapes.items()}

    def named_parameters(self):
        return iter(self.held.items())


class Fleet:
    """Servers whose ranks are threads; `meddle(server, rank, request)` may change a request or take its place."""

    def __init__(self, case, meddle=lambda server, rank, request: request, dtype=torch.float32, device="cpu"):
        self.case, self.meddle = case, meddle
        ranks = case.server_layout.tensor
        self.modules = {
            (server, rank): Module(server_shapes(case, rank), dtype, device)
            for server in range(case.servers)
            for rank in range(ranks)
        }
        self.targets = tuple(Target(f"server {s}", f"http://{s}", ranks) for s in range(case.servers))
        self.refusing = {}

    @asynccontextmanager
    async def calls(self):
        async def post(url, path, body, timeout_s):
            server = int(url.removeprefix("http://"))
            if server in self.refusing:
                raise self.refusing[server]
            assert (path, body["load_format"], body["flush_cache"]) == ("/update_weights_from_tensor", LOADER, False)
            await asyncio.gather(
                *(
                    asyncio.to_thread(self.load, server, rank, payload)
                    for rank, payload in enumerate(body["serialized_named_tensors"])
                )
            )
            return {"success": True}  # whatever the loader did

        yield post

    def load(self, server, rank, payload):
        (name, tensor), *_ = pickle.loads(base64.b64decode(payload))
        request = self.meddle(server, rank, json.loads(name))
        if request is not None:
            receive(self.modules[server, rank], [(json.dumps(request), tensor)])


def synced(
    case,
    fleet,
    *,
    before_sending=lambda senders, offers: None,
    offered=lambda writes: writes,
    timeout_s=SECONDS,
    over="tcp",
    weights=None,
    senders=(),
):
    """The reports of all ranks of the trainer. offered: changes what they offer. weights, senders: other than new
    ones."""
    parameter = shards(case, weights or checkpoint(case))
    world, plan = case.trainer_layout.world_size, case.plan(4)
    senders = senders or [ShardSender("127.0.0.1", fleet.calls) for _ in range(world)]
    wanted = tuple(n // 4 for n in plan.balance().received)
    writes = offered([list(plan.writes(rank)) for rank in range(world)])
    offers = [sender.offer(own, wanted) for sender, own in zip(senders, writes, strict=True)]
    send_plan = SendPlan(
        transport="shards",
        targets=fleet.targets,
        bucket_bytes=2**20,
        timeout_s=timeout_s,
        details={"shards_over": over},
    )
    shard_sender.check_offers(offers, case.servers)
    before_sending(senders, offers)

    def send(rank):
        held = {write.source: parameter(rank, write.source) for write in writes[rank]}
        return senders[rank].send(held, send_plan, offers if rank == 0 else ())

    with ThreadPoolExecutor(world) as pool:
        return list(pool.map(send, range(world)))


@contextmanager
def asked(sender, server, rank):
    """The connection of a receiver that was told what it is to get, and has not said anything to it."""
    host, port, key = sender
    with socket.create_connection((host, port)) as connection:
        send_frame(connection, {"key": key, "server": server, "rank": rank})
        read_frame(connection)
        yield connection


def failures(reports):
    joined = SendReport.beside(reports[0], reports[0])
    for report in reports[1:]:
        joined = joined.beside(report)
    assert joined.apart
    return joined.failures


def has_everything(case, fleet, server, weights=None):
    expected = carried_out(case, weights or checkpoint(case))
    for rank in range(case.server_layout.tensor):
        for name, parameter in fleet.modules[server, rank].held.items():
            if not torch.equal(parameter.float().cpu().nan_to_num(-1), expected[server, rank][name].nan_to_num(-1)):
                return False
    return True


def case_of(name):
    return next(case for case in CASES if case.name == name)


CASE = replace(case_of("wider_server"), servers=3)


def fails_alone(fleet, reports, kind, text, server=1):
    found = failures(reports)
    assert list(found) == [f"server {server}"]
    assert found[f"server {server}"].kind == kind
    assert text in found[f"server {server}"].text
    assert all(has_everything(fleet.case, fleet, other) for other in {0, 1, 2} - {server})
