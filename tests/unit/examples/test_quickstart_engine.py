"""`run.sh --engine`: what reaches the tool that makes the environment, and the training.

The script runs for real, in a copy of its folder; the programs it calls write down how they were called.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from script_copy import Copy

from megatron_daro.config import resolve

ROOT = Path(__file__).resolve().parents[3]
FOLDER = Path("examples/quickstart")


@pytest.fixture
def copy(tmp_path):
    return Copy(tmp_path / "a project", "quickstart")


def trained(copy: Copy, *arguments: str) -> list[str]:
    """The options that reach `megatron-daro train`, after the configuration file; a dry run of them comes before."""
    done = copy.run(*arguments)
    assert done.returncode == 0, done.stderr
    dry_run, command, report = copy.calls("megatron-daro")
    assert command[:2] == ["train", "examples/quickstart/config.yaml"] and report[0] == "report"
    assert dry_run[: len(command)] == command
    assert dry_run[len(command)].startswith("trainer.run_dir=") and dry_run[len(command) + 1 :] == ["--dry-run"]
    return command[2:]


@pytest.mark.parametrize("arguments", [(), ("--engine", "embedded"), ("--engine=embedded",)])
def test_the_embedded_engine_is_the_default_and_changes_nothing(copy, arguments):
    assert trained(copy, *arguments, "trainer.steps=5") == ["trainer.steps=5"]
    assert copy.calls("sglang_cpu_env") == []
    assert copy.calls("megatron-daro")[-1] == ["report", "runs/quickstart"]


@pytest.mark.parametrize("arguments", [("--engine", "sglang"), ("--engine=sglang",)])
def test_sglang_is_two_servers_and_a_run_of_its_own(copy, arguments):
    options = trained(copy, "trainer.steps=5", *arguments, "engine.replicas=3")
    assert copy.calls("sglang_cpu_env") == [[]]
    config = resolve(ROOT / FOLDER / "config.yaml", options)
    assert (config.engine.kind, config.engine.replicas, config.trainer.steps) == ("sglang", 3, 5)
    assert config.trainer.run_dir == Path("runs/quickstart-sglang")
    servers = config.engine.sglang
    assert servers.python == Path(".venv-sglang/bin/python")
    assert servers.sync == "distributed"
    assert servers.arguments["device"] == "cpu" and servers.arguments["sleep_on_idle"] is True
    assert copy.calls("megatron-daro")[-1] == ["report", "runs/quickstart-sglang"]
    assert resolve(ROOT / FOLDER / "config.yaml", options[:2]).engine.replicas == 2


def test_everything_but_engine_and_directory_is_the_same_with_both_engines(copy):
    base = resolve(ROOT / FOLDER / "config.yaml").model_dump()
    other = resolve(ROOT / FOLDER / "config.yaml", trained(copy, "--engine", "sglang")).model_dump()
    assert base.pop("engine")["seed"] == other.pop("engine")["seed"]
    assert base["trainer"].pop("run_dir") != other["trainer"].pop("run_dir")
    assert base == other


def test_the_users_directory_wins_and_an_earlier_run_there_is_kept(copy):
    earlier = copy.root / "runs/mine"
    earlier.mkdir(parents=True)
    options = trained(copy, "--engine", "sglang", "trainer.run_dir=runs/mine")
    assert resolve(ROOT / FOLDER / "config.yaml", options).trainer.run_dir == Path("runs/mine")
    assert copy.calls("megatron-daro")[-1] == ["report", "runs/mine"]
    assert [path.name[:5] for path in earlier.parent.iterdir()] == ["mine-"]


def test_servers_of_the_users_own_need_no_environment(copy):
    options = trained(copy, "--engine", "sglang", "engine.sglang.python=/opt/python")
    assert copy.calls("sglang_cpu_env") == []
    assert resolve(ROOT / FOLDER / "config.yaml", options).engine.sglang.python == Path("/opt/python")


def test_nothing_is_trained_without_the_environment(copy):
    copy.tool_fails(True)
    assert copy.run("--engine", "sglang").returncode == 1
    assert copy.calls("sglang_cpu_env") == [[]] and copy.calls("megatron-daro") == []


@pytest.mark.parametrize(
    ("arguments", "got"),
    [
        (["--engine", "vllm"], "--engine vllm"),
        (["--engine=vllm"], "--engine vllm"),
        (["trainer.steps=5", "--engine"], "--engine "),
        (["--engine", "trainer.steps=5"], "--engine trainer.steps=5"),
        (["--none"], "--none"),
        ([""], ""),
    ],
)
def test_anything_else_is_refused_before_anything_is_done(copy, arguments, got):
    refused = copy.run(*arguments)
    assert refused.returncode == 2
    assert f"got '{got}'" in refused.stderr
    assert copy.calls("python") == copy.calls("sglang_cpu_env") == []


def test_help_names_the_engine_and_runs_nothing(copy):
    shown = copy.run("--help")
    assert shown.returncode == 0 and "--engine" in shown.stdout and copy.calls("python") == []
