"""Imports go only downwards, and each upstream has one importer: read from the syntax trees, nothing is imported."""

from __future__ import annotations

import ast
import graphlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "megatron_daro"
NAME = PACKAGE.name

LEVEL = {"types": 0, "errors": 0, "durable": 0, "ports": 0, "families": 0, "config": 1, "observe": 1}
LEVEL |= dict.fromkeys(("algo", "reward", "data", "rollout", "convert", "plan", "slurm"), 2)
LEVEL |= dict.fromkeys(("actor", "analyze", "curate", "engine", "evaluate", "sync", "controller", "recovery"), 3)
LEVEL |= {"runtime": 4, "plugins": 4, "check_loss": 4, "rehearse": 4, "commands": 5, "cli": 6, "__main__": 7}

SIDEWAYS = {
    "data": {"algo"},  # a batch carries advantages and bins
    "rollout": {"data", "algo"},  # the sampler filters by bin and hands groups to the batch
    "engine": {"sync"},  # buckets are read where weights arrive, and SGLang servers are sent theirs by a transport
    "plan": {"data"},  # one cost model for balancing and planning
    "controller": {"recovery", "sync"},  # it owns the one WeightSync
    "rehearse": {"runtime"},  # the run's own composition, with other ranks
}
"""Imports within a level, beside those within a unit; without a cycle."""

ONLY_IMPORTER = {
    "megatron.core": {"actor", "check_loss", "plugins"},  # plugins: inside functions, where the host has set it up
    "transformer_engine": {"actor"},
    "ray": {"runtime", "rehearse"},
    "sglang": {"engine"},
}
FORBIDDEN = {"config": {"torch", "ray", "megatron", "transformers", "numpy"}}
ALGO_MAY = {"torch", "numpy", f"{NAME}.algo", f"{NAME}.errors"}
PLUGINS_MAY = {"algo", "config", "durable", "errors", "plugins"}
"""What an adapter needs of this package; a host installs nothing else for it."""
PLUGINS_LATE = {"ray", "megatron", "transformer_engine", "sglang"}
"""Imported by plugins inside functions only: importing an adapter starts nothing."""


