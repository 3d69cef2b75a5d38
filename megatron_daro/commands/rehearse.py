"""`megatron-daro rehearse`: a large run's driver on this machine, over thin ranks and canned servers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

Recipe = Annotated[Path, typer.Argument(metavar="RECIPE", help="YAML file of the run.", show_default=False)]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="A.B=C", help="Options that replace those of the file.")]
Nodes = Annotated[int, typer.Option("--nodes", min=1, help="Nodes of the cluster.", show_default=False)]
MeanResponse = Annotated[
    float | None, typer.Option("--mean-response", help="Expected tokens of an answer. Unset: 0.3 of the longest.")
]
LostNode = Annotated[
    int | None, typer.Option("--lose-node", metavar="K", min=0, help="Lose this node, from 0, in the second batch.")
]
LostHow = Annotated[
    str, typer.Option("--lose-how", help="killed: its processes end; silent: its ranks stop answering.")
]
Pace = Annotated[
    float, typer.Option("--pace", min=0, help="Ranks and servers take this part of their planned time here.")
]


def rehearse(
    recipe: Recipe,
    nodes: Nodes,
    overrides: Overrides = None,
    gpus_per_node: Annotated[int, typer.Option("--gpus-per-node", min=1, help="GPUs of each node.")] = 8,
    steps: Annotated[int, typer.Option("--steps", min=1, help="Batches, each of the recipe's optimizer steps.")] = 3,
    lose_node: LostNode = None,
    lose_how: LostHow = "killed",
    gpu: Annotated[str, typer.Option("--gpu", help="Kind of GPU of the planned times, as of `plan`.")] = "h100-80g",
    mean_response: MeanResponse = None,
    pace: Pace = 0.01,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Run the driver of RECIPE as on a cluster: real loop, books, Ray objects and placement; no model, no GPU."""
    import json

    from megatron_daro.runtime.interrupts import interruptible

    with interruptible():
        from rich.console import Console

        from megatron_daro.workshop.rehearse.loop import rehearse as run
        from megatron_daro.workshop.rehearse.report import as_record, view
        from megatron_daro.workshop.rehearse.setting import Asked, setting_of
        from megatron_daro.workshop.rehearse.thin_ranks import Loss

        request = Asked(recipe, tuple(overrides or ()), nodes, gpus_per_node, steps, gpu, mean_response, pace)
        how, setting = _how(lose_how), setting_of(request)
        loss = None if lose_node is None else Loss(lose_node, setting.updates * min(1, steps - 1) + 1, how)
        for warning in setting.warnings:
            typer.echo(f"warning: {warning}", err=True)
        record = as_record(run(setting, loss))
    if as_json:
        typer.echo(json.dumps(record, indent=2))
    else:
        Console(width=max(Console().width, 120), highlight=False, markup=False).print(view(record))
    if not record["holds"]:
        typer.echo("rehearse: " + "; ".join(record["faults"]), err=True)
        raise typer.Exit(1)


def _how(text: str) -> Literal["killed", "silent"]:
    from megatron_daro.errors import ConfigError

    if text == "killed":
        return "killed"
    if text == "silent":
        return "silent"
    raise ConfigError(f"--lose-how: got {text!r}; allowed: killed, silent; fix: --lose-how killed")
