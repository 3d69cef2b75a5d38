"""From a recipe and a cluster file to a job in the queue: sizes, checks, script, sbatch.

Everything that can be known before the queue is checked: the recipe against the cluster's GPUs, the partition and its
limits, other jobs in the run directory, the container image, and what `sbatch --test-only` says.
"""

from __future__ import annotations

import getpass
import math
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

from megatron_daro.config import Config
from megatron_daro.config.base import filled
from megatron_daro.config.hardware import Hardware, gpu_nodes
from megatron_daro.config.placement import demand_of, misfit
from megatron_daro.errors import ConfigError
from megatron_daro.workshop.slurm.cluster_file import ClusterFile, control_characters, seconds_of
from megatron_daro.workshop.slurm.script import Job, script_of

_TIMEOUT_S = 60
_LONGEST_NAME = 64
SCRIPT_FILE = "job.sbatch"
LEAST_SIGNAL_S = 300


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
    needed = demand_of(config).gpus
    least = -(-needed // cluster.gpus_per_node)
    if cluster.nodes is not None and cluster.nodes < least:
        raise ConfigError(
            f"nodes: got {cluster.nodes} of {cluster.gpus_per_node} GPUs; allowed: at least {least}, since the recipe "
            f"needs {needed} GPUs (trainers {config.actor.world_size}); fix: leave nodes unset, or `megatron-daro plan`"
        )
    return cluster.nodes or least


def hardware_of(cluster: ClusterFile, nodes: int) -> Hardware | None:
    """Return the job's hardware, for the checks of the recipe; None, which means this machine, if it has no GPUs."""
    if not cluster.gpus_per_node:
        return None
    return gpu_nodes([cluster.gpus_per_node] * nodes, None, f"the job's {nodes} nodes")


def job_of(
    config: Config, recipe: Path, overrides: Sequence[str], cluster: ClusterFile, signal_before_s: int = LEAST_SIGNAL_S
) -> Job:
    """Return the job of a recipe, submitted from the working directory.

    Args:
        config, recipe, overrides, cluster: checked. signal_before_s: used where the cluster file has none.

    Raises:
        ConfigError: a control character in what the script would hold, or spare nodes without
            trainer.replace_lost_ranks.
    """
    run_dir = filled(config.trainer.run_dir).absolute()
    texts: dict[str, object] = {"the working directory": Path.cwd(), "trainer.run_dir": run_dir}
    texts["RECIPE"] = recipe.absolute()
    texts |= {f"the option {text.partition('=')[0]!r}": text for text in overrides}
    for field, value in texts.items():
        if wrong := control_characters(str(value)):
            raise ConfigError(
                f"{field}: got {str(value)!r}, which has {wrong}; allowed in a job: no control characters; fix: choose "
                "a path without, or write the option into the recipe"
            )
    if cluster.spare_nodes and not config.trainer.replace_lost_ranks:
        raise ConfigError(
            f"spare_nodes: got {cluster.spare_nodes} without trainer.replace_lost_ranks, so that a lost node ends the "
            "attempt whatever is spare; allowed: 0; fix: set trainer.replace_lost_ranks=true, or spare_nodes to 0"
        )
    most = seconds_of(cluster.time) // 2
    return Job(
        name=re.sub(r"[^\w.-]", "-", run_dir.name)[:_LONGEST_NAME] or "megatron-daro",
        nodes=nodes_of(config, cluster) + cluster.spare_nodes,
        run_dir=run_dir,
        directory=Path.cwd(),
        train=(str(recipe.absolute()), *overrides),
        steps=config.trainer.steps,
        signal_before_s=cluster.signal_before_s or min(signal_before_s, most),
        gres=gres_of(cluster),
    )


def gres_of(cluster: ClusterFile) -> int:
    """Return how many GPUs of a node Slurm is asked for: 0 where the partition's nodes declare none, and are given
    whole."""
    try:
        resources = _slurm(["sinfo", "--noheader", f"--partition={cluster.partition}", "--format=%G"])
    except ConfigError:  # a dry run without Slurm, or no answer; when it is submitted, sbatch reports it
        return cluster.gpus_per_node
    return cluster.gpus_per_node if "gpu" in resources or not resources.strip() else 0


def check_cluster(job: Job, cluster: ClusterFile) -> None:
    """Refuse a job that Slurm would keep waiting forever, in a partition that is unknown, down, too small or has too
    short a limit; and a missing image.

    Raises:
        ConfigError: says what the cluster has.
    """
    container = cluster.container
    if container and container.image.startswith(("/", ".")) and not Path(container.image).exists():
        raise ConfigError(
            f"container.image: got {container.image!r}, which is not there; allowed: an image file, or a name of a "
            "registry; fix: check the path"
        )
    listed = _slurm(["sinfo", "--noheader", f"--partition={cluster.partition}", "--format=%a|%l|%D"]).split()
    if not listed:
        known = sorted(set(_slurm(["sinfo", "--noheader", "--format=%R"]).split()))
        raise ConfigError(
            f"partition: got {cluster.partition!r}, which this cluster does not have; allowed: {', '.join(known)}; "
            "fix: correct the cluster file"
        )
    rows = [line.split("|") for line in listed]
    if "up" not in {state for state, _, _ in rows}:
        raise ConfigError(
            f"partition: got {cluster.partition!r}, which is {rows[0][0]}; allowed: one that is up; fix: wait, or "
            "choose another (`sinfo`)"
        )
    limits = {limit: _slurm_seconds(limit) for _, limit, _ in rows}
    longest = max(limits, key=lambda limit: limits[limit])
    if seconds_of(cluster.time) > limits[longest]:
        raise ConfigError(
            f"time: got {cluster.time}, beyond what partition {cluster.partition!r} allows; allowed: at most {longest};"
            f" fix: time: {longest}, and --chain for a longer run"
        )
    nodes = sum(int(count) for _, _, count in rows)
    if job.nodes > nodes:
        raise ConfigError(
            f"nodes: got {job.nodes}, and partition {cluster.partition!r} has {nodes}; allowed: at most those; fix: "
            "`megatron-daro plan` for a layout that fits, or another partition"
        )


def _slurm_seconds(limit: str) -> float:
    """Return the seconds of a limit as sinfo writes it, [days-][[hours:]minutes:]seconds or a word for no limit."""
    if not limit[:1].isdecimal():
        return math.inf
    days, _, clock = limit.rpartition("-")
    parts = [int(part) for part in clock.split(":")]
    return int(days or 0) * 86400 + sum(part * 60**power for power, part in enumerate(reversed(parts)))


def require_no_other_job(job: Job) -> None:
    """Refuse a run directory that another job of this user has.

    Raises:
        ConfigError: says its number and state.
    """
    user = getpass.getuser()
    script = str(job.folder / SCRIPT_FILE)
    for line in _slurm(["squeue", "--noheader", f"--user={user}", "--format=%A|%T|%o"]).splitlines():
        number, state, command = line.split("|", 2)
        if command.strip() == script:
            raise ConfigError(
                f"trainer.run_dir: got {str(job.run_dir)!r}, which job {number} has ({state}); allowed: one job in a "
                f"run directory; fix: wait for it, `scancel {number}`, or another trainer.run_dir (--chain N submits "
                "jobs that follow each other)"
            )


def ask_slurm(job: Job, cluster: ClusterFile) -> str:
    """Return what Slurm says about the job, without submitting it.

    Raises:
        ConfigError: it would refuse the job.
    """
    try:
        return _sbatch(cluster, ["--test-only"], script_of(job, cluster)).strip()
    except ConfigError as error:
        if "allocation failure" not in str(error):
            raise
        raise ConfigError(
            f"{error}; where the nodes are only down for now, --no-test-only submits without asking"
        ) from error


def submit(job: Job, cluster: ClusterFile, *, chain: int = 1) -> list[str]:
    """Write the script and hand it to Slurm.

    Args:
        job, cluster: what to run where.
        chain: how many jobs follow each other; each goes on where the one before ended, and those after the end of the
            run end at once.

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
        ConfigError: it refuses the job; if it refuses the account, the error lists the user's accounts.
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
        output = _slurm(["sacctmgr", "--noheader", "--parsable2", "show", *whose])
    except (ConfigError, OSError, KeyError):  # no name for the user id, no database, or users may not ask it
        return []
    return sorted(set(output.split()))


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
