"""An algorithm of one's own, through the command line: its advantage, filter and coefficient are in the gradient."""

from pathlib import Path

import pytest
import torch
from cli_runs import trained

from megatron_daro.observe.metrics import read_metrics
from megatron_daro.rollout.recorder import read_step

BASELINE = 0.3
STEPS = 3
TESTS = Path(__file__).parents[1]
OPTIONS = ["algorithm.name=toy_algorithm:Toy", "actor.tensor_parallel=1", f"trainer.steps={STEPS}"]


@pytest.fixture(scope="module")
def run(tiny, tmp_path_factory):
    directory = tmp_path_factory.mktemp("own_algorithm")
    options = [*OPTIONS, f"algorithm.options.baseline={BASELINE}", f"trainer.run_dir={directory / 'run'}"]
    trained(["train", tiny.config, *options], directory / "log", {"PYTHONPATH": str(TESTS)})
    return directory / "run"


def test_its_filter_chose_the_groups(run):
    outcomes = [(group.bin, used) for step in range(1, STEPS + 1) for group, used in read_step(run, step)]
    assert {bin_ for bin_, used in outcomes if used == "trained"} <= {1, 2}
    filtered = {bin_ for bin_, used in outcomes if used == "filtered"}
    assert 3 in filtered and not filtered & {1, 2}  # no filter of the package takes such a group out


def test_its_advantage_and_coefficient_make_the_loss_of_every_step(run):
    """With one update per batch the ratio is 1, so a token's loss is -A."""
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


def test_an_option_it_does_not_take_is_refused_before_anything_starts(tiny, tmp_path, refused):
    options = [*OPTIONS, "algorithm.options.base_line=0.3", f"trainer.run_dir={tmp_path / 'run'}"]
    finished = refused(["train", tiny.config, *options])
    assert finished.code == 2
    assert "options of algorithm toy_algorithm:Toy: missing a required argument: 'baseline'" in finished.last_line
    assert not (tmp_path / "run").exists()


def trained_samples(run, step):
    """(bin, rollout, reward) of every rollout that was trained at this step."""
    groups = [group for group, used in read_step(run, step) if used == "trained"]
    return [(g.bin, r, v.reward) for g in groups for r, v in zip(g.rollouts, g.verdicts, strict=True)]
