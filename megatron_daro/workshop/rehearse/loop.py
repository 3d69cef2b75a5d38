"""Runs a rehearsal: the run's own parts, loop, cluster and placement, with thin ranks and canned servers.

Setting -> processes of this machine -> Outcome -> report.py. The loop is runtime/launch.py's.
Everything is ended and removed when it returns.

What a run costs its driver: CPU of each step, how late its event loop wakes, memory, bytes of the object store.

Beside a running controller; the rehearsal and benchmarks/control_plane.py read it.

What each rank of a layout is, sends and saves, without a model: places, weight buckets, checkpoint files.

Shape and layout -> plans -> thin ranks and report. Buckets come from the real packing over
tensors without memory (the meta device); a unit test compares places with Megatron's own groups.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import resource
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import numpy as np
import ray
import torch
from ray._private import internal_api

from megatron_daro.actor.parallel import Layout
from megatron_daro.actor.policy import layout_of
from megatron_daro.config import Config
from megatron_daro.config.hardware import demand_of
from megatron_daro.config.model_shape import ModelShape
from megatron_daro.convert.mapping import hf_to_megatron
from megatron_daro.errors import ConfigError, DaroError
from megatron_daro.observe.metrics import MetricsLog, Phases
from megatron_daro.observe.progress import Progress
from megatron_daro.rollout.deadlines import Deadlines
from megatron_daro.runtime import launch, parts
from megatron_daro.runtime.cluster import Placement, cluster
from megatron_daro.runtime.inputs import Inputs, read_inputs
from megatron_daro.runtime.preflight import begin, check_start
from megatron_daro.runtime.workers import Place
from megatron_daro.sync.buckets import bucketize
from megatron_daro.workshop.plan.memory import Cut, counts
from megatron_daro.workshop.rehearse.canned_server import CannedFleet, canned_fleet
from megatron_daro.workshop.rehearse.setting import Setting, with_one_answer
from megatron_daro.workshop.rehearse.thin_ranks import Loss, Script, ThinPolicyGroup, Unanswered

PAUSE_S, LOOK_S = 0.005, 0.05
PACKAGE = "megatron_daro"


def cpu_s() -> float:
    """User and system time of this process, all threads."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


class Watch:
    """How late the event loop wakes from pauses of 5 ms, where it was meanwhile, and the driver's memory.

    Two clocks: the wall's, and that of the loop's thread, which other processes of a busy machine do not move.
    """

    def __init__(self) -> None:
        self.own_gib = self.mapped_gib = 0.0
        self._off = threading.Event()
        self._thread = threading.get_ident()
        self.begin()

    def begin(self) -> None:
        """Forget what was seen so far."""
        self._late_ms: list[float] = []
        self._busy_ms = 0.0
        self._ticked = time.perf_counter()
        self._places: Counter[str] = Counter()
        self._stalled_in = self._late_in = ""
        self._latest_ms = 0.0

    async def loop(self) -> None:
        """Measure until it is cancelled."""
        while True:
            before, cpu_before = self._ticked, time.thread_time()
            self._places.clear()
            await asyncio.sleep(PAUSE_S)
            self._ticked = time.perf_counter()
            self._late_ms.append(1000 * (self._ticked - before - PAUSE_S))
            busy_ms = 1000 * (time.thread_time() - cpu_before)
            place = self._places.most_common(1)[0][0] if self._places else ""
            if self._late_ms[-1] > self._latest_ms:
                self._latest_ms, self._late_in = self._late_ms[-1], place
            if busy_ms > self._busy_ms:
                self._busy_ms, self._stalled_in = busy_ms, place

    def look(self) -> None:
        """Look many times at the memory, and where a loop is that does not wake; in a thread."""
        while not self._off.wait(LOOK_S):
            if time.perf_counter() - self._ticked > LOOK_S:
                self._places[_own_place(sys._current_frames().get(self._thread))] += 1
            lines = Path("/proc/self/status").read_text().splitlines()
            sizes = {line.split(":")[0]: int(line.split()[1]) / 2**20 for line in lines if line.startswith("Rss")}
            self.own_gib = max(self.own_gib, sizes["RssAnon"])
            self.mapped_gib = max(self.mapped_gib, sizes["RssShmem"])

    def __enter__(self) -> Watch:
        self.begin()
        self._looks, self._ticks = threading.Thread(target=self.look), asyncio.create_task(self.loop())
        self._looks.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ticks.cancel()
        self._off.set()
        self._looks.join()

    def found(self) -> dict[str, float | str]:
        """Return what a table shows."""
        late = np.array(self._late_ms or [0.0])
        return {
            "latest_ms": float(late.max()),
            "latest_in": self._late_in,
            "busiest_ms": self._busy_ms,
            "busiest_in": self._stalled_in,
            "p99_ms": float(np.quantile(late, 0.99)),
            "own_gib": self.own_gib,
            "mapped_gib": self.mapped_gib,
        }


