"""`algorithm.turn_rewards` through the command line: each token's advantage is that of its turn and of later ones."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tiny_task
import torch
from cli_runs import trained
from transformers import AutoModelForCausalLM

from megatron_daro.observe.metrics import read_metrics
from megatron_daro.rollout.recorder import read_step

STEPS = (1, 2, 3)
WEIGHTS = {"right": 2.0, "length": -0.125}
OPTIONS = [
    "environment.kind=toy_steps:Steps",
    "environment.options.named=true",
    "environment.options.tries=3",
    *(f"environment.reward_weights.{name}={weight}" for name, weight in WEIGHTS.items()),
    "rollout.max_response_tokens=16",
    "actor.tensor_parallel=1",
    "algorithm.name=grpo",
    "algorithm.turn_rewards=true",
    "trainer.steps=3",
    "trainer.save_every_steps=0",
]


@pytest.fixture(scope="module")
def run(tiny, tmp_path_factory):
    folder = tmp_path_factory.mktemp("turn_rewards")
    path = {"PYTHONPATH": str(Path(__file__).parents[1])}
    trained(["train", tiny.config, *OPTIONS, f"trainer.run_dir={folder / 'run'}"], folder / "log", path)
    return folder / "run"


def trained_rollouts(run, step):
    return [group.rollouts for group, used in read_step(run, step) if used == "trained"]


def advantages_of(rollouts):
    """Of the generated tokens of each rollout of a group, token by token; DeepSeekMath, section 4.1.3."""
    rewards = [[report.reward for report in rollout.reports] for rollout in rollouts]
    of_all = np.concatenate(rewards)
    scale = of_all.std() + 1e-6
    return [
        [
            sum((reward - of_all.mean()) / scale for reward in own[turn:])
            for turn, (_, generated) in enumerate(rollout.turns)
            for _ in range(generated)
        ]
        for rollout, own in zip(rollouts, rewards, strict=True)
    ]


def answers(rollout):
    """The text of each answer of the model."""
    texts, at = [], rollout.prompt_length
    for observed, generated in rollout.turns:
        ids = rollout.tokens[at + observed : at + observed + generated]
        texts.append("".join(tiny_task.SYMBOLS[i] for i in ids if i > tiny_task.END))
        at += observed + generated
    return texts


def test_turns_have_the_rewards_that_the_environment_gave(run):
    lengths = set()
    for step in STEPS:
        for group, _ in read_step(run, step):
            for one, verdict in zip(group.rollouts, group.verdicts, strict=True):
                expected = [
                    WEIGHTS["length"] * len(text) + WEIGHTS["right"] * (text[-1:] == group.prompt.answer)
                    for text in answers(one)
                ]
                assert [report.reward for report in one.reports] == expected
                assert verdict.reward == pytest.approx(sum(expected))
                lengths.add(len(one.turns))
    assert len(lengths) > 1, "conversations of several lengths"


def test_they_make_the_loss_of_every_step(run):
    """With one step per batch the ratio is 1, so a token's loss is -A, and grpo's is the mean over all tokens."""
    for line in read_metrics(run)[-3:]:
        by_group = [advantages_of(rollouts) for rollouts in trained_rollouts(run, int(line["step"]))]
        of_tokens = [token for group in by_group for rollout in group for token in rollout]
        assert np.std(of_tokens) > 0.1
        assert line["loss/policy"] == pytest.approx(-np.mean(of_tokens), abs=1e-6)


def test_they_make_the_gradient(run, tiny):
    """The first step's gradient norm is that of the same sum, by autograd through transformers' model."""
    model = AutoModelForCausalLM.from_pretrained(tiny.model, dtype=torch.float32)
    groups, total = trained_rollouts(run, 1), torch.zeros(())
    tokens = sum(rollout.generated_length for rollouts in groups for rollout in rollouts)
    for rollouts in groups:
        for rollout, own in zip(rollouts, advantages_of(rollouts), strict=True):
            ids = torch.as_tensor(rollout.tokens).long()
            logprobs = model(ids[None]).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
            said = logprobs[rollout.prompt_length - 1 :][torch.as_tensor(rollout.loss_mask) == 1]
            total = total - (torch.tensor(own, dtype=torch.float32) * said).sum() / tokens
    total.backward()
    norm = torch.linalg.vector_norm(torch.stack([p.grad.norm() for p in model.parameters()]))
    first = next(line for line in read_metrics(run) if line["step"] == 1)
    assert first["loss/grad_norm"] == pytest.approx(float(norm), rel=1e-4)
