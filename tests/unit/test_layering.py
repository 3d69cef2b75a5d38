"""Imports go only downwards, and each upstream has one importer: read from the syntax trees, nothing is imported."""

from __future__ import annotations

import ast
import graphlib
import importlib.util
import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from syntax import parsed

PACKAGE = Path(__file__).resolve().parents[2] / "megatron_daro"
NAME = PACKAGE.name

LEVEL = {
    "types": 0,
    "boxed": 0,
    "deadlines": 0,
    "errors": 0,
    "options": 0,
    "thinking": 0,
    "durable": 0,
    "backoff": 0,
    "ports": 0,
    "temporary": 0,
    "garbage": 0,
    "own_class": 1,
    "routed_experts": 0,
    "process_tree": 0,
    "proxies": 0,
    "sandbox": 0,
    "families": 0,
    "worker_pool": 1,
    "config": 1,
    "observe": 1,
}
LEVEL |= dict.fromkeys(("algo", "reward", "data", "rollout", "convert"), 2)
LEVEL |= dict.fromkeys(("actor", "engine", "environments", "sync", "checkpoints", "controller"), 3)
LEVEL |= {"runtime": 4, "plugins": 4, "commands": 6, "cli": 7, "__main__": 8}
WORKSHOP = {"analyze": 3, "check_layout": 4, "check_loss": 4, "convert": 4, "curate": 5, "doctor": 5, "evaluate": 5}
WORKSHOP |= {"plan": 3, "report": 3, "shorten": 3, "slurm": 2}
"""What stands beside the core: each imports units of the core below its level. No unit of the core imports one."""
LEVEL |= {"workshop": 0} | {f"workshop.{name}": level for name, level in WORKSHOP.items()}

SIDEWAYS = {
    "data": {"algo"},  # a batch carries advantages and bins
    "rollout": {"data", "algo"},  # the sampler filters by bin and hands groups to the batch
    "engine": {"sync"},  # buckets are read where weights arrive, and SGLang servers are sent theirs by a transport
    "controller": {"checkpoints", "sync"},  # it owns the one WeightSync
    "workshop.analyze": {"workshop.report"},  # one look for all pages
    "workshop.curate": {"workshop.evaluate", "workshop.report"},  # pass rates are measured as an evaluation is
    "workshop.doctor": {"workshop.plan"},  # the bytes of the checkpoints that a run keeps
    "workshop.evaluate": {
        "workshop.analyze",
        "workshop.convert",
        "workshop.report",
    },  # a Megatron checkpoint is converted first; answers are looked at as those of a dump
    "workshop.plan": {"sync"},  # what a shard-to-shard sync would move
}
"""Imports within a level, and within the workshop, beside those within a unit; without a cycle."""
MAY_IMPORT_WORKSHOP = {"commands", "cli", "__main__"}

ONLY_IMPORTER = {
    "megatron.core": {"actor", "workshop.check_loss", "workshop.convert", "plugins"},  # plugins: inside functions
    "transformer_engine": {"actor"},
    "ray": {"runtime", "plugins"},  # plugins: inside functions
    "sglang": {"engine"},
}
FORBIDDEN = {"config": {"torch", "ray", "megatron", "transformers", "numpy"}}
ALGO_MAY = {"torch", "numpy", "typing_extensions", f"{NAME}.algo", f"{NAME}.errors", f"{NAME}.options"}
PLUGINS_MAY = {"algo", "config", "durable", "errors", "plugins"}
"""What an adapter needs of this package; a host installs nothing else for it."""
PLUGINS_LATE = {"ray", "megatron", "transformer_engine", "sglang"}
"""Imported by plugins inside functions only: importing an adapter starts nothing."""


