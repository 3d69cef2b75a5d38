"""`megatron-daro plan`: which layouts of a recipe fit a cluster, what they take and cost."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Recipe = Annotated[Path, typer.Argument(metavar="RECIPE", help="YAML file of the run.", show_default=False)]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="A.B=C", help="Options that replace those of the file.")]


def plan(
    recipe: Recipe,
    gpus: Annotated[int, typer.Option("--gpus", min=2, help="GPUs of the cluster, trainers and servers together.")],
    overrides: Overrides = None,
    gpu: Annotated[str, typer.Option("--gpu", help="Kind of GPU, or a YAML file with its numbers.")] = "h100-80g",
    model_config: Annotated[
        Path | None, typer.Option("--model-config", metavar="FILE", help="config.json, where model.path is not here.")
    ] = None,
    mean_response: Annotated[
        float | None, typer.Option("--mean-response", help="Expected tokens of an answer. Unset: 0.3 of the longest.")
    ] = None,
    mean_prompt: Annotated[float | None, typer.Option("--mean-prompt", help="Expected tokens of a prompt.")] = None,
    price: Annotated[float | None, typer.Option("--price", min=0, help="Price of a GPU-hour, for the cost.")] = None,
    best: Annotated[int, typer.Option("--best", min=1, max=50, help="Choices to show.")] = 5,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    write: Annotated[bool, typer.Option("--write", help="Put the best choice into RECIPE.")] = False,
) -> None:
    """Say which layouts of RECIPE fit a cluster, what each part of the memory takes and what a step costs."""
    import json

    from rich.console import Console

    from megatron_daro.config import resolve
    from megatron_daro.config.model_shape import read_model_shape
    from megatron_daro.plan.gpus import find_gpu
    from megatron_daro.plan.recipe_file import write_options
    from megatron_daro.plan.search import search
    from megatron_daro.plan.tables import Bill, as_record, options_of, view
    from megatron_daro.plan.workload import workload_of

    config = resolve(recipe, overrides or ())
    shape = read_model_shape(model_config or config.model.path)
    workload = workload_of(config, shape, mean_response=mean_response, mean_prompt=mean_prompt)
    kind = find_gpu(gpu)
    found = search(workload, kind, gpus, best=best)
    bill = Bill(-(-config.trainer.steps // config.trainer.updates_per_batch), price)
    if as_json:
        typer.echo(json.dumps(as_record(found, workload, kind, bill), indent=2))
    else:
        Console(width=max(Console().width, 180), highlight=False).print(view(found, workload, kind, bill))
    if write:
        write_options(recipe, options_of(found.choices[0]))
        typer.echo(f"written into {recipe}: " + ", ".join(f"{k}={v}" for k, v in options_of(found.choices[0]).items()))
