"""What a rehearsal found, as a record for JSON and as tables for a terminal.

Place in the data flow: Outcome -> record -> views. Measured numbers and planned ones are in sections of their own.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from rich.console import Group
from rich.table import Table

from megatron_daro.rehearse.loop import SILENT_S, Outcome
from megatron_daro.rehearse.setting import world
from megatron_daro.types import PlainValue

Record = dict[str, Any]


def as_record(outcome: Outcome) -> Record:
    """Return everything, as JSON-able values."""
    setting, meter = outcome.setting, outcome.meter
    steps = max(len(meter.spent) / setting.updates, 1)
    return {
        "recipe": str(setting.asked.recipe),
        "nodes": {
            "given": setting.nodes.nodes,
            "gpus_per_node": setting.asked.gpus_per_node,
            "idle": setting.nodes.idle,
        },
        "world": world(setting.full),
        "servers": setting.full.engine.replicas,
        "status": outcome.status,
        "error": outcome.error,
        "steps": [spent.step for spent in meter.spent],
        "updates_of_a_batch": setting.updates,
        "seconds": outcome.seconds,
        "start_s": outcome.start_s,
        "driver": {
            "cpu_s": _of_batches([spent.cpu_s for spent in meter.spent], setting.updates),
            "seconds": _of_batches([spent.seconds for spent in meter.spent], setting.updates),
            "rank_calls": _of_batches([spent.rank_calls for spent in meter.spent], setting.updates),
            **outcome.watched,
        },
        "object_store": {
            "bytes": outcome.store.num_bytes,
            "objects": outcome.store.objects,
            "bytes_a_batch": outcome.store.num_bytes / steps,
            "objects_a_batch": outcome.store.objects / steps,
        },
        "batch": _batch(outcome),
        "phases_s": _phases(outcome),
        "ports": {"chosen": outcome.ports, "clashes": outcome.clashes},
        "planned": _planned(outcome),
        "loss": _loss(outcome),
        "changes": outcome.changes,
        "notices": outcome.notices,
    }


def _batch(outcome: Outcome) -> dict[str, PlainValue]:
    return {key: value for line in outcome.meter.lines[-1:] for key, value in line.items() if key.startswith("batch/")}


def _phases(outcome: Outcome) -> dict[str, list[float]]:
    names = sorted({key for line in outcome.meter.lines for key in line if key.startswith("timing/")})
    updates, lines = outcome.setting.updates, outcome.meter.lines
    return {name.partition("/")[2]: _of_batches([line.get(name, 0.0) for line in lines], updates) for name in names}


def _of_batches(values: list[float], updates: int) -> list[float]:
    """Return the sums over the optimizer steps of each batch."""
    return [sum(values[i : i + updates]) for i in range(0, len(values), updates)]


def _planned(outcome: Outcome) -> Record:
    times = outcome.setting.times
    return {
        "step_s": times.step(outcome.setting.workload.staleness),
        **{f"{name}_s": value for name, value in dataclasses.asdict(times).items()},
        "weight_buckets": [dataclasses.asdict(plan) for plan in outcome.stages],
        "checkpoint": dataclasses.asdict(outcome.checkpoint),
    }


def _loss(outcome: Outcome) -> Record | None:
    loss, open_ = outcome.loss, outcome.unanswered
    if loss is None:
        return None
    ranks = outcome.setting.nodes.ranks_of(loss.node)
    died, waiting = (list(open_.died), list(open_.waiting)) if open_ else ([], [])
    return {
        **dataclasses.asdict(loss),
        "ranks": ranks,
        "servers": outcome.setting.nodes.servers_of(loss.node),
        "seconds_to_the_end": outcome.lost_s,
        "died": died,
        "waiting": len(waiting),
        "call": open_.call if open_ else "",
        "waited_s": open_.waited_s if open_ else 0.0,
        "named_by_the_driver": [rank for rank in ranks if f"actor rank {rank} " in outcome.error],
        "deadline_s": SILENT_S if loss.how == "silent" else None,
        "configured_deadline_s": outcome.step_deadline_s,
    }


def view(record: Record) -> Group:
    """Return the tables."""
    return Group(_head(record), _driver_table(record), _plan_table(record), *_loss_lines(record), _changed(record))


def _head(record: Record) -> str:
    nodes = record["nodes"]
    idle = f", {nodes['idle']} of them idle" if nodes["idle"] else ""
    return (
        f"{record['recipe']}: {record['world']}, {record['servers']} servers on {nodes['given']} nodes of "
        f"{nodes['gpus_per_node']} GPUs{idle}; {record['status']} after {record['seconds']:.0f} s here, "
        f"{record['start_s']:.0f} s of them until everything had started"
    )


def _driver_table(record: Record) -> Table:
    driver, store, ports = record["driver"], record["object_store"], record["ports"]
    table = Table("the driver, measured here", "", title_justify="left")
    rows = {
        "CPU seconds of each batch": _listed(driver["cpu_s"]),
        "seconds of each batch": _listed(driver["seconds"]),
        "calls to ranks of each batch": ", ".join(map(str, driver["rank_calls"])),
        "longest stall of the event loop": f"{driver['latest_ms']:.0f} ms (99 %: {driver['p99_ms']:.1f} ms)",
        "peak memory": f"{driver['own_gib']:.2f} GiB own, {driver['mapped_gib']:.2f} GiB of the object store mapped",
        "object store": f"{store['bytes_a_batch'] / 2**20:.1f} MiB in {store['objects_a_batch']:.0f} objects a batch",
        "ports": f"{ports['chosen']} chosen, {ports['clashes']} twice",
    }
    rows |= {f"phase {name}, seconds": _listed(values) for name, values in record["phases_s"].items()}
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def _plan_table(record: Record) -> Table:
    planned = record["planned"]
    table = Table("the cluster, planned", "")
    parts = ", ".join(f"{name} {planned[f'{name}_s']:.1f}" for name in ("generation", "logprobs", "train", "sync"))
    table.add_row("seconds of a batch", f"{planned['step_s']:.1f} ({parts})")
    for plan in planned["weight_buckets"]:
        table.add_row(
            f"weight sync, stage {plan['stage']}",
            f"{plan['tensors']} tensors, {plan['num_bytes'] / 2**30:.2f} GiB in {plan['buckets']} buckets, the largest "
            f"{plan['largest_bucket'] / 2**20:.0f} MiB",
        )
    files = planned["checkpoint"]
    table.add_row(
        "checkpoint",
        f"{files['files']} files of {files['least'] / 2**30:.2f} to {files['most'] / 2**30:.2f} GiB, one a rank; "
        f"{files['total'] / 2**30:.0f} GiB in all",
    )
    return table


def _loss_lines(record: Record) -> list[str]:
    loss = record["loss"]
    if loss is None:
        return []
    ranks, servers = loss["ranks"], loss["servers"]
    held = " and ".join(
        [f"ranks {_range(ranks)}" for _ in (1,) if ranks] + [f"servers {_range(servers)}" for _ in (1,) if servers]
    )
    lines = [f"node {loss['node']} ({held}) was {loss['how']} in step {loss['step']}"]
    if record["error"]:
        lines.append(f"the run ended {loss['seconds_to_the_end']:.1f} s later: {record['error']}")
        lines.append(
            f"never answered `{loss['call']}`: {len(loss['died'])} ranks whose process is gone "
            f"({_range(loss['died'])}), and {loss['waiting']} that waited {loss['waited_s']:.1f} s for them"
        )
    else:
        lines.append(f"the run went on: {record['status']}, {loss['seconds_to_the_end']:.1f} s later")
        lines += [f"  {notice}" for notice in record["notices"] if "is given up" in notice]
    if loss["deadline_s"] and record["error"]:
        lines.append(
            f"a silent node shows at the deadline of a step: {loss['deadline_s']:g} s here, "
            f"{loss['configured_deadline_s']:g} s in the run (trainer.deadline_scale)"
        )
    return lines


def _changed(record: Record) -> str:
    return "\n".join(["changed for this machine:", *(f"  {change}" for change in record["changes"])])


def _listed(values: list[float]) -> str:
    return ", ".join(f"{value:.2f}" for value in values)


def _range(numbers: list[int]) -> str:
    """Return "8 to 15" where they follow each other, else all."""
    if len(numbers) > 2 and numbers == list(range(numbers[0], numbers[-1] + 1)):
        return f"{numbers[0]} to {numbers[-1]}"
    return ", ".join(map(str, numbers)) or "none"
