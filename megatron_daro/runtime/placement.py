"""The places of a run in its Ray cluster: which node each rank and each server is on.

One placement group of Ray, made whole or not at all, with a place for each of the pieces that config/placement.py
counts. A tensor-parallel group is one bundle (several are, where they share GPUs with one server), and so is a server,
or each part of one that is spread over nodes, because a bundle never spans nodes. Servers that share GPUs with ranks
are in the ranks' bundle: Ray gives its GPUs to the ranks, one each, and the servers are told which GPUs these are. The
groups of one replica (its experts' and context parts, then its pipeline stages) are next to each other. A run that does
not fit is refused, with the numbers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from megatron_daro.config.actor import ActorSection
from megatron_daro.config.placement import Demand, misfit
from megatron_daro.deadlines import Deadlines
from megatron_daro.errors import ConfigError, DeadlineError

_LOOK_S = 1.0
_REMEDY = "lower actor.*_parallel or engine.replicas, or start more nodes"


class Placement:
    """The places of one run, which `start` reserves."""

    def __init__(self, demand: Demand, actor: ActorSection, deadlines: Deadlines) -> None:
        """Reserve nothing. Args: demand: the pieces. actor: the layout, which gives their order. deadlines: `placement`
        bounds the wait for room."""
        self._demand, self._actor, self.deadlines = demand, actor, deadlines
        self._group: PlacementGroup | None = None
        self._gpus = False
        self._bundle_of_group: Mapping[int, int] = {}
        self._gpu_of_rank: Mapping[int, str] = {}

    @classmethod
    def of_engines(cls, demand: Demand, deadlines: Deadlines) -> Placement:
        """Return places for engines alone. Args: demand: without groups."""
        return cls(demand, ActorSection(), deadlines)

    @property
    def has_gpus(self) -> bool:
        """Whether ranks and servers get GPUs from Ray."""
        return self._gpus

    @property
    def shares_gpus(self) -> bool:
        """Whether servers use the GPUs of the ranks, in turns with them."""
        return self._demand.shared

    async def start(self) -> None:
        """Reserve a place for everything.

        Raises:
            ConfigError: the cluster's nodes cannot hold the run. DeadlineError: other work held the room for too long.
        """
        nodes = [node for node in ray.nodes() if node["Alive"]]
        gpus = [int(node["Resources"].get("GPU", 0)) for node in nodes]
        self._gpus = any(gpus)
        what = "GPUs" if self._gpus else "CPUs"
        have = gpus if self._gpus else [int(node["Resources"].get("CPU", 0)) for node in nodes]
        if why := misfit(self._demand, [count for count in have if count], what=what):
            raise ConfigError(f"the run does not fit the Ray cluster: {why}; {_REMEDY}")
        bundles = self._bundles()
        if not bundles:  # servers that run already, and no policy
            return
        self._group = placement_group(bundles, strategy="STRICT_PACK" if self._demand.together else "PACK")
        await self._until_placed(what)
        node_of = placement_group_table(self._group)["bundles_to_node_id"]
        order = group_order(self._actor) if self._demand.groups else []
        groups = self._demand.unit // self._demand.group_size  # per bundle
        slots = assigned(order, [node_of[slot // groups] for slot in range(self._demand.groups)])
        self._bundle_of_group = {group: slot // groups for group, slot in slots.items()}

    def rank(self, rank: int) -> dict[str, Any]:
        """Return the options of a rank's Ray actor."""
        return self._options(self._bundle_of_group[rank // self._demand.group_size], int(self._gpus))

    def server(self, number: int, part: int = 0) -> dict[str, Any]:
        """Return the options of the Ray actor of an engine, or of a part of one that is spread over nodes. If it shares
        GPUs, `gpus_of_server` says which."""
        if self._demand.shared:
            return self._options(number // self._demand.servers_of_unit, 0)
        bundle = self._demand.groups + number * self._demand.server_nodes + part
        return self._options(bundle, self._demand.part_size if self._gpus else 0)

    def take_gpus(self, gpu_of_rank: Mapping[int, str]) -> None:
        """Note which GPU of its node Ray gave to each rank."""
        self._gpu_of_rank = gpu_of_rank

    def gpus_of_server(self, number: int) -> str | None:
        """Return the GPUs that this server shares with ranks of its bundle, in the form of CUDA_VISIBLE_DEVICES; None
        if it has GPUs of its own, or there are none."""
        if not (self._demand.shared and self._gpus):
            return None
        bundle, place = divmod(number, self._demand.servers_of_unit)
        size, group_size = self._demand.server_size, self._demand.group_size
        gpus = [gpu for rank, gpu in self._gpu_of_rank.items() if self._bundle_of_group[rank // group_size] == bundle]
        gpus.sort(key=lambda gpu: (len(gpu), gpu))
        return ",".join(gpus[place * size : (place + 1) * size])

    def close(self) -> None:
        """Give the places back while the driver goes on; Ray takes them back when it ends. May be called twice."""
        group, self._group = self._group, None
        if group is not None:
            remove_placement_group(group)

    def _options(self, bundle: int, gpus: int) -> dict[str, Any]:
        assert self._group, "start comes first"
        strategy = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=bundle)
        return {"num_cpus": 1, "num_gpus": gpus, "scheduling_strategy": strategy}

    def _bundles(self) -> list[dict[str, float]]:
        if self._demand.shared:
            sizes = zip(self._demand.sizes(gpus=False), self._demand.sizes(gpus=True), strict=True)
            return [_bundle(cpus, gpus if self._gpus else 0) for cpus, gpus in sizes]
        size = self._demand.group_size
        groups = [_bundle(size, size if self._gpus else 0)] * self._demand.groups
        return groups + [_bundle(1, self._demand.part_size if self._gpus else 0)] * self._demand.parts

    async def _until_placed(self, what: str) -> None:
        try:
            await self.deadlines.within("placement", self._wait())
        except DeadlineError as error:
            free = ray.available_resources()
            counts = f"{free.get('GPU', 0):g} GPUs and {free.get('CPU', 0):g} CPUs"
            raise DeadlineError(
                f"{error}: {self._demand.text(gpus=what == 'GPUs')} found no room; free in the Ray cluster: {counts}; "
                f"end what else runs there, or {_REMEDY}"
            ) from None

    async def _wait(self) -> None:
        assert self._group
        while not await asyncio.to_thread(self._group.wait, _LOOK_S):
            pass


def group_order(actor: ActorSection) -> list[int]:
    """Return the tensor-parallel groups (rank // TP) in an order in which neighbours exchange most: context parts of a
    stage and the replicas that share its experts, then the stages, then the other replicas. Megatron numbers ranks TP
    fastest, then CP, DP, PP, and experts lie on consecutive ranks of a stage."""
    context, data = actor.context_parallel, actor.data_parallel
    together = max(1, actor.expert_group_size // (actor.tensor_parallel * context))
    return [
        part + context * (replica + data * stage)
        for first in range(0, data, together)
        for stage in range(actor.pipeline_parallel)
        for replica in range(first, min(first + together, data))
        for part in range(context)
    ]


def assigned(order: Sequence[int], nodes: Sequence[str]) -> dict[int, int]:
    """Return group -> slot, a bundle's place for one group, such that consecutive groups are on one node as far as it
    has slots.

    Args:
        order: groups, neighbours next to each other. nodes: the node of each slot.
    """
    first = {node: index for index, node in reversed(list(enumerate(nodes)))}
    bundles = sorted(range(len(nodes)), key=lambda index: (-nodes.count(nodes[index]), first[nodes[index]], index))
    return dict(zip(order, bundles, strict=True))


def _bundle(cpus: float, gpus: float) -> dict[str, float]:
    return {"CPU": cpus} | ({"GPU": gpus} if gpus else {})
