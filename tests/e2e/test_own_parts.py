"""An algorithm, an engine and a verifier of one's own in one run, through the command line: each is what trains.

Of each, what is wrong is refused by name.
"""

from pathlib import Path

import pytest
import torch
from cli_runs import run_cli, trained

from megatron_daro.observe.metrics import read_metrics
from megatron_daro.rollout.recorder import read_step

BASELINE = 0.3
STEPS = 3
TESTS = {"PYTHONPATH": str(Path(__file__).parents[1])}
LAYOUT = ["actor.tensor_parallel=1", f"trainer.steps={STEPS}"]
ALGORITHM = ["algorithm.name=toy_algorithm:Toy", *LAYOUT]
ENGINE = ["engine.kind=toy_engine:Toy", "algorithm.filter=none", *LAYOUT]
VERIFIER = ["reward.verifier=toy_verifier:LastDigit", *LAYOUT]


@pytest.fixture(scope="module")
def run(tiny, tmp_path_factory):
    directory = tmp_path_factory.mktemp("own_parts")
    parts = [*ALGORITHM, "engine.kind=toy_engine:Toy", *VERIFIER]
    options = [
        f"algorithm.options.baseline={BASELINE}",
        "reward.options.near=0.25",
        f"trainer.run_dir={directory / 'run'}",
    ]
    trained(["train", tiny.config, *parts, *options], directory / "log", TESTS)
    return directory / "run"


def test_the_engine_has_the_weights_of_each_step(run):
    lines = [line for line in read_metrics(run) if "loss/policy" in line]
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert all(line["loss/grad_norm"] > 0 for line in lines)
    assert all(line["mismatch/logprob_abs_max"] < 1e-4 for line in lines)
    assert not list(run.glob("engine_weights/*"))


def test_the_verifiers_rewards_are_those_of_the_rollouts(run):
    verdicts = [v for step in (1, 2, 3) for group, _ in read_step(run, step) for v in group.verdicts]
    assert {(v.correct, v.reward, v.reason) for v in verdicts} >= {(True, 1.0, "match"), (False, 0.25, "near")}


def test_the_algorithms_filter_chose_the_groups(run):
    outcomes = [(group.bin, used) for step in range(1, STEPS + 1) for group, used in read_step(run, step)]
    assert {bin_ for bin_, used in outcomes if used == "trained"} <= {1, 2}
    filtered = {bin_ for bin_, used in outcomes if used == "filtered"}
    assert 3 in filtered and not filtered & {1, 2}  # no filter of the package takes such a group out


def test_the_algorithms_advantage_and_coefficient_make_the_loss_of_every_step(run):
    """With one step per batch the ratio is 1, so a token's loss is -A."""
    for line in read_metrics(run)[-STEPS:]:
        samples = trained_samples(run, int(line["step"]))
        tokens = sum(rollout.response_length for _, rollout, _ in samples)
        loss = sum((1 + k) / (10 * tokens) * -(reward - BASELINE) * r.response_length for k, r, reward in samples)
        assert line["loss/policy"] == pytest.approx(loss, rel=1e-5)


