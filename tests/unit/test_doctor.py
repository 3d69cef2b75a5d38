"""`megatron-daro doctor`: each part between ok and broken, and what is broken is said with a fix and an exit code."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import types
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_daro.cli import main
from megatron_daro.config import Config, Hardware, hardware
from megatron_daro.config.problems import Problem
from megatron_daro.errors import ConfigError, DaroError, SandboxError
from megatron_daro.workshop import doctor
from megatron_daro.workshop.doctor import Finding, diagnose


@pytest.fixture(autouse=True)
def tried(monkeypatch):
    """How trials of packages end, in place of processes that take half a minute; other programs run."""
    ended = SimpleNamespace(returncode=0, stdout="x\n1.2 \n", stderr="", hangs=False)
    run = subprocess.run

    def tried(command, **options):
        if command[:2] != [sys.executable, "-c"]:
            return run(command, **options)
        if ended.hangs:
            raise subprocess.TimeoutExpired(command, options["timeout"])
        return ended

    monkeypatch.setattr(doctor.subprocess, "run", tried)
    return ended


@pytest.fixture(autouse=True)
def servers(monkeypatch):
    """What is found of SGLang; `failure` is raised if set."""
    found = SimpleNamespace(failure=None)

    def inspect(_):
        if found.failure:
            raise found.failure
        return SimpleNamespace(version="0.5")

    monkeypatch.setattr(doctor, "inspect_environment", inspect)
    monkeypatch.setattr(doctor, "check_environments", inspect)
    return found


def findings(recipe=None, *overrides) -> dict[str, Finding]:
    """By part."""
    return {finding.part: finding for finding in diagnose(recipe, overrides)}


@pytest.mark.parametrize(
    ("ended", "state", "optional"),
    [
        ({}, "ok", "ok"),
        ({"returncode": 1, "stderr": "a\nValueError: x"}, "broken", "broken"),
        ({"returncode": -6, "stdout": ""}, "broken", "broken"),
        ({"stdout": ""}, "broken", "broken"),
        ({"returncode": 1, "stderr": "ModuleNotFoundError: x"}, "broken", "absent"),
        ({"hangs": True}, "broken", "broken"),
    ],
)
def test_a_library_that_does_not_work_is_a_finding(tried, ended, state, optional):
    vars(tried).update(ended)
    found = findings()
    assert (found["torch"].state, found["transformer-engine"].state) == (state, optional)
    assert found["torch"].found and (state == "ok") == (not found["torch"].fix)


def test_the_machine_alone(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    main(["doctor"])
    out = capsys.readouterr().out
    assert "torch" in out and "open files" in out


def test_whether_code_can_be_isolated(monkeypatch):
    def check(self):
        raise SandboxError("sandbox: unshare: Operation not permitted")

    monkeypatch.setattr(doctor.Sandbox, "run", lambda self, code: SimpleNamespace(output="42\n"))
    assert (findings()["sandbox"].state, findings()["sandbox"].fix) == ("ok", "")
    monkeypatch.setattr(doctor.Sandbox, "check", check)
    assert findings()["sandbox"].state == "absent" and "unshare" in findings()["sandbox"].found


def test_a_recipe_whose_files_are_missing(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    recipe = tmp_path / "run.yaml"
    recipe.write_text(f"model: {{path: {tmp_path}/none}}\ndata: {{train: [{tmp_path}/none.jsonl]}}\n")
    assert main(["doctor", str(recipe), f"trainer.run_dir={tmp_path}/run"]) == 1
    said = capsys.readouterr()
    assert "model.path" in said.out and "model.path" in said.err


def test_versions_are_those_that_were_tested_together(monkeypatch):
    texts = ["a>=2", "b==1; extra == 'gpu'", "c>=1; python_version < '3'", "d<3", "e"]

    def version(name):
        if name == "e":
            raise doctor.metadata.PackageNotFoundError(name)
        return {"a": "2.1rc1", "d": "3.0"}[name]

    monkeypatch.setattr(doctor.metadata, "requires", lambda name: texts if name == "megatron_daro" else [])
    monkeypatch.setattr(doctor.metadata, "version", version)
    found = {part: one for part, one in findings().items() if "version" in part}
    assert {part.split(":")[0]: one.state for part, one in found.items()} == {"d": "broken", "e": "broken"}
    assert "3.0" in found["d: version"].found and "pip install 'd<3'" in found["d: version"].fix


def recipe(tmp_path, monkeypatch, *, passed=(), warnings=(), problems=(), **sections) -> Path:
    """A file that is read as this configuration, of which the checks say this."""
    trainer = {"run_dir": tmp_path / "not" / "yet"}
    tree = {"model": {"path": tmp_path}, "data": {"train": ("x",)}, "trainer": trainer, **sections}
    report = SimpleNamespace(passed=passed, warnings=warnings, problems=problems)
    monkeypatch.setattr(doctor, "check", lambda given: report)
    monkeypatch.setattr(doctor, "resolve", lambda path, overrides: Config.model_validate(tree))
    return tmp_path / "recipe.yaml"


def test_servers_are_absent_or_broken_by_what_a_recipe_needs(tmp_path, monkeypatch, servers):
    needed = {"kind": "sglang", "sglang": {"python": Path("/p/python")}}
    running = {"kind": "sglang", "sglang": {"urls": ("http://h:1",)}}
    for failure, states in (
        (None, ("ok", "ok", "ok")),
        (DaroError("a\n b, which has no sglang"), ("absent", "broken", "absent")),
        (DaroError("too old"), ("broken", "broken", "broken")),
    ):
        servers.failure = failure
        found = [findings()["sglang"]]
        found += [findings(recipe(tmp_path, monkeypatch, engine=engine))["sglang"] for engine in (needed, running)]
        assert tuple(one.state for one in found) == states


def test_gpus_are_counted_and_say_whether_fp8_runs_there(tmp_path, monkeypatch):
    monkeypatch.setattr(doctor, "detect", lambda: Hardware("gpu", 8, capability=8.0))
    assert findings()["GPUs"].found.startswith("8, no fp8")
    monkeypatch.setattr(doctor, "detect", lambda: Hardware("cpu", 3))
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
    found = findings()["GPUs"]
    assert found.state == "absent" and "3 CPU cores" in found.found
    elsewhere = findings(recipe(tmp_path, monkeypatch, cluster={"gpus_per_node": 8}))["GPUs"]
    assert elsewhere.state == "absent" and "8" in elsewhere.fix


@pytest.fixture
def amd_machine(tmp_path, monkeypatch):
    """rocm-smi that shows four GPUs (as in slurm's test of it), a torch built for ROCm or not, and no nvidia-smi."""
    tool = tmp_path / "rocm-smi"
    rows = "".join(f"card{i},206141652992,297795584\n" for i in range(4))
    tool.write_text(
        f"#!/bin/bash\n/bin/cat <<END\ndevice,VRAM Total Memory (B),VRAM Total Used Memory (B)\n{rows}END\n"
    )
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    for name in ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)

    def torch(hip: str) -> None:
        (tmp_path / "version.py").write_text(f"cuda: Optional[str] = None\nhip: Optional[str] = {hip}\n")

    spec = types.SimpleNamespace(origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(hardware.importlib.util, "find_spec", lambda name: spec)
    return torch


def test_gpus_of_amd_are_found_where_torch_is_built_for_them(amd_machine, monkeypatch):
    amd_machine("'6.4.43482-0f2d60242'")
    found = findings()["GPUs"]
    assert found.state == "ok" and found.found.startswith("4 of AMD") and hardware.detect().fp8 is None
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "1,2")
    assert hardware.detect().count == 2
    amd_machine("None")
    assert findings()["GPUs"].state == "broken" and hardware.detect().kind == "cpu"


