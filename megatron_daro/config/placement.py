"""Whether a run fits on nodes: its pieces, each of which has to be whole on one node.

Pieces are tensor-parallel groups and servers, or a server's parts. Checked with the expected nodes, and with those that
are there by runtime/placement.py, which gives each piece its place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from megatron_daro.config.sections import Config


@dataclass(frozen=True, slots=True)
class Demand:
    """The pieces of a run.

    groups: tensor-parallel groups of the actor, of group_size ranks each. servers: engines that the run starts, of
    server_size GPUs each; 0 for those that compute on the CPU; each in server_nodes equal parts. noun: what one is
    called in messages. together: all on one node, since its processes share GPU memory. shared: servers have the GPUs
    of the ranks, in turns with them.
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
        """Parts of servers, each of which has a place of its own."""
        return self.servers * self.server_nodes

    @property
    def part_size(self) -> int:
        """GPUs of such a part."""
        return self.server_size // self.server_nodes

    @property
    def gpus(self) -> int:
        """GPUs, where there are some."""
        own = 0 if self.shared else self.servers * self.server_size
        return self.groups * self.group_size + own

    @property
    def unit(self) -> int:
        """Ranks of a piece that stays together: a tensor-parallel group, or those whose GPUs a larger server shares."""
        return max(self.group_size, self.server_size) if self.shared else self.group_size

    @property
    def servers_of_unit(self) -> int:
        """Servers that share the GPUs of such a piece."""
        return self.unit // max(self.server_size, 1) if self.shared else 0

    def sizes(self, *, gpus: bool) -> list[int]:
        """Return what each piece takes of its node (GPUs, or CPUs), groups first."""
        if self.shared:
            size = self.unit + (0 if gpus else self.servers_of_unit)
            return [size] * (self.groups * self.group_size // self.unit)
        part = self.part_size if gpus else 1
        return [self.group_size] * self.groups + ([part] * self.parts if part else [])

    def text(self, *, gpus: bool) -> str:
        """Return the pieces in words, without those that take nothing."""
        size = self.server_size if gpus else 1
        parts = [f"{self.groups} x tensor-parallel group of {self.group_size}"] if self.groups else []
        if self.shared and gpus:
            return f"{parts[0]}, whose GPUs {self.servers} x {self.noun} of {size} share,"
        spread = f" in {self.server_nodes} parts" if self.server_nodes > 1 else ""
        parts += [f"{self.servers} x {self.noun} of {size}{spread}"] if self.servers and size else []
        return " and ".join(parts)


def demand_of(config: Config, *, engines: bool = True) -> Demand:
    """Return the pieces of a run. Args: engines: False for one that generates nothing."""
    actor, demand = config.actor, engines_of(config)
    groups = actor.world_size // actor.tensor_parallel
    servers = demand.servers if engines else 0
    shared = servers > 0 and config.engine.colocate
    # Servers that share the GPUs of ranks are on a node with these, and get their weights there.
    maps_memory = config.engine.kind == "sglang" and config.engine.sglang.transport.maps_memory
    together = servers > 0 and not shared and maps_memory
    return replace(
        demand, groups=groups, group_size=actor.tensor_parallel, servers=servers, together=together, shared=shared
    )


def engines_of(config: Config) -> Demand:
    """Return the pieces of what only generates."""
    engine = config.engine
    started = 0 if engine.is_own or (engine.kind == "sglang" and engine.sglang.urls) else engine.replicas
    if engine.kind != "sglang":
        return Demand(0, 1, started, server_size=0)
    return Demand(0, 1, started, engine.sglang.tensor_parallel, engine.sglang.nodes, "server")


def misfit(demand: Demand, nodes: Sequence[int], *, what: str = "GPUs") -> str:
    """Return why the pieces do not fit, with the numbers; empty if they do.

    The largest piece goes first, to the node where it leaves least: right where sizes divide one another, as powers of
    two do.

    Args:
        demand: the pieces.
        nodes: what each node has.
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
    """Nodes in words: "2 nodes of 8 and 1 of 4"."""
    if not nodes:
        return "0 nodes"
    counts = {size: list(nodes).count(size) for size in sorted(set(nodes), reverse=True)}
    texts = [f"{count} of {size}" for size, count in counts.items()]
    first, *rest = texts
    first = first.replace(" of ", " node of " if first.startswith("1 ") else " nodes of ", 1)
    return " and ".join([first, *rest])