def test_they_make_the_gradient(tiny, run):
    """The first step's gradient norm is that of the same sum, by autograd through transformers' model."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny.model, dtype=torch.float32)
    samples = trained_samples(run, 1)
    tokens = sum(rollout.response_length for _, rollout, _ in samples)
    loss = torch.zeros(())
    for k, rollout, reward in samples:
        tokens_S = torch.as_tensor(rollout.tokens).long()
        logprobs_S = model(tokens_S[None]).logits[0, :-1].log_softmax(-1).gather(1, tokens_S[1:, None])[:, 0]
        loss = loss - (1 + k) / (10 * tokens) * (reward - BASELINE) * logprobs_S[rollout.prompt_length - 1 :].sum()
    loss.backward()
    norm = torch.linalg.vector_norm(torch.stack([p.grad.norm() for p in model.parameters()]))
    assert read_metrics(run)[-STEPS]["loss/grad_norm"] == pytest.approx(float(norm), rel=1e-4)


def trained_samples(run, step):
    """(bin, rollout, reward) of every rollout that was trained at this step."""
    groups = [group for group, used in read_step(run, step) if used == "trained"]
    return [(g.bin, r, v.reward) for g in groups for r, v in zip(g.rollouts, g.verdicts, strict=True)]


def test_an_option_that_the_algorithm_does_not_take_is_refused_before_anything_starts(tiny, tmp_path, refused):
    options = [*ALGORITHM, "algorithm.options.base_line=0.3", f"trainer.run_dir={tmp_path / 'run'}"]
    finished = refused(["train", tiny.config, *options])
    assert finished.code == 2
    assert "options of algorithm toy_algorithm:Toy: missing a required argument: 'baseline'" in finished.last_line
    assert not (tmp_path / "run").exists()


@pytest.mark.heavy
def test_weights_that_the_engine_does_not_load_show_as_a_mismatch(tiny, tmp_path):
    options = [*ENGINE, "engine.options.wrong=stale", f"trainer.run_dir={tmp_path / 'run'}"]
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
def test_an_engine_that_does_not_fit_is_refused_before_anything_starts(tiny, tmp_path, refused, changes, words):
    finished = refused(["train", tiny.config, *ENGINE, *changes, f"trainer.run_dir={tmp_path / 'run'}"])
    assert finished.code == 2
    assert words in finished.last_line


def test_a_replay_needs_no_engine(tiny, run, tmp_path):
    options = ["engine.kind=no_such_module:Toy", *LAYOUT, f"trainer.run_dir={tmp_path / 'again'}"]
    found = run_cli(["train", tiny.config, *options, "--replay", run, "--dry-run"], tmp_path / "log", TESTS)
    assert found.code == 0, found.stderr


def test_an_engine_that_cannot_be_made_is_refused_before_a_step(tiny, tmp_path):
    options = [*ENGINE, "engine.options.wrong=constructor", f"trainer.run_dir={tmp_path / 'run'}"]
    finished = run_cli(["train", tiny.config, *options], tmp_path / "log", TESTS)
    assert finished.code == 2
    assert "toy_engine:Toy cannot be made (RuntimeError: no such accelerator)" in finished.last_line


@pytest.mark.heavy  # the check: tests/unit/engine/test_own_engine_checks.py; how a run ends of it: the verifier's below
@pytest.mark.parametrize(
    ("wrong", "words"),
    [("tokens", "tokens; allowed: 1 to 4"), ("logprobs", "allowed: one log-prob for each token")],
)
def test_an_answer_of_the_wrong_length_is_refused_before_a_step(tiny, tmp_path, wrong, words):
    options = [*ENGINE, f"engine.options.wrong={wrong}", f"trainer.run_dir={tmp_path / 'run'}"]
    finished = run_cli(["train", tiny.config, *options], tmp_path / "log", TESTS)
    assert finished.code != 0
    assert "engine toy_engine:Toy.answer: got" in finished.stderr and words in finished.stderr
    assert not [line for line in read_metrics(tmp_path / "run") if "loss/policy" in line]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (["reward.verifier=no_such_module:X"], "reward.verifier: got 'no_such_module:X', which cannot be imported"),
        (["reward.verifier=toy_verifier:OtherSignature"], "OtherSignature.verify does not fit Verifier"),
        (["reward.verifier=exact", "reward.options.stict=false"], "did you mean strict"),
    ],
)
def test_a_verifier_that_does_not_fit_is_refused_before_anything_starts(tiny, tmp_path, refused, changes, words):
    finished = refused(["train", tiny.config, *VERIFIER, *changes, f"trainer.run_dir={tmp_path / 'run'}"])
    assert finished.code == 2
    assert words in finished.last_line


def test_a_verifier_that_cannot_be_made_is_refused_before_a_step(tiny, tmp_path):
    options = [*VERIFIER, "reward.options.wrong=constructor", f"trainer.run_dir={tmp_path / 'run'}"]
    finished = run_cli(["train", tiny.config, *options], tmp_path / "log", TESTS)
    assert finished.code == 2
    assert "toy_verifier:LastDigit cannot be made (RuntimeError: no such table)" in finished.last_line


def test_something_else_than_a_verdict_of_the_verifier_is_refused_before_a_step(tiny, tmp_path):
    options = [*VERIFIER, "reward.options.wrong=type", f"trainer.run_dir={tmp_path / 'run'}"]
    finished = run_cli(["train", tiny.config, *options], tmp_path / "log", TESTS)
    assert finished.code != 0
    assert "toy_verifier:LastDigit.verify returned a float" in finished.stderr
    assert not [line for line in read_metrics(tmp_path / "run") if "loss/policy" in line]
