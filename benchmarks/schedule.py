"""Benchmark: the split over data-parallel ranks and micro-batches, beside verl's, in one run.

Lengths are log-normal like those of reasoning answers (median 3,000 tokens, sigma 1), cut at 20,480. Both sides get the
same lengths, seed by seed, and both must hold the token budget with equally many micro-batches on every rank. In a
training run verl splits over micro-batches on each rank for itself: `time_shared_by_ranks_s` says what that would take.
Imbalance is the fullest rank over the mean, less one; `micro_batches_fewest_possible` is tokens / (ranks * budget),
rounded up. verl's search adds micro-batches one by one and is cut off after --verl-limit-s per seed: `over_budget` then
says how many micro-batches of its last try were too full, and its time is a lower bound. The second table packs all
micro-batches of one rank and counts the padding.

    python benchmarks/schedule.py [--verl SEQLEN_BALANCING.py] [--json]

verl is compared only where its file is given: `pip download --no-deps verl==0.9.1` and unzip the wheel; the file is
verl/utils/seqlen_balancing.py. Its other modules are not needed by the functions called and are replaced by empty ones.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path

import harness
import numpy as np

from megatron_daro.config.actor import pack_multiples
from megatron_daro.data.packing import pack
from megatron_daro.data.schedule import CostModel, Schedule, schedule
from megatron_daro.types import Sequences

Split = list[list[list[int]]]
Splitter = Callable[[np.ndarray], tuple[Split, float]]
MOST_S = 1.0


def reasoning_lengths(num: int, seed: int, longest: int) -> np.ndarray:
    """int64 [num], tokens of prompt and answer."""
    lengths = np.random.default_rng(seed).lognormal(math.log(3000), 1.0, num)
    return np.clip(lengths.astype(np.int64), 64, longest)


def load_verl(path: Path) -> types.ModuleType:
    """verl's seqlen_balancing alone; the package around it would want a GPU stack."""
    for name in ("verl", "verl.utils", "verl.protocol", "verl.utils.tensordict_utils", "verl.utils.device"):
        sys.modules.setdefault(name, types.ModuleType(name))
    sys.modules["verl.protocol"].__dict__["DataProto"] = object
    sys.modules["verl.utils"].__dict__["tensordict_utils"] = sys.modules["verl.utils.tensordict_utils"]
    sys.modules["verl.utils.device"].__dict__["get_device_name"] = lambda: "cpu"
    spec = importlib.util.spec_from_file_location("verl_seqlen_balancing", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def verl_split(
    verl: types.ModuleType, lengths: np.ndarray, ranks: int, budget: int, limit_s: float
) -> tuple[Split, float]:
    """What verl's trainer and its rearrange_micro_batches do, and the seconds if each rank splits only its own part.

    Over ranks by workload, equally many samples each; then per rank by workload into as many micro-batches as the
    fullest rank needs, one more until every rank holds the budget; after `limit_s` it is left there, over the budget.
    """
    start = time.perf_counter()
    workloads = verl.calculate_workload(lengths).tolist()
    parts = verl.get_seqlen_balanced_partitions(workloads, k_partitions=ranks, equal_size=True)
    over_ranks = time.perf_counter() - start
    count = max(-(-int(lengths[part].sum()) // budget) for part in parts)
    while True:
        split = []
        for part in parts:
            own = [workloads[i] for i in part]
            inner = verl.get_seqlen_balanced_partitions(own, k_partitions=count, equal_size=False)
            split.append([[part[i] for i in micro] for micro in inner])
        held = all(int(lengths[micro].sum()) <= budget for rank in split for micro in rank)
        if held or time.perf_counter() - start > limit_s:
            break
        count += 1
    within = time.perf_counter() - start - over_ranks
    return split, over_ranks + within / ranks


def measured(split_of: Splitter, lengths: np.ndarray, budget: int) -> dict[str, float]:
    """Figures of one split; time_s is that of one process doing all of it."""
    start = time.perf_counter()
    split, shared = split_of(lengths)
    elapsed = time.perf_counter() - start
    used = sorted(i for rank in split for micro in rank for i in micro)
    assert used == list(range(len(lengths))), "a sample is lost or repeated"
    tokens = np.array([sum(int(lengths[micro].sum()) for micro in rank) for rank in split])
    flops = np.array([sum(float(flops_of(lengths[micro])) for micro in rank) for rank in split])
    micros = [int(lengths[micro].sum()) for rank in split for micro in rank]
    return {
        "time_s": elapsed,
        "time_shared_by_ranks_s": shared or elapsed,
        "token_imbalance": float(tokens.max() / tokens.mean() - 1),
        "flops_imbalance": float(flops.max() / flops.mean() - 1),
        "micro_batches": len(split[0]),
        "over_budget": sum(size > budget for size in micros),
        "micro_batches_fewest_possible": -(-int(lengths.sum()) // (budget * len(split))),
    }


def flops_of(lengths: np.ndarray) -> float:
    """Forward and backward of a 7B model (28 layers, width 3,584)."""
    return float(FLOPS.of(lengths).sum())


FLOPS = CostModel.transformer(num_parameters=7.1e9, num_layers=28, attention_width=3584)


def run(options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Medians over the seeds, by variant."""

    def ours(cost: CostModel | None) -> Splitter:
        def split_of(lengths: np.ndarray) -> tuple[Split, float]:
            plan = schedule(lengths, options.ranks, options.budget, cost=cost)
            return [[list(micro) for micro in rank] for rank in plan], 0.0

        return split_of

    variants = {"ours, tokens": ours(None), "ours, flops": ours(FLOPS)}
    if options.verl:
        verl = load_verl(options.verl)
        variants["verl"] = lambda lengths: verl_split(
            verl, lengths, options.ranks, options.budget, options.verl_limit_s
        )
    rows: dict[str, list[dict[str, float]]] = {name: [] for name in variants}
    for seed in range(options.seeds):
        lengths = reasoning_lengths(options.samples, seed, options.longest)
        for name, split_of in variants.items():
            rows[name].append(measured(split_of, lengths, options.budget))
    return {name: harness.medians(of_seeds) for name, of_seeds in rows.items()}


def small_batches(options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Medians over 20 seeds for as few samples as an optimizer step has, by number and by what is balanced."""
    medians = {}
    for num in (64, 128, 256, 512):
        for name, cost in (("tokens", None), ("operations", FLOPS)):
            rows = []
            for seed in range(20):
                lengths = reasoning_lengths(num, seed, options.longest)
                plan = schedule(lengths, options.ranks, options.budget, cost=cost)
                rows.append(measured_plan(plan, lengths, options.budget))
            medians[f"{num}, {name}"] = harness.medians(rows)
    return medians


def measured_plan(plan: Schedule, lengths: np.ndarray, budget: int) -> dict[str, float]:
    """Imbalances of one schedule; the time is not looked at."""
    split = [[list(micro) for micro in rank] for rank in plan]
    figures = measured(lambda _: (split, 0.0), lengths, budget)
    return {name: value for name, value in figures.items() if not name.startswith("time")}


def packing(options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Padding and time of packing all micro-batches of the first rank, by layout; and padding to the longest sample."""
    lengths = reasoning_lengths(options.samples, 0, options.longest)
    own = [list(micro) for micro in schedule(lengths, options.ranks, options.budget)[0]]
    batch = sequences_of(lengths[np.concatenate(own)])
    ends = np.cumsum([len(micro) for micro in own])
    micros = [list(range(end - len(micro), end)) for micro, end in zip(own, ends, strict=True)]
    tokens = int(batch.lengths_N.sum())
    results = {"padded to the longest": {"padding": 1 - tokens / (len(batch) * int(lengths.max()))}}
    for name, (tensor, context) in {
        "packed": (1, 1),
        "packed, TP 2 SP": (2, 1),
        "packed, TP 2 SP CP 2": (2, 2),
    }.items():
        sequence_multiple, total_multiple = pack_multiples(tensor, context, tensor > 1)
        start = time.perf_counter()
        packs = [pack(batch, m, sequence_multiple=sequence_multiple, total_multiple=total_multiple) for m in micros]
        elapsed = time.perf_counter() - start
        held = sum(len(packed.tokens_T) for packed in packs)
        results[name] = {"padding": 1 - tokens / held, "pack_tokens_per_s": tokens / elapsed}
    return results


def sequences_of(lengths: np.ndarray) -> Sequences:
    """Samples of these lengths with a prompt of 32 tokens each; the contents do not matter."""
    return Sequences(
        tokens_T=np.ones(int(lengths.sum()), dtype=np.int32),
        lengths_N=lengths,
        prompt_lengths_N=np.full(len(lengths), 32),
        loss_mask_R=np.ones(int(lengths.sum()) - 32 * len(lengths), dtype=np.uint8),
    )


def show(title: str, results: dict[str, dict[str, float]]) -> None:
    """One table, variants as rows."""
    header = tuple(dict.fromkeys(key for row in results.values() for key in row))
    harness.table(title, header, {name: [row.get(key, "") for key in header] for name, row in results.items()})


def main() -> None:
    parser = harness.arguments_of(__doc__)
    parser.add_argument("--samples", type=int, default=16384)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--longest", type=int, default=20480)
    parser.add_argument("--budget", type=int, default=20480)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--verl-limit-s", type=float, default=20.0, help="verl's search for a split is cut off here")
    parser.add_argument("--verl", type=Path, help="path of verl/utils/seqlen_balancing.py (0.9.1)")
    options = parser.parse_args()
    results, small, packed = run(options), small_batches(options), packing(options)
    setting = f"{options.samples} samples, {options.ranks} ranks, budget {options.budget} tokens"
    show(f"{setting}, median of {options.seeds} seeds", results)
    show(f"{options.ranks} ranks, budget {options.budget} tokens, samples and what is balanced", small)
    show(f"{setting}, micro-batches of one rank", packed)
    setup = {**harness.setup_of(options, "verl"), "verl": bool(options.verl)}
    problems = harness.at_most("seconds of a split", results["ours, tokens"]["time_s"], MOST_S)
    result = {"setup": setup, "medians": results, "small": small, "packing": packed}
    harness.conclude("schedule", result, problems, write=options.json)


if __name__ == "__main__":
    main()
