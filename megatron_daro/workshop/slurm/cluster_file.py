"""The cluster file: what a site wants in its jobs. One YAML file for all recipes of a cluster.

`--cluster FILE` -> ClusterFile -> script.py. Refuses unknown keys, and names the nearest known ones.
"""

from __future__ import annotations

import json
import re
import subprocess
import unicodedata
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, ValidationError, model_validator

from megatron_daro.config import yaml_text
from megatron_daro.config.base import Section
from megatron_daro.config.problems import Problem, config_error, did_you_mean, nearest_paths, show

_UNITS = (86400, 3600, 60, 1)
_OWN_OPTIONS = {
    **dict.fromkeys(("array", "chdir", "error", "export", "no-requeue", "open-mode", "output", "requeue", "wrap"), ""),
    **dict.fromkeys(("ntasks", "ntasks-per-node", "test-only", "parsable", "wait", "dependency"), ""),
    **{name: name for name in ("partition", "account", "qos", "time", "nodes", "exclusive")},
    "signal": "signal_before_s",
    "mem": "memory_gib",
    "cpus-per-task": "cpus_per_node",
    **dict.fromkeys(("gpus-per-node", "gres"), "gpus_per_node"),
    "job-name": "trainer.run_dir, whose last part it is",
}
"""Options of sbatch that the script sets itself -> the field that sets them; empty: a job needs them as they are."""


_SCRIPT_NAMES = frozenset({"attempt", "attempt_dir", "with_log", "BASH_ENV", "IFS"})
"""Variables that the batch script reads after it has set the job's environment, or that change how bash reads it."""


def control_characters(text: str, *, but: str = "") -> str:
    """Return the names of the control characters and lone surrogates in a text, except those in `but`; empty if none.

    They can end lines and words of a batch script, and quoting does not keep them out of a log that a terminal shows.
    """
    names = {"\n": "newline", "\t": "tab", "\r": "carriage return", "\0": "NUL", "\x1b": "escape"}
    wrong = sorted({c for c in text if unicodedata.category(c) in ("Cc", "Cs", "Zl", "Zp")} - set(but))
    return ", ".join(f"U+{ord(c):04X}" + (f" ({names[c]})" if c in names else "") for c in wrong)


def _plain(text: str) -> str:
    if wrong := control_characters(text):
        raise ValueError(f"control characters are not allowed, and it has {wrong}")
    return text


def _time(text: str) -> str:
    """Return [days-]hours:minutes[:seconds] as D-HH:MM:SS: Slurm itself reads 12:30 as minutes and seconds."""
    days, _, clock = text.rpartition("-")
    numbers = [int(part) for part in clock.split(":")]
    if any(number > 59 for number in numbers[1:]):
        raise ValueError("minutes and seconds are at most 59, in [days-]hours:minutes[:seconds]")
    total = sum(n * unit for n, unit in zip((int(days or 0), *numbers, 0), _UNITS, strict=False))
    if total < 60:
        raise ValueError("at least a minute, as [days-]hours:minutes[:seconds]")
    days_, rest = divmod(total, _UNITS[0])
    return f"{days_}-{rest // 3600:02}:{rest // 60 % 60:02}:{rest % 60:02}"


def seconds_of(time: str) -> int:
    """Return the seconds of a time limit as D-HH:MM:SS."""
    return sum(int(n) * unit for n, unit in zip(re.split("[-:]", time), _UNITS, strict=True))


def _shell_line(text: str) -> str:
    if wrong := control_characters(text, but="\n\t"):
        raise ValueError(f"control characters are not allowed, and it has {wrong}")
    if text.rstrip("\n").endswith("\\"):
        raise ValueError("it ends with a backslash, which would swallow the line after it")
    done = subprocess.run(["bash", "-n"], input=f"(\n{text}\n)\n", capture_output=True, text=True, check=False)
    if done.returncode or done.stderr:  # bash only warns of a here-document without its end
        raise ValueError(f"bash cannot read it: {' '.join(done.stderr.split())}")
    return text


def _option(text: str) -> str:
    name = text[2:].partition("=")[0]
    if name in _OWN_OPTIONS:
        why = f"set {_OWN_OPTIONS[name]}" if _OWN_OPTIONS[name] else "remove it: the job sets it, and needs it so"
        raise ValueError(f"an option that stands in the script already; {why}")
    return text


def _variable(name: str) -> str:
    if name in _SCRIPT_NAMES or name.startswith("SLURM_"):
        raise ValueError(
            "a name that Slurm, bash or the batch script itself uses; choose another, or set it in `setup`"
        )
    return name


def _mount(text: str) -> str:
    if "," in text:
        raise ValueError("a comma begins the next mount; mount a directory above it, or a link to it")
    return text


PlainText = Annotated[str, AfterValidator(_plain)]
Text = Annotated[PlainText, Field(min_length=1)]
Word = Annotated[str, Field(pattern=r"^[^\s'\"-][^\s'\"]*$"), AfterValidator(_plain)]
Minutes = Annotated[float, Field(gt=0)]


