"""An agent that is a program, through the command line: it trains on several sequences a rollout, replays, resumes."""

import importlib.util
import json
import shutil
import sys
from pathlib import Path

import clients_of_others
import pytest
from books import assert_books_add_up
from cli_runs import checkpoint, metric_lines, trained

from megatron_daro.observe.metrics import read_metrics
from megatron_daro.rollout.recorder import read_step

AGENT = Path(__file__).parents[1] / "toy_agent.py"
# The tiny model knows "d=" -> "####d" or "####(d+1)": a user's message is the digit, and an answer begins with "=".
TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}={% endif %}"


@pytest.fixture(scope="module")
def task(tiny, tmp_path_factory):
    """Model with a chat template, and the options of a run."""
    folder = tmp_path_factory.mktemp("agents")
    model = shutil.copytree(tiny.model, folder / "model")
    (model / "chat_template.jinja").write_text(TEMPLATE)
    environment = {"kind": "agent", "command": [sys.executable, str(AGENT)], "workers": 4}
    return [
        tiny.config,
        f"environment={json.dumps(environment)}",
        f"model.path={model}",
        "data.prompt_template=chat",
        "rollout.max_response_tokens=24",
        "actor.tensor_parallel=1",
        "algorithm.filter=none",
        "trainer.save_every_steps=2",
        "trainer.eval_every_steps=3",
    ]


@pytest.fixture(scope="module")
def run(task, tmp_path_factory):
    """Three steps with an evaluation before and after."""
    folder = tmp_path_factory.mktemp("run")
    trained(["train", *task, "trainer.steps=3", f"trainer.run_dir={folder / 'run'}"], folder / "log")
    return folder / "run"


def steps(run):
    return [line for line in read_metrics(run) if "loss/policy" in line]


def test_the_trainer_finds_the_log_probs_of_every_sequence(run):
    lines = steps(run)
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert all(line["loss/grad_norm"] > 0 and line["mismatch/logprob_abs_max"] < 1e-4 for line in lines)
    assert all(line["environment/failed"] == line["environment/restarted"] == 0 for line in lines)
    assert all(line["environment/turns_mean"] == 3 for line in lines)
    assert {line["step"] for line in read_metrics(run) if "eval/digits/accuracy" in line} == {0, 3}
    for line in lines:
        assert_books_add_up(line)
    for group, _ in read_step(run, 1):
        for rollout, verdict in zip(group.rollouts, group.verdicts, strict=True):
            assert rollout.prompt_length == 1 and len(rollout.contexts) == 2 and len(rollout.turns) == 3
            assert sum(rollout.contexts) == len(rollout.tokens) and verdict.rewards == ()
            assert rollout.loss_mask.sum() == rollout.generated_length


def test_a_replay_trains_the_same_and_needs_no_agent(run, task, tmp_path):
    options = ["environment.command=[no-such-program]", "trainer.steps=3", f"trainer.run_dir={tmp_path / 'again'}"]
    trained(["train", *task, *options, "--replay", str(run)], tmp_path / "log")
    names = ("loss/policy", "loss/grad_norm", "accuracy/mean", "response/length_mean")
    again, first = steps(tmp_path / "again"), steps(run)
    assert [[line[name] for name in names] for line in again] == [[line[name] for name in names] for line in first]


@pytest.fixture(scope="module")
def mixed(task, tiny, tmp_path_factory):
    """Options of a run with this agent and single answers, and a run of three steps."""
    folder = tmp_path_factory.mktemp("mixed")
    rows = [json.loads(line) for line in tiny.train.read_text().splitlines()]
    files = [folder / "single.jsonl", folder / "agents.jsonl"]
    for number, path in enumerate(files):
        path.write_text("".join(json.dumps(row) + "\n" for row in rows[number::2]))
    agent = json.loads(task[1].removeprefix("environment="))
    several = [
        {"name": "single", "weight": 1},
        {"name": "tools", "sources": ["agents", "held_out"], "weight": 1, **agent},
    ]
    options = [
        *(option for option in task if not str(option).startswith(("environment=", "trainer.eval"))),
        f"environments={json.dumps(several)}",
        f"data.train={json.dumps([str(path) for path in files])}",
        "algorithm.daro.weights_by=environment_pass_rate",
        "trainer.eval_every_steps=0",
    ]
    trained(["train", *options, "trainer.steps=4", f"trainer.run_dir={folder / 'run'}"], folder / "log")
    return options, folder / "run"


