"""What is installed, which of it works, and what a run of a recipe would miss: the rows of `megatron-daro doctor`.

This machine (and a recipe) -> Findings. Parts are tried in processes of their own with a time
limit, so that a library that hangs or crashes when it is imported is a finding.
"""

from __future__ import annotations

import os
import platform
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Literal

from packaging.requirements import Requirement

from megatron_daro.config import Config, detect, precision, resolve
from megatron_daro.config.base import filled
from megatron_daro.config.checks import check
from megatron_daro.config.hardware import torch_hip
from megatron_daro.config.model_files import critic_shape
from megatron_daro.config.model_shape import read_model_shape
from megatron_daro.engine.sglang.interpreter import check_environments, inspect_environment
from megatron_daro.errors import DaroError, SandboxError
from megatron_daro.sandbox import Sandbox
from megatron_daro.workshop.plan.layout import checkpoint_bytes
from megatron_daro.workshop.plan.workload import adapters_of

_IMPORT_LIMIT_S = 180
_LEAST_OPEN_FILES = 4096
_LEAST_SHARED_GIB = 1.0
_LEAST_DISK_GIB = 10.0
State = Literal["ok", "absent", "broken"]


@dataclass(frozen=True, slots=True)
class Finding:
    """A part: ok; absent, where only some runs need it; or broken. fix: what to do, empty if nothing is to be done."""

    state: State
    part: str
    found: str
    fix: str = ""


@dataclass(frozen=True, slots=True)
class _Package:
    """A library, the code that tries it (its last line is what was found), and how to get it. needed: by every run."""

    name: str
    trial: str
    fix: str
    needed: bool = True


_DISTRIBUTION = "megatron_daro"
_INSTALL = "pip install -e . in the checkout"
_PACKAGES = (
    _Package("torch", "import torch; torch.ones(2).sum(); print(torch.__version__)", _INSTALL),
    _Package(
        "megatron-core",
        "import importlib.metadata, megatron_daro.actor.model; print(importlib.metadata.version('megatron-core'))",
        _INSTALL,
    ),
    _Package("transformers", "import transformers; print(transformers.__version__)", _INSTALL),
    _Package("ray", "import ray; print(ray.__version__)", _INSTALL),
    _Package(
        "pyarrow",
        "import pyarrow.parquet as parquet, pyarrow, io; b = io.BytesIO(); "
        "parquet.write_table(pyarrow.table({'a': [1]}), b); print(pyarrow.__version__)",
        _INSTALL,
    ),
    _Package(
        "math-verify",
        "from math_verify import parse, verify; assert verify(parse('$1/2$'), parse('$0.5$')); print('1/2 = 0.5')",
        _INSTALL,
    ),
    _Package(
        "transformer-engine",
        "import transformer_engine.pytorch as te; import transformer_engine; print(transformer_engine.__version__)",
        "pip install -e '.[gpu]', on a machine with a GPU; bf16 runs use Megatron's own layers without it",
        needed=False,
    ),
)


def diagnose(recipe: Path | None, overrides: Sequence[str]) -> list[Finding]:
    """Return what was found.

    Args:
        recipe: its needs are checked too; None: only the machine is. overrides: texts a.b=c.

    Raises:
        ConfigError: the recipe cannot be read.
    """
    config = resolve(recipe, overrides) if recipe else None
    findings = [
        _python(),
        *_versions(),
        *map(_package, _PACKAGES),
        _gpus(config),
        _sglang(config),
        *_limits(),
        _sandbox(),
        _slurm(),
    ]
    return findings + (list(_recipe(config)) if config else [])


def _python() -> Finding:
    version = f"{platform.python_version()}, {sys.executable}"
    return Finding("ok" if sys.version_info >= (3, 11) else "broken", "Python", version)


