"""`megatron-daro plan`: which layouts of a recipe fit a cluster, what memory they take and what a step costs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from megatron_daro.config import Config
    from megatron_daro.config.model_shape import ModelShape
    from megatron_daro.workshop.plan.gpus import Gpu
    from megatron_daro.workshop.plan.search import Plan
    from megatron_daro.workshop.plan.shard_sync import SyncRow
    from megatron_daro.workshop.plan.tables import Bill
    from megatron_daro.workshop.plan.times import Constants
    from megatron_daro.workshop.plan.workload import Workload

Recipe = Annotated[Path, typer.Argument(metavar="RECIPE", help="YAML file of the run.", show_default=False)]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="A.B=C", help="Options that replace those of the file.")]

ModelFile = Annotated[
    Path | None, typer.Option("--model-config", metavar="FILE", help="config.json, where model.path is not here.")
]
MeanResponse = Annotated[
    float | None, typer.Option("--mean-response", help="Expected tokens of an answer. Unset: 0.3 of the longest.")
]
RunDirectory = Annotated[
    Path | None, typer.Option("--from", metavar="RUN", help="Learn lengths and times from a recorded run.")
]
PlotFile = Annotated[
    Path | None,
    typer.Option("--scaling", metavar="FILE.html", help="Simulate up to --gpus with failures, and plot it."),
]
Hours = Annotated[float, typer.Option("--mtbf-hours", min=1, help="Mean time between failures of a GPU.")]


def plan(
    recipe: Recipe,
    gpus: Annotated[int, typer.Option("--gpus", min=2, help="GPUs of the cluster, trainers and servers together.")],
    overrides: Overrides = None,
    gpu: Annotated[str, typer.Option("--gpu", help="Kind of GPU, or a YAML file with its numbers.")] = "h100-80g",
    model_config: ModelFile = None,
    mean_response: MeanResponse = None,
    mean_prompt: Annotated[float | None, typer.Option("--mean-prompt", help="Expected tokens of a prompt.")] = None,
    price: Annotated[float | None, typer.Option("--price", min=0, help="Price of a GPU-hour, for the cost.")] = None,
    best: Annotated[int, typer.Option("--best", min=1, max=50, help="Choices to show.")] = 5,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    from_run: RunDirectory = None,
    scaling: PlotFile = None,
    mtbf_hours: Hours = 5e4,
    sync: Annotated[
        bool, typer.Option("--sync", help="Also show what weights from shards to shards would move.")
    ] = False,
    write: Annotated[bool, typer.Option("--write", help="Put the best choice into RECIPE.")] = False,
) -> None:
    """Say which layouts of RECIPE fit a cluster, what each part of the memory takes and what a step costs."""
    from megatron_daro.config import resolve
    from megatron_daro.config.model_shape import read_model_shape
    from megatron_daro.workshop.plan.gpus import find_gpu
    from megatron_daro.workshop.plan.search import search
    from megatron_daro.workshop.plan.tables import Bill, options_of, write_options
    from megatron_daro.workshop.plan.workload import workload_of

    config = resolve(recipe, overrides or ())
    shape = read_model_shape(model_config or config.model.path)
    kind, constants = find_gpu(gpu), None
    if from_run:
        workload, constants = _learned(from_run, config, shape, kind)
    else:
        workload = workload_of(config, shape, mean_response=mean_response, mean_prompt=mean_prompt)
    result = search(workload, kind, gpus, constants=constants, best=best)
    per_batch = config.trainer.steps_per_batch
    rows = _sync_rows(config, shape, result, kind) if sync else []
    _show(result, workload, kind, Bill(-(-config.trainer.steps // per_batch), price), rows, as_json)
    if scaling:
        save_every = (config.trainer.save_every_steps or config.trainer.steps) // per_batch
        _simulate(workload, kind, gpus, mtbf_hours, constants, save_every, scaling)
    if write:
        chosen = options_of(result.choices[0])
        write_options(recipe, chosen)
        typer.echo(f"written into {recipe}: " + ", ".join(f"{k}={v}" for k, v in chosen.items()), err=True)


def _sync_rows(config: Config, shape: ModelShape, result: Plan, gpu: Gpu) -> list[SyncRow]:
    from megatron_daro.workshop.plan.shard_sync import sync_rows  # imports torch

    return sync_rows(config, shape, result.choices, gpu)


def _show(result: Plan, workload: Workload, gpu: Gpu, bill: Bill, sync: Sequence[SyncRow], as_json: bool) -> None:
    """Print the plan as tables, or as JSON."""
    import json

    from megatron_daro.workshop.plan.tables import as_record, view

    if as_json:
        record = as_record(result, workload, gpu, bill)
        typer.echo(json.dumps(record | ({"shard_sync": [row.record() for row in sync]} if sync else {}), indent=2))
        return
    typer.echo(view(result, workload, gpu, bill))
    if sync:
        from megatron_daro.workshop.plan.shard_sync import sync_table

        typer.echo(sync_table(sync))


def _learned(run: Path, config: Config, shape: ModelShape, gpu: Gpu) -> tuple[Workload, Constants]:
    """Return the workload with the run's lengths, and constants that reproduce the run's times; print a summary."""
    from megatron_daro.config.model_shape import read_model_shape
    from megatron_daro.workshop.plan.history import fitted, read_history

    history = read_history(run)
    own = history.config.model.path
    constants = fitted(history, read_model_shape(own) if own.is_dir() else shape, gpu)
    typer.echo(
        f"{run}: {history.steps} steps, median {history.step:.1f} s (generation {history.rollout:.1f}, training "
        f"{history.train + history.logprob:.1f}, sync {history.sync:.1f}), answers of {history.lengths.mean():.0f} "
        f"tokens; against the assumed constants generation took {constants.generation_factor:.3g} times as long, "
        f"training {constants.training_factor:.3g} times",
        err=True,
    )
    return history.workload(config, shape), constants


def _simulate(
    workload: Workload, gpu: Gpu, gpus: int, mtbf_hours: float, constants: Constants | None, save_every: int, file: Path
) -> None:
    """Simulate sizes up to `gpus`, write the plot, and print where scaling stops."""
    from megatron_daro.workshop.plan.scaling import Failures, doublings, simulate, stops_at, write_plot

    failures = Failures(mtbf_hours, save_every=max(save_every, 1))
    sizes = simulate(workload, gpu, doublings(gpu.gpus_per_node, gpus), failures, constants=constants)
    write_plot(sizes, file, f"{workload.samples} answers a batch on {gpu.name}")
    for size in sizes:
        typer.echo(
            f"{size.gpus:6d} GPUs: {size.tokens_per_s:12.0f} tokens/s, step {size.step:.1f} s, {size.bound_by}",
            err=True,
        )
    end = stops_at(sizes)
    where = f"stops scaling at {end.gpus} GPUs: {end.bound_by}" if end else f"scales to {sizes[-1].gpus} GPUs"
    typer.echo(f"{where}; plot: {file}", err=True)
