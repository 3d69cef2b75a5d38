"""An environment of one's own, through the command line: it trains, replays and resumes; refusals by name."""

import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
from books import assert_books_add_up
from cli_runs import checkpoint, last_step, metric_lines, run_cli, started, trained

from megatron_daro.observe.metrics import read_metrics
from megatron_daro.rollout.recorder import read_step

TESTS = {"PYTHONPATH": str(Path(__file__).parents[1])}
OPTIONS = [
    "environment.kind=toy_environment:SecondTry",
    "rollout.max_response_tokens=8",
    "actor.tensor_parallel=1",
    "algorithm.filter=none",
    "trainer.save_every_steps=2",
]


@pytest.fixture(scope="module")
def run(tiny, tmp_path_factory):
    """Three steps with an evaluation before and after."""
    folder = tmp_path_factory.mktemp("conversations")
    options = [*OPTIONS, "trainer.steps=3", "trainer.eval_every_steps=3", f"trainer.run_dir={folder / 'run'}"]
    trained(["train", tiny.config, *options], folder / "log", TESTS)
    return folder / "run"


def recorded(run):
    return [
        (rollout, verdict)
        for step in (1, 2, 3)
        for group, _ in read_step(run, step)
        for rollout, verdict in zip(group.rollouts, group.verdicts, strict=True)
    ]


def test_it_trains_three_steps_on_conversations(run):
    lines = [line for line in read_metrics(run) if "loss/policy" in line]
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert all(line["loss/grad_norm"] > 0 for line in lines)
    assert all(line["mismatch/logprob_abs_max"] < 1e-4 for line in lines)  # of the model's tokens, in every turn
    assert all(line["environment/restarted"] == 0 for line in lines)
    assert {line["step"] for line in read_metrics(run) if "eval/digits/accuracy" in line} == {0, 3}
    seen = {(verdict.reason, verdict.reward, len(rollout.turns)) for rollout, verdict in recorded(run)}
    assert seen == {("try_1", 1.0, 1), ("try_2", 0.5, 2), ("no_match", 0.0, 2)}


def test_the_columns_of_a_conversation_are_aligned(run):
    for rollout, _ in recorded(run):
        mask = np.concatenate([np.repeat([0, 1], turn) for turn in rollout.turns])
        assert rollout.loss_mask.tolist() == mask.tolist()
        response = rollout.tokens[rollout.prompt_length :]
        assert ((rollout.logprobs != 0) <= (mask == 1)).all() and rollout.generated_length == mask.sum()
        if len(rollout.turns) == 2:
            assert response[mask == 0].tolist() == rollout.tokens[: rollout.prompt_length].tolist()[-2:]
    lengths = [line["response/length_mean"] for line in read_metrics(run) if "loss/policy" in line]
    means = [
        np.mean([r.generated_length for group, _ in read_step(run, step) for r in group.rollouts]) for step in (1, 2, 3)
    ]
    np.testing.assert_allclose(lengths, means)
    turns = [np.mean([len(r.turns) for group, _ in read_step(run, step) for r in group.rollouts]) for step in (1, 2, 3)]
    metrics = [line for line in read_metrics(run) if "loss/policy" in line]
    np.testing.assert_allclose([line["environment/turns_mean"] for line in metrics], turns)
    observed = [line["environment/observed_tokens_mean"] for line in metrics]
    np.testing.assert_allclose(observed, [2 * (mean - 1) for mean in turns])


def test_a_replay_trains_the_same_and_needs_no_environment(run, tiny, tmp_path):
    options = [*OPTIONS[1:], "trainer.steps=3", f"trainer.run_dir={tmp_path / 'again'}", "--replay", str(run)]
    trained(["train", tiny.config, *options], tmp_path / "log")
    again = [line for line in read_metrics(tmp_path / "again") if "loss/policy" in line]
    first = [line for line in read_metrics(run) if "loss/policy" in line]
    names = ("loss/policy", "loss/grad_norm", "accuracy/mean", "response/length_mean")
    assert [[line[name] for name in names] for line in again] == [[line[name] for name in names] for line in first]


