"""Weights on their way out of the ranks: to engines by the transport that a plan names, or into a Hugging Face
checkpoint.

Ranks send and write themselves; this file decides which rank sends what to whom, and joins their reports. `EXPORTS`
has, by transport, which ranks send at the same time; `write` makes a checkpoint.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from megatron_daro.config.lora import peft_config
from megatron_daro.config.model_shape import CRITIC_HEADS, read_model_shape
from megatron_daro.convert.mapping import critic_config
from megatron_daro.runtime.ranks import Ranks
from megatron_daro.runtime.ray_calls import gather, yielding_to_event_loop
from megatron_daro.sync.files import Written, complete_adapter, complete_checkpoint, open_checkpoint
from megatron_daro.sync.plan import SendPlan, SendReport, WeightFiles
from megatron_daro.sync.routes import RankRole, Routes, joined_report, one_route, routes
from megatron_daro.sync.shard_sender import check_offers

_Routing = Callable[[SendPlan, Mapping[int, RankRole]], Routes]


async def staged(ranks: Ranks, plan: SendPlan, routing: _Routing = one_route) -> SendReport:
    """Have every pipeline stage send its weights, one after the other, since receivers take one bucket at a time; after
    a failure the remaining stages do not send. Args: routing: which ranks of a stage send to which servers."""
    reports: list[SendReport] = []
    for stage in _stages(ranks):
        reports.append(await _send_stages(ranks, [stage], plan, routing))
        if reports[-1].failures:
            break
    return functools.reduce(SendReport.joined, reports)


async def staged_by_host(ranks: Ranks, plan: SendPlan) -> SendReport:
    """Do as `staged`, with a rank on the host of each server sending to it."""
    return await staged(ranks, plan, routes)


async def at_once(ranks: Ranks, plan: SendPlan) -> SendReport:
    """Have the first stage gather what all stages have, such as adapters, and send it."""
    return await _send_stages(ranks, _stages(ranks), plan, one_route)


async def shard_to_shard(ranks: Ranks, plan: SendPlan) -> SendReport:
    """Have every rank send what it holds to the servers' ranks that need it, all at once."""
    offers = await ranks.all(lambda worker: worker.offer_shards.remote(plan))
    check_offers(offers, len(plan.targets))
    caller, *others = ranks.workers.items()
    calls = {caller[0]: caller[1].send_shards.remote(plan, offers)}
    calls |= {name: worker.send_shards.remote(plan, ()) async for name, worker in yielding_to_event_loop(others)}
    first, *rest = await gather(calls)
    return functools.reduce(SendReport.beside, rest, first)


EXPORTS: Mapping[str, Callable[[Ranks, SendPlan], Awaitable[SendReport]]] = {
    "tensor": staged_by_host,
    "adapters": at_once,
    "shards": shard_to_shard,
}
"""By the name of the transport; others use `staged`."""


async def export(ranks: Ranks, plan: SendPlan) -> SendReport:
    """Send the weights as the plan says."""
    return await EXPORTS.get(plan.transport, staged)(ranks, plan)


async def write(ranks: Ranks, files: WeightFiles) -> SendReport:
    """Have the ranks write one checkpoint, whole or not at all: one pipeline stage after the other, except that the
    first stage writes all adapters."""
    started, report = time.perf_counter(), SendReport()
    files = replace(files, directory=files.directory.absolute())
    await asyncio.to_thread(open_checkpoint, files)
    stages = _stages(ranks)
    for together in [stages] if files.what == "adapter" else [[stage] for stage in stages]:
        report = report.joined(await _write_stages(ranks, together, files))
    await asyncio.to_thread(_complete, ranks, files, report.files)
    return replace(report, send_s=time.perf_counter() - started)


async def _write_stages(ranks: Ranks, stages: Sequence[int], files: WeightFiles) -> SendReport:
    """Have the first rank of the first stage write what all exporting ranks of these stages gather."""
    calls = dict[str, Any]()
    parts = zip(ranks.infos, ranks.workers.items(), strict=True)
    async for info, (name, worker) in yielding_to_event_loop(parts):
        if info.sends and info.stage == stages[0]:
            calls[name] = worker.write.remote(files)
        elif info.exports and info.stage in stages:
            calls[name] = worker.export.remote(None, (), files.what)
    return next(report for report in await gather(calls) if report)


def _complete(ranks: Ranks, files: WeightFiles, written: Written) -> None:
    """Add the checkpoint's files besides those of tensors, and move it to its final name."""
    path, changes = ranks.settings.model_path, dict[str, Any]()
    if files.what == "adapter":
        config = peft_config(ranks.settings.lora, read_model_shape(path), str(path))
        complete_adapter(files, written, config)
        return
    if files.what == "critic":
        path = ranks.algorithm.critic.path or path
        changes = critic_config(read_model_shape(path, CRITIC_HEADS).family)
    complete_checkpoint(files, written, path, ranks.actor.torch_dtype, changes)


def _stages(ranks: Ranks) -> list[int]:
    return sorted({info.stage for info in ranks.infos})


async def _send_stages(ranks: Ranks, stages: Sequence[int], plan: SendPlan, routing: _Routing) -> SendReport:
    """Have the exporting ranks of these stages export; `routing` chooses which of them send, and which other ranks
    relay."""
    roles = {
        rank: RankRole(info.host, info.exports and info.stage in stages, info.sends and info.stage == stages[0])
        for rank, info in enumerate(ranks.infos)
    }
    stage_routes = routing(plan, roles)
    members = stage_routes.members
    if members:
        await ranks.join_relays(members)
    calls, senders = dict[str, Any](), dict[str, int]()
    async for rank, (name, worker) in yielding_to_event_loop(enumerate(ranks.workers.items())):
        if rank in stage_routes.relays:
            calls[name] = worker.relay.remote(stage_routes.relays[rank], members)
        elif roles[rank].exports:
            group = members if rank == stage_routes.sender else ()
            calls[name] = worker.export.remote(stage_routes.plans.get(rank), group, plan.what)
        if rank in stage_routes.relays or rank in stage_routes.plans:
            senders[name] = rank
    results = dict(zip(calls, await gather(calls), strict=True))
    return joined_report(stage_routes, {rank: results[name] for name, rank in senders.items()})
