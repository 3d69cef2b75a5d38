"""A whole run in which the trainer and a real SGLang server take turns. On a CPU a server gives no memory back, but
takes the calls, refuses and dies as one on a GPU does; so the order of the steps is what is seen here."""

from __future__ import annotations

import re

import pytest
from books import assert_books_add_up
from cli_runs import last_step, servers, started
from sglang_pool import cpu_servers

from megatron_daro.observe.metrics import read_metrics

pytestmark = [pytest.mark.slow, pytest.mark.heavy, pytest.mark.timeout(1200)]

STEPS, START_LIMIT_S = 3, 400
_CALL = re.compile(r'"POST /(\w+) HTTP')
_TURNS = ("generate", "release_memory_occupation", "resume_memory_occupation", "update_weights_from_disk")


@pytest.fixture
def config(tiny, tmp_path, pool):
    """The tiny task on as many servers as there are ranks, which they share their places with."""
    sglang = cpu_servers(sync="disk", sync_timeout_s=120, request_timeout_s=120)
    pool.down()

    def write(**sections):
        ranks = sections.pop("ranks")
        engine = {"kind": "sglang", "replicas": ranks, "colocate": True, "sglang": sglang}
        changes = {"engine": engine, "rollout": {"max_refill_rounds": 20}, "actor": {"tensor_parallel": ranks}}
        return tiny.write_config(tmp_path / "colocated.yaml", changes | sections)

    return write


def test_trainer_and_server_take_turns(config, tmp_path):
    run_dir = tmp_path / "run"
    trainer = {"steps": STEPS, "save_every_steps": 1, "keep_checkpoints": 5, "eval_every_steps": 2}
    with started(["train", config(ranks=1, trainer=trainer), f"trainer.run_dir={run_dir}"], tmp_path / "log") as run:
        finished = run.finish()
        assert run.left_behind() == []
    assert finished.code == 0, finished.stderr
    lines = read_metrics(run_dir)
    assert [line["step"] for line in lines] == list(range(STEPS + 1))
    for line in lines[1:]:
        assert_books_add_up(line)
        assert line["rollout/staleness_mean"] == 0
        assert line["mismatch/logprob_abs_mean"] < 1e-4, "the server has the weights of the step before"
        assert line["sync/verified"] == 1
        assert line["memory/moved_bytes"] > 0 and line["memory/left_bytes"] == 0
        assert line["engine/fenced"] == 0
    assert sorted(path.name for path in (run_dir / "checkpoints").glob("step_*")) == [
        f"step_{step:06d}" for step in range(1, STEPS + 1)
    ]
    assert turns_of(run_dir / "logs" / "server_0.log") == [
        "generate",  # the first token, and whether it is the right model
        *(["release", "resume", "update", "resume", "generate"] * (STEPS + 1)),  # once before the first step
        "release",  # for the last checkpoint
    ]


def test_a_server_killed_in_the_trainers_turn_comes_back_and_the_run_resumes(config, tmp_path):
    run_dir, steps = tmp_path / "run", 8
    command = ["train", config(ranks=2), f"trainer.run_dir={run_dir}"]
    with started([*command, f"trainer.steps={steps}"], tmp_path / "log") as run:
        log = run_dir / "logs" / "server_0.log"
        run.wait_until(lambda: last_step(run_dir) >= 1, "first step", START_LIMIT_S)
        run.wait_until(lambda: turns_of(log)[-1] == "release", "the trainer's turn")
        servers(run)[0].kill()
        finished = run.finish()
        assert run.left_behind() == []
    assert finished.code == 0, finished.stderr
    lines = read_metrics(run_dir)
    assert [line["step"] for line in lines] == list(range(1, steps + 1))
    assert lines[-1]["engine/fenced"] == lines[-1]["engine/restarts"] == 1
    assert [line["sync/servers"] for line in lines][-1] == 2, "it was given the weights with the other"
    for line in lines:
        assert_books_add_up(line)
        assert line["mismatch/logprob_abs_mean"] < 1e-4 and line["memory/left_bytes"] == 0
    with started([*command, f"trainer.steps={steps + 1}", "--resume"], tmp_path / "again") as run:
        assert run.finish().code == 0
    assert read_metrics(run_dir)[-1]["step"] == steps + 1


def turns_of(log):
    """Names of the calls that matter in a server's log, those that follow each other without a change once."""
    calls = [call for call in _CALL.findall(log.read_text()) if call in _TURNS]
    return [a.split("_")[0] for a, b in zip(calls, [None, *calls], strict=False) if a != b]
