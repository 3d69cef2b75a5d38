"""The rows of `megatron-daro doctor`: each part at the edge between ok and broken, with its words."""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_daro.cli import main
from megatron_daro.config import Config, Hardware
from megatron_daro.config.problems import Problem
from megatron_daro.errors import ConfigError, DaroError
from megatron_daro.workshop import doctor
from megatron_daro.workshop.doctor import Finding, _Package

INSTALL = "pip install -e . in the checkout"


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