def unit_of(path: Path) -> str:
    """The top-level folder or module of the package that a file belongs to."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported(tree: ast.Module, path: Path) -> Iterator[tuple[int, str]]:
    """(line, absolute dotted name) of every import, also inside functions and under TYPE_CHECKING."""
    package = [NAME, *path.relative_to(PACKAGE).parts[:-1]]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)


def under(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(f"{prefix}.")


def faults_of(text: str, path: Path) -> list[str]:
    """Every import of a file that breaks a rule."""
    unit, found = unit_of(path), []
    for line, name in imported(ast.parse(text), path):
        place = f"{path.relative_to(PACKAGE.parent)}:{line}: {unit} imports {name}"
        if under(name, NAME) and name != NAME:
            target = name.split(".")[1]
            level, allowed = LEVEL.get(target, -1), SIDEWAYS.get(unit, set())
            beside = level == LEVEL[unit] != 0 and target != unit
            beside = beside and not any(under(name, f"{NAME}.{other}") for other in allowed)
            found += [f"{place}, which is not below it"] if level > LEVEL[unit] or beside else []
        found += [f"{place}, which only {o} may" for u, o in ONLY_IMPORTER.items() if under(name, u) and unit not in o]
        found += [f"{place}, which it never may" for u in FORBIDDEN.get(unit, ()) if under(name, u)]
        if unit == "algo" and not any(under(name, allowed_name) for allowed_name in ALGO_MAY):
            found += (
                [] if name.split(".")[0] in sys.stdlib_module_names else [f"{place}: neither torch, numpy nor stdlib"]
            )
        if unit == "plugins" and under(name, NAME) and name.split(".")[1:2] and name.split(".")[1] not in PLUGINS_MAY:
            found.append(f"{place}, which plugins never may")
    if unit == "plugins":
        found += [f"{path.name}: plugins import {name} inside functions only" for name in early_imports(text)]
    return found


def early_imports(text: str) -> list[str]:
    """What of PLUGINS_LATE a module imports as soon as it is imported itself."""
    names = []
    for node in ast.parse(text).body:
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names.append(node.module or "")
    return [name for name in names if name.split(".")[0] in PLUGINS_LATE]


def test_sideways_imports_have_no_cycle():
    edges = {unit: {target.partition(".")[0] for target in targets} for unit, targets in SIDEWAYS.items()}
    assert all(LEVEL[unit] == LEVEL[target] for unit, targets in edges.items() for target in targets)
    tuple(graphlib.TopologicalSorter(edges).static_order())  # raises CycleError


FILES = sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


def test_every_unit_has_a_level():
    assert {unit_of(path) for path in FILES} <= set(LEVEL)


@pytest.mark.parametrize("unit", sorted({unit_of(path) for path in FILES}))
def test_imports_follow_the_layers(unit):
    faults = [f for path in FILES if unit_of(path) == unit for f in faults_of(path.read_text(encoding="utf-8"), path)]
    assert not faults, "\n" + "\n".join(faults)


@pytest.mark.parametrize(
    ("place", "text"),
    [
        ("config/x.py", "import torch"),
        ("config/x.py", "def f():\n    from transformers import AutoConfig"),
        ("algo/x.py", "from megatron_daro.types import Rollout"),
        ("algo/x.py", "import pydantic"),
        ("algo/x.py", "from ..config import Config"),
        ("data/x.py", "from megatron_daro import actor"),
        ("data/x.py", "from megatron_daro.rollout.ledger import Ledger"),
        ("sync/x.py", "from megatron_daro.engine import weights"),
        ("reward/x.py", "from megatron_daro.data import prompts"),
        ("engine/x.py", "from megatron_daro.actor.model import build_model"),
        ("engine/x.py", "import megatron.core.parallel_state"),
        ("controller.py", "import ray"),
        ("actor/x.py", "from ray import remote"),
        ("plugins/x.py", "from megatron_daro.actor import step"),
        ("plugins/x.py", "from megatron_daro.rollout.ledger import Ledger"),
        ("plugins/x.py", "from megatron.core import parallel_state"),
        ("plugins/x.py", "import ray"),
        ("runtime/x.py", "from megatron_daro.cli import main"),
        ("runtime/x.py", "from megatron.core import parallel_state"),
        ("types.py", "from megatron_daro.config import Config"),
    ],
)
def test_the_rules_see_a_forbidden_import(place, text):
    assert faults_of(text, PACKAGE / place)


@pytest.mark.parametrize(
    ("place", "text"),
    [
        ("algo/x.py", "import math, torch\nfrom megatron_daro.errors import DaroError\nfrom . import surrogate"),
        ("rollout/x.py", "from megatron_daro.data.batch import build_batch"),
        ("actor/x.py", "import megatron.core\nfrom megatron_daro.algo import weighting"),
        ("plugins/x.py", "from megatron_daro.algo import weighting\nfrom megatron_daro import durable"),
        ("plugins/x.py", "def f():\n    from megatron.core import parallel_state"),
        ("types.py", "from megatron_daro.errors import DaroError"),
        ("observe/x.py", "import rich"),
    ],
)
def test_the_rules_let_an_allowed_import_pass(place, text):
    assert not faults_of(text, PACKAGE / place)


def test_importing_the_package_imports_nothing():
    code = f"import sys; before = set(sys.modules); import {NAME}; print(sorted(set(sys.modules) - before))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str([NAME])


def test_no_files_import_each_other_in_a_circle():
    names = {".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts): path for path in FILES}
    names = {name.removesuffix(".__init__"): path for name, path in names.items()}
    edges = {}
    for name, path in names.items():
        targets = {target for _, target in imported(ast.parse(path.read_text(encoding="utf-8")), path)}
        targets |= {target.rpartition(".")[0] for target in targets}
        # A package's own __init__ gathers its files; only what the files import counts.
        edges[name] = {t for t in targets if t in names and t != name and not under(name, t)}
    tuple(graphlib.TopologicalSorter(edges).static_order())  # raises CycleError, with the circle
