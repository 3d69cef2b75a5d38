"""The recipe as it is rehearsed, and the node that each rank and server of it would be on.

Recipe, nodes -> Setting -> loop.py: checked as it is, then changed where this machine must stand for a cluster; every
change is listed for the report. Refuses what `train --dry-run` refuses, and engines that are not SGLang servers.

Demand and nodes -> NodeMap -> thin ranks, canned servers, report. Ray packs bundles in order; here each goes to the
first node with room, and runtime/cluster.py's own functions give the ranks their bundles. Refuses what these refuse.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatron_daro.actor.policy import layout_of
from megatron_daro.config import Config, resolve_and_check, yaml_text
from megatron_daro.config.actor import ActorSection
from megatron_daro.config.check_training import part_layers
from megatron_daro.config.hardware import Demand, demand_of, misfit
from megatron_daro.config.model_shape import ModelShape, read_model_shape
from megatron_daro.config.sections import GPU_BUCKET_MIB
from megatron_daro.data.templates import trained_with
from megatron_daro.errors import ConfigError
from megatron_daro.rollout.protocol import PromptSource
from megatron_daro.runtime.cluster import assigned, group_order
from megatron_daro.runtime.inputs import Inputs
from megatron_daro.types import Group, Prompt
from megatron_daro.workshop.plan.gpus import Gpu, find_gpu
from megatron_daro.workshop.plan.layout import ModelLayout
from megatron_daro.workshop.plan.times import Constants, generation_s, sync_s, train_times
from megatron_daro.workshop.plan.workload import Workload, workload_of
from megatron_daro.workshop.rehearse.canned_server import CannedAnswers

ANSWER = "7"
_BODIES = 8


@dataclass(frozen=True, slots=True)
class Asked:
    """What a person asked for: the options of the command."""

    recipe: Path
    overrides: tuple[str, ...] = ()
    nodes: int = 1
    gpus_per_node: int = 8
    steps: int = 3
    gpu: str = "h100-80g"
    mean_response: float | None = None
    pace: float = 0.01


@dataclass(frozen=True, slots=True)
class PlannedTimes:
    """Seconds of a step on the GPUs, by part, as `megatron-daro plan` reckons."""

    generation: float
    logprobs: float
    train: float
    sync: float

    def step(self, staleness: int) -> float:
        """Return the seconds of a step; generation is hidden behind training with batches ahead."""
        trainer = self.logprobs + self.train + self.sync
        return max(self.generation, trainer) if staleness else self.generation + trainer


@dataclass(frozen=True, slots=True)
class Setting:
    """A recipe ready to be rehearsed. full: as it is, on its nodes."""

    asked: Asked
    full: Config
    shape: ModelShape
    nodes: NodeMap
    workload: Workload
    times: PlannedTimes
    warnings: tuple[str, ...]

    @property
    def updates(self) -> int:
        """Optimizer steps of a batch."""
        return self.full.trainer.steps_per_batch

    @property
    def layers(self) -> list[list[range]]:
        """Layers of each part of each pipeline stage."""
        actor, layers = self.full.actor, self.shape.layers
        sizes = (actor.pipeline_parallel, actor.virtual_pipeline_parallel)
        return part_layers(layers, *sizes, actor.megatron) or [[range(layers)]]

    @property
    def bucket_bytes(self) -> int:
        """Limit of a weight bucket."""
        return (self.full.engine.sglang.bucket_mib or GPU_BUCKET_MIB) * 2**20

    def changes(self, run_dir: Path, urls: Sequence[str]) -> list[str]:
        """Return the overrides under which this machine stands for the cluster."""
        steps = self.asked.steps * self.updates
        return [
            f"engine.sglang.urls={json.dumps(list(urls))}",
            "engine.sglang.verify=false",
            "engine.sglang.sync=distributed",
            "engine.sglang.fp8_blocks=false",
            "actor.routing_replay=false",
            f"reward.workers={min(2, self.full.reward.workers)}",
            f"trainer.run_dir={run_dir}",
            f"trainer.steps={steps}",
            f"actor.optimizer.warmup_steps={min(self.full.actor.optimizer.warmup_steps, steps)}",
            f"trainer.save_every_steps={steps}",
            "trainer.eval_every_steps=0",
            "trainer.export_hf=false",
            "observe.progress=false",
            "observe.tensorboard=false",
        ]

    @property
    def left_out(self) -> list[str]:
        """Options for servers that a rehearsal does not start."""
        names = ("python", "arguments", "env")
        return [f"without engine.sglang.{name}" for name in names if getattr(self.full.engine.sglang, name)]

    def rehearsed(self, run_dir: Path, urls: Sequence[str]) -> Config:
        """Return the configuration of the rehearsal, by way of a file beside its run directory: options for servers
        that would be started are refused beside servers that run, and no override can remove a table's keys."""
        document = self.full.model_dump(mode="json")
        document["engine"]["sglang"] |= {"python": None, "arguments": {}, "env": {}}
        file = run_dir.with_name("rehearsed.yaml")
        file.write_text(yaml_text.dump(document), encoding="utf-8")
        return resolve_and_check(file, self.changes(run_dir, urls))[0]

    def answers(self, inputs: Inputs) -> CannedAnswers:
        """Return what canned servers say: lengths as planned, half of the answers right."""
        tokenizer, config = inputs.tokenizer, self.full
        reserved = [token for token in tokenizer.all_special_ids if token > 300]
        last = min([*reserved, len(tokenizer)])
        rng = np.random.default_rng(0)
        samples = config.rollout.rollouts_per_prompt
        lengths = rng.choice(self.workload.response_Q, (_BODIES, samples)).astype(int).clip(_LEAST_ANSWER)
        endings = [
            [*tokenizer.encode(_ending(config, answer), add_special_tokens=False), inputs.stops.token_ids[0]]
            for answer in (ANSWER, "8")
        ]
        return CannedAnswers(
            lengths=lengths.tolist(),
            ordinary=(last // 2, last),
            endings=endings,
            vocabulary=json.loads((config.model.path / "config.json").read_text())["vocab_size"],
            model_type=json.loads((config.model.path / "config.json").read_text())["model_type"],
            device="cuda",
            dtype=config.actor.torch_dtype,
            tensor_parallel=config.engine.sglang.tensor_parallel,
            delay_s=self.asked.pace * min(self.times.generation, _LONGEST_S),
        )


_LEAST_ANSWER, _LONGEST_S = 16, 3600.0


def _ending(config: Config, answer: str) -> str:
    """Return the end of an answer as the recipe's verifier reads it."""
    template = trained_with(config.data)
    if template and template.tagged:
        return f" </think> <answer> {answer} </answer>"
    forms = {"math": f" \\boxed{{{answer}}}", "integer": f"\nAnswer: {answer}"}
    return forms.get(config.reward.verifier, f"\n{config.reward.marker} {answer}")


class _OneAnswer:
    """The recipe's prompts in the recipe's order, with an answer that canned servers know."""

    def __init__(self, source: PromptSource) -> None:
        self._source = source

    def next(self, n: int) -> list[Prompt]:
        """Return the next n prompts."""
        return [dataclasses.replace(prompt, answer=ANSWER, alternatives=()) for prompt in self._source.next(n)]

    def observe(self, groups: Sequence[Group]) -> None:
        """Hand on what became of prompts."""
        self._source.observe(groups)

    def state_dict(self) -> Mapping[str, Any]:
        """Return the source's own."""
        return self._source.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where it was taken."""
        self._source.load_state_dict(state)


def with_one_answer(inputs: Inputs) -> Inputs:
    """Return the problems with an answer that canned servers know, and no held-out sets."""
    return dataclasses.replace(inputs, prompts=_OneAnswer(inputs.prompts), held_out=[])


def setting_of(asked: Asked) -> Setting:
    """Return the setting.

    Raises:
        ConfigError: what `train --dry-run` would say of the recipe on these nodes, or an embedded engine.
    """
    config, report = resolve_and_check(asked.recipe, _of_cluster(asked))
    if config.engine.kind != "sglang":
        raise ConfigError(
            f"engine.kind: got {config.engine.kind!r}; allowed in a rehearsal: 'sglang', whose servers can be played; "
            "fix: rehearse the recipe of the cluster, or train this one here"
        )
    if config.engine.sglang.urls:
        raise ConfigError("engine.sglang.urls: got servers that run; allowed in a rehearsal: none; fix: unset it")
    if config.engine.colocate:
        raise ConfigError(
            "engine.colocate: got true; allowed in a rehearsal: false, since its ranks and servers have no memory to "
            "take turns with; fix: set engine.colocate=false"
        )
    shape, gpu = read_model_shape(config.model.path), find_gpu(asked.gpu)
    workload = workload_of(config, shape, mean_response=asked.mean_response)
    nodes = node_map(demand_of(config), config.actor, asked.nodes, asked.gpus_per_node)
    times = _planned(config, workload, gpu)
    return Setting(asked, config, shape, nodes, workload, times, tuple(map(str, report.warnings)))


def _of_cluster(asked: Asked) -> list[str]:
    return [*asked.overrides, f"cluster.nodes={asked.nodes}", f"cluster.gpus_per_node={asked.gpus_per_node}"]


def _planned(config: Config, workload: Workload, gpu: Gpu) -> PlannedTimes:
    actor, constants = config.actor, Constants()
    layout = ModelLayout.of(actor)
    trainers = train_times(workload, layout, actor.data_parallel, gpu, constants)
    size = config.engine.sglang.tensor_parallel
    generation = generation_s(workload, size, config.engine.replicas, gpu, constants)
    return PlannedTimes(generation, trainers.logprobs, trainers.train, sync_s(workload, layout, gpu, constants))


def world(config: Config) -> str:
    """Return the layout in words."""
    layout = layout_of(config.actor)
    virtual = f" in {layout.virtual_pipeline} parts each" if layout.virtual_pipeline > 1 else ""
    return (
        f"{layout.world_size} ranks (TP {layout.tensor}, PP {layout.pipeline}{virtual}, CP {layout.context}, "
        f"DP {layout.data}, EP {layout.expert})"
    )


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
    free, places = [each] * nodes, []
    for size in sizes:
        place = next((node for node, left in enumerate(free) if left >= size), None)
        if place is None:
            raise ConfigError(f"{nodes} nodes of {each} GPUs have no room for a piece of {size}; fix: raise --nodes")
        free[place] -= size
        places.append(place)
    return places
