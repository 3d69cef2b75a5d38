"""What DARO adds to a train step over GRPO: both on the same batches, taking turns in one process.

Both run the same model forward and backward; DARO has other coefficients, and afterwards one small Adam step on K+1
weights. Reported: the ratio of the median step times, the median of the ratios of neighbouring steps (a slow moment of
the machine hits both of a pair), and DARO's own calls timed alone, which the noise of a step cannot hide.

    OMP_NUM_THREADS=1 python benchmarks/daro_overhead.py --pairs 20 --json
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import tempfile
import time
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import harness
from harness import Seconds

ROLLOUTS = 8
TARGET_RATIO = 1.02


def parse_arguments() -> argparse.Namespace:
    parser = harness.arguments_of(__doc__)
    parser.add_argument("--pairs", type=int, default=30, help="timed steps of each algorithm")
    parser.add_argument("--warm-up", type=int, default=3, help="steps of each that are not timed")
    parser.add_argument("--groups", type=int, default=25, help=f"groups of {ROLLOUTS} samples in a batch")
    parser.add_argument("--tokens", type=int, default=40, help="mean tokens of a sample")
    parser.add_argument("--micro-batches", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1)
    return parser.parse_args()


def save_model(directory: Path) -> None:
    """A small Qwen2 model of the quickstart's kind, random weights."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen2Config

    torch.manual_seed(0)
    config = Qwen2Config(
        hidden_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=384,
        vocab_size=32,
        max_position_embeddings=512,
        tie_word_embeddings=True,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)


def make_batch(groups: int, mean_tokens: int, seed: int) -> Any:
    """Samples of all bins 1..K-1, lengths around the mean."""
    import numpy as np

    from megatron_daro.types import StepBatch

    rng = np.random.default_rng(seed)
    num = groups * ROLLOUTS
    prompts = rng.integers(6, 13, num)
    responses = np.maximum(rng.normal(mean_tokens - 9, mean_tokens / 4, num).astype(np.int64), 1)
    bins = np.repeat(rng.integers(1, ROLLOUTS, groups), ROLLOUTS)
    total = int(responses.sum())
    return StepBatch(
        tokens_T=rng.integers(0, 32, int((prompts + responses).sum())).astype(np.int32),
        lengths_N=prompts + responses,
        prompt_lengths_N=prompts,
        loss_mask_R=np.ones(total, np.uint8),
        rollout_logprobs_R=np.full(total, -3.4, np.float32),
        rewards_N=np.zeros(num, np.float32),
        correct_N=(np.tile(np.arange(ROLLOUTS), groups) < bins).astype(np.uint8),
        bins_N=bins,
        group_ids_N=np.repeat(np.arange(groups), ROLLOUTS),
        advantages_N=rng.standard_normal(num).astype(np.float32),
        truncated_N=np.zeros(num, np.uint8),
        rollouts_per_prompt=ROLLOUTS,
    )


def build_policies(directory: Path, names: tuple[str, ...]) -> dict[str, Any]:
    from megatron_daro.actor import parallel
    from megatron_daro.actor.policy import MegatronPolicy
    from megatron_daro.actor.settings import PolicySettings
    from megatron_daro.config.actor import ActorSection
    from megatron_daro.config.algorithm import AlgorithmSection

    parallel.initialize(parallel.Layout(), seed=1, timeout_s=60)
    settings = PolicySettings(directory, ROLLOUTS, max_response_tokens=64, temperature=1.0, total_steps=10_000)
    actor = ActorSection(precision="fp32")
    return {name: MegatronPolicy(settings, actor, AlgorithmSection(name=name)) for name in names}


def measure(policies: dict[str, Any], arguments: argparse.Namespace) -> dict[str, list[Seconds]]:
    """Times of steps; both sides see the same batches."""

    def step(policy: Any, pairs: Any) -> Seconds:
        batch = make_batch(arguments.groups, arguments.tokens, seed=next(pairs))
        micro_batches = [list(range(i, len(batch), arguments.micro_batches)) for i in range(arguments.micro_batches)]
        result, seconds = harness.timed(lambda: policy.train_step(batch, micro_batches, step=1))
        assert not result.skipped, result.reason
        return seconds

    sides = {name: partial(step, policy, itertools.count()) for name, policy in policies.items()}
    return harness.in_turns(sides, arguments.pairs, warm_up=arguments.warm_up)


