"""The cluster file: what a site wants in its jobs. One YAML file for all recipes of a cluster.

Place in the data flow: `--cluster FILE` -> ClusterFile -> script.py. Refuses unknown keys, nearest ones given.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, ValidationError

from megatron_daro.config import yaml_text
from megatron_daro.config.base import Section
from megatron_daro.config.problems import Problem, config_error, did_you_mean, nearest_paths, show

Word = Annotated[str, Field(pattern=r"^[^\s'\"]+$")]
Minutes = Annotated[float, Field(gt=0)]


class Container(Section):
    """The container that nodes run in."""

    image: Annotated[str, Field(min_length=1)]
    """File or registry name of the image."""
    runtime: Literal["pyxis", "apptainer"] = "pyxis"
    """pyxis: srun's own options; apptainer: `apptainer exec --nv`."""
    mounts: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Directories as host:container; the working directory and the run directory must be among them."""


class ClusterFile(Section):
    """What a job asks Slurm for, and how its nodes are prepared."""

    partition: Word
    """Slurm partition."""
    account: Word | None = None
    """Slurm account. Unset: the user's default."""
    qos: Word | None = None
    """Quality of service. Unset: the default."""
    time: Annotated[str, Field(pattern=r"^(\d+-)?\d{1,2}:\d{2}(:\d{2})?$")] = "24:00:00"
    """Time limit, as [days-]hours:minutes[:seconds]."""
    nodes: Annotated[int, Field(ge=1)] | None = None
    """Nodes of a job. Unset: what the recipe's GPUs need."""
    gpus_per_node: Annotated[int, Field(ge=0)] = 8
    """GPUs of each node; 0: a cluster without GPUs, which needs `nodes`."""
    cpus_per_node: Annotated[int, Field(ge=1)] | None = None
    """CPU cores asked for on each node; without GPUs also how many ranks and servers it takes. Unset: all cores."""
    exclusive: bool = True
    """Nodes for this job alone."""
    python: str = "python"
    """Interpreter that has megatron_daro, on the nodes (in the container where there is one)."""
    container: Container | None = None
    """Container. Unset: none."""
    setup: tuple[str, ...] = ()
    """Shell lines before anything starts, such as `module load cuda` or `source env/bin/activate`."""
    environment: dict[Annotated[str, Field(pattern=r"^[A-Za-z_]\w*$")], str] = {}
    """Environment variables of the job."""
    sbatch: tuple[Annotated[str, Field(pattern=r"^--\S")], ...] = ()
    """Further options of sbatch, such as --constraint=h100."""
    network_interface: Word | None = None
    """Network card of the nodes for Ray, gloo and NCCL's start, such as ib0. Unset: that of the host name."""
    addresses: dict[str, Word] = {}
    """Address of single nodes by name, where neither host name nor card leads to the right one."""
    signal_before_s: Annotated[int, Field(ge=10, le=3600)] = 300
    """Seconds before the time limit at which training is asked to save and end."""
    term_grace_s: Annotated[float, Field(gt=0)] = 20.0
    """Seconds that a job has after SIGTERM (scancel): below the cluster's KillWait."""
    attempts: Annotated[int, Field(ge=1)] = 50
    """Starts of a run in all, requeues included; then it stays down."""
    stall_minutes: Minutes = 60.0
    """Minutes without a new step (or the first one) after which a job ends itself."""
    check_minutes: Minutes = 2.0
    """Minutes until every node of a job has reported its health."""
    exclude_bad_nodes: bool = False
    """Requeue without the nodes whose health check failed; off: the job ends and names them."""
    free_disk_gib: Annotated[float, Field(ge=0)] = 10.0
    """Least free space in the run directory, GiB."""


def read_cluster_file(path: Path) -> ClusterFile:
    """Read a cluster file.

    Raises:
        ConfigError: it is not there, or fields are wrong; lists all of them.
    """
    try:
        document = yaml_text.parse(path.read_text(encoding="utf-8"), path.name)
    except (OSError, UnicodeDecodeError) as error:
        raise config_error(
            str(path), [Problem("--cluster", str(error), "a YAML file", "see examples/slurm/cluster.yaml")]
        ) from None
    if document.problems:
        raise config_error(str(path), document.problems)
    try:
        return ClusterFile.model_validate_json(json.dumps(document.value or {}))
    except ValidationError as error:
        raise config_error(str(path), [_problem(dict(found), path) for found in error.errors()]) from None


def _problem(found: dict[str, object], path: Path) -> Problem:
    loc = found["loc"]
    assert isinstance(loc, tuple)
    name = ".".join(map(str, loc)) or path.name
    known = [*ClusterFile.model_fields, *(f"container.{field}" for field in Container.model_fields)]
    if found["type"] == "extra_forbidden":
        fix = did_you_mean(nearest_paths(name, known), "remove it; docs/slurm.md has every field")
        return Problem(name, f"an unknown key with value {show(found['input'])}", ", ".join(known), fix)
    got = "nothing" if found["type"] == "missing" else show(found["input"])
    return Problem(name, got, str(found["msg"]), "correct it; docs/slurm.md has every field")