def test_a_run_that_was_cut_goes_on_with_the_same_conversations(run, tiny, tmp_path):
    """As if it had ended after the checkpoint of step 2: what it wrote later is there, and is written again."""
    resumed = shutil.copytree(run, tmp_path / "run")
    shutil.rmtree(checkpoint(resumed, 3))
    (resumed / "rollouts" / "step_000003.parquet").unlink()
    options = [*OPTIONS, "trainer.eval_every_steps=3", f"trainer.run_dir={resumed}"]
    trained(["train", tiny.config, *options, "trainer.steps=3", "--resume"], tmp_path / "resumed", TESTS)
    assert metric_lines(resumed, [1, 2, 3])[2] == metric_lines(run, [1, 2, 3])[2]
    for one, other in zip(read_step(resumed, 3), read_step(run, 3), strict=True):
        for mine, theirs in zip(one[0].rollouts, other[0].rollouts, strict=True):
            assert mine.tokens.tolist() == theirs.tokens.tolist() and mine.turns == theirs.turns
            assert mine.logprobs.tobytes() == theirs.logprobs.tobytes()


@pytest.mark.heavy
def test_a_run_that_was_killed_between_turns_goes_on_with_the_same_conversations(run, tiny, tmp_path):
    killed = tmp_path / "run"
    arguments = ["train", tiny.config, *OPTIONS, "trainer.eval_every_steps=3", f"trainer.run_dir={killed}"]
    arguments += ["trainer.steps=3", f"environment.options.kill={tmp_path / 'killed'}"]
    with started(arguments, tmp_path / "log", TESTS) as one:  # the environment kills the driver in a second turn
        assert one.finish().code == -signal.SIGKILL
        assert one.left_behind() == []
    assert (tmp_path / "killed").exists() and last_step(killed) in (0, 1, 2)
    trained([*arguments, "--resume"], tmp_path / "resumed", TESTS)
    assert metric_lines(killed) == metric_lines(run)
    for line in read_metrics(killed)[1:]:
        assert_books_add_up(line)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (["environment.kind=no_such_module:X"], "environment.kind: got 'no_such_module:X'"),
        (["environment.kind=toy_environment:OtherSignature"], "OtherSignature.rollout"),
        (["environment.kind=single_turn", "environment.options.late=1"], "environment.options: got {'late': 1}"),
    ],
)
def test_a_class_that_does_not_fit_is_refused_before_anything_starts(tiny, tmp_path, refused, changes, words):
    finished = refused(["train", tiny.config, *OPTIONS, *changes, f"trainer.run_dir={tmp_path / 'run'}"])
    assert finished.code == 2
    assert words in finished.last_line


def test_a_class_that_cannot_be_made_is_refused_before_a_step(tiny, tmp_path):
    options = [*OPTIONS, "environment.options.wrong=constructor", f"trainer.run_dir={tmp_path / 'run'}"]
    finished = run_cli(["train", tiny.config, *options], tmp_path / "log", TESTS)
    assert finished.code == 2
    assert "toy_environment:SecondTry cannot be made (RuntimeError: no such" in finished.last_line


@pytest.mark.heavy  # the check: tests/unit/rollout/test_conversations.py; how a run ends of it: test_own_parts.py
def test_something_else_than_a_verdict_is_refused_before_a_step(tiny, tmp_path):
    options = [*OPTIONS, "environment.options.wrong=type", f"trainer.run_dir={tmp_path / 'run'}"]
    finished = run_cli(["train", tiny.config, *options], tmp_path / "log", TESTS)
    assert finished.code != 0
    assert "toy_environment:SecondTry: rollout returned a float" in finished.stderr
    assert not [line for line in read_metrics(tmp_path / "run") if "loss/policy" in line]
