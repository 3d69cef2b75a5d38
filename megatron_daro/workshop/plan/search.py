"""Searches all layouts and splits of the GPUs between trainers and servers for the best, and says why others are out.

Workload, Gpu, number of GPUs -> Plan (choices in order of the expected step, and refusals by reason) -> tables.py.
Given the split, the best servers do not depend on the trainers, so they are found once per split.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from statistics import NormalDist

from megatron_daro.errors import ConfigError
from megatron_daro.workshop.plan.gpus import Gpu
from megatron_daro.workshop.plan.layout import ModelLayout, in_parts, model_layouts, server_sizes
from megatron_daro.workshop.plan.memory import (
    HEADROOM,
    Memory,
    kv_bytes_per_token,
    room_of_trainer,
    server_memory,
    trainer_memory,
)
from megatron_daro.workshop.plan.times import (
    Constants,
    TrainTimes,
    generation_s,
    micro_batches_of,
    offload_s,
    step_error,
    sync_s,
    train_times,
)
from megatron_daro.workshop.plan.workload import Workload

MOST_SPLITS = 48
"""Evenly spaced splits of the GPUs between trainers and servers that are tried, at most."""
_NINE_TENTHS = 1.645
"""Nine tenths of a normal distribution lie within this many standard deviations."""
LEAST_KV_ANSWERS = 4
"""How many of the longest samples a server's cache must hold at once."""


@dataclass(frozen=True, slots=True)
class Trainers:
    """One way to train: layout, replicas (DP), micro-batches of an update, memory of the fullest rank, times."""

    layout: ModelLayout
    data: int
    micro_batches: int
    memory: Memory
    times: TrainTimes

    @property
    def gpus(self) -> int:
        """GPUs that train."""
        return self.layout.ranks * self.data


@dataclass(frozen=True, slots=True)
class Servers:
    """One way to generate: servers of `tensor` GPUs on `nodes` nodes each, memory of a GPU, seconds of a batch."""

    tensor: int
    nodes: int
    replicas: int
    memory: Memory
    generation: float

    @property
    def gpus(self) -> int:
        """GPUs that generate."""
        return self.tensor * self.replicas


@dataclass(frozen=True, slots=True)
class Choice:
    """Trainers and servers together. Seconds are of one batch. offload: seconds to hand the GPUs to each other, if
    shared. error: the factor by which the step may be off (docs/plan.md)."""

    trainers: Trainers
    servers: Servers
    sync: float
    fixed: float
    batches_ahead: int
    offload: float = 0.0
    shared: bool = False
    error: float = 1.0

    @property
    def step(self) -> float:
        """Seconds of one batch: training plus generation, or the slower of the two if batches are generated ahead; and
        what neither hides."""
        train, generation = self.trainers.times.total, self.servers.generation
        both = train + generation if self.batches_ahead == 0 else max(train, generation)
        return both + self.sync + self.fixed + self.offload

    @property
    def expected(self) -> float:
        """The expected step when training and generation are each off by a random factor. If they overlap the longer
        one counts, so two equal sides are expected to take longer than either; and they hand over no GPUs."""
        train, generation = self.trainers.times.total, self.servers.generation
        if self.batches_ahead == 0 or self.error == 1.0 or min(train, generation) <= 0:
            return self.step
        spread = math.sqrt(2) * math.log(self.error) / _NINE_TENTHS
        apart = math.log(train / generation) / spread
        normal = NormalDist().cdf
        longer = train * normal(apart + spread / 2) + generation * normal(spread / 2 - apart)
        return longer + self.sync + self.fixed

    @property
    def gpus(self) -> int:
        """All GPUs of the choice."""
        return self.trainers.gpus + (0 if self.shared else self.servers.gpus)


@dataclass(slots=True)
class Refusals:
    """Refused layouts by reason: how many, and the one that came nearest, as (what it needs, words)."""

    counts: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    nearest: dict[str, tuple[float, str]] = field(default_factory=dict)

    def add(self, reason: str, need: float, words: str) -> None:
        """Count a refusal, and keep the words of the one with the least `need`."""
        self.counts[reason] += 1
        if reason not in self.nearest or need < self.nearest[reason][0]:
            self.nearest[reason] = (need, words)


@dataclass(frozen=True, slots=True)
class Plan:
    """choices: best first. looked_at: how many layouts were tried."""

    choices: tuple[Choice, ...]
    refusals: Refusals
    looked_at: int