def _own_place(frame: FrameType | None) -> str:
    """Return where a thread is: the innermost line of this package, and the function that it waits for."""
    inner = frame
    while frame is not None and PACKAGE not in frame.f_code.co_filename:
        frame = frame.f_back
    if frame is None or inner is None:
        return "elsewhere"
    file = frame.f_code.co_filename.rpartition(f"{PACKAGE}/")[2]
    within = "" if inner is frame else f", in {inner.f_code.co_name} of {Path(inner.f_code.co_filename).name}"
    return f"{file}:{frame.f_lineno} {frame.f_code.co_name}{within}"


@dataclass(frozen=True, slots=True)
class Spent:
    """Of the driver, until a step was written: since the start, or the step before."""

    step: int
    cpu_s: float
    seconds: float
    rank_calls: int


class StepMeter(MetricsLog):
    """Metrics that know what each step cost. calls: counts calls to ranks, set by whoever counts."""

    def begin(self) -> None:
        """Count from now on: the run is about to start."""
        self.spent: list[Spent] = []
        self.lines: list[dict[str, float]] = []
        self._calls_before = 0
        self._before = cpu_s(), time.perf_counter()

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the line of a step."""
        super().write(step, metrics)
        self.lines.append(dict(metrics))
        now = cpu_s(), time.perf_counter()
        calls = self.calls()
        cpu, seconds = (after - before for before, after in zip(self._before, now, strict=True))
        self.spent.append(Spent(step, cpu, seconds, calls - self._calls_before))
        self._before, self._calls_before = now, calls

    def calls(self) -> int:
        """Return how many calls to ranks were made so far."""
        return 0


@dataclass(frozen=True, slots=True)
class StoreUse:
    """Objects and bytes that were put into the object store since the cluster began."""

    objects: int
    num_bytes: int

    @classmethod
    def now(cls) -> StoreUse:
        """Ask this machine's raylet."""
        (node,) = [node for node in ray.nodes() if node["Alive"]]
        stats = internal_api.node_stats(node["NodeManagerAddress"], node["NodeManagerPort"], False).store_stats
        return cls(int(stats.cumulative_created_objects), int(stats.cumulative_created_bytes))


_DTYPES = {2: torch.bfloat16, 4: torch.float32}
_STATE_BYTES = {2: 12, 4: 8}
"""Of the optimizer for each element, by bytes of a weight: two fp32 moments, with bf16 also an fp32 copy."""


@dataclass(frozen=True, slots=True)
class StagePlan:
    """What the sender of a pipeline stage hands on in one weight sync."""

    stage: int
    tensors: int
    buckets: int
    num_bytes: int
    largest_bucket: int


@dataclass(frozen=True, slots=True)
class CheckpointPlan:
    """Each rank writes one file. least, most: bytes of a rank's file; total: of all."""

    files: int
    least: int
    most: int
    total: int


