"""Runs a rehearsal: the run's own parts, loop, cluster and placement, with thin ranks and canned servers.

Place in the data flow: Setting -> processes of this machine -> Outcome -> report.py. The loop is runtime/launch.py's.
Everything is ended and removed when it returns.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from megatron_daro.actor.policy import layout_of
from megatron_daro.config import Config
from megatron_daro.config.fit import demand_of
from megatron_daro.errors import ConfigError, DaroError
from megatron_daro.observe.progress import Progress
from megatron_daro.observe.trace import Phases
from megatron_daro.rehearse.canned_fleet import CannedFleet, canned_fleet
from megatron_daro.rehearse.gauges import StepMeter, StoreUse, Watch
from megatron_daro.rehearse.plans import CheckpointPlan, StagePlan, checkpoint_plan, place_of, stage_plans
from megatron_daro.rehearse.setting import Setting, with_one_answer
from megatron_daro.rehearse.thin_actor import Script
from megatron_daro.rehearse.thin_ranks import Loss, ThinPolicyGroup, Unanswered
from megatron_daro.runtime import launch, parts
from megatron_daro.runtime.cluster import cluster
from megatron_daro.runtime.inputs import Inputs, read_inputs
from megatron_daro.runtime.placement import Placement
from megatron_daro.runtime.rehearsal import check_start
from megatron_daro.runtime.start import begin
from megatron_daro.runtime.workers import Place

SILENT_S = 10.0
"""Deadline of a step in which a node falls silent; the configured one is hours."""


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
    watched: dict[str, float]
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
        What was found, also where the run ended with an error of a lost node.

    Raises:
        ConfigError: the node is not there, nothing is on it, or what `train --dry-run` would say. DaroError: the run
            failed although no node was lost.
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
                if self._loss is None:
                    raise
                error = f"{type(raised).__name__}: {raised}"
        group = self._group
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
            self._setting.changes(Path("TEMPORARY"), [f"{len(self._fleet.urls)} canned servers"]),
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
        algorithm, limits = parts.algorithm_of(config), parts.deadlines(config)
        if self._loss and self._loss.how == "silent":
            limits = dataclasses.replace(limits, train=SILENT_S)
        placement = Placement(demand_of(self._setting.full), config.actor, limits)
        policy = parts.policy_group(config, placement, ThinPolicyGroup)
        assert isinstance(policy, ThinPolicyGroup)
        self._group = policy
        places = [place_of(rank, self._layout) for rank in range(self._layout.world_size)]
        before = StoreUse.now()

        def begins() -> None:
            meter.begin()
            self._watch.late_ms.clear()
            self._begun = time.perf_counter()

        script, nodes = self._script(places), self._setting.nodes
        policy.rehearse(places, nodes, script, self._loss, on_begin=begins, on_loss=self._fleet.lose)
        made = parts.generation(config, inputs, algorithm, placement, progress, phases)
        start = begin(parts.run_directory(config), config, resume=False, progress=progress)
        observers = launch.Observers(meter, progress, phases)
        meter.calls = lambda: policy.asked.count  # type: ignore[method-assign]
        meter.begin()
        with self._watch:
            try:
                return await launch.drive(
                    config, algorithm, launch.Driven(placement, policy, made.sampler, made), observers, start
                )
            finally:
                self._ended = time.perf_counter()
                now = StoreUse.now()
                self._store = StoreUse(now.objects - before.objects, now.num_bytes - before.num_bytes)

    def _script(self, places: list[Place]) -> Script:
        pace, times = self._setting.asked.pace, self._setting.times
        updates = self._config.trainer.updates_per_batch
        return Script(
            train_s=pace * times.train / updates,
            logprobs_s=pace * times.logprobs / updates,
            send_s=pace * times.sync / len(self.stages),
            stages={plan.stage: (plan.num_bytes, plan.buckets) for plan in self.stages},
            answering=frozenset(rank for rank, place in enumerate(places) if place.answers),
            stage_of={rank: place.stage for rank, place in enumerate(places) if place.sends},
        )
