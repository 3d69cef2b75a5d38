"""An environment of the package verifiers, through the command line: it trains, and its problems are its own.

Skipped without the package: bash tests/verifiers_hub.sh
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest
from cli_runs import run_cli, trained
from test_own_environment_runs import TESTS

from megatron_daro.observe.metrics import read_metrics
from megatron_daro.rollout.recorder import read_step

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("verifiers") is None,
    reason="the package verifiers is not here: bash tests/verifiers_hub.sh installs it",
)
# The tiny model knows "d=" -> "####d" or "####(d+1)": a user's message is the digit, and an answer begins with "=".
TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}={% endif %}"


@pytest.fixture(scope="module")
def task(tiny, tmp_path_factory):
    """Model with a chat template, and the options of a run on the environment's own problems."""
    folder = tmp_path_factory.mktemp("hub")
    model, train = shutil.copytree(tiny.model, folder / "model"), folder / "train.jsonl"
    (model / "chat_template.jinja").write_text(TEMPLATE)
    command = [sys.executable, "-m", "megatron_daro.rollout.verifiers_hub", "hub_digits", "--model", str(model)]
    written = subprocess.run(command, env={**os.environ, **paths()}, capture_output=True, text=True, timeout=120)
    assert written.returncode == 0, written.stderr
    train.write_text(written.stdout)
    return [
        tiny.config,
        "environment.kind=verifiers:hub_digits",
        f"model.path={model}",
        f"data.train=[{train}]",
        "data.prompt_template=chat",
        "data.eval=[]",
        "rollout.max_response_tokens=16",
        "actor.tensor_parallel=1",
        "algorithm.filter=none",
        "trainer.steps=3",
    ]


def paths():
    """PYTHONPATH with the environment's module and the package."""
    return {"PYTHONPATH": os.pathsep.join([TESTS["PYTHONPATH"], os.environ.get("PYTHONPATH", "")])}


def test_it_trains_three_steps_of_its_conversations(task, tmp_path):
    trained(["train", *task, f"trainer.run_dir={tmp_path / 'run'}"], tmp_path / "log", paths())
    lines = [line for line in read_metrics(tmp_path / "run") if "loss/policy" in line]
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert all(line["mismatch/logprob_abs_max"] < 1e-4 and line["loss/grad_norm"] > 0 for line in lines)
    assert all(line["environment/restarted"] == 0 and 1 < line["environment/turns_mean"] <= 3 for line in lines)
    assert all(line["environment/reward/repeats"] == pytest.approx(line["accuracy/mean"]) for line in lines)
    for group, _ in read_step(tmp_path / "run", 1):
        for rollout, verdict in zip(group.rollouts, group.verdicts, strict=True):
            mask = np.concatenate([np.repeat([0, 1], turn) for turn in rollout.turns])
            assert rollout.loss_mask.tolist() == mask.tolist()
            assert verdict.reason in ("has_final_env_response", "max_turns_reached")
            assert dict(verdict.rewards)["brief"] == len(rollout.turns)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (["environment.options.kind=group"], "verifiers:hub_digits has rewards of a whole group"),
        (["environment.kind=verifiers:no_such"], "verifiers:no_such cannot be loaded"),
    ],
)
def test_what_is_not_served_is_refused_before_anything_starts(task, tmp_path, changes, words):
    finished = run_cli(["train", *task, *changes, f"trainer.run_dir={tmp_path / 'run'}"], tmp_path / "log", paths())
    assert finished.code == 2
    assert words in finished.last_line
