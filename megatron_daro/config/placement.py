"""Whether a run fits on nodes: its pieces, each of which must be whole on one node.

Pieces are tensor-parallel groups and servers, or the parts of a server. Rules check them against the expected nodes;
runtime/placement.py checks them against the nodes that exist, and places each piece.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from megatron_daro.config.sections import Config


@dataclass(frozen=True, slots=True)
class Demand:
    """The pieces of a run.

    groups: tensor-parallel groups of the actor, of group_size ranks each.
    servers: engines that the run starts, of server_size GPUs each (0 if they compute on the CPU), each split into
        server_nodes equal parts. noun: what messages call an engine.
    together: all pieces must be on one node, since their processes share GPU memory.
    shared: servers take turns with the ranks on the ranks' GPUs.
    """

    groups: int
    group_size: int
    servers: int = 0
    server_size: int = 1
    server_nodes: int = 1
    noun: str = "engine"
    together: bool = False
    shared: bool = False

    @property
    def processes(self) -> int:
        """Ranks, and engines or their parts."""
        return self.groups * self.group_size + self.parts

    @property
    def parts(self) -> int:
        """Parts of all servers; each is placed by itself."""
        return self.servers * self.server_nodes

    @property
    def part_size(self) -> int:
        """GPUs of one part of a server."""
        return self.server_size // self.server_nodes

    @property
    def gpus(self) -> int:
        """GPUs that the run needs, if it runs on GPUs."""
        own = 0 if self.shared else self.servers * self.server_size
        return self.groups * self.group_size + own

    @property
    def unit(self) -> int:
        """Ranks of a piece that must stay together: a tensor-parallel group, or, if a server is larger, all ranks whose
        GPUs it shares."""
        return max(self.group_size, self.server_size) if self.shared else self.group_size

    @property
    def servers_of_unit(self) -> int:
        """Servers that share the GPUs of one `unit`."""
        return self.unit // max(self.server_size, 1) if self.shared else 0

    def sizes(self, *, gpus: bool) -> list[int]:
        """Return how many GPUs (or CPUs) of its node each piece takes, groups first."""
        if self.shared:
            size = self.unit + (0 if gpus else self.servers_of_unit)
            return [size] * (self.groups * self.group_size // self.unit)
        part = self.part_size if gpus else 1
        return [self.group_size] * self.groups + ([part] * self.parts if part else [])

    def text(self, *, gpus: bool) -> str:
        """Return the pieces in words; pieces that take nothing are left out."""
        size = self.server_size if gpus else 1
        parts = [f"{self.groups} x tensor-parallel group of {self.group_size}"] if self.groups else []
        if self.shared and gpus:
            return f"{parts[0]}, whose GPUs {self.servers} x {self.noun} of {size} share,"
        spread = f" in {self.server_nodes} parts" if self.server_nodes > 1 else ""
        parts += [f"{self.servers} x {self.noun} of {size}{spread}"] if self.servers and size else []
        return " and ".join(parts)


def demand_of(config: Config, *, engines: bool = True) -> Demand:
    """Return the pieces of a run. Args: engines: False for a run that generates nothing."""
    actor, demand = config.actor, engines_of(config)
    groups = actor.world_size // actor.tensor_parallel
    servers = demand.servers if engines else 0
    shared = servers > 0 and config.engine.colocate
    # Servers that share the GPUs of ranks are on the node of these ranks anyway, and get their weights there.
    maps_memory = config.engine.kind == "sglang" and config.engine.sglang.transport.maps_memory
    together = servers > 0 and not shared and maps_memory
    return replace(
        demand, groups=groups, group_size=actor.tensor_parallel, servers=servers, together=together, shared=shared
    )


def engines_of(config: Config) -> Demand:
    """Return only the pieces that generate."""
    engine = config.engine
    started = 0 if engine.is_own or (engine.kind == "sglang" and engine.sglang.urls) else engine.replicas
    if engine.kind != "sglang":
        return Demand(0, 1, started, server_size=0)
    return Demand(0, 1, started, engine.sglang.tensor_parallel, engine.sglang.nodes, "server")


def misfit(demand: Demand, nodes: Sequence[int], *, what: str = "GPUs") -> str:
    """Return why the pieces do not fit, with the numbers; empty if they do.

    The largest piece is placed first, on the node where it leaves the least room. This is exact if sizes divide one
    another, as powers of two do.

    Args:
        demand: the pieces.
        nodes: GPUs or CPUs of each node.
        what: what is counted: "GPUs", or "CPUs", of which a server takes one.
    """
    gpus, free, homeless = what == "GPUs", list(nodes), list[int]()
    total, have = sum(demand.sizes(gpus=gpus)), sum(nodes)
    if demand.together:
        if total <= max(nodes, default=0):
            return ""
        why = "all of them on one node, since this engine.sglang.sync hands over memory of a node's GPUs"
        return f"{demand.text(gpus=gpus)} need {total} {what}, {why}; there are {_listed(nodes)}"
    for size in sorted(demand.sizes(gpus=gpus), reverse=True):
        room = [index for index, left in enumerate(free) if left >= size]
        if room:
            free[min(room, key=lambda index: free[index])] -= size
        else:
            homeless.append(size)
    if not homeless:
        return ""
    return (
        f"{demand.text(gpus=gpus)} need {total} {what}, each of them whole on one node; {_listed(nodes)} "
        f"with {have} {what} in all: no room for {len(homeless)} of them"
    )


def _listed(nodes: Sequence[int]) -> str:
    """Return nodes in words: "2 nodes of 8 and 1 of 4"."""
    if not nodes:
        return "0 nodes"
    counts = {size: list(nodes).count(size) for size in sorted(set(nodes), reverse=True)}
    texts = [f"{count} of {size}" for size, count in counts.items()]
    first, *rest = texts
    first = first.replace(" of ", " node of " if first.startswith("1 ") else " nodes of ", 1)
    return " and ".join([first, *rest])
