"""`megatron-daro submit`: a recipe as a job on Slurm."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def submit(
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE", help="YAML file of the run.", show_default=False)],
    cluster: Annotated[
        Path, typer.Option("--cluster", metavar="FILE", help="Cluster file (docs/slurm.md).", show_default=False)
    ],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="A.B=C", help="Options that replace those of the file.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check, print the batch script, and end.")] = False,
    test_only: Annotated[
        bool, typer.Option("--test-only", help="Ask Slurm whether and when it would run; submit nothing.")
    ] = False,
    chain: Annotated[
        int, typer.Option("--chain", min=1, help="Jobs that wait for each other, each going on where one ended.")
    ] = 1,
) -> None:
    """Write a batch script for RECIPE, show where it is, and hand it to Slurm."""
    from megatron_daro.config import resolve, resolve_and_check
    from megatron_daro.slurm import submission
    from megatron_daro.slurm.cluster_file import read_cluster_file
    from megatron_daro.slurm.script import script_of

    site = read_cluster_file(cluster)
    asked = overrides or []
    hardware = submission.hardware_of(site, submission.nodes_of(resolve(recipe, asked), site))
    config, checks = resolve_and_check(recipe, asked, hardware)
    job = submission.job_of(config, recipe, asked, site)
    for warning in checks.warnings:
        typer.echo(f"warning: {warning}", err=True)
    if dry_run:
        typer.echo(script_of(job, site), nl=False)
        return
    submission.check_cluster(site)
    if test_only:
        typer.echo(submission.tried(job, site))
        return
    numbers = submission.submit(job, site, chain=chain)
    typer.echo(f"script: {job.folder / submission.SCRIPT_FILE}")
    typer.echo(f"logs: {job.folder}/job_{numbers[0]}.log, and a directory for each attempt beside it")
    typer.echo(
        f"submitted: {', '.join(numbers)} ({job.nodes} nodes, {site.partition}); look with: squeue -j {numbers[0]}"
    )
