"""A run directory that looks like a real one: 200 DARO steps at K = 8, with rollouts, configuration and evaluation.

The numbers follow a small model of learning (ability rises, pass rates are binomial, wrong answers are longer), so that
plots of it have the shapes a real run has. Everything is made from the seed.

Run as a script, it writes a run directory: `python synthetic_run.py DIRECTORY`.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path

import numpy as np

from megatron_daro.observe import MetricsLog
from megatron_daro.rollout.recorder import RecordedMiniBatch, Recorder
from megatron_daro.types import Group, Prompt, Rollout, Verdict

HOSTILE_TEXTS = (
    '</script><img src=x onerror="document.title=\'owned\'"><script>document.title="owned"</script>',
    "[red]not red[/red] [link=https://example.invalid]click[/link] [/] [bold",
    "\x1b[2J\x1b]0;owned\x07\x1b[31mred\x1b[0m and \u202eright to left\u2028end",
    "<!-- <script> ${alert(1)} %3Cscript%3E \x00 \ud800 end",
)


def write_synthetic_run(
    run_dir: Path,
    *,
    steps: int = 200,
    rollouts_per_prompt: int = 8,
    prompts_per_batch: int = 32,
    seed: int = 0,
    with_rollouts: bool = True,
    hostile: bool = False,
) -> Path:
    """Writes config.yaml, metrics.jsonl and rollouts/ under `run_dir` and returns it."""
    rng = np.random.default_rng(seed)
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / "config.yaml").write_text(_CONFIG.format(K=rollouts_per_prompt, prompts=prompts_per_batch, steps=steps))
    weights = np.ones(rollouts_per_prompt + 1)
    ledger = {"trained": 0, "filtered": 0, "dropped": 0}
    with MetricsLog(run_dir, tensorboard=False) as log:
        log.write(0, _evaluation(-1.2, rng))
        for step in range(1, steps + 1):
            ability = -1.2 + 3.0 * (1 - math.exp(-step / max(20, steps / 2.5)))
            metrics = _step_metrics(step, ability, weights, rollouts_per_prompt, prompts_per_batch, rng)
            metrics |= _count_groups(ledger, metrics, step, rollouts_per_prompt)
            if step % 50 == 0 or step == steps:
                metrics |= _evaluation(ability, rng)
            log.write(step, metrics)
            if with_rollouts and (step in (1, steps // 2, steps) or step % 20 == 0):
                write_rollouts(run_dir, step, rollouts_per_prompt, ability, rng, hostile=hostile)
    return run_dir


def _step_metrics(step, ability, weights, k_max, prompts, rng) -> dict[str, float]:
    difficulty = rng.normal(0, 1.5, prompts)
    p = 1 / (1 + np.exp(difficulty - ability))
    bins = rng.binomial(k_max, p)
    right, wrong = 90 + 20 * ability + rng.normal(0, 4), 150 + 10 * ability + rng.normal(0, 6)
    metrics: dict[str, float] = {}
    m: dict[str, float] = metrics
    total_tokens = 0.0
    for k in range(k_max + 1):
        groups = int((bins == k).sum())
        mu = k / k_max
        tokens = groups * (k * right + (k_max - k) * wrong)
        m[f"difficulty/groups/{k}"] = groups
        m[f"difficulty/tokens/{k}"] = int(tokens) if 0 < k < k_max else 0
        total_tokens += tokens
        if 0 < k < k_max:
            m[f"difficulty/weight/{k}"] = weights[k]
        if groups and 0 < k < k_max:
            predicted = math.sqrt(mu * (1 - mu)) * (wrong - right) / (mu * right + (1 - mu) * wrong)
            loss = predicted + rng.normal(0, 0.05 / math.sqrt(groups))
            m[f"difficulty/predicted_loss/{k}"] = predicted
            m[f"difficulty/loss/{k}"] = loss
            m[f"difficulty/length_right/{k}"] = right
            m[f"difficulty/length_wrong/{k}"] = wrong
            weights[k] = float(np.clip(weights[k] * math.exp(-0.05 * (weights[k] * abs(loss) - 1)), 0.1, 10))
    clamped = int(((weights[1:k_max] >= 10) | (weights[1:k_max] <= 0.1)).sum())
    mean = float(bins.mean() / k_max)
    rollout_s, train_s = 2.2 + total_tokens / 5e4 + rng.gamma(2, 0.2), 1.4 + rng.gamma(2, 0.05)
    checkpoint_s = 0.9 if step % 20 == 0 else 0.0
    return m | {
        "accuracy/mean": mean,
        "reward/mean": 2 * mean - 1,
        "response/length_mean": total_tokens / prompts / k_max,
        "response/length_max": int(wrong * 2.4),
        "response/truncated_fraction": max(0.0, 0.14 * math.exp(-step / 40) + rng.normal(0, 0.006)),
        "loss/policy": 0.1 * math.exp(-step / 80) + rng.normal(0, 0.03),
        "loss/total": 0.1 * math.exp(-step / 80) + rng.normal(0, 0.03),
        "loss/grad_norm": 0.4 + rng.gamma(2, 0.1),
        "optimizer/learning_rate": 1e-4 * min(1, step / 10),
        "ratio/clip_fraction_high": abs(rng.normal(0.004, 0.002)),
        "ratio/clip_fraction_low": abs(rng.normal(0.002, 0.001)),
        "policy/entropy": 0.3 + 0.9 * math.exp(-step / 90) + rng.normal(0, 0.02),
        "mismatch/logprob_abs_mean": abs(rng.normal(2e-6, 5e-7)),
        "mismatch/logprob_abs_max": abs(rng.normal(6e-5, 1e-5)),
        "mismatch/corrected_fraction": 0.0,
        "ratio/dual_clip_fraction": 0.0,
        "ratio/mean": rng.normal(1, 1e-3),
        "policy/kl_reference": 0.0,
        "rollout/rounds": 1 + step % 2,
        "rollout/retries": 0,
        "rollout/late_refused": 0,
        "rollout/steps_skipped": 0,
        "mismatch/kl": abs(rng.normal(3e-9, 1e-9)),
        "difficulty/clamped": clamped,
        "rollout/groups_outstanding": 4,
        "rollout/staleness_mean": float(rng.integers(0, 3) > 1) * 0.25,
        "timing/rollout_s": rollout_s,
        "timing/reward_s": 0.2 + rng.gamma(2, 0.03),
        "timing/train_s": train_s,
        "timing/sync_s": 0.08,
        "timing/checkpoint_s": checkpoint_s,
        "timing/other_s": 0.05,
        "timing/step_s": rollout_s + train_s + checkpoint_s + 0.75,
        "throughput/rollout_tokens_per_s": total_tokens / rollout_s,
        "throughput/train_tokens_per_s": total_tokens / train_s,
    }


def _count_groups(ledger, metrics, step, k_max) -> dict[str, float]:
    """Adds the step to the cumulative ledger, which always balances."""
    unused = int(metrics["difficulty/groups/0"] + metrics[f"difficulty/groups/{k_max}"])
    ledger["filtered"] += unused
    ledger["trained"] += int(sum(metrics[f"difficulty/groups/{k}"] for k in range(1, k_max)))
    ledger["dropped"] += step % 30 == 0
    counts = {f"rollout/groups_{name}": value for name, value in ledger.items()}
    return counts | {"rollout/groups_admitted": sum(ledger.values()) + 4}


def _evaluation(ability: float, rng) -> dict[str, float]:
    centres = {"1": -1.5, "2": -0.5, "3": 0.5, "4": 1.5}
    by_level = {
        d: float(np.clip(1 / (1 + math.exp(c - ability)) + rng.normal(0, 0.02), 0, 1)) for d, c in centres.items()
    }
    accuracies = {f"eval/arithmetic/accuracy/{d}": value for d, value in by_level.items()}
    return accuracies | {"eval/arithmetic/accuracy": sum(by_level.values()) / 4}


def write_rollouts(
    run_dir: Path, step: int, k_max: int, ability: float, rng, *, groups: int = 6, hostile: bool = False
) -> Path:
    """Writes rollouts/step_XXXXXX.parquet; hostile texts stand among the answers."""
    made = []
    for g in range(groups):
        a, b = (int(x) for x in rng.integers(10, 99, 2))
        p = 1 / (1 + math.exp(rng.normal(0, 1) - ability))
        text = f"What is {a} + {b}? Answer in \\boxed{{}}." if g or not hostile else HOSTILE_TEXTS[0]
        prompt = Prompt(f"arithmetic/{step}-{g}", str(a + b), "arithmetic", text=text, tokens=(1, 2, 3))
        verdicts = tuple(_verdict(bool(rng.random() < p)) for _ in range(k_max))
        rollouts = tuple(
            _rollout(prompt, step * 100 + g, i, (a, b), v.correct, step, rng, hostile) for i, v in enumerate(verdicts)
        )
        made.append(Group(step * 100 + g, prompt, rollouts, verdicts))
    update = RecordedMiniBatch(step, step, 1, tuple(group.group_id for group in made), True)
    return Recorder(run_dir).write_step(step, {"trained": made}, update)


def _verdict(correct: bool) -> Verdict:
    return Verdict(correct, 1.0 if correct else -1.0, "match" if correct else "no_match")


def _rollout(prompt, group_id, index, numbers, correct, step, rng, hostile) -> Rollout:
    (a, b), length = numbers, int(rng.gamma(4, 10)) + 8
    said = a + b if correct else a + b + int(rng.integers(1, 9))
    working = f"{a} + {b}\n= {a} + {b // 10 * 10} + {b % 10}\n= {a + b // 10 * 10} + {b % 10}\n"
    text = f"{working}= {said}\n\\boxed{{{said}}}"
    return Rollout(
        prompt_id=prompt.id,
        group_id=group_id,
        attempt=0,
        index=index,
        tokens=np.concatenate([prompt.tokens, rng.integers(0, 200, length)]).astype(np.int32),
        prompt_length=len(prompt.tokens),
        loss_mask=np.ones(length, np.uint8),
        logprobs=-rng.exponential(0.2, length).astype(np.float32),
        finish_reason="stop",
        weight_version=step - 1,
        text="\n".join((text, *HOSTILE_TEXTS)) if hostile else text,
    )


_CONFIG = """\
model:
  path: runs/quickstart/base
data:
  train: [arithmetic.jsonl]
  prompt_template: plain
rollout:
  prompts_per_batch: {prompts}
  rollouts_per_prompt: {K}
  temperature: 1.0
  max_response_tokens: 256
algorithm:
  name: daro
  clip_low: 0.2
  clip_high: 0.28
  daro:
    learning_rate: 0.01
    magnitude: abs
    clamp: [0.1, 10]
actor:
  tensor_parallel: 2
trainer:
  steps: {steps}
  seed: 1
"""

if __name__ == "__main__":
    print(write_synthetic_run(Path(sys.argv[1])))
