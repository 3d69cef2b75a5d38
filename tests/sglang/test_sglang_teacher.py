"""Distillation from a real SGLang server: the log-probs that a run trains on are the teacher's, token by token."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from books import assert_books_add_up
from cli_runs import trained
from sglang_pool import logprobs_of, serving
from transformers import AutoModelForCausalLM

from megatron_daro.observe.metrics import read_metrics
from megatron_daro.rollout.recorder import read_step

EXAMPLES = Path(__file__).parents[2] / "examples" / "environments"
sys.path.insert(0, str(EXAMPLES))

import tiny_tools  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.heavy, pytest.mark.timeout(1200)]
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def tools(tmp_path_factory):
    return tiny_tools.build(tmp_path_factory.mktemp("tools"))


@pytest.fixture(scope="module")
def teacher(tools, tmp_path_factory):
    """The same architecture with other weights: its model, and the URL of a server of it."""
    directory = tmp_path_factory.mktemp("teacher")
    shutil.copytree(tools.directory / "base", directory / "model")
    model = AutoModelForCausalLM.from_pretrained(directory / "model", dtype=torch.float32)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
    model.save_pretrained(directory / "model")
    with serving(directory) as server:
        yield model, server.url


def test_three_steps_train_on_the_log_probs_of_the_teacher(tools, teacher, tmp_path):
    model, url = teacher
    options = [*tools.options("word_game:WordGame"), f"trainer.run_dir={tmp_path / 'run'}"]
    options += [
        "algorithm.name=grpo",
        f"algorithm.distill.urls={json.dumps([url])}",
        "algorithm.distill.coefficient=0.5",
    ]
    trained(["train", tools.directory / "tools.yaml", *options], tmp_path / "log", {"PYTHONPATH": str(EXAMPLES)})
    lines = [line for line in read_metrics(tmp_path / "run") if "loss/policy" in line]
    assert [line["step"] for line in lines] == [1, 2, 3]
    for line in lines:
        assert_books_add_up(line)
        apart = []
        for group, _ in read_step(tmp_path / "run", line["step"]):
            for rollout in group.rollouts:
                said = rollout.loss_mask == 1
                assert not rollout.teacher_logprobs[~said].any() and len(rollout.turns) > 0
                expected = logprobs_of(model, rollout)
                np.testing.assert_allclose(rollout.teacher_logprobs[said], expected[said], atol=TOLERANCE, rtol=0)
                apart.append((rollout.logprobs - expected)[said])
        assert line["distill/reverse_kl"] == pytest.approx(np.concatenate(apart).mean(), abs=TOLERANCE)
        assert abs(line["distill/reverse_kl"]) > 10 * TOLERANCE
        # Tokens have the weight 1/N and, in the first pass over them, the ratio 1: the loss is the KL times its factor.
        assert line["loss/policy"] == pytest.approx(0.5 * line["distill/reverse_kl"], abs=TOLERANCE)
