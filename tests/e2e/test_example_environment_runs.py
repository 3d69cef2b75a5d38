"""Each environment of examples/environments, through the command line: three steps of several turns, in workers."""

import os
import sys
from pathlib import Path

import numpy as np
import pytest
import sandboxed
from cli_runs import run_cli, trained

from megatron_daro.observe.metrics import read_metrics
from megatron_daro.rollout.recorder import read_step

EXAMPLES = Path(__file__).parents[2] / "examples" / "environments"
PATH = {"PYTHONPATH": os.pathsep.join([str(EXAMPLES), str(Path(__file__).parents[1])])}
sys.path.insert(0, str(EXAMPLES))

import tiny_tools  # noqa: E402


@pytest.fixture(scope="module")
def tools(tmp_path_factory):
    return tiny_tools.build(tmp_path_factory.mktemp("tools"))


@pytest.mark.parametrize(
    "kind",
    [
        # What each of them does: tests/unit/examples/test_example_environments.py.
        pytest.param(kind, marks=[] if kind == "python_tool:PythonTool" else [pytest.mark.heavy])
        for kind in tiny_tools.ENVIRONMENTS
    ],
)
def test_it_trains_three_steps(tools, tmp_path, kind):
    if kind != "word_game:WordGame":
        sandboxed.require()
    options = [*tools.options(kind), f"trainer.run_dir={tmp_path / 'run'}"]
    trained(["train", tools.directory / "tools.yaml", *options], tmp_path / "log", PATH)
    lines = [line for line in read_metrics(tmp_path / "run") if "loss/policy" in line]
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert all(line["mismatch/logprob_abs_max"] < 1e-3 for line in lines)
    assert any(line["loss/grad_norm"] > 0 for line in lines)
    assert all(line["environment/turns_mean"] > 1 and line["environment/restarted"] == 0 for line in lines)
    assert 0 < np.mean([line["accuracy/mean"] for line in lines]) < 1
    if kind != "word_game:WordGame":
        assert lines[-1]["environment/tool_calls"] >= 3 * 8
    for step in (1, 2, 3):
        for group, _ in read_step(tmp_path / "run", step):
            for rollout in group.rollouts:
                mask = np.concatenate([np.repeat([0, 1], turn) for turn in rollout.turns])
                assert rollout.loss_mask.tolist() == mask.tolist()


def test_what_a_worker_refuses_is_said_before_anything_starts(tools, tmp_path):
    sandboxed.require()
    options = [*tools.options("python_tool:PythonTool"), f"trainer.run_dir={tmp_path / 'run'}"]
    wrong = ["environment.options.limits.wall_s=0"]
    finished = run_cli(["train", tools.directory / "tools.yaml", *options, *wrong], tmp_path / "log", PATH)
    assert finished.code == 2
    assert "python_tool:PythonTool cannot be made (SandboxError: sandbox limits: got wall_s 0" in finished.last_line
