"""Which node each rank and each server of a run would be on, by the rules of the real placement.

Demand and nodes -> NodeMap -> thin ranks, canned servers, report. Ray packs bundles in order;
here each goes to the first node with room, and runtime/cluster.py's own functions give the ranks their bundles.
Refuses what runtime/cluster.py refuses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_daro.config.actor import ActorSection
from megatron_daro.config.hardware import Demand, misfit
from megatron_daro.errors import ConfigError
from megatron_daro.runtime.cluster import assigned, group_order


@dataclass(frozen=True, slots=True)
class NodeMap:
    """ranks: the number of the node of each. servers: that of each part of each. nodes: how many there are."""

    nodes: int
    ranks: tuple[int, ...]
    servers: tuple[tuple[int, ...], ...]

    def ranks_of(self, node: int) -> list[int]:
        """Return the ranks on a node, ascending."""
        return [rank for rank, place in enumerate(self.ranks) if place == node]

    def servers_of(self, node: int) -> list[int]:
        """Return the servers of which some part is on a node, ascending."""
        return [server for server, places in enumerate(self.servers) if node in places]

    @property
    def used(self) -> list[int]:
        """Nodes that something is on, ascending."""
        return sorted({*self.ranks, *(place for places in self.servers for place in places)})

    @property
    def idle(self) -> int:
        """Nodes that nothing is on."""
        return self.nodes - len(self.used)


def node_map(demand: Demand, actor: ActorSection, nodes: int, gpus_per_node: int) -> NodeMap:
    """Return where everything goes.

    Raises:
        ConfigError: it does not fit.
    """
    if why := misfit(demand, [gpus_per_node] * nodes):
        raise ConfigError(f"the run does not fit the nodes: {why}; fix: raise --nodes, or lower actor.*_parallel")
    places = _first_fit(demand.sizes(gpus=True), nodes, gpus_per_node)
    bundle_of = assigned(group_order(actor), [str(place) for place in places[: demand.groups]])
    size = demand.group_size
    ranks = tuple(places[bundle_of[rank // size]] for rank in range(demand.groups * size))
    parts, each = places[demand.groups :], demand.server_nodes
    return NodeMap(nodes, ranks, tuple(tuple(parts[i : i + each]) for i in range(0, len(parts), each)))


def _first_fit(sizes: Sequence[int], nodes: int, each: int) -> list[int]:
    """Return the node of each piece: the first with room. Pieces whose sizes divide one another always find one."""
    free, found = [each] * nodes, []
    for size in sizes:
        place = next((node for node, left in enumerate(free) if left >= size), None)
        if place is None:
            raise ConfigError(f"{nodes} nodes of {each} GPUs have no room for a piece of {size}; fix: raise --nodes")
        free[place] -= size
        found.append(place)
    return found
