"""What is installed, which of it works, and what a run of a recipe would miss: the rows of `megatron-daro doctor`.

Place in the data flow: this machine (and a recipe) -> Findings. Parts are tried in processes of their own with a time
limit, so that a library that hangs or crashes when it is imported is a finding. Changes nothing.
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
from pathlib import Path
from typing import Literal

from megatron_daro.config import Config, detect, precision, resolve
from megatron_daro.config.base import filled
from megatron_daro.config.checks import check
from megatron_daro.engine.sglang.environment import check_environments
from megatron_daro.errors import DaroError

_IMPORT_LIMIT_S = 180
_LEAST_OPEN_FILES = 4096
_LEAST_SHARED_GIB = 1.0
_LEAST_DISK_GIB = 10.0
State = Literal["ok", "absent", "broken"]


@dataclass(frozen=True, slots=True)
class Finding:
    """A part: ok; absent, which only some runs need; or broken. fix: what to do, empty where nothing is."""

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
        recipe: whose needs are looked at too; None: of the machine alone. overrides: texts a.b=c.

    Raises:
        ConfigError: the recipe cannot be read.
    """
    config = resolve(recipe, overrides) if recipe else None
    findings = [_python(), *map(_package, _PACKAGES), _gpus(config), _sglang(config), *_limits(), _slurm()]
    return findings + (list(_recipe(config)) if config else [])


def _python() -> Finding:
    found = f"{platform.python_version()}, {sys.executable}"
    return Finding("ok" if sys.version_info >= (3, 11) else "broken", "Python", found)


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
    if not done.returncode:
        return Finding("ok", package.name, done.stdout.strip().splitlines()[-1])
    said = done.stderr.strip().splitlines() or [f"ended with code {done.returncode}"]
    absent = not package.needed and re.search(r"ModuleNotFoundError", said[-1]) is not None
    return Finding("absent" if absent else "broken", package.name, said[-1][:200], package.fix)


def _gpus(config: Config | None) -> Finding:
    hardware = detect()
    if hardware.kind == "gpu":
        found = replace(precision.installed(here=True), capability=hardware.capability)
        recipes = [name for name in precision.NEEDS if not precision.why_not(name, found)]
        fp8 = f"fp8 recipes {', '.join(recipes)}" if recipes else f"no fp8: {precision.why_not('tensorwise', found)}"
        return Finding("ok", "GPUs", f"{hardware.count}, {fp8}")
    fix = "runs of small models work on the CPU; on a GPU machine look at nvidia-smi and torch's build"
    if config and config.cluster.gpus_per_node:
        fix = f"the recipe's cluster has {config.cluster.gpus_per_node} on each node: start it there"
    return Finding("absent", "GPUs", f"none that torch can use; {hardware.count} CPU cores", fix)


def _sglang(config: Config | None) -> Finding:
    """Return whether servers can be started with the interpreter of the recipe, or this one."""
    needed = config is not None and config.engine.kind == "sglang" and not config.engine.sglang.urls
    if config is None or not needed:
        trial = _Package(
            "sglang", "import sglang; print(sglang.__version__)", "only recipes with engine.kind sglang need it"
        )
        found = _package(trial)
        return found if found.state == "ok" else Finding("absent", "sglang", "not in this interpreter", trial.fix)
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


def _slurm() -> Finding:
    path = shutil.which("sbatch")
    return Finding("ok", "Slurm", path) if path else Finding("absent", "Slurm", "no sbatch", "only `submit` needs it")


def _recipe(config: Config) -> Iterator[Finding]:
    """Yield what the checks of a start say, and room on the disk."""
    report = check(config)
    for subject, found in report.passed:
        yield Finding("ok", f"recipe: {subject}", found)
    for problem in (*report.warnings, *report.problems):
        state: State = "broken" if problem in report.problems else "absent"
        yield Finding(state, f"recipe: {problem.field}", f"{problem.got}; allowed: {problem.allowed}", problem.fix)
    run_dir = filled(config.trainer.run_dir).absolute()
    there = next(path for path in (run_dir, *run_dir.parents) if path.exists())
    free = shutil.disk_usage(there).free / 2**30
    enough = free >= _LEAST_DISK_GIB
    fix = "" if enough else "checkpoints need about 14 bytes for each parameter: free space, or another trainer.run_dir"
    yield Finding("ok" if enough else "broken", "recipe: disk", f"{free:.0f} GiB free in {there}", fix)


def _one_line(text: str) -> str:
    return "; ".join(line.strip() for line in text.splitlines() if line.strip())
