"""The search: every layout, every split of the GPUs between trainers and servers; the best, and why others are out.

Place in the data flow: Workload, Gpu, number of GPUs -> Plan (choices in order of step time, and refusals by reason) ->
tables.py. Trainers and servers do not depend on each other but for the split, so each side's best is found by itself.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

from megatron_daro.errors import ConfigError
from megatron_daro.plan.gpus import Gpu
from megatron_daro.plan.layout import ModelLayout, in_parts, model_layouts, server_sizes
from megatron_daro.plan.memory import Memory, kv_bytes_per_token, server_memory, trainer_memory
from megatron_daro.plan.times import Constants, TrainTimes, generation_s, micro_batches_of, sync_s, train_times
from megatron_daro.plan.workload import Workload

HEADROOM = 0.95
"""Share of a GPU's memory that a layout may take."""
MOST_SPLITS = 48
"""Splits of the GPUs between trainers and servers that are looked at."""
LEAST_KV_ANSWERS = 4
"""A server must hold so many of the longest samples at once."""


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
    """One way to generate: servers of `tensor` GPUs each, memory of a GPU, seconds of a batch."""

    tensor: int
    replicas: int
    memory: Memory
    generation: float

    @property
    def gpus(self) -> int:
        """GPUs that generate."""
        return self.tensor * self.replicas


@dataclass(frozen=True, slots=True)
class Choice:
    """Trainers and servers together. Seconds are of one batch."""

    trainers: Trainers
    servers: Servers
    sync: float
    fixed: float
    staleness: int

    @property
    def step(self) -> float:
        """One batch: one after the other at staleness 0, else the slower side, and the sync."""
        train, generation = self.trainers.times.total, self.servers.generation
        both = train + generation if self.staleness == 0 else max(train, generation)
        return both + self.sync + self.fixed

    @property
    def gpus(self) -> int:
        """All GPUs of the choice."""
        return self.trainers.gpus + self.servers.gpus


@dataclass(slots=True)
class Refusals:
    """Layouts that are out, by reason: how many, and the one that came nearest, with what it needs."""

    counts: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    nearest: dict[str, tuple[float, str]] = field(default_factory=dict)

    def add(self, reason: str, need: float, words: str) -> None:
        """Count one; the least `need` of a reason keeps its words."""
        self.counts[reason] += 1
        if reason not in self.nearest or need < self.nearest[reason][0]:
            self.nearest[reason] = (need, words)


@dataclass(frozen=True, slots=True)
class Plan:
    """choices, best first; refusals; how many layouts were looked at."""

    choices: tuple[Choice, ...]
    refusals: Refusals
    looked_at: int


def search(workload: Workload, gpu: Gpu, gpus: int, *, constants: Constants | None = None, best: int = 5) -> Plan:
    """Look for the layouts with the shortest step.

    Args:
        workload: of the recipe.
        gpu: of the cluster. gpus: all of them, trainers and servers.
        constants: efficiencies; the assumed ones where None.
        best: choices to return.

    Returns:
        The plan, with at least one choice.

    Raises:
        ConfigError: nothing fits; says which part is too large and what would fit.
    """
    known, refusals = constants or Constants(), Refusals()
    fleets = _Fleets(workload, gpu, known, refusals)
    options = list(model_layouts(workload, gpu, gpus - 1))
    found: list[Choice] = []
    looked_at = 0
    for training in splits(gpus, gpu.gpus_per_node):
        servers = fleets.best(gpus - training)
        for layout in options:
            if training % layout.ranks or servers is None:
                continue
            looked_at += 1
            seconds, data = sync_s(workload, layout, gpu, known), training // layout.ranks
            for trainers in _in_parts(workload, layout, data, gpu, known, refusals):
                found.append(Choice(trainers, servers, seconds, known.fixed_s, workload.staleness))
    if not found:
        raise ConfigError(_nothing_fits(workload, gpu, gpus, refusals))
    shortest = min(choice.step for choice in found)
    # Within a fiftieth of each other the constants do not tell them apart: fewer GPUs of a replica are simpler.
    # So are stages in one part.
    found.sort(key=lambda choice: (int((choice.step / shortest - 1) / 0.02), *_complexity(choice), choice.step))
    return Plan(tuple(_distinct(found, best)), refusals, looked_at)