def place_of(rank: int, layout: Layout) -> Place:
    """Return a rank's part. Megatron numbers ranks TP fastest, then CP, DP, PP; experts lie on consecutive ranks."""
    tensor, rest = rank % layout.tensor, rank // layout.tensor
    context, rest = rest % layout.context, rest // layout.context
    data, stage = rest % layout.data, rest // layout.data
    in_stage = rank % (layout.world_size // layout.pipeline)
    first = data == 0 and context == 0
    return Place(
        data_parallel=data,
        stage=stage,
        exports=first or in_stage < layout.expert_group_size,
        sends=first and tensor == 0,
        answers=tensor == 0 and context == 0 and stage == layout.pipeline - 1,
    )


def stage_plans(
    shape: ModelShape, layers_of_stages: list[list[range]], bucket_bytes: int, dtype_bytes: int
) -> list[StagePlan]:
    """Return the buckets of each stage.

    Args:
        shape: the model. layers_of_stages: the layers of each part of each stage. bucket_bytes: limit of a bucket.
        dtype_bytes: of a weight, 2 or 4.
    """
    plans, dtype = [], _DTYPES[dtype_bytes]
    for stage, layers in enumerate(layers_of_stages):
        ends = stage == 0, stage == len(layers_of_stages) - 1
        tensors = [
            tensor
            for number, own in enumerate(layers)
            for tensor in _part_tensors(shape, own, ends[0] and number == 0, ends[1] and own is layers[-1], dtype)
        ]
        sizes = [len(bucket.data) for bucket in bucketize(tensors, bucket_bytes)]
        plans.append(StagePlan(stage, len(tensors), len(sizes), sum(sizes), max(sizes)))
    return plans


def _part_tensors(
    shape: ModelShape, own: range, is_first: bool, is_last: bool, dtype: torch.dtype
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (HF name, tensor on the meta device) of a part of the model in the order of the export."""
    for rule in hf_to_megatron(shape):
        if rule.layer is None:
            mine = is_first if rule.megatron_name.startswith("embedding") else is_last
        else:
            mine = rule.layer in own
        if mine:
            for name, dims in zip(rule.hf_names, rule.hf_shapes, strict=True):
                yield name, torch.empty(dims, dtype=dtype, device="meta")


def checkpoint_plan(shape: ModelShape, layout: Layout, dtype_bytes: int, *, distributed: bool) -> CheckpointPlan:
    """Return the files of a checkpoint: the weights by the first replica, optimizer state by who owns it.

    Args:
        shape, layout: what is saved. dtype_bytes: of a weight. distributed: whether ranks share the optimizer's state.
    """
    cut = Cut(layout.tensor, layout.pipeline, layout.expert, layout.expert_tensor_size, layout.virtual_pipeline)
    state, sizes = _STATE_BYTES[dtype_bytes], []
    shards = layout.data * layout.context
    in_stage = layout.world_size // layout.pipeline
    expert_shards = in_stage // layout.expert_group_size
    for rank in range(layout.world_size):
        rest, experts = counts(shape, cut, rank // in_stage)
        first = rank % in_stage < layout.tensor
        first_experts = rank % in_stage < layout.expert_group_size
        saved = dtype_bytes * (rest * first + experts * first_experts)
        if distributed:
            saved += round(state * (rest / shards + experts / expert_shards))
        else:
            saved += state * (rest * first + experts * first_experts)
        sizes.append(saved)
    return CheckpointPlan(len(sizes), min(sizes), max(sizes), sum(sizes))


SILENT_S = 10.0
"""Deadline of a step in which a node falls silent; the configured one is hours."""
_STARTS = ("placement", "policy_start", "verifier_start", "engine_start", "workers_start")
START_WAIT_S = 300.0
LEAST_WAIT_S, MOST_WAIT_S, BATCHES_WAITED = 60.0, 120.0, 20
"""A wait may take --pace of its limit in a run: at least this, for this machine does real work too; at most this, or so
many batches where those are longer."""
_OUTER, OUTER_SHARE = ("engine_free", "turn", "batch"), 1.5
"""Waits for what has a limit of its own: longer, so that the error names the wait that hangs."""
ANSWER_S = 0.01
"""What the work of an answer adds to the most: it is made, parsed, verified and recorded here, on a machine that may be
busy with other things."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a rehearsal found.

    status: of the run, or "failed" with its error. seconds: of the whole, of which `start_s` until the first step
    began. lost_s: from the loss to the end of the run, where one was injected. store: of the object store.
    """

    setting: Setting
    loss: Loss | None
    status: str
    error: str
    meter: StepMeter
    watched: dict[str, float | str]
    store: StoreUse
    unanswered: Unanswered | None
    stages: list[StagePlan]
    checkpoint: CheckpointPlan
    changes: list[str]
    notices: list[str]
    ports: int
    clashes: int
    seconds: float
    start_s: float
    lost_s: float
    step_deadline_s: float


class _Notices(Progress):
    """Keeps what the run says."""

    said: list[str]

    def notice(self, text: str) -> None:
        """Keep it."""
        self.said.append(text)

    def warn(self, text: str) -> None:
        """Keep it."""
        self.said.append(f"warning: {text}")


def rehearse(setting: Setting, loss: Loss | None = None) -> Outcome:
    """Rehearse a recipe.

    Args:
        setting: what and on which nodes. loss: of a node, None for none.

    Returns:
        What was found, also where the run ended with an error; report.verdict judges it.

    Raises:
        ConfigError: the node is not there, nothing is on it, or what `train --dry-run` would say. DaroError: the run
            could not begin.
    """
    lost_servers = _require_loss(setting, loss)
    # This machine's own GPUs, and a cluster that it belongs to, are none of a rehearsal's business.
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ.pop("RAY_ADDRESS", None)
    with tempfile.TemporaryDirectory(prefix="megatron_daro_rehearsal_") as name:
        run_dir = Path(name) / "run"
        progress = _Notices(total_steps=setting.asked.steps, rollouts_per_prompt=1, mode="off", title="rehearsal")
        progress.said = []
        inputs = read_inputs(setting.full, progress)
        replicas = setting.full.engine.replicas
        with canned_fleet(replicas, lost_servers, setting.answers(inputs)) as fleet:
            config = setting.rehearsed(run_dir, fleet.urls)
            check_start(config, resume=False, generates=True)
            run = _Rehearsal(setting, loss, config, fleet, progress)
            return run.outcome(with_one_answer(inputs))


def _require_loss(setting: Setting, loss: Loss | None) -> list[int]:
    """Return the servers on the node that will be lost. Raises ConfigError."""
    if loss is None:
        return []
    nodes = setting.nodes
    if loss.node not in nodes.used:
        raise ConfigError(
            f"--lose-node: got {loss.node}; allowed: a node that something is on, {nodes.used[0]} to {nodes.used[-1]}; "
            f"fix: --lose-node {nodes.used[0]}"
        )
    if loss.how == "silent" and not nodes.ranks_of(loss.node):
        raise ConfigError(f"--lose-how silent: node {loss.node} has no ranks; fix: --lose-how killed, or another node")
    return nodes.servers_of(loss.node)


def paced(own: Deadlines, pace: float, batch_s: float, answers: int) -> Deadlines:
    """Return the limits of a run's waits at the pace of a rehearsal, as far as this machine allows.

    Args:
        own: of the run. pace: of the rehearsal. batch_s: planned seconds of a batch at that pace. answers: of a batch.
    """
    most = max(MOST_WAIT_S, BATCHES_WAITED * batch_s) + ANSWER_S * answers
    limits = {
        limit.name: min(getattr(own, limit.name), most, max(LEAST_WAIT_S, pace * getattr(own, limit.name)))
        for limit in dataclasses.fields(own)
    }
    limits |= {name: min(getattr(own, name), OUTER_SHARE * limits[name]) for name in _OUTER}
    limits |= {name: min(getattr(own, name), START_WAIT_S) for name in _STARTS}  # real processes, at no pace
    return Deadlines(**limits)


class _Rehearsal:
    """One rehearsal with everything it needs."""

    def __init__(
        self, setting: Setting, loss: Loss | None, config: Config, fleet: CannedFleet, progress: _Notices
    ) -> None:
        self._setting, self._loss, self._config = setting, loss, config
        self._fleet, self._progress = fleet, progress
        shape, actor = setting.shape, setting.full.actor
        self._layout = layout_of(actor)
        dtype = {"float32": 4, "bfloat16": 2}[actor.torch_dtype]
        self.stages = stage_plans(shape, setting.layers, setting.bucket_bytes, dtype)
        self.checkpoint = checkpoint_plan(shape, self._layout, dtype, distributed=actor.optimizer.distributed)
        self._watch, self._store = Watch(), StoreUse(0, 0)
        self._group: ThinPolicyGroup | None = None
        self._begun = self._ended = 0.0

    def outcome(self, inputs: Inputs) -> Outcome:
        """Run, and say what was found."""
        started, config = time.perf_counter(), self._config
        run_dir = parts.run_directory(config)
        status, error = "failed", ""
        meter = StepMeter(run_dir, tensorboard=False)
        with meter, cluster(demand_of(self._setting.full).processes):
            try:
                status = asyncio.run(self._run(inputs, meter)).status
            except DaroError as raised:
                if self._group is None:  # it is this machine's fault, or the recipe's
                    raise
                error = f"{type(raised).__name__}: {raised}"
        group, servers = self._group, [f"{len(self._fleet.urls)} canned servers"]
        assert group
        return Outcome(
            self._setting,
            self._loss,
            status,
            error,
            meter,
            self._watch.found(),
            self._store,
            group.unanswered,
            self.stages,
            self.checkpoint,
            [*self._setting.changes(Path("TEMPORARY"), servers), *self._setting.left_out],
            self._progress.said,
            len(self._fleet.ports),
            self._fleet.clashes,
            time.perf_counter() - started,
            max(self._begun - started, 0.0),
            self._ended - group.lost_at if group.lost_at else 0.0,
            parts.deadlines(self._setting.full).train,
        )

    async def _run(self, inputs: Inputs, meter: StepMeter) -> launch.RunOutcome:
        config, progress, phases = self._config, self._progress, Phases()
        algorithm, limits = parts.algorithm_of(config), self._limits()
        placement = Placement(demand_of(self._setting.full), config.actor, limits)
        policy = parts.policy_group(config, placement, ThinPolicyGroup)
        assert isinstance(policy, ThinPolicyGroup)
        self._group = policy
        places = [place_of(rank, self._layout) for rank in range(self._layout.world_size)]
        before = StoreUse.now()

        def begins() -> None:
            meter.begin()
            self._watch.begin()
            self._begun = time.perf_counter()

        script, nodes = self._script(places), self._setting.nodes
        policy.rehearse(places, nodes, script, self._loss, on_begin=begins, on_loss=self._fleet.lose)
        generation = parts.generation(config, inputs, algorithm, placement, progress, phases)
        start = begin(parts.run_directory(config), config, resume=False, progress=progress)
        observers = launch.Observers(meter, progress, phases)
        meter.calls = lambda: policy.asked.count  # type: ignore[method-assign]
        meter.begin()
        with self._watch:
            try:
                return await launch.drive(
                    config,
                    algorithm,
                    launch.Driven(placement, policy, generation.sampler, generation),
                    observers,
                    start,
                )
            finally:
                self._ended = time.perf_counter()
                now = StoreUse.now()
                self._store = StoreUse(now.objects - before.objects, now.num_bytes - before.num_bytes)

    def _limits(self) -> Deadlines:
        """Return the limits of waits here."""
        setting = self._setting
        pace, workload = setting.asked.pace, setting.workload
        batch_s = pace * setting.times.step(workload.staleness)
        limits = paced(parts.deadlines(self._config), pace, batch_s, workload.generated)
        silent = self._loss is not None and self._loss.how == "silent"
        return dataclasses.replace(limits, train=SILENT_S) if silent else limits

    def _script(self, places: list[Place]) -> Script:
        pace, times = self._setting.asked.pace, self._setting.times
        trainer = self._config.trainer
        return Script(
            train_s=pace * times.train / trainer.steps_per_batch,
            logprobs_s=pace * times.logprobs / trainer.updates_per_batch,
            send_s=pace * times.sync / len(self.stages),
            stages={plan.stage: (plan.num_bytes, plan.buckets) for plan in self.stages},
            answering=frozenset(rank for rank, place in enumerate(places) if place.answers),
            stage_of={rank: place.stage for rank, place in enumerate(places) if place.sends},
        )