def _versions() -> Iterator[Finding]:
    """Yield the packages whose versions are not among those that this one declares, or one finding if all are."""
    wrong, count = [], 0
    for text in metadata.requires(_DISTRIBUTION) or []:
        wanted = Requirement(text)
        if wanted.marker and not wanted.marker.evaluate({"extra": ""}):
            continue
        count += 1
        try:
            version = metadata.version(wanted.name)
        except metadata.PackageNotFoundError:
            wrong.append((wanted, "not installed"))
            continue
        if not wanted.specifier.contains(version, prereleases=True):
            wrong.append((wanted, version))
    for wanted, got in wrong:
        allowed = str(wanted.specifier)
        yield Finding(
            "broken", f"{wanted.name}: version", f"{got}; allowed: {allowed}", f"pip install '{wanted.name}{allowed}'"
        )
    if not wrong:
        yield Finding("ok", "versions", f"all {count} packages are of the versions that were tested together")


def _package(package: _Package) -> Finding:
    """Try a library in a process of its own."""
    environment = {**os.environ, "PYTHONWARNINGS": "ignore", "TOKENIZERS_PARALLELISM": "false"}
    command = [sys.executable, "-c", package.trial]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_IMPORT_LIMIT_S, env=environment, check=False
        )
    except subprocess.TimeoutExpired:
        return Finding("broken", package.name, f"no answer in {_IMPORT_LIMIT_S} s", package.fix)
    printed = done.stdout.strip().splitlines()
    if not done.returncode and printed:
        return Finding("ok", package.name, printed[-1])
    how = f"ended with code {done.returncode}" + ("" if done.returncode else " while it was imported")
    lines = done.stderr.strip().splitlines() if done.returncode else []
    lines = lines or [how]
    absent = not package.needed and re.search(r"ModuleNotFoundError", lines[-1]) is not None
    return Finding("absent" if absent else "broken", package.name, lines[-1][:200], package.fix)


def _gpus(config: Config | None) -> Finding:
    hardware = detect()
    if hardware.kind == "gpu" and (hip := torch_hip()):
        version = ".".join(map(str, hip))
        return Finding("ok", "GPUs", f"{hardware.count} of AMD (ROCm {version}); no run was ever made on one")
    if hardware.kind == "gpu":
        installed = replace(precision.installed(here=True), capability=hardware.capability)
        recipes = [name for name in precision.NEEDS if not precision.why_not(name, installed)]
        fp8 = (
            f"fp8 recipes {', '.join(recipes)}" if recipes else f"no fp8: {precision.why_not('tensorwise', installed)}"
        )
        return Finding("ok", "GPUs", f"{hardware.count}, {fp8}")
    if shutil.which("rocm-smi") and not torch_hip():
        return Finding("broken", "GPUs", "rocm-smi is here, and torch is not built for ROCm", "install torch for ROCm")
    fix = "runs of small models work on the CPU; on a GPU machine look at nvidia-smi and torch's build"
    if config and config.cluster.gpus_per_node:
        fix = f"the recipe's cluster has {config.cluster.gpus_per_node} on each node: start it there"
    return Finding("absent", "GPUs", f"none that torch can use; {hardware.count} CPU cores", fix)


def _sglang(config: Config | None) -> Finding:
    """Try whether servers can be started with the interpreter of the recipe, or this one."""
    needed = config is not None and config.engine.kind == "sglang" and not config.engine.sglang.urls
    if config is None or not needed:
        try:
            return Finding("ok", "sglang", inspect_environment(Path(sys.executable)).version)
        except DaroError as error:
            if "which has no sglang" not in str(error):
                return Finding("broken", "sglang", _one_line(str(error)), "see the end of what was found")
        return Finding(
            "absent", "sglang", "not in this interpreter", "only recipes with engine.kind sglang need it, also in "
            "another interpreter (engine.sglang.python)",
        )  # fmt: skip
    try:
        check_environments(config.engine.sglang)
    except DaroError as error:
        return Finding("broken", "sglang", _one_line(str(error)), "see the end of what was found")
    return Finding("ok", "sglang", str(config.engine.sglang.python or sys.executable))


