"""`megatron-daro submit` with stand-ins for Slurm's commands: what Slurm is asked, what is printed."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
import yaml
from weightless import save_tiny_model

from megatron_daro.cli import main

ANSWERS = {"sbatch": "echo 17", "squeue": "true", "sinfo": "echo 'up|infinite|8'"}


@pytest.fixture
def submit(tmp_path, monkeypatch):
    """Runs the command; the calls of Slurm's commands that a job follows."""
    log, tools = tmp_path / "log", tmp_path / "bin"
    tools.mkdir()
    for name, body in ANSWERS.items():
        (tools / name).write_text(f"#!/bin/bash\necho {name} $* >> {log}\n{body}\n")
        (tools / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    model = save_tiny_model(tmp_path / "model")
    (tmp_path / "train.jsonl").write_text('{"problem": "1=", "answer": "1"}\n')
    tree = {"model": {"path": str(model)}, "data": {"train": [str(tmp_path / "train.jsonl")]}}
    tree |= {"engine": {"kind": "sglang"}, "trainer": {"run_dir": str(tmp_path / "run")}}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(tree))

    def run(*options: str, **fields: object) -> list[str]:
        site = {"partition": "gpu", "gpus_per_node": 8, "nodes": 2, "time": "2:00:00"}
        (tmp_path / "cluster.yaml").write_text(json.dumps(site | fields))
        log.write_text("")
        command = ["submit", str(tmp_path / "recipe.yaml"), "--cluster", str(tmp_path / "cluster.yaml")]
        assert main([*command, *options]) == 0
        return re.findall(r"sbatch --test-only|sbatch --parsable|squeue", log.read_text())

    return run


def test_a_job_is_tried_before_it_is_submitted(submit, tmp_path, capsys):
    assert submit() == ["squeue", "sbatch --test-only", "sbatch --parsable"]
    out = capsys.readouterr().out
    (script,) = re.findall(r"script: (\S+)", out)
    assert Path(script).exists() and str(tmp_path / "run") in script and "17" in out
    assert submit("--no-test-only") == ["squeue", "sbatch --parsable"]
    assert submit("--test-only") == ["sbatch --test-only"]
    assert submit("--dry-run") == []


def test_jobs_of_a_chain_are_submitted_one_by_one(submit, capsys):
    assert submit("--chain", "2", "--no-test-only")[1:] == ["sbatch --parsable"] * 2
    assert "17, 17" in capsys.readouterr().out


def test_a_signal_that_comes_too_late_to_save_is_warned_of(submit, capsys):
    submit("--dry-run")
    unset = capsys.readouterr()
    (seconds,) = map(int, re.findall(r"#SBATCH --signal=\S*@(\d+)", unset.out))
    assert seconds > 100 and "signal_before_s" not in unset.err
    submit("--dry-run", signal_before_s=10)
    assert "signal_before_s: got 10" in capsys.readouterr().err