class Container(Section):
    """The container that nodes run in."""

    image: Annotated[Text, Field(pattern="^[^-]")]
    """File or registry name of the image."""
    runtime: Literal["pyxis", "apptainer"] = "pyxis"
    """pyxis: srun's own options; apptainer: `apptainer exec --nv`."""
    mounts: tuple[Annotated[Text, AfterValidator(_mount)], ...] = ()
    """Directories as host:container; the working directory and the run directory must be among them."""


class ClusterFile(Section):
    """What a job asks Slurm for, and how its nodes are prepared."""

    partition: Word
    """Slurm partition."""
    account: Word | None = None
    """Slurm account. Unset: the user's default."""
    qos: Word | None = None
    """Quality of service. Unset: the default."""
    time: Annotated[str, Field(pattern=r"^([0-9]{1,4}-)?[0-9]{1,4}:[0-9]{2}(:[0-9]{2})?$"), AfterValidator(_time)] = (
        "1-00:00:00"
    )
    """Time limit, as [days-]hours:minutes[:seconds]."""
    nodes: Annotated[int, Field(ge=1)] | None = None
    """Nodes that the run uses. Unset: what the recipe's GPUs need."""
    spare_nodes: Annotated[int, Field(ge=0)] = 0
    """Further nodes of a job, which stay idle: as many may be lost, and the run goes on in place. Needs
    trainer.replace_lost_ranks."""
    gpus_per_node: Annotated[int, Field(ge=0)] = 8
    """GPUs per node; 0: a cluster without GPUs, which needs `nodes`. Slurm is asked for them (--gres) unless the
    partition's nodes declare none."""
    cpus_per_node: Annotated[int, Field(ge=1)] | None = None
    """CPU cores per node; without GPUs also how many ranks and servers it takes. Unset: all."""
    memory_gib: Annotated[int, Field(ge=1)] | None = None
    """Memory per node, GiB. Unset: all of an exclusive node's, else the partition's default."""
    exclusive: bool = True
    """Nodes for this job alone."""
    python: Text = "python"
    """Interpreter that has megatron_daro, on the nodes or in the container."""
    container: Container | None = None
    """Container. Unset: none."""
    setup: tuple[Annotated[str, AfterValidator(_shell_line)], ...] = ()
    """Shell lines before anything starts, such as `module load cuda`."""
    environment: dict[
        Annotated[str, Field(pattern="^[A-Za-z_][A-Za-z0-9_]*$"), AfterValidator(_variable)], PlainText
    ] = {}
    """Environment variables of the job."""
    sbatch: tuple[Annotated[PlainText, Field(pattern="^--[a-z][a-z0-9-]*(=.*)?$"), AfterValidator(_option)], ...] = ()
    """Further sbatch options, each as --name or --name=value."""
    network_interface: Word | None = None
    """Network interface of the nodes for Ray, gloo and NCCL, such as ib0. Unset: that of the host name."""
    addresses: dict[Annotated[str, Field(pattern=r"^[^\s=-][^\s=]*$"), AfterValidator(_plain)], Word] = {}
    """Addresses of single nodes by name, where neither host name nor interface leads to the right one."""
    signal_before_s: Annotated[int, Field(ge=10, le=65535)] | None = None
    """Seconds before the time limit at which training is asked to save and end. Unset: what the plan of a step and
    a checkpoint needs, at least 300."""
    term_grace_s: Annotated[float, Field(gt=0, le=3600)] = 20.0
    """Seconds that a job has after SIGTERM (scancel): below the cluster's KillWait."""
    attempts: Annotated[int, Field(ge=1)] = 50
    """Starts of a run in all, requeues included."""
    stall_minutes: Minutes = 60.0
    """Minutes without a new step after which a job ends itself."""
    check_minutes: Minutes = 2.0
    """Minutes until every node must have reported its health."""
    exclude_bad_nodes: bool = False
    """Requeue without the nodes whose health check failed; off: the job ends and names them."""
    free_disk_gib: Annotated[float, Field(ge=0)] = 10.0
    """Least free space in the run directory, GiB."""

    @model_validator(mode="after")
    def _ends_after_it_begins(self) -> ClusterFile:
        if self.signal_before_s and self.signal_before_s >= seconds_of(self.time):
            raise ValueError(
                f"signal_before_s: {self.signal_before_s} s before a time limit of {self.time} is before the start; "
                "allowed: less than `time`"
            )
        return self


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
        raise config_error(str(path), [_problem(dict(entry), path) for entry in error.errors()]) from None


def _problem(entry: dict[str, object], path: Path) -> Problem:
    loc = entry["loc"]
    assert isinstance(loc, tuple)
    name = ".".join(map(str, loc)) or path.name
    if not loc:  # from the check of two fields together, which names them
        return Problem("signal_before_s, time", "a pair that cannot be", str(entry["msg"]), "correct one of them")
    known = [*ClusterFile.model_fields, *(f"container.{field}" for field in Container.model_fields)]
    if entry["type"] == "extra_forbidden":
        fix = did_you_mean(nearest_paths(name, known), "remove it; docs/configuration.md has every field")
        return Problem(name, f"an unknown key with value {show(entry['input'])}", ", ".join(known), fix)
    got = "nothing" if entry["type"] == "missing" else show(entry["input"])
    return Problem(name, got, str(entry["msg"]), "correct it; docs/configuration.md has every field")