def _limits() -> Iterator[Finding]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = max(soft, hard) if resource.RLIM_INFINITY not in (soft, hard) else 10**6
    yield Finding(
        "ok" if most >= _LEAST_OPEN_FILES else "broken", "open files", str(most),
        "" if most >= _LEAST_OPEN_FILES else f"raise `ulimit -n` to {_LEAST_OPEN_FILES}",
    )  # fmt: skip
    shared = shutil.disk_usage("/dev/shm").free / 2**30
    enough = shared >= _LEAST_SHARED_GIB
    fix = "" if enough else "give the container more: --shm-size; Ray keeps its objects there"
    yield Finding("ok" if enough else "broken", "/dev/shm", f"{shared:.1f} GiB free", fix)


def _sandbox() -> Finding:
    """Try whether the code that a model writes can be isolated."""
    try:
        Sandbox().check()
    except SandboxError as error:
        return Finding("absent", "sandbox", _one_line(str(error)), "only environments that run code need it")
    return Finding("ok", "sandbox", "code of a model runs in namespaces; memory that cannot be counted is refused")


def _slurm() -> Finding:
    path = shutil.which("sbatch")
    return Finding("ok", "Slurm", path) if path else Finding("absent", "Slurm", "no sbatch", "only `submit` needs it")


def _recipe(config: Config) -> Iterator[Finding]:
    """Yield what the checks of a start found, and whether the disk has room."""
    report = check(config)
    for subject, value in report.passed:
        yield Finding("ok", f"recipe: {subject}", value)
    for problem in (*report.warnings, *report.problems):
        state: State = "broken" if problem in report.problems else "absent"
        yield Finding(state, f"recipe: {problem.field}", f"{problem.got}; allowed: {problem.allowed}", problem.fix)
    run_dir = filled(config.trainer.run_dir).absolute()
    there = next(path for path in (run_dir, *run_dir.parents) if path.exists())
    free = shutil.disk_usage(there).free / 2**30
    needed, words = _disk_of(config)
    enough = free >= needed
    fix = "" if enough else "free space, another trainer.run_dir, or fewer trainer.keep_checkpoints"
    yield Finding(
        "ok" if enough else "broken", "recipe: disk",
        f"{free:.0f} GiB free in {there}; needed: {needed:.0f} GiB, {words}", fix,
    )  # fmt: skip


def _disk_of(config: Config) -> tuple[float, str]:
    """Return the GiB that checkpoints and exports of a run take at most, and what takes them."""
    try:
        shape = read_model_shape(config.model.path)
        critic = critic_shape(config, shape)
    except DaroError:
        return _LEAST_DISK_GIB, "at least; the model, which says how large checkpoints are, cannot be read"
    trainer, weight = config.trainer, 4 if config.actor.dtype == "fp32" else 2
    policy_gib, whole_gib = (checkpoint_bytes(shape, weight, own) / 2**30 for own in (adapters_of(config, shape), None))
    critic_gib = checkpoint_bytes(critic, weight) / 2**30 if critic else 0.0
    one = policy_gib + critic_gib
    written = trainer.steps // trainer.save_every_steps if trainer.save_every_steps else 1
    milestones = trainer.steps // trainer.keep_every_steps if trainer.keep_every_steps else 0
    # The oldest is removed only when the newest is complete.
    count = min(max(written, 1), trainer.keep_checkpoints + 1) + milestones
    exported = whole_gib * trainer.export_hf + critic_gib * trainer.export_critic
    export = exported / (weight + {2: 12, 4: 8}[weight]) * weight
    words = f"{count} checkpoints of {_size(one)}" + (f" and what is exported of {_size(export)}" if export else "")
    return max(count * one + export, _LEAST_DISK_GIB), words


def _size(gib: float) -> str:
    return f"{gib:.1f} GiB" if gib >= 0.1 else f"{gib * 1024:.0f} MiB"


def _one_line(text: str) -> str:
    return "; ".join(line.strip() for line in text.splitlines() if line.strip())
