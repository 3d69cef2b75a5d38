"""Conversations of several turns on two real SGLang servers: they train, each turn on the server of the one before."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import yaml
from books import assert_books_add_up
from cli_runs import trained
from sglang_pool import cpu_servers

from megatron_daro.observe.metrics import read_metrics
from megatron_daro.rollout.recorder import read_step

EXAMPLES = Path(__file__).parents[2] / "examples" / "environments"
sys.path.insert(0, str(EXAMPLES))

import tiny_tools  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


@pytest.mark.heavy
def test_a_game_of_several_turns_trains_on_two_servers(tmp_path, pool):
    pool.down()
    tools = tiny_tools.build(tmp_path)
    content = yaml.safe_load((tmp_path / "tools.yaml").read_text())
    content["engine"] = {"kind": "sglang", "replicas": 2, "sglang": cpu_servers(sync="distributed")}
    (tmp_path / "sglang.yaml").write_text(yaml.safe_dump(content))
    options = [*tools.options("word_game:WordGame"), f"trainer.run_dir={tmp_path / 'run'}"]
    trained(["train", tmp_path / "sglang.yaml", *options], tmp_path / "log", {"PYTHONPATH": str(EXAMPLES)})
    lines = [line for line in read_metrics(tmp_path / "run") if "loss/policy" in line]
    assert [line["step"] for line in lines] == [1, 2, 3]
    for line in lines:
        assert_books_add_up(line)
        assert line["mismatch/logprob_abs_max"] < 1e-3
        assert 1 < line["environment/turns_mean"] <= 3 and line["environment/restarted"] == 0
        assert line["engine/servers"] == 2 and line["engine/retries"] == 0
    assert any(line["loss/grad_norm"] > 0 for line in lines)
    for step, line in enumerate(lines, 1):
        groups = [group for group, _ in read_step(tmp_path / "run", step)]
        # What a server samples varies: a step whose groups each have one reward only has no advantages.
        signal = any(len({verdict.reward for verdict in group.verdicts}) > 1 for group in groups)
        assert (line["loss/grad_norm"] > 0) == signal
        for group in groups:
            for rollout in group.rollouts:
                mask = np.concatenate([np.repeat([0, 1], turn) for turn in rollout.turns])
                assert rollout.loss_mask.tolist() == mask.tolist()
                assert rollout.weight_version == step - 1 and len(rollout.version_spans) == 1
                assert len(rollout.reports) == len(rollout.turns)
