"""`megatron-daro doctor`: what works is ok, what is broken is said with a fix and an exit code."""

from __future__ import annotations

import os
import subprocess
import sys
import types

import pytest

from megatron_daro.cli import main
from megatron_daro.config import Config, Hardware, hardware, precision
from megatron_daro.engine.sglang import command
from megatron_daro.workshop import doctor
from megatron_daro.workshop.doctor import _Package, _package


@pytest.fixture
def few_packages(monkeypatch):
    """One package that is there: the real list takes half a minute to import."""
    monkeypatch.setattr(doctor, "_PACKAGES", (_Package("numpy", "import numpy; print(numpy.__version__)", "x"),))


def test_a_library_that_works_says_its_version():
    found = _package(_Package("numpy", "import numpy; print(numpy.__version__)", "x"))
    assert found.state == "ok" and found.found[0].isdigit()


@pytest.mark.parametrize(
    ("trial", "needed", "state", "said"),
    [
        ("import no_such_module", True, "broken", "No module named 'no_such_module'"),
        ("import no_such_module", False, "absent", "No module named 'no_such_module'"),
        ("raise ImportError('undefined symbol')", False, "broken", "undefined symbol"),
        ("import os; os.abort()", True, "broken", "ended with code -6"),
        ("raise SystemExit(0)", True, "broken", "ended with code 0 while it was imported"),
    ],
)
def test_a_library_that_does_not_work_is_a_finding(trial, needed, state, said):
    found = _package(_Package("x", trial, "install it", needed))
    assert found.state == state and said in found.found and found.fix == "install it"


def test_a_library_that_hangs_is_a_finding(monkeypatch):
    monkeypatch.setattr(doctor, "_IMPORT_LIMIT_S", 0.5)
    found = _package(_Package("x", "import time; time.sleep(60)", "y"))
    assert found.state == "broken" and found.found == "no answer in 0.5 s"


def test_every_trial_is_python():
    for package in doctor._PACKAGES:
        compile(package.trial, package.name, "exec")


