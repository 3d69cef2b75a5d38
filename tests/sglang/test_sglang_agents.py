"""Agents on two real SGLang servers: chats whose tokens the trainer finds again, also where one of the two is lost."""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
from pathlib import Path

import clients_of_others
import pytest
import yaml
from books import assert_books_add_up
from cli_runs import servers, started, trained
from sglang_pool import cpu_servers

from megatron_daro.observe.metrics import read_metrics
from megatron_daro.rollout.recorder import read_step

AGENT = Path(__file__).parents[1] / "toy_agent.py"
# The tiny model knows "d=" -> "####d" or "####(d+1)": a user's message is the digit, and an answer begins with "=".
TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}={% endif %}"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


@pytest.fixture
def arguments(tmp_path, pool, tiny):
    """options of toy_agent.py, or another environment -> those of `megatron-daro train`."""
    pool.down()
    model = shutil.copytree(tiny.model, tmp_path / "model")
    (model / "chat_template.jinja").write_text(TEMPLATE)
    content = yaml.safe_load(tiny.config.read_text())
    content["engine"] = {"kind": "sglang", "replicas": 2, "sglang": cpu_servers(sync="distributed")}
    (tmp_path / "sglang.yaml").write_text(yaml.safe_dump(content))
    command = [sys.executable, str(AGENT)]

    def write(environment=None, **own):
        environment = environment or {"kind": "agent", "command": command, "workers": 4, "options": own}
        options = [f"environment={json.dumps(environment)}", f"model.path={model}", "data.prompt_template=chat"]
        options += ["rollout.max_response_tokens=28", "actor.tensor_parallel=1", "algorithm.filter=none"]
        options += ["trainer.steps=3", f"trainer.run_dir={tmp_path / 'run'}", "trainer.eval_every_steps=0"]
        # Of the text by which SGLang warms itself up the tiny tokenizer knows nothing, and no tokens end the server.
        options += ["engine.sglang.arguments.skip_server_warmup=true"]
        return ["train", tmp_path / "sglang.yaml", *options]

    return write


@pytest.mark.heavy
def test_an_agent_trains_on_two_servers(tmp_path, arguments):
    trained(arguments(at_once=True), tmp_path / "log")
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


@pytest.mark.heavy
def test_an_agent_does_not_notice_that_the_server_of_its_session_is_lost(tmp_path, arguments):
    waits = tmp_path / "waits"
    waits.mkdir()
    with started(arguments(waits=str(waits)), tmp_path / "log") as run:
        run.wait_until(lambda: len(list(waits.iterdir())) >= 4, "agents with an answer", 400)
        servers(run)[0].kill()  # sessions of four agents are on two servers
        (waits / "go").touch()
        finished = run.finish()
    assert finished.code == 0, finished.stderr
    lines = [line for line in read_metrics(tmp_path / "run") if "loss/policy" in line]
    assert [line["step"] for line in lines] == [1, 2, 3] and lines[-1]["engine/fenced"] >= 1
    for step, line in enumerate(lines, 1):
        assert_books_add_up(line)
        assert line["environment/failed"] == 0 and line["mismatch/logprob_abs_max"] < 1e-3
        for group, _ in read_step(tmp_path / "run", step):
            for rollout in group.rollouts:
                assert len(rollout.contexts) == 2 and len(rollout.turns) == 3
                assert rollout.loss_mask.sum() == rollout.generated_length


@pytest.mark.skipif(
    importlib.util.find_spec("minisweagent") is None,
    reason="clients of others are not here: bash tests/agents.sh installs them",
)
def test_clients_of_others_train_on_two_servers(tmp_path, arguments):
    command = arguments({"kind": "clients_of_others:solve"})
    trained(command, tmp_path / "log", clients_of_others.environment(tmp_path))
    clients_of_others.check(tmp_path / "run", 1e-3)
