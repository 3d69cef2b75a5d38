"""An engine of one's own, through the command line: it trains three steps, and is refused by name where it is wrong."""

from pathlib import Path

import pytest
from cli_runs import run_cli, trained

from megatron_daro.observe.metrics import read_metrics

TESTS = {"PYTHONPATH": str(Path(__file__).parents[1])}
OPTIONS = ["engine.kind=toy_engine:Toy", "actor.tensor_parallel=1", "trainer.steps=3", "algorithm.filter=none"]


def test_it_trains_three_steps_with_the_weights_of_each(tiny, tmp_path):
    trained(["train", tiny.config, *OPTIONS, f"trainer.run_dir={tmp_path / 'run'}"], tmp_path / "log", TESTS)
    lines = [line for line in read_metrics(tmp_path / "run") if "loss/policy" in line]
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert all(line["loss/grad_norm"] > 0 for line in lines)
    assert all(line["mismatch/logprob_abs_max"] < 1e-4 for line in lines)
    assert not list((tmp_path / "run").glob("engine_weights/*"))


@pytest.mark.heavy
def test_weights_that_it_does_not_load_show_as_a_mismatch(tiny, tmp_path):
    options = [*OPTIONS, "engine.options.wrong=stale", f"trainer.run_dir={tmp_path / 'run'}"]
    trained(["train", tiny.config, *options], tmp_path / "log", TESTS)
    last = [line for line in read_metrics(tmp_path / "run") if "loss/policy" in line][-1]
    assert last["mismatch/logprob_abs_max"] > 1e-3


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (["engine.kind=no_such_module:Toy"], "engine.kind: got 'no_such_module:Toy', which cannot be imported"),
        (["engine.kind=toy_engine:Missing"], "engine.kind: got 'toy_engine:Missing', which cannot be imported"),
        (["engine.kind=toy_engine:WithoutLoad"], "toy_engine:WithoutLoad.load_weights does not fit ServerApi"),
        (["engine.kind=toy_engine:OtherAnswer"], "toy_engine:OtherAnswer.answer does not fit ServerApi"),
        (["engine.options.wrongg=x"], "toy_engine:Toy: got an unexpected keyword argument 'wrongg'"),
    ],
)
def test_a_class_that_does_not_fit_is_refused_before_anything_starts(tiny, tmp_path, refused, changes, words):
    finished = refused(["train", tiny.config, *OPTIONS, *changes, f"trainer.run_dir={tmp_path / 'run'}"])
    assert finished.code == 2
    assert words in finished.last_line


def test_a_class_that_cannot_be_made_is_refused_before_a_step(tiny, tmp_path):
    options = [*OPTIONS, "engine.options.wrong=constructor", f"trainer.run_dir={tmp_path / 'run'}"]
    finished = run_cli(["train", tiny.config, *options], tmp_path / "log", TESTS)
    assert finished.code == 2
    assert "toy_engine:Toy cannot be made (RuntimeError: no such accelerator)" in finished.last_line


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ("tokens", "tokens; allowed: 1 to 4"),
        pytest.param("logprobs", "allowed: one log-prob for each token", marks=pytest.mark.heavy),
    ],
)
def test_an_answer_of_the_wrong_length_is_refused_before_a_step(tiny, tmp_path, wrong, words):
    options = [*OPTIONS, f"engine.options.wrong={wrong}", f"trainer.run_dir={tmp_path / 'run'}"]
    finished = run_cli(["train", tiny.config, *options], tmp_path / "log", TESTS)
    assert finished.code != 0
    assert "engine toy_engine:Toy.answer: got" in finished.stderr and words in finished.stderr
    assert not [line for line in read_metrics(tmp_path / "run") if "loss/policy" in line]
