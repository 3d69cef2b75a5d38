"""`megatron-daro doctor`: what is installed, which of it works, and what a run of a recipe would miss."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def doctor(
    recipe: Annotated[
        Path | None, typer.Argument(metavar="[RECIPE]", help="YAML file of a run.", show_default=False)
    ] = None,
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="A.B=C", help="Options that replace those of the file.")
    ] = None,
) -> None:
    """Say what is installed, which of it works, and what a run of RECIPE would miss, with fixes."""
    from megatron_daro.observe.table import prose
    from megatron_daro.workshop.doctor import diagnose

    findings = diagnose(recipe, overrides or [])
    for finding in findings:
        typer.echo(prose(f"{finding.state:<7} {finding.part}: {finding.found}"))
        if finding.fix:
            typer.echo(prose(f"        fix: {finding.fix}"))
    broken = [finding.part for finding in findings if finding.state == "broken"]
    if broken:
        typer.echo(f"{len(broken)} of {len(findings)} are broken: {', '.join(broken)}", err=True)
        raise typer.Exit(1)
    typer.echo("nothing is broken")