def test_several_environments_train_together_and_are_measured_each(mixed):
    _, run = mixed
    lines = steps(run)
    for line in lines:
        assert_books_add_up(line)
        assert line["mismatch/logprob_abs_max"] < 1e-4
        assert line["environments/tools/groups"] + line["environments/single/groups"] > 0
        assert line["environments/tools/failed"] == line["environment/failed"] == 0
    weights = {
        name: value for name, value in lines[-1].items() if name.startswith("difficulty/weight_by_environment/1/")
    }
    assert set(weights) == {"difficulty/weight_by_environment/1/single", "difficulty/weight_by_environment/1/tools"}
    assert len({*weights.values(), 1.0}) == 3
    for group, _ in read_step(run, 1):
        turns = {len(rollout.turns) for rollout in group.rollouts}
        assert turns == ({3} if group.prompt.source == "agents" else {0})


@pytest.mark.heavy
def test_a_mixed_run_replays_and_resumes(mixed, tmp_path):
    options, run = mixed
    trained(
        ["train", *options, "trainer.steps=4", f"trainer.run_dir={tmp_path / 'again'}", "--replay", str(run)],
        tmp_path / "log",
    )
    names = ("loss/policy", "loss/grad_norm", "difficulty/weight_by_environment/1/tools", "environments/tools/reward")
    assert [[line[n] for n in names] for line in steps(tmp_path / "again")] == [
        [line[n] for n in names] for line in steps(run)
    ]
    resumed = shutil.copytree(run, tmp_path / "run")
    shutil.rmtree(checkpoint(resumed, 4))
    (resumed / "rollouts" / "step_000004.parquet").unlink()
    (resumed / "rollouts" / "step_000003.parquet").unlink()
    trained(["train", *options, f"trainer.run_dir={resumed}", "trainer.steps=4", "--resume"], tmp_path / "resumed")
    assert metric_lines(resumed, [1, 2, 3, 4]) == metric_lines(run, [1, 2, 3, 4])


@pytest.mark.heavy
def test_a_run_that_was_cut_goes_on(run, task, tmp_path):
    resumed = shutil.copytree(run, tmp_path / "run")
    shutil.rmtree(checkpoint(resumed, 3))
    (resumed / "rollouts" / "step_000003.parquet").unlink()
    trained(["train", *task, f"trainer.run_dir={resumed}", "trainer.steps=3", "--resume"], tmp_path / "resumed")
    assert [line["step"] for line in steps(resumed)] == [1, 2, 3] and metric_lines(resumed, [1, 2]) == metric_lines(
        run, [1, 2]
    )


@pytest.mark.skipif(
    importlib.util.find_spec("minisweagent") is None,
    reason="clients of others are not here: bash tests/agents.sh installs them",
)
def test_clients_of_others_train_on_the_same_sequences(run, task, tmp_path):
    """openai, litellm and openai-agents make the program's requests, so every token is the same; mini-swe-agent makes
    two of its own."""
    own = [option for option in task if not str(option).startswith("environment=")]
    options = ["environment.kind=clients_of_others:solve", "trainer.steps=3", f"trainer.run_dir={tmp_path / 'run'}"]
    trained(["train", *own, *options], tmp_path / "log", clients_of_others.environment(tmp_path))
    clients_of_others.check(tmp_path / "run", 1e-4)
    for one, other in zip(read_step(tmp_path / "run", 1), read_step(run, 1), strict=True):
        for mine, theirs in zip(one[0].rollouts, other[0].rollouts, strict=True):
            if clients_of_others.client_of(one[0].prompt) is not clients_of_others.with_mini_swe_agent:
                assert mine.tokens.tolist() == theirs.tokens.tolist() and mine.contexts == theirs.contexts


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (["environment.kind=agent"], "environment.command: got []"),
        (["environment.kind=agent", "environment.command=[python3]"], "data.prompt_template: got 'plain'"),
        (
            ["environment.kind=agent", "environment.command=[no-such-program]", "data.prompt_template=chat"],
            "environment.command: got 'no-such-program'",
        ),
        (["environment.kind=toy_agent:user", "data.prompt_template=chat"], "which is no class"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_starts(tiny, tmp_path, refused, monkeypatch, changes, words):
    monkeypatch.syspath_prepend(AGENT.parent)
    finished = refused(["train", tiny.config, *changes, f"trainer.run_dir={tmp_path / 'run'}"])
    assert finished.code == 2 and words in finished.stderr
