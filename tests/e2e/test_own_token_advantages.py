"""An own algorithm with advantages per token, through the command line: the reference's log-probs are in every loss."""

from pathlib import Path

import numpy as np
import pytest
import torch
from cli_runs import run_cli, trained

from megatron_daro.observe.metrics import read_metrics
from megatron_daro.rollout.recorder import read_step

SCALE, DISCOUNT, STEPS = 0.3, 0.8, 3
ENVIRONMENT = {"PYTHONPATH": str(Path(__file__).parents[1])}
FLUENT = [
    "algorithm.name=toy_algorithm:Fluent",
    f"algorithm.options.scale={SCALE}",
    f"algorithm.options.discount={DISCOUNT}",
]
LAYOUT = ["actor.tensor_parallel=1", "actor.context_parallel=2"]


@pytest.fixture(scope="module")
def run(tiny, tmp_path_factory):
    directory = tmp_path_factory.mktemp("token_advantages")
    options = [*FLUENT, *LAYOUT, f"trainer.steps={STEPS}", f"trainer.run_dir={directory / 'run'}"]
    trained(["train", tiny.config, *options], directory / "log", ENVIRONMENT)
    return directory / "run"


@pytest.fixture(scope="module")
def reference(tiny):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(tiny.model, dtype=torch.float32)


def logprobs_of(model, rollout):
    tokens_S = torch.as_tensor(rollout.tokens).long()
    logprobs_S = model(tokens_S[None]).logits[0, :-1].log_softmax(-1).gather(1, tokens_S[1:, None])[:, 0]
    return logprobs_S[rollout.prompt_length - 1 :]


def advantages_of(reference, samples):
    """Each rollout's [R]: standard score in its group, and discounted log-probs to its end; whitened over the step."""
    raw = []
    for rewards, reward, rollout in samples:
        with torch.no_grad():
            ref_R = logprobs_of(reference, rollout).double().numpy()
        group = (reward - np.mean(rewards)) / (np.std(rewards) + 1e-6)
        sums = [sum(DISCOUNT**n * value for n, value in enumerate(ref_R[t:])) for t in range(len(ref_R))]
        raw.append(group + SCALE * np.array(sums))
    everything = np.concatenate(raw)
    return [(part - everything.mean()) / everything.std() for part in raw]


def trained_samples(run, step):
    """(rewards of its group, its reward, rollout) of every rollout that was trained at this step."""
    groups = [group for group, used in read_step(run, step) if used == "trained"]
    return [
        ([v.reward for v in g.verdicts], v.reward, r)
        for g in groups
        for r, v in zip(g.rollouts, g.verdicts, strict=True)
    ]


def test_they_make_the_loss_of_every_step(run, reference):
    """With one step per batch the ratio is 1, so a token's loss is -A."""
    lines = read_metrics(run)[-STEPS:]
    for line in lines:
        samples = trained_samples(run, int(line["step"]))
        advantages = np.concatenate(advantages_of(reference, samples))
        assert np.abs(advantages).max() > 1
        assert line["loss/policy"] == pytest.approx(-advantages.mean(), abs=1e-6), "whitened: the mean is 0"
        assert line["policy/kl_reference"] >= 0
    assert lines[-1]["policy/kl_reference"] > lines[0]["policy/kl_reference"], "the reference stayed, the policy moved"


def test_they_make_the_gradient(run, reference):
    """The first step's gradient norm is that of the same sum, by autograd through transformers' model."""
    samples = trained_samples(run, 1)
    advantages = advantages_of(reference, samples)
    tokens, loss = sum(len(part) for part in advantages), torch.zeros(())
    reference.zero_grad()
    for (_, _, rollout), part in zip(samples, advantages, strict=True):
        loss = loss - (torch.tensor(part).float() * logprobs_of(reference, rollout)).sum() / tokens
    loss.backward()
    norm = torch.linalg.vector_norm(torch.stack([p.grad.norm() for p in reference.parameters()]))
    assert read_metrics(run)[-STEPS]["loss/grad_norm"] == pytest.approx(float(norm), rel=1e-4)


@pytest.mark.heavy
def test_several_updates_of_a_batch_after_a_step_that_is_resumed(tiny, tmp_path):
    """Old log-probs are recomputed beside the reference's; a resumed run has the same reference."""
    options = [*FLUENT, "trainer.minibatches_per_batch=2", "trainer.save_every_steps=2"]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    runs = [(whole, 4, []), (parts, 2, []), (parts, 4, ["--resume"])]
    for number, (run, steps, more) in enumerate(runs):
        changes = [*options, f"trainer.steps={steps}", f"trainer.run_dir={run}", *more]
        trained(["train", tiny.config, *changes], tmp_path / str(number), ENVIRONMENT)
    keys = ("loss/policy", "loss/grad_norm", "ratio/mean", "policy/kl_reference")
    lines = [[[line.get(key) for key in keys] for line in read_metrics(run)] for run in (whole, parts)]
    assert lines[0] == lines[1]


@pytest.mark.heavy  # what ranks refuse: tests/parallel/test_token_advantages.py
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["algorithm.options.fault=long"], "algorithm faulty, token_advantages: got torch.float64"),
        (
            ["algorithm.options.fault=nan", "reward.correct_reward=7"],
            "of the step's trained tokens have an advantage that is not finite",
        ),
    ],
)
def test_what_the_ranks_refuse_ends_the_run_by_name(tiny, tmp_path, options, message):
    faulty = ["algorithm.name=toy_algorithm:Faulty", *options, "trainer.steps=1", f"trainer.run_dir={tmp_path / 'run'}"]
    finished = run_cli(["train", tiny.config, *faulty], tmp_path / "log", ENVIRONMENT)
    assert finished.code != 0
    assert message in finished.last_line
