"""A verifier of one's own, through the command line: three steps on its rewards, and refusals by name."""

from pathlib import Path

import pytest
from cli_runs import run_cli, trained

from megatron_daro.observe.metrics import read_metrics
from megatron_daro.rollout.recorder import read_step

TESTS = {"PYTHONPATH": str(Path(__file__).parents[1])}
OPTIONS = ["reward.verifier=toy_verifier:LastDigit", "actor.tensor_parallel=1", "trainer.steps=3"]


def test_it_trains_three_steps_on_its_own_rewards(tiny, tmp_path):
    run = tmp_path / "run"
    options = [*OPTIONS, "reward.options.near=0.25", "algorithm.filter=none", f"trainer.run_dir={run}"]
    trained(["train", tiny.config, *options], tmp_path / "log", TESTS)
    lines = [line for line in read_metrics(run) if "loss/policy" in line]
    assert [line["step"] for line in lines] == [1, 2, 3]
    verdicts = [v for step in (1, 2, 3) for group, _ in read_step(run, step) for v in group.verdicts]
    assert {(v.correct, v.reward, v.reason) for v in verdicts} >= {(True, 1.0, "match"), (False, 0.25, "near")}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (["reward.verifier=no_such_module:X"], "reward.verifier: got 'no_such_module:X', which cannot be imported"),
        (["reward.verifier=toy_verifier:OtherSignature"], "OtherSignature.verify does not fit AnswerVerifier"),
        (["reward.strict=false"], "strict with reward.verifier toy_verifier:LastDigit, which would not use them"),
    ],
)
def test_a_class_that_does_not_fit_is_refused_before_anything_starts(tiny, tmp_path, refused, changes, words):
    finished = refused(["train", tiny.config, *OPTIONS, *changes, f"trainer.run_dir={tmp_path / 'run'}"])
    assert finished.code == 2
    assert words in finished.last_line


def test_a_class_that_cannot_be_made_is_refused_before_a_step(tiny, tmp_path):
    options = [*OPTIONS, "reward.options.wrong=constructor", f"trainer.run_dir={tmp_path / 'run'}"]
    finished = run_cli(["train", tiny.config, *options], tmp_path / "log", TESTS)
    assert finished.code == 2
    assert "toy_verifier:LastDigit cannot be made (RuntimeError: no such table)" in finished.last_line


def test_something_else_than_a_verdict_is_refused_before_a_step(tiny, tmp_path):
    options = [*OPTIONS, "reward.options.wrong=type", f"trainer.run_dir={tmp_path / 'run'}"]
    finished = run_cli(["train", tiny.config, *options], tmp_path / "log", TESTS)
    assert finished.code != 0
    assert "toy_verifier:LastDigit.verify returned a float" in finished.stderr
    assert not [line for line in read_metrics(tmp_path / "run") if "loss/policy" in line]
