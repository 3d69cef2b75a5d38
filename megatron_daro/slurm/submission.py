"""From a recipe and a cluster file to a job in the queue: sizes, checks, script, sbatch.

Place in the data flow: commands/submit.py calls it. Everything that can be known before the queue is: the recipe
against the cluster's GPUs, the partition, the container image, and what `sbatch --test-only` says.
"""

from __future__ import annotations

import getpass
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

from megatron_daro.config import Config
from megatron_daro.config.base import filled
from megatron_daro.config.fit import demand_of, misfit
from megatron_daro.config.hardware import Hardware, gpu_nodes
from megatron_daro.errors import ConfigError
from megatron_daro.slurm.cluster_file import ClusterFile
from megatron_daro.slurm.script import Job, script_of

_TIMEOUT_S = 60
SCRIPT_FILE = "job.sbatch"


def gpus_of(config: Config) -> int:
    """Return the GPUs that the recipe needs: one for each rank, and those of the servers that it starts."""
    return demand_of(config).gpus


def nodes_of(config: Config, cluster: ClusterFile) -> int:
    """Return the nodes of the job.

    Raises:
        ConfigError: the cluster file's nodes have too few GPUs or cores, or it has neither nodes nor GPUs.
    """
    if not cluster.gpus_per_node:
        if cluster.nodes is None:
            raise ConfigError("nodes: got nothing with gpus_per_node 0; allowed: a number; fix: set nodes")
        cores = cluster.cpus_per_node
        if cores and (why := misfit(demand_of(config), [cores] * cluster.nodes, what="CPUs")):
            raise ConfigError(
                f"cpus_per_node: got {cores}; allowed: a core for each rank and server; {why}; fix: raise it"
            )
        return cluster.nodes
    needed = gpus_of(config)
    least = -(-needed // cluster.gpus_per_node)
    if cluster.nodes is not None and cluster.nodes < least:
        raise ConfigError(
            f"nodes: got {cluster.nodes} of {cluster.gpus_per_node} GPUs; allowed: at least {least}, since the recipe "
            f"needs {needed} GPUs (trainers {config.actor.world_size}); fix: leave nodes unset, or `megatron-daro plan`"
        )
    return cluster.nodes or least


def hardware_of(cluster: ClusterFile, nodes: int) -> Hardware | None:
    """Return what the job will have, for the checks of the recipe; None: like this machine, where it has no GPUs."""
    if not cluster.gpus_per_node:
        return None
    return gpu_nodes([cluster.gpus_per_node] * nodes, None, f"the job's {nodes} nodes")


def job_of(config: Config, recipe: Path, overrides: Sequence[str], cluster: ClusterFile) -> Job:
    """Return the job of a recipe, submitted from the working directory."""
    run_dir = filled(config.trainer.run_dir).absolute()
    return Job(
        name=re.sub(r"[^\w.-]", "-", run_dir.name) or "megatron-daro",
        nodes=nodes_of(config, cluster),
        run_dir=run_dir,
        directory=Path.cwd(),
        train=(str(recipe.absolute()), *overrides),
        steps=config.trainer.steps,
    )


def check_cluster(cluster: ClusterFile) -> None:
    """Refuse what Slurm would keep waiting for ever: a partition that is unknown or down; and a missing image.

    Raises:
        ConfigError: with what the cluster has.
    """
    container = cluster.container
    if container and container.image.startswith(("/", ".")) and not Path(container.image).exists():
        raise ConfigError(
            f"container.image: got {container.image!r}, which is not there; allowed: an image file, or a name of a "
            "registry; fix: check the path"
        )
    state = _slurm(["sinfo", "--noheader", f"--partition={cluster.partition}", "--format=%a"]).split()
    if not state:
        known = sorted(set(_slurm(["sinfo", "--noheader", "--format=%R"]).split()))
        raise ConfigError(
            f"partition: got {cluster.partition!r}, which this cluster does not have; allowed: {', '.join(known)}; "
            "fix: correct the cluster file"
        )
    if "up" not in state:
        raise ConfigError(
            f"partition: got {cluster.partition!r}, which is {state[0]}; allowed: one that is up; fix: wait, or choose "
            "another (`sinfo`)"
        )


def tried(job: Job, cluster: ClusterFile) -> str:
    """Return what Slurm says about the job without taking it.

    Raises:
        ConfigError: it would refuse the job.
    """
    return _sbatch(cluster, ["--test-only"], script_of(job, cluster)).strip()


def submit(job: Job, cluster: ClusterFile, *, chain: int = 1) -> list[str]:
    """Write the script and hand it to Slurm.

    Args:
        job, cluster: what to run where.
        chain: jobs that wait for each other; each goes on where the one before has ended, and those after the end of
            the run end at once.

    Returns:
        The numbers of the jobs.

    Raises:
        ConfigError: Slurm refuses the job, or its script cannot be written.
    """
    script = job.folder / SCRIPT_FILE
    try:
        job.folder.mkdir(parents=True, exist_ok=True)
        (job.folder / "finished").unlink(missing_ok=True)
        script.write_text(script_of(job, cluster), encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"trainer.run_dir: got {str(job.run_dir)!r}, which cannot be written ({error.strerror}); allowed: a "
            "directory that all nodes share; fix: choose another trainer.run_dir"
        ) from error
    numbers: list[str] = []
    for _ in range(chain):
        after = [f"--dependency=afterany:{numbers[-1]}"] if numbers else []
        numbers.append(_sbatch(cluster, ["--parsable", *after, str(script)]).strip().split(";")[0])
    return numbers


def _sbatch(cluster: ClusterFile, options: list[str], text: str | None = None) -> str:
    """Return what `sbatch` prints.

    Raises:
        ConfigError: it refuses the job; where it refuses the account, with the accounts that there are.
    """
    try:
        return _slurm(["sbatch", *options], text, with_stderr="--test-only" in options)
    except ConfigError as error:
        if "Invalid account" not in str(error) or not (accounts := _own_accounts()):
            raise
        got = repr(cluster.account) if cluster.account else "none"
        raise ConfigError(
            f"account: got {got}, which Slurm refuses you in partition {cluster.partition!r}; allowed: of yours, "
            f"{', '.join(accounts)}; fix: correct the cluster file"
        ) from error


def _own_accounts() -> list[str]:
    """Return the accounts that Slurm's database has for this user; none where there is no answer."""
    try:
        whose = ["associations", f"user={getpass.getuser()}", "format=account"]
        said = _slurm(["sacctmgr", "--noheader", "--parsable2", "show", *whose])
    except (ConfigError, OSError, KeyError):  # no name for the user id, no database, or not for users to ask
        return []
    return sorted(set(said.split()))


def _slurm(command: list[str], text: str | None = None, *, with_stderr: bool = False) -> str:
    """Return what a command of Slurm prints.

    Raises:
        ConfigError: it is not there, refuses, or does not answer.
    """
    try:
        done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except FileNotFoundError:
        raise ConfigError(
            f"{command[0]}: not found; allowed: a machine with Slurm's commands; fix: log in to the cluster, or use "
            "--dry-run to see the script"
        ) from None
    except subprocess.TimeoutExpired:
        raise ConfigError(f"{command[0]}: no answer in {_TIMEOUT_S} s; Slurm's controller is down or busy") from None
    if done.returncode:
        why = " ".join((done.stderr or done.stdout).split())
        raise ConfigError(f"{' '.join(command[:2])}: refused: {why}; fix: correct the cluster file")
    return done.stdout + (done.stderr if with_stderr else "")
