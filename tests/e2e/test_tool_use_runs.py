"""`bash examples/tool_use/run.sh` from base model to table, with few steps of both."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest
import sandboxed
from cli_runs import Run

from megatron_daro.observe.metrics import read_metrics
from megatron_daro.rollout.recorder import read_step

pytestmark = [pytest.mark.heavy, pytest.mark.slow, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
PYTHON = """#!/usr/bin/env bash
[ "$1" != examples/tool_use/products.py ] || set -- "$@" --steps 200
exec {python} "$@"
"""


def executable(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


def test_the_script_makes_a_model_trains_it_with_the_tool_and_prints_what_it_gained(tmp_path):
    sandboxed.require()
    shutil.copytree(ROOT / "examples", tmp_path / "examples", ignore=shutil.ignore_patterns("results", "__pycache__"))
    executable(tmp_path / "env/bin/python", PYTHON.format(python=sys.executable))
    executable(tmp_path / "env/bin/megatron-daro", f'#!/bin/sh\nexec {sys.executable} -m megatron_daro "$@"\n')
    executable(tmp_path / "tools/install_packages.sh", "")
    sets = "data.eval=[{name: products, path: runs/tool_use-base/held_out.jsonl, temperature: 1.0}]"
    sizes = ["rollout.prompts_per_batch=2", "rollout.rollouts_per_prompt=4", "algorithm.filter=none", "trainer.steps=2"]
    command = ["bash", str(tmp_path / "examples/tool_use/run.sh"), sets, *sizes]
    run = Run(command, tmp_path / "log", {"VIRTUAL_ENV": str(tmp_path / "env"), "PYTHONPATH": str(ROOT)})
    try:
        done = run.finish(800)
        assert done.code == 0, done.stdout[-2000:] + done.stderr[-4000:]
        assert run.left_behind() == []
    finally:
        run.kill_all()
    rows = [line.replace("│", " ").replace("┃", " ").split() for line in done.stdout.splitlines()]
    assert [row[0] for row in rows if row[:1] and row[0].startswith("digits_")] == ["digits_3", "digits_4"]
    lines = read_metrics(tmp_path / "runs/tool_use")
    first, last = (line for line in lines if "eval/products/accuracy" in line)
    assert 0.3 < first["eval/products/tool_calls_mean"] < 1.5
    shown = next(row for row in rows if row[:3] == ["tool", "calls,", "mean"])
    assert shown[3:5] == [f"{line['eval/products/tool_calls_mean']:.3f}" for line in (first, last)]
    trained = [line for line in lines if "loss/policy" in line]
    assert [line["step"] for line in trained] == [1, 2]
    assert all(line["mismatch/logprob_abs_max"] < 1e-3 and line["environment/restarted"] == 0 for line in trained)
    groups = [group for step in (1, 2) for group, _ in read_step(tmp_path / "runs/tool_use", step)]
    assert any(report.tool_calls for group in groups for one in group.rollouts for report in one.reports)
    assert (tmp_path / "runs/tool_use/report.html").is_file() and (tmp_path / "runs/tool_use/hf").is_dir()
