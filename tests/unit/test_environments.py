"""The pinned environments for GPUs fit what the package asks for, and each other."""

from __future__ import annotations

import re
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]


def pins(name):
    """Package -> version of a file of tools/environments."""
    lines = (ROOT / "tools" / "environments" / name).read_text().splitlines()
    found = [Requirement(line) for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(r.name): next(iter(r.specifier)).version for r in found}


def test_the_trainers_pins_are_what_the_package_asks_for():
    asked = [line for line in (ROOT / "requirements.txt").read_text().splitlines() if line and line[0] != "#"]
    ranges = {canonicalize_name(r.name): r.specifier for r in map(Requirement, asked)}
    pinned = pins("trainer.txt")
    assert {"torch", "megatron-core"} <= pinned.keys() & ranges.keys()
    assert all(ranges[name].contains(version) for name, version in pinned.items() if name in ranges)


def test_both_environments_have_one_nccl():
    assert pins("trainer-no-deps.txt")["nvidia-nccl-cu13"] == pins("servers.txt")["nvidia-nccl-cu13"]


def test_both_images_are_of_the_servers_sglang_and_install_alike():
    docker, apptainer = ((ROOT / "containers" / name).read_text() for name in ("Dockerfile", "megatron_daro.def"))
    tag = f"lmsysorg/sglang:v{pins('servers.txt')['sglang']}-runtime"
    assert f"FROM {tag}\n" in docker and f"From: {tag}\n" in apptainer
    installs = [re.findall(r"\S+(?: -m pip| -m venv|/pip) .*?(?= \\\n|\n)", text) for text in (docker, apptainer)]
    assert installs[0] == installs[1] and len(installs[0]) == 5


def test_the_parts_of_transformer_engine_are_of_one_version():
    parts = pins("trainer.txt") | pins("trainer-no-deps.txt")
    assert len({version for name, version in parts.items() if name.startswith("transformer-engine")}) == 1


def test_the_extra_takes_a_transformer_engine_that_the_megatron_of_its_python_was_made_for():
    """Python 3.11 gets Megatron-core 0.16.1, whose metadata says >=2.9.0a0,<2.12.0; 3.12 gets what is pinned."""
    extra = list(
        map(Requirement, re.findall(r"'(transformer_engine\[pytorch\][^']+)'", (ROOT / "setup.py").read_text()))
    )
    pinned = pins("trainer.txt")["transformer-engine"]
    by_python = {
        python: [r.specifier for r in extra if r.marker.evaluate({"python_version": python})]
        for python in ("3.11", "3.12", "3.13")
    }
    assert all(len(found) == 1 for found in by_python.values())
    old, new = by_python["3.11"][0], by_python["3.12"][0]
    assert [old.contains(version) for version in ("2.8", "2.9", "2.11.1", "2.12", pinned)] == [
        False,
        True,
        True,
        False,
        False,
    ]
    assert new.contains(pinned) and by_python["3.13"] == [new]