def _complexity(choice: Choice) -> tuple[int, int]:
    layout = choice.trainers.layout
    return layout.ranks, layout.virtual


def splits(gpus: int, node: int) -> list[int]:
    """Return numbers of GPUs that train: whole nodes where there are several, at most MOST_SPLITS of them."""
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
    """Yield the trainers where they fit, and with their stages in several parts where these fit too."""
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
    """Return the trainers, or None with a refusal."""
    inner = layout.tensor * layout.context * data
    group = layout.cut.expert * layout.cut.expert_tensor
    if inner % group:
        refusals.add("groups of experts (ETP x EP) do not divide TP x CP x DP", group, f"{describe(layout)} DP {data}")
        return None
    samples = workload.samples // workload.updates
    if samples < data:
        refusals.add(f"an update has {samples} samples, fewer than replicas (DP)", data, f"DP {data}")
        return None
    if samples % data:
        refusals.add("samples of an update are no multiple of the replicas (DP)", data, f"{samples} samples, DP {data}")
        return None
    num = micro_batches_of(workload, layout, data)
    memory = trainer_memory(workload, layout, shards=data * layout.context, micro_batches=num)
    if memory.total > HEADROOM * gpu.memory_bytes:
        words = (
            f"{describe(layout)} DP {data} needs {memory.total / 2**30:.0f} GiB of "
            f"{HEADROOM * gpu.memory_bytes / 2**30:.0f}; {memory.largest} alone "
            f"{memory.parts()[memory.largest] / 2**30:.0f}"
        )
        refusals.add(f"out of memory, mostly {memory.largest}", memory.total, words)
        return None
    return Trainers(layout, data, num, memory, train_times(workload, layout, data, gpu, constants))


class _Fleets:
    """The best servers on a number of GPUs."""

    def __init__(self, workload: Workload, gpu: Gpu, constants: Constants, refusals: Refusals) -> None:
        self._known = (workload, gpu, constants)
        self._sizes: list[tuple[int, Memory]] = []
        for tensor in server_sizes(workload.shape, gpu):
            memory = server_memory(workload, gpu, tensor)
            if memory.kv_cache < LEAST_KV_ANSWERS * workload.longest * kv_bytes_per_token(workload, tensor):
                need = memory.weights / 2**30
                words = f"a server of {tensor} GPUs: weights {need:.0f} GiB a GPU leave too little for KV cache"
                refusals.add("servers without room for KV cache", need, words)
            else:
                self._sizes.append((tensor, memory))

    def best(self, gpus: int) -> Servers | None:
        """Return the servers that generate a batch soonest; None where none fits."""
        workload, gpu, constants = self._known
        fitting = [(tensor, memory) for tensor, memory in self._sizes if tensor <= gpus]
        options = [
            Servers(tensor, gpus // tensor, memory, generation_s(workload, tensor, gpus // tensor, gpu, constants))
            for tensor, memory in fitting
        ]
        return min(options, key=lambda servers: servers.generation, default=None)


def describe(layout: ModelLayout) -> str:
    """Return the layout in a few words."""
    experts = f" EP {layout.expert}" if layout.expert > 1 else ""
    virtual = f" VPP {layout.virtual}" if layout.virtual > 1 else ""
    parts = f"TP {layout.tensor} PP {layout.pipeline}{virtual} CP {layout.context}{experts}"
    return f"{parts} recompute {layout.recompute}, {layout.micro_batch_tokens} tokens"


def _distinct(found: list[Choice], best: int) -> Iterator[Choice]:
    """Return the best choices of different sizes: the same layout on another split says little."""
    seen = set()
    for choice in found:
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
    needed = workload.shape.num_parameters * (workload.dtype_bytes + 16) / (HEADROOM * gpu.memory_bytes)
    return (
        f"no layout of this model fits {gpus} GPUs of {gpu.name}: {reasons or 'one GPU cannot train and generate'}. "
        f"Training alone takes about {needed:.0f} of them for weights, gradients and optimizer; fix: more GPUs, GPUs "
        "with more memory, or shorter sequences (rollout.max_response_tokens)"
    )