def search(workload: Workload, gpu: Gpu, gpus: int, *, constants: Constants | None = None, best: int = 5) -> Plan:
    """Find the layouts with the shortest expected step.

    Args:
        workload: of the recipe.
        gpu: of the cluster. gpus: all of them, trainers and servers.
        constants: efficiencies; None: the defaults.
        best: choices to return.

    Returns:
        The plan, with at least one choice.

    Raises:
        ConfigError: nothing fits; says which part is too large and what would fit.
    """
    known, refusals = constants or Constants(), Refusals()
    fleets = _Fleets(workload, gpu, known, refusals)
    shared, error = workload.colocated, step_error(workload, known)
    options = list(model_layouts(workload, gpu, gpus if shared else gpus - 1))
    choices: list[Choice] = []
    looked_at = 0
    for training in [gpus] if shared else splits(gpus, gpu.gpus_per_node):
        servers = fleets.best(gpus if shared else gpus - training)
        for layout in options:
            if training % layout.ranks or servers is None or (shared and not _shareable(layout, servers, gpus)):
                continue
            looked_at += 1
            near = shared or gpus <= gpu.linked
            seconds = sync_s(workload, layout, gpu, known, near=near, server_gpus=servers.gpus)
            data = training // layout.ranks
            for trainers in _in_parts(workload, layout, data, gpu, known, refusals):
                offload = offload_s(trainers.memory, known) if shared else 0.0
                choice = Choice(
                    trainers, servers, seconds, known.fixed_s, workload.batches_ahead, offload, shared, error
                )
                choices.append(choice)
    if not choices:
        raise ConfigError(_nothing_fits(workload, gpu, gpus, refusals))
    shortest = min(choice.expected for choice in choices)
    # The constants cannot tell choices apart that are within 2 % of each other: the simpler one, with fewer GPUs per
    # replica and then fewer virtual parts, comes first.
    choices.sort(
        key=lambda choice: (int((choice.expected / shortest - 1) / 0.02), *_complexity(choice), choice.expected)
    )
    return Plan(tuple(_distinct(choices, best)), refusals, looked_at)


def _shareable(layout: ModelLayout, servers: Servers, gpus: int) -> bool:
    """Return whether servers can share the GPUs of ranks in this layout (engine.colocate): one tensor-parallel size
    divides the other, and servers use every GPU."""
    sizes = sorted((layout.tensor, servers.tensor))
    return sizes[1] % sizes[0] == 0 and servers.gpus == gpus


def _complexity(choice: Choice) -> tuple[int, int]:
    layout = choice.trainers.layout
    return layout.ranks, layout.virtual


def splits(gpus: int, node: int) -> list[int]:
    """Return the numbers of GPUs for training that are tried, in whole nodes if there are several. If these are more
    than MOST_SPLITS, only evenly spaced ones and powers of two times the unit."""
    unit = node if gpus >= 2 * node else 1
    every = range(unit, gpus, unit)
    if len(every) <= MOST_SPLITS:
        return list(every)
    step = len(every) / MOST_SPLITS
    return sorted({every[int(i * step)] for i in range(MOST_SPLITS)} | {n for n in _powers(unit) if n < gpus})


def _powers(unit: int) -> Iterator[int]:
    for exponent in range(16):
        yield unit << exponent


def _in_parts(
    workload: Workload, layout: ModelLayout, data: int, gpu: Gpu, constants: Constants, refusals: Refusals
) -> Iterator[Trainers]:
    """Yield the trainers if they fit, and then each of their variants with virtual parts that fits too."""
    trainers = _trainers(workload, layout, data, gpu, constants, refusals)
    if trainers is None:
        return
    yield trainers
    for other in in_parts(workload.shape, layout):
        parted = _trainers(workload, other, data, gpu, constants, refusals)
        if parted is not None:
            yield parted


