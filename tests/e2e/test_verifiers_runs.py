"""Tasks of the package verifiers, through the command line: they train, and their problems are their own.

Skipped without the package: bash tests/verifiers_hub.sh
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from books import assert_books_add_up
from cli_runs import run_cli, trained
from sglang_pool import cpu_servers

from megatron_daro.observe.metrics import read_metrics
from megatron_daro.rollout.recorder import read_step

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("verifiers") is None,
    reason="the package verifiers is not here: bash tests/verifiers_hub.sh installs it",
)
# The tiny model knows "d=" -> "####d" or "####(d+1)": a user's message is the digit, and an answer begins with "=".
TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}={% endif %}"
PATHS = {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])}


@pytest.fixture(scope="module")
def task(tiny, tmp_path_factory):
    """Model with a chat template, and the options of a run on the taskset's own problems."""
    folder = tmp_path_factory.mktemp("hub")
    model, train = shutil.copytree(tiny.model, folder / "model"), folder / "train.jsonl"
    (model / "chat_template.jinja").write_text(TEMPLATE)
    command = [sys.executable, "-m", "megatron_daro.environments.verifiers_worker", "hub_digits"]
    written = subprocess.run(command, env={**os.environ, **PATHS}, capture_output=True, text=True, timeout=120)
    assert written.returncode == 0, written.stderr
    train.write_text("".join(line + "\n" for line in written.stdout.splitlines() if '"7"' not in line))
    return [
        tiny.config,
        "environment.kind=verifiers:hub_digits",
        "environment.options={agent: {runtime: {type: subprocess}}}",
        f"model.path={model}",
        f"data.train=[{train}]",
        "data.prompt_template=chat",
        "data.eval=[]",
        "rollout.max_response_tokens=24",
        "actor.tensor_parallel=1",
        "algorithm.filter=none",
        "trainer.eval_every_steps=0",
        "trainer.steps=2",
    ]


@pytest.mark.parametrize(("kind", "apart"), [("embedded", 1e-4), ("sglang", 1e-3)])
def test_its_harness_asks_and_its_rewards_train(task, tmp_path, kind, apart):
    options = [f"trainer.run_dir={tmp_path / 'run'}"]
    if kind == "sglang":
        engine = {"kind": "sglang", "replicas": 2, "sglang": cpu_servers(sync="distributed")}
        # Of the text by which SGLang warms itself up the tiny tokenizer knows nothing, and no tokens end the server.
        options += [f"engine={json.dumps(engine)}", "engine.sglang.arguments.skip_server_warmup=true"]
    trained(["train", *task, *options], tmp_path / "log", PATHS)
    lines = [line for line in read_metrics(tmp_path / "run") if "loss/policy" in line]
    assert [line["step"] for line in lines] == [1, 2]
    for line in lines:
        assert_books_add_up(line)
        assert line["mismatch/logprob_abs_max"] < apart and line["environment/restarted"] == 0
        assert line["environment/reward/repeats"] == pytest.approx(line["accuracy/mean"])
    for group, _ in read_step(tmp_path / "run", 1):
        for rollout, verdict in zip(group.rollouts, group.verdicts, strict=True):
            assert rollout.contexts == () and 1 <= len(rollout.turns) <= 2
            assert verdict.correct == (verdict.reward == 1.0) and dict(verdict.rewards)["turns"] == 0.0


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (["environment.options={taskset: {endless: true}}"], "verifiers:hub_digits has no tasks, or endless ones"),
        (["environment.kind=verifiers:no_such"], "verifiers:no_such cannot be loaded"),
    ],
)
def test_what_is_not_served_is_refused_before_anything_starts(task, tmp_path, changes, words):
    finished = run_cli(["train", *task, *changes, f"trainer.run_dir={tmp_path / 'run'}"], tmp_path / "log", PATHS)
    assert finished.code == 2
    assert words in finished.last_line
