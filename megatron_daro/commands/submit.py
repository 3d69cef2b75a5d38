"""`megatron-daro submit`: a recipe as a job on Slurm."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from megatron_daro.config import Config
    from megatron_daro.workshop.slurm.cluster_file import ClusterFile
    from megatron_daro.workshop.slurm.script import Job

_GPU = "h100-80g"
"""GPU to plan with where the recipe's `cluster.gpu` names none."""
_NODE_GIB_S, _MOST_GIB_S = 0.5, 4.0
"""Assumed speed of writing a checkpoint: of each node, and at most of the file system."""
_END_S = 60.0
"""Time for all else between the signal and the end of a job; Slurm may signal up to a minute late or early."""


def submit(
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE", help="YAML file of the run.", show_default=False)],
    cluster: Annotated[
        Path, typer.Option("--cluster", metavar="FILE", help="Cluster file (docs/cluster.md).", show_default=False)
    ],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="A.B=C", help="Options that replace those of the file.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check, print the batch script, and end.")] = False,
    test_only: Annotated[
        bool | None,
        typer.Option(
            "--test-only/--no-test-only",
            help="Ask Slurm whether and when it would run, and submit nothing; or do not ask before submitting.",
            show_default=False,
        ),
    ] = None,
    chain: Annotated[
        int, typer.Option("--chain", min=1, help="Jobs that wait for each other, each going on where one ended.")
    ] = 1,
) -> None:
    """Write a batch script for RECIPE, show where it is, and hand it to Slurm."""
    from megatron_daro.config import resolve, resolve_and_check
    from megatron_daro.workshop.slurm import submission
    from megatron_daro.workshop.slurm.cluster_file import read_cluster_file
    from megatron_daro.workshop.slurm.script import script_of

    site = read_cluster_file(cluster)
    options = overrides or []
    nodes = submission.nodes_of(resolve(recipe, options), site)
    config, checks = resolve_and_check(recipe, options, submission.hardware_of(site, nodes))
    signal_before_s, remarks = _signal_before_s(config, site, nodes)
    job = submission.job_of(config, recipe, options, site, max(signal_before_s, submission.LEAST_SIGNAL_S))
    for warning in (*checks.warnings, *remarks):
        typer.echo(f"warning: {warning}", err=True)
    if dry_run:
        typer.echo(script_of(job, site), nl=False)
        return
    submission.check_cluster(job, site)
    if test_only:
        typer.echo(submission.ask_slurm(job, site))
        return
    submission.require_no_other_job(job)
    if test_only is None:
        submission.ask_slurm(job, site)
    _show(job, site, submission.submit(job, site, chain=chain))


def _show(job: Job, site: ClusterFile, numbers: list[str]) -> None:
    """Print where everything is."""
    from megatron_daro.workshop.slurm.submission import SCRIPT_FILE

    typer.echo(f"script: {job.folder / SCRIPT_FILE}")
    typer.echo(f"logs: {job.folder}/job_{numbers[0]}.log, and a directory for each attempt beside it")
    typer.echo(f"a shell beside the training, while it runs: bash {job.folder}/attach.sh")
    typer.echo(
        f"submitted: {', '.join(numbers)} ({job.nodes} nodes, {site.partition}); look with: squeue -j {numbers[0]}"
    )


def _signal_before_s(config: Config, site: ClusterFile, nodes: int) -> tuple[int, list[str]]:
    """Return how many seconds before the time limit training must be signalled, 0 where there is no plan, and warnings
    about the cluster file's own number.

    The time is that of two planned steps, since a plan may be too fast by half, a checkpoint, and the end of all
    processes.
    """
    from megatron_daro.config.model_shape import read_model_shape
    from megatron_daro.errors import ConfigError
    from megatron_daro.workshop.plan.gpus import find_gpu
    from megatron_daro.workshop.plan.layout import ModelLayout, checkpoint_bytes
    from megatron_daro.workshop.plan.times import Constants, generation_s, train_times
    from megatron_daro.workshop.plan.workload import workload_of

    if config.engine.kind != "sglang" or config.engine.sglang.urls or not site.gpus_per_node:
        return 0, []
    try:
        gpu = find_gpu(config.cluster.gpu or _GPU)
    except ConfigError:  # a name of Ray's that the planner does not know
        gpu = find_gpu(_GPU)
    shape, actor, constants = read_model_shape(config.model.path), config.actor, Constants()
    workload, servers = workload_of(config, shape), config.engine
    train = train_times(workload, ModelLayout.of(actor), actor.data_parallel, gpu, constants).total
    generate = generation_s(workload, servers.sglang.tensor_parallel, servers.replicas, gpu, constants)
    step_s = max(train, generate) if config.rollout.batches_ahead else train + generate
    gib = checkpoint_bytes(shape, 4 if actor.dtype == "fp32" else 2, workload.adapters) / 2**30
    save_s = gib / min(_NODE_GIB_S * nodes, _MOST_GIB_S)
    needed = 60 * math.ceil((2 * step_s + save_s + _END_S) / 60)
    given = site.signal_before_s
    if given is None or given >= step_s + save_s + _END_S:
        return needed, []
    return needed, [
        f"signal_before_s: got {given}; a step is planned to take {step_s:.0f} s on {gpu.name}, and a checkpoint of "
        f"{gib:.0f} GiB about {save_s:.0f} s, so training may not have saved when the time limit ends it, and what it "
        f"did since its last checkpoint is lost; fix: leave signal_before_s unset, which takes {needed}"
    ]
