"""`megatron-daro check-layout`: whether a checkpoint of some config.json fills every rank of a world exactly."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from megatron_daro.config.actor import ActorSection
    from megatron_daro.config.model_shape import ModelShape
    from megatron_daro.workshop.check_layout import WorldReport

ModelConfig = Annotated[
    Path, typer.Argument(metavar="MODEL_CONFIG", help="config.json of the model, or its directory.", show_default=False)
]


def check_layout(
    model_config: ModelConfig,
    world: Annotated[int, typer.Option("--world", min=1, help="Ranks; data parallel is what TP, PP and CP leave.")],
    tensor: Annotated[int, typer.Option("--tp", min=1, help="Tensor parallel size.")] = 1,
    pipeline: Annotated[int, typer.Option("--pp", min=1, help="Pipeline stages.")] = 1,
    virtual: Annotated[int, typer.Option("--vpp", min=1, help="Parts of the model on each pipeline stage.")] = 1,
    context: Annotated[int, typer.Option("--cp", min=1, help="Context parallel size.")] = 1,
    expert: Annotated[int, typer.Option("--ep", min=1, help="Expert parallel size.")] = 1,
    expert_tensor: Annotated[
        int | None, typer.Option("--etp", min=1, help="Tensor parallel size of experts; unset: 1 with --ep, else --tp.")
    ] = None,
    first_layers: Annotated[int | None, typer.Option("--first-layers", min=1, help="Layers of stage 0.")] = None,
    last_layers: Annotated[int | None, typer.Option("--last-layers", min=1, help="Layers of the last stage.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, with every rank.")] = False,
) -> None:
    """Build every rank of a world without memory; prove that the checkpoint fills each parameter exactly once."""
    from megatron_daro.config.actor import ActorSection
    from megatron_daro.config.model_shape import read_model_shape
    from megatron_daro.config.problems import config_error
    from megatron_daro.config.rules.layout import division
    from megatron_daro.config.stages import FIRST_STAGE, LAST_STAGE
    from megatron_daro.errors import ConfigError

    shape = read_model_shape(model_config)
    replica = tensor * pipeline * context
    if world % replica:
        raise ConfigError(
            f"--world: got {world}; allowed: a multiple of TP {tensor} * PP {pipeline} * CP {context} = {replica}; "
            f"fix: use --world {-(-world // replica) * replica}"
        )
    stages = {FIRST_STAGE: first_layers, LAST_STAGE: last_layers}
    actor = ActorSection(
        tensor_parallel=tensor,
        pipeline_parallel=pipeline,
        virtual_pipeline_parallel=virtual,
        context_parallel=context,
        data_parallel=world // replica,
        expert_parallel=expert,
        expert_tensor_parallel=expert_tensor,
        megatron={name: layers for name, layers in stages.items() if layers is not None},
    )
    problems = list(division(actor, shape))
    if problems:
        raise config_error(str(model_config), problems)
    _print(_checked(actor, shape), as_json=as_json)


def _checked(actor: ActorSection, shape: ModelShape) -> WorldReport:
    """Check the world, with a progress bar on a terminal."""
    from rich.console import Console
    from rich.progress import Progress

    from megatron_daro.actor.translation import layout_of
    from megatron_daro.workshop.check_layout import check_world

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("ranks", total=actor.world_size)
        return check_world(
            shape,
            layout_of(actor),
            options=actor.megatron,
            progress=lambda rank: bar.update(task, completed=rank + 1),
        )


def _print(report: WorldReport, *, as_json: bool) -> None:
    """Print one line for all ranks of a stage that hold the same amount, or every rank as JSON."""
    import dataclasses
    import json
    from collections import Counter

    from megatron_daro.observe.table import prose, table_text

    if as_json:
        typer.echo(json.dumps(dataclasses.asdict(report), indent=2))
        return
    alike = Counter((share.stage, share.parameters, share.size_bytes) for share in report.ranks)
    rows = [
        [str(stage), str(count), f"{parameters:,}", f"{size_bytes / 2**30:.3f} GiB"]
        for (stage, parameters, size_bytes), count in sorted(alike.items())
    ]
    typer.echo(table_text(["stage", "ranks", "parameters of a rank", "weights of a rank (bf16)"], rows, left=1))
    typer.echo(
        prose(
            f"{report.tensors} tensors, {report.parameters:,} parameters: each is used exactly once by every replica, "
            f"and fills every parameter of all {len(report.ranks)} ranks; all shapes agree."
        )
    )
