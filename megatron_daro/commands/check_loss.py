"""`megatron-daro check-loss`: is a loss exact under DP, CP, TP, PP and micro-batches? On a CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer


def check_loss(
    function: Annotated[
        str, typer.Argument(metavar="MODULE:FUNCTION", help="The loss (docs/check_loss.md).", show_default=False)
    ],
    per_token: Annotated[
        Literal["both", "on", "off"],
        typer.Option("--per-token", help="Values of Megatron's calculate_per_token_loss that the loss is written for."),
    ] = "both",
    uses: Annotated[
        str,
        typer.Option(
            "--uses", help="Inputs that must have an influence: advantages, rewards, old_logprobs, ref_logprobs."
        ),
    ] = "advantages",
    samples: Annotated[
        Literal["parts", "whole"],
        typer.Option("--samples", help="What a context-parallel rank sees: its part of a sample, or, as in verl, all."),
    ] = "parts",
    seconds: Annotated[float, typer.Option("--seconds", min=0, help="Time for random cases.")] = 20.0,
    seed: Annotated[int, typer.Option("--seed", help="Of the random cases.")] = 0,
    script: Annotated[
        Path, typer.Option("--script", metavar="FILE", help="Where the smallest failing case is written.")
    ] = Path("loss_case.py"),
) -> None:
    """Compare a loss under many layouts with one process; find the smallest case that differs, and its likely cause."""
    from megatron_daro.workshop.check_loss.pool import CasePool, find_function
    from megatron_daro.workshop.check_loss.script import write_script
    from megatron_daro.workshop.check_loss.search import Row, check

    find_function(function)  # reports an error of the import here, once

    def show(row: Row) -> None:
        flag = "on " if row.per_token else "off"
        verdict = "exact" if row.exact else f"differs by {row.difference:.2g}"
        typer.echo(f"  per-token {flag}  {row.name:<38} {verdict}")

    flags = {"both": (True, False), "on": (True,), "off": (False,)}[per_token]
    used_inputs = [name for name in uses.split(",") if name]
    with CasePool() as pool:
        report = check(
            function,
            pool=pool,
            flags=flags,
            uses=used_inputs,
            whole=samples == "whole",
            seconds=seconds,
            seed=seed,
            progress=show,
        )
    if report.exact:
        typer.echo(f"exact: {len(report.rows)} cases in {report.seconds:.0f} s agree with one process to 1e-5")
        return
    typer.echo(f"NOT exact, found in {report.seconds:.0f} s")
    typer.echo(f"likely cause: {report.cause}")
    if report.error:
        typer.echo(report.error.rstrip())
    if report.case is not None:
        typer.echo(f"smallest case: {report.case.describe()}")
        typer.echo(f"largest difference, relative to the gradient: {report.difference:.3g}")
        write_script(script, function, report.case, report.cause)
        typer.echo(f"repeat it: torchrun --nproc-per-node {report.case.world_size} {script}")
    raise typer.Exit(1)