def unit_of(path: Path) -> str:
    """The top-level folder or module of the package that a file belongs to; of workshop/ the folder or module in it."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return unit_named(".".join(parts))


def unit_named(name: str) -> str:
    """The unit of a dotted name within the package."""
    first, _, rest = name.partition(".")
    return f"workshop.{rest.partition('.')[0]}" if first == "workshop" and rest.partition(".")[0] in WORKSHOP else first


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


def allowed_units(unit: str) -> set[str]:
    """Units that a unit may import: itself, what is below it, and what SIDEWAYS names."""
    below = {other for other, level in LEVEL.items() if level < LEVEL[unit] or LEVEL[unit] == level == 0}
    if unit not in MAY_IMPORT_WORKSHOP:
        below -= {other for other in LEVEL if under(other, "workshop")}
    return below | {unit} | SIDEWAYS.get(unit, set()) | ({"workshop"} if under(unit, "workshop") else set())


def faults_of(text: str, path: Path) -> list[str]:
    """Every import of a file that breaks a rule."""
    unit, found = unit_of(path), []
    for line, name in imported(parsed(text), path):
        place = f"{path.relative_to(PACKAGE.parent)}:{line}: {unit} imports {name}"
        if under(name, NAME) and name != NAME:
            target = unit_named(name.removeprefix(f"{NAME}."))
            found += [f"{place}, which it may not"] if target in LEVEL and target not in allowed_units(unit) else []
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
    for node in parsed(text).body:
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names.append(node.module or "")
    return [name for name in names if name.split(".")[0] in PLUGINS_LATE]


def test_sideways_imports_have_no_cycle():
    edges = {unit: set(targets) for unit, targets in SIDEWAYS.items()}
    level_edges = [(a, b) for a, targets in SIDEWAYS.items() for b in targets if not under(a, "workshop")]
    assert all(LEVEL[a] == LEVEL[b] for a, b in level_edges)
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
        ("runtime/x.py", "from megatron_daro.workshop.evaluate.results import pass_at_k"),
        ("controller.py", "def f():\n    from megatron_daro import workshop"),
        ("plugins/x.py", "from megatron_daro.workshop.plan import gpus"),
        ("workshop/plan/x.py", "from megatron_daro.actor.model import build_model"),
        ("workshop/slurm/x.py", "from megatron_daro.workshop.plan import search"),
        ("workshop/evaluate/x.py", "import ray"),
    ],
)
def test_the_rules_see_a_forbidden_import(place, text):
    assert faults_of(text, PACKAGE / place)


@pytest.mark.parametrize(
    ("place", "text"),
    [
        ("algo/x.py", "import math, torch\nfrom megatron_daro.errors import DaroError\nfrom . import surrogate"),
        ("rollout/x.py", "from megatron_daro.data.batch import build_step_batch"),
        ("actor/x.py", "import megatron.core\nfrom megatron_daro.algo import weighting"),
        ("plugins/x.py", "from megatron_daro.algo import weighting\nfrom megatron_daro import durable"),
        ("plugins/x.py", "def f():\n    from megatron.core import parallel_state"),
        ("types.py", "from megatron_daro.errors import DaroError"),
        ("observe/x.py", "import rich"),
        ("workshop/curate/x.py", "from megatron_daro.workshop.evaluate import metrics"),
        ("commands/x.py", "from megatron_daro.workshop.plan import search"),
    ],
)
def test_the_rules_let_an_allowed_import_pass(place, text):
    assert not faults_of(text, PACKAGE / place)


def test_importing_the_package_imports_nothing():
    code = f"import sys; before = set(sys.modules); import {NAME}; print(sorted(set(sys.modules) - before))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str([NAME])


def test_the_wheel_of_the_plugins_holds_what_its_modules_import(monkeypatch):
    import setuptools

    monkeypatch.setattr(setuptools, "setup", lambda **arguments: None)
    monkeypatch.chdir(PACKAGE.parent)
    listed = runpy.run_path(str(PACKAGE.parent / "setup.py"))
    held = {*listed["ALGO"], *listed["ALGO_MODULES"]}
    needed = {"__init__"}
    for path in FILES:
        if unit_of(path) in held:
            names = (name for _, name in imported(parsed(path.read_text(encoding="utf-8")), path))
            needed |= {
                unit_named(name.removeprefix(f"{NAME}.")) for name in names if under(name, NAME) and name != NAME
            }
    assert needed == held | {"__init__"}, "setup.py lists the units of megatron-daro-algo in ALGO and ALGO_MODULES"


def test_the_wheel_of_the_plugins_describes_what_is_in_it(monkeypatch):
    import setuptools

    given = {}
    monkeypatch.setattr(setuptools, "setup", given.update)
    monkeypatch.setenv("MEGATRON_DARO_DISTRIBUTION", "algo")
    monkeypatch.chdir(PACKAGE.parent)
    runpy.run_path(str(PACKAGE.parent / "setup.py"))
    text = given["long_description"]
    assert not re.findall(r"\]\((?!https)|\bmegatron-daro (?!\d)|examples/|tests/", text), (
        "links and files of the checkout"
    )
    named = set(re.findall(r"megatron_daro\.plugins\.[a-z_]+", text))
    assert len(named) >= 5 and all(importlib.util.find_spec(name) for name in named)


def test_no_files_import_each_other_in_a_circle():
    names = {".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts): path for path in FILES}
    names = {name.removesuffix(".__init__"): path for name, path in names.items()}
    edges = {}
    for name, path in names.items():
        targets = {target for _, target in imported(parsed(path.read_text(encoding="utf-8")), path)}
        targets |= {target.rpartition(".")[0] for target in targets}
        # A package's own __init__ gathers its files; only what the files import counts.
        edges[name] = {t for t in targets if t in names and t != name and not under(name, t)}
    tuple(graphlib.TopologicalSorter(edges).static_order())  # raises CycleError, with the circle
