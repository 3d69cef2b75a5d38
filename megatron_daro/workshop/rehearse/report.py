"""What a rehearsal found, as a record for JSON and as tables for a terminal.

Outcome -> record -> views. Measured numbers and planned ones are in sections of their own.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from rich.console import Group
from rich.table import Table

from megatron_daro.types import PlainValue
from megatron_daro.workshop.rehearse.loop import SILENT_S, Outcome
from megatron_daro.workshop.rehearse.setting import world

Record = dict[str, Any]
MOST_BUSY_MS = 1000.0
"""Of its own work, until the event loop wakes: answers of servers and the deaths of workers wait meanwhile."""
MOST_DRIVER_SHARE = 0.5
"""Of the planned time of a batch, that the driver may compute."""


def as_record(outcome: Outcome) -> Record:
    """Return everything, as JSON-able values."""
    setting, meter = outcome.setting, outcome.meter
    steps = max(len(meter.spent) / setting.updates, 1)
    record = {
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
    holds, faults = verdict(record)
    return record | {"holds": holds, "faults": faults}


def verdict(record: Record) -> tuple[bool, list[str]]:
    """Return whether the rehearsal went as it must, and a sentence for each thing that did not."""
    loss, driver, planned_s = record["loss"], record["driver"], record["planned"]["step_s"]
    faults = []
    ends = bool(loss and loss["ranks"])
    if ends and record["status"] != "failed":
        faults.append(f"ranks of node {loss['node']} were lost, and the run went on")
    elif ends and loss["how"] == "killed" and not loss["named_by_the_driver"]:
        faults.append(f"the run ended without naming a rank of node {loss['node']}: {record['error']}")
    elif ends and loss["how"] == "silent" and "deadline 'train'" not in record["error"]:
        faults.append(f"a silent node did not show at the deadline of a step: {record['error']}")
    elif not ends and record["status"] != "finished":
        faults.append(f"the run did not finish: {record['error'] or record['status']}")
    if record["ports"]["clashes"]:
        faults.append(f"{record['ports']['clashes']} ports were chosen twice")
    if driver["busiest_ms"] > MOST_BUSY_MS:
        faults.append(
            f"the event loop did not wake for {driver['busiest_ms'] / 1000:.1f} s of its own work (at most "
            f"{MOST_BUSY_MS / 1000:g} s), in {driver['busiest_in'] or 'a place that was not seen'}"
        )
    cpu_s = driver["cpu_s"][-1] if driver["cpu_s"] else 0.0
    if cpu_s > MOST_DRIVER_SHARE * planned_s:
        faults.append(
            f"the driver needs {cpu_s:.1f} CPU seconds for a batch that is planned to take {planned_s:.1f} s (at most "
            f"{MOST_DRIVER_SHARE:.0%} of it)"
        )
    return not faults, faults


def _verdict_line(record: Record) -> str:
    if record["holds"]:
        lost = "; the loss of the node was seen and named" if record["loss"] else ""
        return f"verdict: holds; every rank was called, the driver keeps up, no wait was endless{lost}"
    return "verdict: does not hold; " + "; ".join(record["faults"])


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
    tables = _driver_table(record), _plan_table(record)
    return Group(_head(record), *tables, *_loss_lines(record), _changed(record), _verdict_line(record))


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
        "longest stall of the event loop": f"{driver['latest_ms']:.0f} ms (99 %: {driver['p99_ms']:.1f} ms), in "
        f"{driver['latest_in'] or 'no one place'}",
        "of its own work": f"{driver['busiest_ms']:.0f} ms at most, in {driver['busiest_in'] or 'no one place'}",
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