@pytest.mark.parametrize(
    ("limits", "state"),
    [((1024, 4096), "ok"), ((1024, 4095), "broken"), ((10, resource.RLIM_INFINITY), "ok")],
)
def test_open_files_are_limited_by_what_may_be_raised(monkeypatch, limits, state):
    monkeypatch.setattr(doctor.resource, "getrlimit", lambda kind: limits)
    assert findings()["open files"].state == state


@pytest.mark.parametrize(("gib", "state"), [(1e-3, "broken"), (1e6, "ok")])
def test_a_small_dev_shm_is_told_with_what_to_do(monkeypatch, gib, state):
    usage = types.SimpleNamespace(free=int(gib * 2**30))
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: usage)
    shm = findings()["/dev/shm"]
    assert shm.state == state and ("--shm-size" in shm.fix) == (state == "broken")


def test_a_recipe_has_what_its_checks_say(tmp_path, monkeypatch):
    warning, problem = (Problem(name, "g", "a", "f") for name in ("w", "p"))
    checks = {"passed": (("batch", "fine"),), "warnings": (warning,), "problems": (problem,)}
    found = findings(recipe(tmp_path, monkeypatch, **checks))
    assert {part.split()[-1]: one.state for part, one in found.items() if part.startswith("recipe: ")} == {
        "batch": "ok", "w": "absent", "p": "broken", "disk": found["recipe: disk"].state,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("options", "gib"),
    [
        ({"steps": 100, "save_every_steps": 20}, 42),
        ({"steps": 30, "save_every_steps": 20}, 14),
        ({"steps": 100, "save_every_steps": 10, "keep_checkpoints": 5}, 84),
        ({"steps": 100, "keep_every_steps": 30}, 84),
        ({"steps": 10, "precision": "fp32"}, 12),
        ({"steps": 10, "export_hf": True}, 16),
        ({"steps": 10, "critic": "c", "export_critic": True}, 30),
        ({"steps": 10, "bytes": 1}, 10),
        ({"steps": 100, "save_every_steps": 10, "keep_checkpoints": 5, "export_hf": True, "rank": 8}, 26),
    ],
)
def test_a_run_needs_room_for_what_it_keeps_and_exports(tmp_path, monkeypatch, options, gib):
    """With 14 GiB for each checkpoint of the policy in bf16, 12 in fp32, 4 with adapters, and the same as the policy's
    for the critic; 10 at least."""
    trainer = {"run_dir": tmp_path / "not" / "yet", **options}
    precision, critic = trainer.pop("precision", "bf16"), trainer.pop("critic", None)
    unit = trainer.pop("bytes", 2**30)
    monkeypatch.setattr(doctor, "read_model_shape", lambda path: path)
    monkeypatch.setattr(doctor, "critic_shape", lambda given, shape: critic)
    rank = trainer.pop("rank", 0)
    monkeypatch.setattr(doctor, "adapters_of", lambda config, shape: config.lora.rank)
    sizes = {2: 14, 4: 12}
    monkeypatch.setattr(doctor, "checkpoint_bytes", lambda shape, weight, own=0: (4 if own else sizes[weight]) * unit)
    for free, state in ((gib, "ok"), (gib - 0.1, "broken")):
        usage = SimpleNamespace(free=free * 2**30)
        monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path, usage=usage: usage)
        given = recipe(tmp_path, monkeypatch, actor={"precision": precision}, lora={"rank": rank}, trainer=trainer)
        assert findings(given)["recipe: disk"].state == state


