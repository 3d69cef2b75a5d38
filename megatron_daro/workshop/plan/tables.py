"""A plan for people and programs: tables, JSON, and a choice put into a recipe, which keeps its comments and order."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from ruamel.yaml import YAML

from megatron_daro.errors import ConfigError
from megatron_daro.observe.table import prose, table_text
from megatron_daro.workshop.plan.gpus import Gpu
from megatron_daro.workshop.plan.memory import Memory
from megatron_daro.workshop.plan.search import Choice, Plan
from megatron_daro.workshop.plan.workload import Workload

GIB = 2**30


@dataclass(frozen=True, slots=True)
class Bill:
    """What a run costs: batches of the run, and the price of a GPU-hour in any currency (None: not said)."""

    batches: int
    price: float | None = None


def options_of(choice: Choice) -> dict[str, object]:
    """Return the options of the configuration for this choice."""
    layout = choice.trainers.layout
    experts = {"actor.expert_parallel": layout.expert, "actor.expert_tensor_parallel": 1}
    return {
        "actor.tensor_parallel": layout.tensor,
        "actor.pipeline_parallel": layout.pipeline,
        "actor.virtual_pipeline_parallel": layout.virtual,
        "actor.context_parallel": layout.context,
        "actor.data_parallel": choice.trainers.data,
        "actor.sequence_parallel": layout.tensor > 1,
        "actor.recompute": layout.recompute,
        "actor.micro_batch_tokens": layout.micro_batch_tokens,
        **(experts if layout.expert > 1 else {}),
        "engine.kind": "sglang",
        "engine.replicas": choice.servers.replicas,
        "engine.sglang.tensor_parallel": choice.servers.tensor,
        **({"engine.sglang.nodes": choice.servers.nodes} if choice.servers.nodes > 1 else {}),
    }


def as_record(plan: Plan, workload: Workload, gpu: Gpu, bill: Bill) -> dict[str, object]:
    """Return the plan as plain values for JSON, in bytes, seconds and tokens."""
    return {
        "gpu": gpu.model_dump(),
        "tokens_per_batch": workload.tokens,
        "layouts": plan.looked_at,
        "warnings": _warnings(workload),
        "choices": [_choice_record(choice, workload, bill) for choice in plan.choices],
        "refused": {
            reason: {"layouts": count, "nearest": plan.refusals.nearest[reason][1]}
            for reason, count in plan.refusals.counts.items()
        },
    }


def _choice_record(choice: Choice, workload: Workload, bill: Bill) -> dict[str, object]:
    times = choice.trainers.times
    return {
        "options": options_of(choice),
        "gpus": {"train": choice.trainers.gpus, "generate": choice.servers.gpus},
        "micro_batches": choice.trainers.micro_batches,
        "trainer_memory": choice.trainers.memory.parts(),
        "server_memory": choice.servers.memory.parts(),
        "seconds": {
            "step": choice.step,
            "step_low": choice.step / choice.error,
            "step_high": choice.step * choice.error,
            "generation": choice.servers.generation,
            **asdict(times),
            "sync": choice.sync,
            "offload": choice.offload,
            "fixed": choice.fixed,
        },
        "tokens_per_s": workload.tokens / choice.step,
        "tokens_per_s_per_gpu": workload.tokens / choice.step / choice.gpus,
        "gpu_hours": _gpu_hours(choice, bill),
        "cost": None if bill.price is None else _gpu_hours(choice, bill) * bill.price,
    }


def _gpu_hours(choice: Choice, bill: Bill) -> float:
    return bill.batches * choice.step * choice.gpus / 3600


def view(plan: Plan, workload: Workload, gpu: Gpu, bill: Bill) -> str:
    """Return the tables: layouts, times by part, memory by part, and what is out."""
    return "\n".join(
        [
            prose(
                f"{workload.samples} answers a batch, mean {workload.mean_response:.0f} tokens (prompt "
                f"{workload.mean_prompt:.0f}, longest sample {workload.longest}), generated "
                f"{workload.batches_ahead} ahead, {gpu.name}{_adapter_words(workload)}"
            ),
            _layouts_table(plan, workload, bill),
            "seconds of a step",
            _times_table(plan),
            *map(prose, _time_lines(plan)),
            *map(prose, _warnings(workload)),
            f"GiB of a GPU's {gpu.memory_bytes / GIB:.0f}",
            *(_memory_table(place, memories) for place, memories in _memories(plan).items()),
            *map(prose, _refusal_lines(plan.refusals.counts, plan)),
        ]
    )


def _adapter_words(workload: Workload) -> str:
    if workload.adapters is None:
        return ""
    sent = "go to servers alone" if workload.adapters.alone else "are merged into the weights that servers get"
    return f"; adapters of rank {workload.adapters.rank}, which {sent}"


def _layouts_table(plan: Plan, workload: Workload, bill: Bill) -> str:
    head = ["", "TP PP VPP CP DP EP", "recompute", "tokens", "train", "servers", "step s"]
    head += ["tokens/s each GPU", "GPU-hours", *(["cost"] if bill.price is not None else [])]
    rows = []
    for number, choice in enumerate(plan.choices, 1):
        layout = choice.trainers.layout
        sizes = layout.tensor, layout.pipeline, layout.virtual, layout.context, choice.trainers.data, layout.expert
        hours = _gpu_hours(choice, bill)
        cells = [
            str(number),
            " ".join(map(str, sizes)),
            layout.recompute,
            str(layout.micro_batch_tokens),
            f"{choice.trainers.gpus} GPUs",
            f"{choice.servers.replicas} x {choice.servers.tensor}",
            f"{choice.step:.0f} ({choice.step / choice.error:.0f} to {choice.step * choice.error:.0f})",
            f"{workload.tokens / choice.step / choice.gpus:.0f}",
            f"{hours:.0f}",
        ]
        rows.append([*cells, *([f"{hours * bill.price:.0f}"] if bill.price is not None else [])])
    return table_text(head, rows, left=3)


def _times_table(plan: Plan) -> str:
    head = ["", "generate", "log-probs", "train", "sync", "hand-over", "fixed", "step", "bubble", "comm."]
    rows = []
    for number, choice in enumerate(plan.choices, 1):
        times = choice.trainers.times
        parts = [choice.servers.generation, times.logprobs, times.train, choice.sync, choice.offload, choice.fixed]
        seconds = [*parts, choice.step, times.bubble, times.communication]
        rows.append([str(number), *(f"{one:.1f}" for one in seconds)])
    return table_text(head, rows, left=1)


def _time_lines(plan: Plan) -> Iterator[str]:
    first = plan.choices[0]
    near = sum(choice.step <= first.step * first.error for choice in plan.choices) - 1
    if first.batches_ahead:
        yield "step: generate or log-probs + train, whichever is longer, then sync, hand-over and fixed"
    else:
        yield "step: generate, log-probs, train, sync, hand-over and fixed, one after the other"
    yield "fixed: verification, recording and waits that nothing hides; train: with bubble and comm."
    yield (
        f"step s: nine tenths of the steps that the times were learned from are within a factor of {first.error:g}; "
        f"{near} of the other {len(plan.choices) - 1} choices are within it of the first"
    )


def _warnings(workload: Workload) -> list[str]:
    """Return a warning if the times are of other layers than those that will run."""
    if not workload.shape.local_layers or workload.dtype_bytes == 4:
        return []
    return [
        "warning: train and log-probs are those of Transformer Engine's layers, and too short: this model runs in "
        "Megatron's own (docs/models.md)"
    ]


def _memories(plan: Plan) -> dict[str, list[Memory]]:
    return {
        "trainer": [choice.trainers.memory for choice in plan.choices],
        "server": [choice.servers.memory for choice in plan.choices],
    }


def _memory_table(place: str, memories: Sequence[Memory]) -> str:
    """Return a table of the parts that are not 0 in every choice."""
    parts = [memory.parts() for memory in memories]
    names = [name for name in Memory().parts() if any(one[name] for one in parts)]
    rows = [
        [f"{number} {place}", *(f"{one[name] / GIB:.1f}" for name in names), f"{memory.total / GIB:.1f}"]
        for number, (one, memory) in enumerate(zip(parts, memories, strict=True), 1)
    ]
    return table_text(["", *(name.replace("_", " ") for name in names), "sum"], rows, left=1)


def _refusal_lines(counts: Mapping[str, int], plan: Plan) -> Iterator[str]:
    yield f"{plan.looked_at} layouts were looked at; out are:"
    for reason, count in sorted(counts.items(), key=lambda item: -item[1]):
        yield f"  {count}: {reason} (nearest: {plan.refusals.nearest[reason][1]})"


def write_options(recipe: Path, options: Mapping[str, object]) -> None:
    """Set dotted options in a YAML file; sections that are missing are added at its end.

    Raises:
        ConfigError: a section of an option is no mapping in the file.
    """
    yaml = YAML()
    yaml.preserve_quotes = True
    yaml.width = 4096
    yaml.indent(mapping=2, sequence=4, offset=2)
    tree = yaml.load(recipe.read_text(encoding="utf-8"))
    for path, value in options.items():
        *sections, leaf = path.split(".")
        place = tree
        for name in sections:
            if place.get(name) is None:
                place[name] = {}
            place = place[name]
            if not isinstance(place, dict):
                raise ConfigError(
                    f"{recipe}: got {name}: {place!r}; allowed: options below {name}; fix: {path}={value}"
                )
        place[leaf] = value
    text = io.StringIO()
    yaml.dump(tree, text)
    beside = recipe.with_name(recipe.name + ".new")
    beside.write_text(text.getvalue(), encoding="utf-8")
    beside.replace(recipe)
