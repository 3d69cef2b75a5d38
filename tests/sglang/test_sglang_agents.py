"""An agent on two real SGLang servers: chats one after the other and at once, whose tokens the trainer finds again."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
import yaml
from books import assert_books_add_up
from cli_runs import trained
from sglang_pool import cpu_servers

from megatron_daro.observe.metrics import read_metrics
from megatron_daro.rollout.recorder import read_step

AGENT = Path(__file__).parents[1] / "toy_agent.py"
# The tiny model knows "d=" -> "####d" or "####(d+1)": a user's message is the digit, and an answer begins with "=".
TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}={% endif %}"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


@pytest.mark.heavy
def test_an_agent_trains_on_two_servers(tmp_path, pool, tiny):
    pool.down()
    model = shutil.copytree(tiny.model, tmp_path / "model")
    (model / "chat_template.jinja").write_text(TEMPLATE)
    content = yaml.safe_load(tiny.config.read_text())
    content["engine"] = {"kind": "sglang", "replicas": 2, "sglang": cpu_servers(sync="distributed")}
    (tmp_path / "sglang.yaml").write_text(yaml.safe_dump(content))
    command = [sys.executable, str(AGENT)]
    environment = {"kind": "agent", "command": command, "workers": 4, "options": {"at_once": True}}
    options = [f"environment={json.dumps(environment)}", f"model.path={model}", "data.prompt_template=chat"]
    options += ["rollout.max_response_tokens=28", "actor.tensor_parallel=1", "algorithm.filter=none"]
    options += ["trainer.steps=3", f"trainer.run_dir={tmp_path / 'run'}"]
    # Of the text by which SGLang warms itself up the tiny tokenizer knows nothing, and no tokens end the server.
    options += ["engine.sglang.arguments.skip_server_warmup=true"]
    trained(["train", tmp_path / "sglang.yaml", *options], tmp_path / "log")
    lines = [line for line in read_metrics(tmp_path / "run") if "loss/policy" in line]
    assert [line["step"] for line in lines] == [1, 2, 3]
    for step, line in enumerate(lines, 1):
        assert_books_add_up(line)
        assert line["mismatch/logprob_abs_max"] < 1e-3
        assert line["environment/failed"] == 0 and line["engine/retries"] == 0
        for group, _ in read_step(tmp_path / "run", step):
            for rollout in group.rollouts:
                assert len(rollout.contexts) == 4 and len(rollout.turns) == 5
                assert sum(rollout.contexts) == len(rollout.tokens)
                assert rollout.loss_mask.sum() == rollout.generated_length