def time_alone(policies: dict[str, Any], batch: Any, repeats: int = 200) -> dict[str, float]:
    """Median seconds per step of what an algorithm itself computes: coefficients, reported terms, update."""
    import torch

    from megatron_daro.algo.weighting import StepStats, StepTotals

    bins, lengths = torch.from_numpy(batch.bins_N), torch.from_numpy(batch.trained_tokens_N)
    totals = StepTotals.of(bins, lengths, ROLLOUTS)
    sums = torch.linspace(-1, 1, ROLLOUTS + 1, dtype=torch.float64)
    medians = {}
    for name, policy in policies.items():
        algorithm, times = policy.train_state.algorithm, []
        for _ in range(repeats):
            start = time.perf_counter()
            algorithm.bin_coefficients(bins, lengths, totals)
            algorithm.extra_loss(totals)
            algorithm.learn(StepStats.of_bins(totals, sums, sums.abs()))
            _ = algorithm.weights, algorithm.clamped
            times.append(time.perf_counter() - start)
        medians[name] = statistics.median(times)
    return medians


def summarize(
    seconds: dict[str, list[Seconds]], alone: dict[str, float], arguments: argparse.Namespace
) -> dict[str, Any]:
    result: dict[str, Any] = {**harness.setup_of(arguments), "rollouts_per_prompt": ROLLOUTS}
    for clock in ("wall", "cpu"):
        times = {name: [getattr(one, clock) for one in values] for name, values in seconds.items()}
        medians = {name: statistics.median(values) for name, values in times.items()}
        pairs = [d / g for d, g in zip(times["daro"], times["grpo"], strict=True)]
        result[clock] = {
            "step_s": medians,
            "ratio_of_medians": medians["daro"] / medians["grpo"],
            "pair_ratio_quartiles": statistics.quantiles(pairs, n=4),
        }
    result["algorithm_alone_s"] = alone
    result["daro_alone_fraction"] = (alone["daro"] - alone["grpo"]) / result["cpu"]["step_s"]["grpo"]
    return result


def print_table(result: dict[str, Any]) -> None:
    rows: dict[str, list[object]] = {}
    for clock in ("wall", "cpu"):
        row = result[clock]
        quartiles = "  ".join(f"{q:.3f}" for q in row["pair_ratio_quartiles"])
        rows[f"step, {clock}, s"] = [*row["step_s"].values(), row["ratio_of_medians"], quartiles]
    share = f"+{result['daro_alone_fraction']:.3%} of a step"
    rows["algorithm alone, s"] = [*result["algorithm_alone_s"].values(), share, ""]
    harness.table("Train step, DARO beside GRPO", ("grpo", "daro", "daro / grpo", "pairs: quartiles"), rows)


def main() -> None:
    arguments = parse_arguments()
    os.environ["OMP_NUM_THREADS"] = str(arguments.threads)
    warnings.simplefilter("ignore")
    import torch

    torch.set_num_threads(arguments.threads)
    from megatron_daro.actor import parallel

    with tempfile.TemporaryDirectory() as directory:
        save_model(Path(directory))
        policies = build_policies(Path(directory), ("grpo", "daro"))
        seconds = measure(policies, arguments)
        alone = time_alone(policies, make_batch(arguments.groups, arguments.tokens, seed=0))
        parallel.shutdown()
    result = summarize(seconds, alone, arguments)
    print_table(result)
    problems = harness.at_most("daro's step over grpo's, wall", result["wall"]["ratio_of_medians"], TARGET_RATIO)
    harness.conclude("daro_overhead", result, problems, write=arguments.json)


if __name__ == "__main__":
    main()
