"""A tiny real run to compare with: recorded groups, trained by the Megatron policy in a process of its own."""

from __future__ import annotations

import json
import multiprocessing
from pathlib import Path

import numpy as np

from megatron_daro.algo.weighting import make_algorithm
from megatron_daro.config import Config, to_yaml
from megatron_daro.rollout.recorder import RecordedMiniBatch, Recorder
from megatron_daro.types import Group, Prompt, Rollout, Verdict

ROLLOUTS, STEPS, VOCAB = 4, 3, 24


def tiny_config(model: Path, run: Path) -> Config:
    return Config.model_validate(
        {
            "model": {"path": model},
            "data": {"train": [run / "unused.jsonl"], "prompt_template": "plain"},
            "rollout": {"prompts_per_batch": 6, "rollouts_per_prompt": ROLLOUTS, "temperature": 0.8},
            "algorithm": {
                "old_logprobs": "forward",
                "daro": {"learning_rate": 0.05, "magnitude": "token", "scale": "mean"},
            },
            "actor": {
                "precision": "fp32",
                "optimizer": {"learning_rate": 1e-3, "warmup_steps": 2, "weight_decay": 0.1},
            },
            "reward": {"verifier": "exact", "correct_reward": 1.0, "incorrect_reward": -1.0},
            "trainer": {"run_dir": run, "steps": STEPS},
        }
    )


def random_groups(rng: np.random.Generator, first_id: int, bins: list[int]) -> list[Group]:
    """One group per entry: so many right answers of ROLLOUTS, right ones first, ragged lengths."""
    groups = []
    for i, right in enumerate(bins):
        tokens = tuple(int(t) for t in rng.integers(3, VOCAB, rng.integers(2, 7)))
        prompt = Prompt(id=f"p{first_id + i}", answer="1", source="test", text="", tokens=tokens)
        rollouts, verdicts = [], []
        for index in range(ROLLOUTS):
            length = int(rng.integers(1, 20))
            response = rng.integers(3, VOCAB, length)
            rollouts.append(
                Rollout(
                    prompt_id=prompt.id,
                    group_id=first_id + i,
                    attempt=0,
                    index=index,
                    tokens=np.array([*tokens, *response], dtype=np.int32),
                    prompt_length=len(tokens),
                    loss_mask=np.ones(length, dtype=np.uint8),
                    logprobs=(-3 * rng.random(length)).astype(np.float32),
                    finish_reason="stop",
                    weight_version=0,
                )
            )
            correct = index < right
            verdicts.append(Verdict(correct, 1.0 if correct else -1.0, "match" if correct else "no_match"))
        groups.append(Group(first_id + i, prompt, tuple(rollouts), tuple(verdicts)))
    return groups


def record(model: Path, run: Path) -> Path:
    """RUN with config.yaml, rollouts and the metrics of the Megatron policy, over STEPS steps."""
    run.mkdir(parents=True)
    config = tiny_config(model, run)
    (run / "config.yaml").write_text(to_yaml(config))
    rng = np.random.default_rng(0)
    trained = []
    for step in range(1, STEPS + 1):
        groups = random_groups(rng, 100 * step, [1, 2, 3, 1, 2, 2])
        trivial = random_groups(rng, 100 * step + 50, [0, ROLLOUTS])
        update = RecordedMiniBatch(step, step, 1, tuple(group.group_id for group in groups), True)
        Recorder(run).write_step(step, {"trained": groups, "filtered": trivial}, update)
        trained.append(groups)
    process = multiprocessing.get_context("spawn").Process(target=_train, args=(config, trained, run))
    process.start()
    process.join(240)
    assert process.exitcode == 0, f"the training process ended with {process.exitcode}"
    return run


def _train(config: Config, steps: list[list[Group]], run: Path) -> None:
    from megatron_daro.actor import parallel
    from megatron_daro.actor.policy import MegatronPolicy
    from megatron_daro.actor.settings import PolicySettings
    from megatron_daro.data.batch import build_step_batch

    parallel.initialize(parallel.Layout(), seed=0, timeout_s=60)
    settings = PolicySettings(
        config.model.path,
        rollouts_per_prompt=ROLLOUTS,
        max_response_tokens=32,
        temperature=config.rollout.temperature,
        total_steps=STEPS,
    )
    policy = MegatronPolicy(settings, config.actor, config.algorithm)
    algorithm = make_algorithm(**config.algorithm.arguments(rollouts_per_prompt=ROLLOUTS, max_response_tokens=32))
    lines = []
    for step, groups in enumerate(steps, start=1):
        batch = build_step_batch(groups, algorithm)
        halves = [range(10), range(10, len(batch))]
        lines.append({"step": step, **policy.train_step(batch, halves, step=step).metrics})
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    parallel.shutdown()