@pytest.mark.usefixtures("few_packages")
def test_the_machine_alone(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "numpy" in out and "open files" in out and "nothing is broken" in out


@pytest.mark.usefixtures("few_packages")
def test_a_recipe_whose_files_are_missing(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    recipe = tmp_path / "run.yaml"
    recipe.write_text(f"model: {{path: {tmp_path}/none}}\ndata: {{train: [{tmp_path}/none.jsonl]}}\n")
    assert main(["doctor", str(recipe), f"trainer.run_dir={tmp_path}/run"]) == 1
    said = capsys.readouterr()
    assert "recipe: model.path" in said.out and "give the local directory of the model" in said.out
    assert "are broken" in said.err and "recipe: model.path" in said.err


@pytest.mark.parametrize(
    ("capability", "engine", "said"),
    [
        (9.0, (2, 20, 2), "8, fp8 recipes tensorwise, blockwise"),
        (8.0, (2, 20, 2), "8, no fp8: a GPU has compute capability 8, it needs 8.9 or newer"),
        (9.0, None, "8, no fp8: Transformer Engine is not installed"),
    ],
)
def test_gpus_say_which_recipes_of_fp8_run_there(monkeypatch, capability, engine, said):
    monkeypatch.setattr(doctor, "detect", lambda: Hardware("gpu", 8, capability=capability))
    monkeypatch.setattr(precision, "_version", {"transformer_engine": engine}.get)
    monkeypatch.setattr(precision, "torch_cuda", lambda: (13, 0))
    assert doctor._gpus(None).found == said


def test_versions_are_those_that_were_tested_together(monkeypatch):
    versions = {"transformers": "4.30.0", "pyarrow": None}

    def version(name):
        if name in versions and versions[name] is None:
            raise doctor.metadata.PackageNotFoundError(name)
        return versions.get(name) or real(name)

    real = doctor.metadata.version
    assert [finding.state for finding in doctor._versions()] == ["ok"]
    monkeypatch.setattr(doctor.metadata, "version", version)
    found = {finding.part: finding for finding in doctor._versions()}
    assert set(found) == {"transformers: version", "pyarrow: version"}
    assert found["transformers: version"].found.startswith("4.30.0; allowed: ")
    assert "pip install 'transformers" in found["transformers: version"].fix
    assert found["pyarrow: version"].found.startswith("not installed")


def test_an_sglang_that_is_too_old_is_broken_and_none_is_absent(monkeypatch):
    for version, state in (("0.4.1", "broken"), ("0.5.23", "ok"), (None, "absent")):
        inspected = {"version": version, "names": [], "python": "3.11"}
        monkeypatch.setattr(command, "_run", lambda *_, inspected=inspected: inspected)
        found = doctor._sglang(None)
        assert found.state == state, found
        assert version is None or version in found.found


def test_the_disk_must_hold_the_runs_own_checkpoints(tmp_path, monkeypatch):
    """A model of 8 billion parameters: 14 bytes each, two checkpoints and the one that is written, and the export."""
    config = Config.model_validate(
        {"model": {"path": tmp_path}, "data": {"train": ("x",)}, "actor": {"precision": "bf16"},
         "trainer": {"run_dir": tmp_path, "steps": 100, "save_every_steps": 10, "export_hf": True}}
    )  # fmt: skip
    monkeypatch.setattr(doctor, "read_model_shape", lambda _: "a shape")
    monkeypatch.setattr(doctor, "checkpoint_bytes", lambda _, weight: 8 * 10**9 * 14)
    gib, words = doctor._disk_of(config)
    assert gib == pytest.approx((3 * 8e9 * 14 + 8e9 * 2) / 2**30) and words.startswith("3 checkpoints of 104.3")
    ppo = config.model_copy(update={"algorithm": config.algorithm.model_copy(update={"name": "ppo"})})
    assert doctor._disk_of(ppo)[1].startswith("3 checkpoints of 208.6"), "of both models"
    single = config.model_copy(update={"trainer": config.trainer.model_copy(update={"save_every_steps": 0})})
    assert doctor._disk_of(single)[1].startswith("1 checkpoints of 104.3")


def test_a_missing_package_of_the_command_line_is_a_sentence(tmp_path):
    (tmp_path / "typer.py").write_text("raise ModuleNotFoundError(\"No module named 'typer'\", name='typer')\n")
    ended = subprocess.run(
        [sys.executable, "-m", "megatron_daro", "doctor"], capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )  # fmt: skip
    assert ended.returncode == 1
    assert (
        ended.stderr.startswith("megatron-daro: the package 'typer' is not installed in ")
        and "fix: pip" in ended.stderr
    )


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


def test_gpus_of_amd_are_found_and_said_to_be_untried(amd_machine, monkeypatch):
    amd_machine("'6.4.43482-0f2d60242'")
    assert doctor._gpus(None).found == "4 of AMD (ROCm 6.4.43482); no run was ever made on one"
    assert hardware.detect().fp8 is None
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "1,2")
    assert hardware.detect().count == 2


def test_gpus_of_amd_without_a_torch_for_them_are_broken(amd_machine):
    amd_machine("None")
    found = doctor._gpus(None)
    assert (found.state, found.fix) == ("broken", "install torch for ROCm") and hardware.detect().kind == "cpu"


@pytest.mark.parametrize(("gib", "state"), [(1e-3, "broken"), (1e6, "ok")])
def test_a_small_dev_shm_is_told_with_what_to_do(monkeypatch, gib, state):
    usage = types.SimpleNamespace(free=int(gib * 2**30))
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: usage)
    shm = next(finding for finding in doctor._limits() if finding.part == "/dev/shm")
    assert shm.state == state and ("--shm-size" in shm.fix) == (state == "broken")
