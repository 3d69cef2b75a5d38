"""Weights on their way out of the ranks: to engines on the way that a plan names, or into a Hugging Face checkpoint.

Ranks send to receivers by themselves; this says who sends what to whom, and joins their reports.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from megatron_daro.config.transports import TRANSPORTS
from megatron_daro.runtime.ranks import Ranks
from megatron_daro.runtime.supervisor import gather, yielding_to_event_loop
from megatron_daro.sync import files
from megatron_daro.sync.plan import SendPlan, SendReport
from megatron_daro.sync.routes import RankRole, joined_report, routes
from megatron_daro.sync.shard_sender import check_offers


async def send(ranks: Ranks, plan: SendPlan) -> SendReport:
    """Have every pipeline stage send its weights as the plan says, one after the other, since receivers take one bucket
    at a time; after a failure the rest is not sent. Adapters are gathered on the first stage, which sends all."""
    if TRANSPORTS[plan.transport].shard_plan:
        return await _send_shards(ranks, plan)
    stages = sorted({info.stage for info in ranks.infos})
    if plan.what == "adapter":
        return await _send_stages(ranks, stages, plan)
    report = SendReport()
    for stage in stages:
        report = report.joined(await _send_stages(ranks, [stage], plan))
        if report.failures:
            break
    return report


async def write(ranks: Ranks, plan: SendPlan, complete: Callable[[SendPlan, files.Written], None]) -> SendReport:
    """Have them write one checkpoint into the plan's directory, whole or not at all. Args: complete: adds what else it
    has, and gives it its name."""
    started = time.perf_counter()
    plan = replace(plan, directory=files.directory_of(plan).absolute())
    await asyncio.to_thread(files.open_checkpoint, plan)
    report = await send(ranks, plan)
    if report.failures:
        return report
    await asyncio.to_thread(complete, plan, report.files)
    return replace(report, send_s=time.perf_counter() - started)


async def _send_shards(ranks: Ranks, plan: SendPlan) -> SendReport:
    """Have every rank send what it holds to the servers' ranks that need it, all at once."""
    offers = await ranks.all(lambda worker: worker.offer_shards.remote(plan))
    check_offers(offers, len(plan.targets))
    caller, *others = ranks.workers.items()
    calls = {caller[0]: caller[1].send_shards.remote(plan, offers)}
    calls |= {name: worker.send_shards.remote(plan, ()) async for name, worker in yielding_to_event_loop(others)}
    first, *rest = await gather(calls)
    return functools.reduce(SendReport.beside, rest, first)


async def _send_stages(ranks: Ranks, stages: Sequence[int], plan: SendPlan) -> SendReport:
    """Have the exporting ranks of these stages export, and those of the first that have servers of the plan on their
    host send."""
    roles = {
        rank: RankRole(info.host, info.exports and info.stage in stages, info.sends and info.stage == stages[0])
        for rank, info in enumerate(ranks.infos)
    }
    stage_routes = routes(plan, roles)
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
