"""What a weight sync from shards to shards would move: layouts -> table.

Bytes come from sync/shard_plan.py and are exact. Seconds are the busiest rank's bytes over its share of the network: a
lower bound without latencies, which TCP (`engine.sglang.sync: shards`) may not reach.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from megatron_daro.config import Config
from megatron_daro.config.model_shape import ModelShape
from megatron_daro.config.stages import part_layers
from megatron_daro.errors import ModelError
from megatron_daro.observe.table import prose, table_text
from megatron_daro.sync.shard_layouts import TrainerLayout, server_layout
from megatron_daro.sync.shard_plan import Balance, ShardPlan
from megatron_daro.workshop.plan.gpus import Gpu
from megatron_daro.workshop.plan.layout import ModelLayout
from megatron_daro.workshop.plan.search import Choice

_GB = 1e9


@dataclass(frozen=True, slots=True)
class SyncRow:
    """One pair of layouts: name, sizes in words, bytes of each rank, seconds (see the module); or `refused`: why this
    sync is not possible."""

    name: str
    sizes: str
    balance: Balance | None = None
    seconds: float = 0.0
    refused: str = ""

    def record(self) -> dict[str, object]:
        """Return the row as plain values for JSON; bytes are of one sync."""
        if self.balance is None:
            return {"layout": self.name, "refused": self.refused}
        return {
            "layout": self.name,
            "sent_bytes": list(self.balance.sent),
            "received_bytes": list(self.balance.received),
            "links": self.balance.links,
            "busiest_sender_over_mean": self.balance.over_mean,
            "least_possible_over_mean": self.balance.floor_over_mean,
            "seconds_at_least": self.seconds,
        }


@dataclass(frozen=True, slots=True)
class _Sizes:
    """`data` replicas of a layout that write to `servers` servers of `tensor` GPUs. options: Megatron's, which may
    decide the layers of each stage."""

    layout: ModelLayout
    data: int
    tensor: int
    servers: int
    options: Mapping[str, object]

    def __str__(self) -> str:
        own = self.layout
        sizes = own.tensor, own.pipeline, own.virtual, own.context, self.data, own.expert
        return f"{' '.join(map(str, sizes))} to {self.servers} x {self.tensor}"


def sync_rows(config: Config, shape: ModelShape, choices: Iterable[Choice], gpu: Gpu) -> list[SyncRow]:
    """Return a row for the recipe's own layout and one for each choice, but only where SGLang servers have their own
    GPUs."""
    cases: dict[str, _Sizes] = {}
    if config.engine.kind == "sglang" and not config.engine.colocate:
        actor, servers = config.actor, config.engine
        own = ModelLayout.of(actor)
        tensor = servers.sglang.tensor_parallel
        cases["recipe"] = _Sizes(own, actor.data_parallel, tensor, servers.replicas, actor.megatron)
    for number, choice in enumerate(choices, 1):
        if not choice.shared:
            trainers, fleet = choice.trainers, choice.servers
            cases[str(number)] = _Sizes(trainers.layout, trainers.data, fleet.tensor, fleet.replicas, {})
    return [_row(name, sizes, config, shape, gpu) for name, sizes in cases.items()]


def _row(name: str, sizes: _Sizes, config: Config, shape: ModelShape, gpu: Gpu) -> SyncRow:
    layout = sizes.layout
    parts = part_layers(shape.layers, layout.pipeline, layout.virtual, sizes.options)
    if parts is None:
        return SyncRow(name, str(sizes), refused="the layers do not divide over the stages")
    try:
        trainer = TrainerLayout(
            parts=tuple(map(tuple, parts)),
            padded_vocab=shape.padded_vocab(layout.tensor),
            tensor=layout.tensor,
            context=layout.context,
            data=sizes.data,
            expert=layout.expert,
            expert_tensor=layout.cut.expert_tensor,
        )
        server = server_layout(shape, {**config.engine.sglang.named_arguments, "tp_size": sizes.tensor})
        itemsize = 4 if config.actor.precision == "fp32" else 2
        balance = ShardPlan(shape, trainer, server, sizes.servers, itemsize=itemsize).balance()
    except ModelError as error:
        return SyncRow(name, str(sizes), refused=str(error))
    busiest = max(*balance.sent, *balance.received)
    return SyncRow(name, str(sizes), balance, busiest / (gpu.network_gb_s * _GB))


def sync_table(rows: Iterable[SyncRow]) -> str:
    """Return the rows as text for people."""
    head = ["", "TP PP VPP CP DP EP to servers", "senders", "GB each", "busiest / mean", "least possible"]
    head += ["receivers", "GB each, at most", "links", "s"]
    cells, refusals = [], []
    for row in rows:
        if row.balance is None:
            refusals.append(f"{row.name} {row.sizes}: {row.refused}")
            continue
        own = row.balance
        mean = sum(own.sent) / len(own.sent)
        receivers = round(sum(own.sent) / sum(own.received)) * len(own.received)
        sent = [str(len(own.sent)), f"{mean / _GB:.2f}", f"{own.over_mean:.3f}", f"{own.floor_over_mean:.3f}"]
        received = [str(receivers), f"{max(own.received) / _GB:.2f}", str(own.links)]
        cells.append([row.name, row.sizes, *sent, *received, f"{row.seconds:.2f}"])
    title = "engine.sglang.sync=shards: bytes of one sync, and the least seconds on the network"
    return "\n".join([prose(title), *([table_text(head, cells, left=2)] if cells else []), *map(prose, refusals)])
