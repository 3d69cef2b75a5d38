"""`megatron-daro doctor`: each part between ok and broken, and what is broken is said with a fix and an exit code."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import types
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_daro.cli import main
from megatron_daro.config import Config, Hardware, hardware, precision
from megatron_daro.config.problems import Problem
from megatron_daro.engine.sglang import command
from megatron_daro.errors import ConfigError, DaroError
from megatron_daro.workshop import doctor
from megatron_daro.workshop.doctor import Finding, _Package, _package

INSTALL = "pip install -e . in the checkout"


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


def config(tmp_path, **sections) -> Config:
    tree = {"model": {"path": tmp_path}, "data": {"train": ("x",)}, **sections}
    return Config.model_validate(tree)


def test_the_python_is_the_one_that_runs(monkeypatch):
    version = ".".join(map(str, sys.version_info[:3]))
    assert doctor._python() == Finding("ok", "Python", f"{version}, {sys.executable}")
    monkeypatch.setattr(doctor.sys, "version_info", (3, 11))
    assert doctor._python().state == "ok"
    monkeypatch.setattr(doctor.sys, "version_info", (3, 10, 9))
    assert doctor._python().state == "broken"


def test_only_requirements_of_this_platform_count(monkeypatch):
    texts = ["a>=2", "b==1; extra == 'gpu'", "c>=1; python_version < '3'", "d<3"]
    monkeypatch.setattr(doctor.metadata, "requires", lambda name: texts if name == "megatron_daro" else [])
    monkeypatch.setattr(doctor.metadata, "version", {"a": "2.1rc1", "d": "3.0"}.get)
    assert list(doctor._versions()) == [Finding("broken", "d: version", "3.0; allowed: <3", "pip install 'd<3'")]
    texts.remove("d<3")
    words = "all 1 packages are of the versions that were tested together"
    assert list(doctor._versions()) == [Finding("ok", "versions", words)]
    monkeypatch.setattr(doctor.metadata, "requires", lambda name: None)
    assert "all 0 packages" in next(doctor._versions()).found


@pytest.fixture
def tried(monkeypatch):
    """Trials of packages, in place of processes; the first item is how they end."""
    calls = [SimpleNamespace(returncode=0, stdout="x\n1.2 \n", stderr="")]

    def run(command, **options):
        calls.append((command, options))
        return calls[0]

    monkeypatch.setattr(doctor.subprocess, "run", run)
    return calls


def test_a_package_is_tried_quietly_and_says_its_last_line(tried):
    assert doctor._package(_Package("x", "print(1)", "y")) == Finding("ok", "x", "1.2")
    command, options = tried[1]
    assert command == [sys.executable, "-c", "print(1)"]
    assert options.pop("env") == {**os.environ, "PYTHONWARNINGS": "ignore", "TOKENIZERS_PARALLELISM": "false"}
    assert options == {"capture_output": True, "text": True, "timeout": 180, "check": False}


@pytest.mark.parametrize(
    ("code", "stdout", "stderr", "needed", "finding"),
    [
        (1, "1.2", "a\nValueError: x", True, ("broken", "ValueError: x")),
        (1, "", "", True, ("broken", "ended with code 1")),
        (0, "", "a warning", True, ("broken", "ended with code 0 while it was imported")),
        (1, "", "ModuleNotFoundError: x", False, ("absent", "ModuleNotFoundError: x")),
        (1, "", "ModuleNotFoundError: x", True, ("broken", "ModuleNotFoundError: x")),
        (1, "", "ModuleNotFoundError: x\nOther", False, ("broken", "Other")),
        (1, "", "y" * 300, False, ("broken", "y" * 200)),
    ],
)
def test_a_trial_that_fails_says_its_last_words(tried, code, stdout, stderr, needed, finding):
    tried[0] = SimpleNamespace(returncode=code, stdout=stdout, stderr=stderr)
    assert doctor._package(_Package("x", "", "y", needed)) == Finding(finding[0], "x", finding[1], "y")


def test_one_package_is_not_needed_by_every_run():
    assert [(package.name, package.needed) for package in doctor._PACKAGES if not package.needed] == [
        ("transformer-engine", False)
    ]
    assert {package.fix for package in doctor._PACKAGES if package.needed} == {INSTALL}


def test_without_gpus_the_recipe_may_be_for_another_machine(tmp_path, monkeypatch):
    monkeypatch.setattr(doctor, "detect", lambda: Hardware("cpu", 3))
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
    words, fix = (
        "none that torch can use; 3 CPU cores",
        "runs of small models work on the CPU; on a GPU machine look at ",
    )
    assert doctor._gpus(None) == Finding("absent", "GPUs", words, fix + "nvidia-smi and torch's build")
    assert doctor._gpus(config(tmp_path)).fix == fix + "nvidia-smi and torch's build"
    elsewhere = doctor._gpus(config(tmp_path, cluster={"gpus_per_node": 8}))
    assert elsewhere.fix == "the recipe's cluster has 8 on each node: start it there"


@pytest.fixture
def environments(monkeypatch):
    """What is found of SGLang; `failure` is raised if set."""
    found = SimpleNamespace(failure=None, asked=[])

    def inspect(python):
        found.asked.append(python)
        if found.failure:
            raise found.failure
        return SimpleNamespace(version="0.5")

    monkeypatch.setattr(doctor, "inspect_environment", inspect)
    monkeypatch.setattr(doctor, "check_environments", inspect)
    return found


def test_servers_are_looked_for_where_a_recipe_starts_them(tmp_path, environments):
    own = config(tmp_path, engine={"kind": "sglang", "sglang": {"python": Path("/p/python")}})
    assert doctor._sglang(own) == Finding("ok", "sglang", "/p/python") and environments.asked == [own.engine.sglang]
    here = config(tmp_path, engine={"kind": "sglang"})
    assert doctor._sglang(here) == Finding("ok", "sglang", sys.executable)
    running = config(tmp_path, engine={"kind": "sglang", "sglang": {"urls": ("http://h:1",)}})
    for other in (None, config(tmp_path), running):
        assert doctor._sglang(other) == Finding("ok", "sglang", "0.5")
        assert environments.asked[-1] == Path(sys.executable)


def test_servers_that_cannot_start_are_broken_or_absent(tmp_path, environments):
    environments.failure = DaroError("a\n b, which has no sglang")
    absent = doctor._sglang(None)
    assert (absent.state, absent.found) == ("absent", "not in this interpreter")
    assert absent.fix.startswith("only recipes with engine.kind sglang need it, also in another interpreter")
    needed = config(tmp_path, engine={"kind": "sglang"})
    broken = Finding("broken", "sglang", "a; b, which has no sglang", "see the end of what was found")
    assert doctor._sglang(needed) == broken
    environments.failure = DaroError("too old")
    assert doctor._sglang(None) == Finding("broken", "sglang", "too old", "see the end of what was found")


@pytest.mark.parametrize(
    ("limits", "most", "state"),
    [
        ((1024, 4096), 4096, "ok"),
        ((4096, 1024), 4096, "ok"),
        ((1024, 4095), 4095, "broken"),
        ((resource.RLIM_INFINITY, 10), 10**6, "ok"),
        ((10, resource.RLIM_INFINITY), 10**6, "ok"),
    ],
)
def test_open_files_are_limited_by_what_may_be_raised(monkeypatch, limits, most, state):
    monkeypatch.setattr(doctor.resource, "getrlimit", lambda kind: {resource.RLIMIT_NOFILE: limits}[kind])
    fix = "" if state == "ok" else "raise `ulimit -n` to 4096"
    assert next(doctor._limits()) == Finding(state, "open files", str(most), fix)


@pytest.mark.parametrize(("free", "state"), [(2**30, "ok"), (2**30 - 1, "broken")])
def test_shared_memory_of_a_gib_is_enough(monkeypatch, free, state):
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: {"/dev/shm": SimpleNamespace(free=free)}[path])
    fix = "" if state == "ok" else "give the container more: --shm-size; Ray keeps its objects there"
    assert list(doctor._limits())[1] == Finding(state, "/dev/shm", "1.0 GiB free", fix)


@pytest.mark.parametrize(
    ("path", "finding"),
    [
        ("/b/sbatch", Finding("ok", "Slurm", "/b/sbatch")),
        (None, Finding("absent", "Slurm", "no sbatch", "only `submit` needs it")),
    ],
)
def test_slurm_is_there_or_not(monkeypatch, path, finding):
    monkeypatch.setattr(doctor.shutil, "which", lambda name: path if name == "sbatch" else "no")
    assert doctor._slurm() == finding


@pytest.mark.parametrize(("free", "state"), [(12.0, "ok"), (11.9, "broken")])
def test_a_recipe_has_what_its_checks_say_and_room_on_the_disk(tmp_path, monkeypatch, free, state):
    warning, problem = (Problem(name, "g", "a", "f") for name in ("w", "p"))
    report = SimpleNamespace(passed=(("batch", "fine"),), warnings=(warning,), problems=(problem,))
    monkeypatch.setattr(doctor, "check", lambda given: report)
    monkeypatch.setattr(doctor, "_disk_of", lambda given: (12.0, "words"))
    usage = {tmp_path: SimpleNamespace(free=free * 2**30)}
    monkeypatch.setattr(doctor.shutil, "disk_usage", usage.__getitem__)
    run = config(tmp_path, trainer={"run_dir": tmp_path / "not" / "yet"})
    fix = "" if state == "ok" else "free space, another trainer.run_dir, or fewer trainer.keep_checkpoints"
    assert list(doctor._recipe(run)) == [
        Finding("ok", "recipe: batch", "fine"),
        Finding("absent", "recipe: w", "g; allowed: a", "f"),
        Finding("broken", "recipe: p", "g; allowed: a", "f"),
        Finding(state, "recipe: disk", f"12 GiB free in {tmp_path}; needed: 12 GiB, words", fix),
    ]


def disk(tmp_path, monkeypatch, critic=None, *, precision="bf16", name="daro", **trainer):
    """With 14 GiB for each checkpoint of the policy in bf16, 16 in fp32, and the same for the critic."""
    monkeypatch.setattr(doctor, "read_model_shape", lambda path: path)
    monkeypatch.setattr(doctor, "critic_shape", lambda given, shape: critic)
    monkeypatch.setattr(doctor, "checkpoint_bytes", lambda shape, weight: {2: 14, 4: 12}[weight] * 2**30)
    return doctor._disk_of(config(tmp_path, actor={"precision": precision}, trainer=trainer))


@pytest.mark.parametrize(
    ("options", "gib", "words"),
    [
        ({"steps": 100, "save_every_steps": 20}, 42, "3 checkpoints of 14.0"),
        ({"steps": 30, "save_every_steps": 20}, 14, "1 checkpoints of 14.0"),
        ({"steps": 10, "save_every_steps": 20}, 14, "1 checkpoints of 14.0"),
        ({"steps": 100, "save_every_steps": 0}, 14, "1 checkpoints of 14.0"),
        ({"steps": 100, "save_every_steps": 10, "keep_checkpoints": 5}, 84, "6 checkpoints of 14.0"),
        ({"steps": 100, "keep_every_steps": 30}, 84, "6 checkpoints of 14.0"),
        ({"steps": 10, "precision": "fp32"}, 12, "1 checkpoints of 12.0"),
        ({"steps": 10, "export_hf": True}, 16, "1 checkpoints of 14.0 and what is exported of 2.0"),
        (
            {"steps": 10, "precision": "fp32", "export_hf": True},
            16,
            "1 checkpoints of 12.0 and what is exported of 4.0",
        ),
        ({"steps": 10, "critic": "c"}, 28, "1 checkpoints of 28.0"),
        ({"steps": 10, "critic": "c", "export_critic": True}, 30, "1 checkpoints of 28.0 and what is exported of 2.0"),
        ({"steps": 10, "export_critic": True}, 14, "1 checkpoints of 14.0"),
    ],
)
def test_a_run_needs_room_for_what_it_keeps_and_exports(tmp_path, monkeypatch, options, gib, words):
    found = disk(tmp_path, monkeypatch, **options)
    assert found == (pytest.approx(gib), words)


def test_a_run_needs_ten_gib_at_least(tmp_path, monkeypatch):
    monkeypatch.setattr(doctor, "checkpoint_bytes", lambda *_: 2**20)
    least = "at least; the model, which says how large checkpoints are, cannot be read"
    assert doctor._disk_of(config(tmp_path)) == (10.0, least)
    monkeypatch.setattr(doctor, "read_model_shape", lambda path: path)
    assert doctor._disk_of(config(tmp_path)) == (10.0, "3 checkpoints of 0.0")


@pytest.mark.parametrize("recipe", [False, True])
def test_the_parts_come_in_their_order(tmp_path, monkeypatch, recipe):
    asked = []
    monkeypatch.setattr(doctor, "resolve", lambda *given: asked.append(given) or "config")
    for name in ("_python", "_slurm"):
        monkeypatch.setattr(doctor, name, lambda name=name: name)
    for name in ("_versions", "_limits"):
        monkeypatch.setattr(doctor, name, lambda name=name: iter([name]))
    for name in ("_gpus", "_sglang"):
        monkeypatch.setattr(doctor, name, lambda given, name=name: (name, given))
    monkeypatch.setattr(doctor, "_package", lambda package: package.name)
    monkeypatch.setattr(doctor, "_recipe", lambda given: iter([("recipe", given)]))
    given = "config" if recipe else None
    names = [package.name for package in doctor._PACKAGES]
    expected = ["_python", "_versions", *names, ("_gpus", given), ("_sglang", given), "_limits", "_slurm"]
    found = doctor.diagnose(tmp_path if recipe else None, ["a=1"])
    assert found == expected + [("recipe", "config")] * recipe and asked == [(tmp_path, ["a=1"])] * recipe


@pytest.mark.parametrize(
    ("findings", "code", "last"),
    [
        ([Finding("ok", "a", "x"), Finding("absent", "b", "y", "z")], 0, "nothing is broken"),
        (
            [Finding("broken", "a", "x"), Finding("ok", "b", "y"), Finding("broken", "c", "z")],
            1,
            "2 of 3 are broken: a, c",
        ),
    ],
)
def test_the_command_prints_a_row_for_each_part(monkeypatch, capsys, findings, code, last):
    monkeypatch.setattr(
        doctor, "diagnose", lambda recipe, overrides: [*findings, *[Finding("ok", "[b]d", "e" * 90)][code:]]
    )
    monkeypatch.setenv("COLUMNS", "60")
    assert main(["doctor"]) == code
    printed = capsys.readouterr()
    assert (printed.err if code else printed.out).splitlines()[-1] == last
    assert "…" not in printed.out and all(finding.part in printed.out for finding in findings)
    assert code or ("[b]d" in printed.out and printed.out.count("e") >= 90)


def test_the_command_hands_on_the_recipe_and_its_options(monkeypatch):
    asked = []
    monkeypatch.setattr(doctor, "diagnose", lambda *given: asked.append(given) or [])
    assert (main(["doctor"]), main(["doctor", "r.yaml", "a=1"])) == (0, 0)
    assert asked == [(None, []), (Path("r.yaml"), ["a=1"])]


def test_a_recipe_that_cannot_be_read_is_a_configuration_error(tmp_path):
    with pytest.raises(ConfigError, match="no such file"):
        doctor.diagnose(tmp_path / "none.yaml", ())