def _trainers(
    workload: Workload, layout: ModelLayout, data: int, gpu: Gpu, constants: Constants, refusals: Refusals
) -> Trainers | None:
    """Return the trainers; or add a refusal and return None."""
    inner = layout.tensor * layout.context * data
    group = layout.cut.expert * layout.cut.expert_tensor
    if inner % group:
        refusals.add("groups of experts (ETP x EP) do not divide TP x CP x DP", group, f"{describe(layout)} DP {data}")
        return None
    if workload.smallest_minibatch < data:
        refusals.add(
            f"an update has {workload.smallest_minibatch} samples, fewer than replicas (DP)", data, f"DP {data}"
        )
        return None
    samples = workload.samples // workload.minibatches
    if samples % data:  # the trainer accepts such layouts, but some of its replicas would wait
        refusals.add("replicas (DP) that do not divide the samples of an update", data, f"{samples} samples, DP {data}")
        return None
    num = micro_batches_of(workload, layout, data)
    memory = trainer_memory(workload, layout, shards=data * layout.context, micro_batches=num)
    room = room_of_trainer(workload, gpu)
    if workload.colocated:
        beside = (workload.server_fraction or 0.0) * gpu.memory_bytes
        if memory.weights + beside > room:
            words = f"{describe(layout)}: weights of {memory.weights / 2**30:.0f} GiB beside {beside / 2**30:.0f}"
            refusals.add("no room for both weights and the cache at the end of an update", memory.weights, words)
            return None
    if memory.total > room:
        words = (
            f"{describe(layout)} DP {data} needs {memory.total / 2**30:.0f} GiB of "
            f"{room / 2**30:.0f}; {memory.largest} alone "
            f"{memory.parts()[memory.largest] / 2**30:.0f}"
        )
        refusals.add(f"out of memory, mostly {memory.largest}", memory.total, words)
        return None
    return Trainers(layout, data, num, memory, train_times(workload, layout, data, gpu, constants))


class _Fleets:
    """Finds the best servers on a number of GPUs."""

    def __init__(self, workload: Workload, gpu: Gpu, constants: Constants, refusals: Refusals) -> None:
        self._known = (workload, gpu, constants)
        self._sizes: list[tuple[int, int, Memory]] = []
        for tensor, nodes in server_sizes(workload.shape, gpu, 1 if workload.colocated else workload.server_nodes):
            memory = server_memory(workload, gpu, tensor)
            if memory.kv_cache < LEAST_KV_ANSWERS * workload.longest * kv_bytes_per_token(workload, tensor):
                need = memory.weights / 2**30
                words = f"a server of {tensor} GPUs: weights {need:.0f} GiB a GPU leave too little for KV cache"
                refusals.add("servers without room for KV cache", need, words)
            else:
                self._sizes.append((tensor, nodes, memory))

    def best(self, gpus: int) -> Servers | None:
        """Return the servers that generate a batch in the shortest time; None if none fit."""
        workload, gpu, constants = self._known
        fitting = [(tensor, nodes, memory) for tensor, nodes, memory in self._sizes if tensor <= gpus]
        if workload.colocated:
            fitting = [entry for entry in fitting if gpus % entry[0] == 0]
        options = [
            Servers(
                tensor, nodes, gpus // tensor, memory, generation_s(workload, tensor, gpus // tensor, gpu, constants)
            )
            for tensor, nodes, memory in fitting
        ]
        return min(options, key=lambda servers: servers.generation, default=None)


def describe(layout: ModelLayout) -> str:
    """Return the layout in a few words."""
    experts = f" EP {layout.expert}" if layout.expert > 1 else ""
    virtual = f" VPP {layout.virtual}" if layout.virtual > 1 else ""
    parts = f"TP {layout.tensor} PP {layout.pipeline}{virtual} CP {layout.context}{experts}"
    return f"{parts} recompute {layout.recompute}, {layout.micro_batch_tokens} tokens"


def _distinct(choices: list[Choice], best: int) -> Iterator[Choice]:
    """Yield the best choices with different parallel sizes, since variants in recomputation, token budget or virtual
    parts say little."""
    seen = set()
    for choice in choices:
        layout = choice.trainers.layout
        key = (layout.tensor, layout.pipeline, layout.context, layout.expert, choice.trainers.data)
        if key not in seen:
            seen.add(key)
            yield choice
        if len(seen) == best:
            return


def _nothing_fits(workload: Workload, gpu: Gpu, gpus: int, refusals: Refusals) -> str:
    reasons = "; ".join(
        f"{reason} ({count} layouts, nearest: {refusals.nearest[reason][1]})"
        for reason, count in sorted(refusals.counts.items(), key=lambda item: -item[1])[:3]
    )
    each = workload.dtype_bytes + (16 if workload.adapters is None else 0)
    needed = workload.shape.num_parameters * each / (HEADROOM * gpu.memory_bytes)
    return (
        f"no layout of this model fits {gpus} GPUs of {gpu.name}: {reasons or 'one GPU cannot train and generate'}. "
        f"Training alone takes about {needed:.0f} of them for weights, gradients and optimizer; fix: more GPUs, GPUs "
        "with more memory, or shorter sequences (rollout.max_response_tokens)"
    )