def test_a_recipe_with_adapters_is_judged_as_train_runs_it(tmp_path):
    """Servers get the adapters alone, as nothing else is asked for."""
    model = {"model_type": "qwen2", "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
    model |= {"hidden_size": 16, "intermediate_size": 32, "vocab_size": 64}
    (tmp_path / "config.json").write_text(json.dumps(model))
    (tmp_path / "run.yaml").write_text(
        f"model: {{path: {tmp_path}}}\ndata: {{train: a.jsonl}}\nlora: {{rank: 8}}\nengine: {{kind: sglang}}\n"
    )
    told = findings(tmp_path / "run.yaml")
    assert "recipe: lora.rank" not in told
    told = findings(tmp_path / "run.yaml", "engine.sglang.sync=distributed")
    assert "engines get none" in told["recipe: lora.rank"].found


def test_a_missing_package_of_the_command_line_is_a_sentence(tmp_path, monkeypatch):
    monkeypatch.undo()
    (tmp_path / "typer.py").write_text("raise ModuleNotFoundError(\"No module named 'typer'\", name='typer')\n")
    ended = subprocess.run(
        [sys.executable, "-m", "megatron_daro", "doctor"], capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"},
    )  # fmt: skip
    assert ended.returncode == 1
    assert "'typer'" in ended.stderr and "Traceback" not in ended.stderr


@pytest.mark.parametrize(
    ("found", "code"),
    [
        ([Finding("ok", "[b]a", "x" * 90), Finding("absent", "b", "y", "z")], 0),
        ([Finding("broken", "a", "x"), Finding("ok", "b", "y"), Finding("broken", "c", "z")], 1),
    ],
)
def test_the_command_prints_a_row_for_each_part_and_names_what_is_broken(monkeypatch, capsys, found, code):
    monkeypatch.setattr(doctor, "diagnose", lambda recipe, overrides: found)
    monkeypatch.setenv("COLUMNS", "60")
    assert main(["doctor"]) == code
    printed = capsys.readouterr()
    assert all(finding.part in printed.out for finding in found)
    assert not code or "a, c" in printed.err


def test_a_recipe_that_cannot_be_read_is_a_configuration_error(tmp_path):
    with pytest.raises(ConfigError, match=r"none\.yaml"):
        diagnose(tmp_path / "none.yaml", ())
