"""Answers per second, self-match and latency of the verifier pool on real golds mixed with wrong answers.

Reads the evaluation files of a data folder (default `../shared/data`); for each gold the gold itself in another
notation and wrong answers taken from other problems of the same set. Then the same load with one pathological answer
mixed in, side by side: what it costs the others. Usage: python benchmarks/verifier_pool.py [--limit 60] [--json].
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from megatron_daro.reward import ScreenLimits, VerifierSpec
from megatron_daro.reward.extraction import after_marker, last_box
from megatron_daro.reward.pool import RewardPool

ROOT = Path(__file__).resolve().parent.parent
FILES = {
    "aime24": ("aime24.qwen25math.jsonl", "answer"),
    "aime25": ("aime25.areal.jsonl", "answer"),
    "amc23": ("amc23_40.qwen25math.jsonl", "answer"),
    "math500": ("math500.simplerl.jsonl", "answer"),
    "minerva": ("minerva_math.qwen25math.jsonl", "solution"),
    "olympiadbench": ("olympiadbench.qwen25math.jsonl", "final_answer"),
    "gsm8k": ("gsm8k_test.openai.jsonl", "answer"),
}
FILLER = "Let us compute step by step. We have $x = 3$ and so the sum is 12. " * 30
# Passes the screen on purpose (its limits are lifted below): only a worker's hard limit ends it.
PATHOLOGICAL = "3^{1000000000}"
TIMEOUT_S = 5.0


def golds_of(name: str, data: Path) -> list[str]:
    """Gold answers of one evaluation file, as text."""
    file, field = FILES[name]
    values: list[Any] = [json.loads(line)[field] for line in (data / "eval" / file).read_text().splitlines()]
    if name == "minerva":
        return [last_box(value) or "" for value in values]
    if name == "olympiadbench":
        return [value[0] for value in values]
    if name == "gsm8k":
        return [after_marker(value, "####") or "" for value in values]
    return [str(value) for value in values]


def respelled(gold: str) -> str:
    """The same answer in another notation where that is easy, so that literal equality does not decide."""
    gold = gold.strip().strip("$")
    if gold.lstrip("-").isdigit():
        return f"\\frac{{{2 * int(gold)}}}{{2}}"
    plain = not any(part in gold for part in (",", "=", "_", "%", "text", "mbox", "matrix", "floor", "circ"))
    return gold.replace("\\frac", "\\dfrac") + " + 0" if plain else f"\\left. {gold} \\right."


def load(golds: list[str], rng: random.Random, wrong: int) -> list[tuple[str, str]]:
    """For each gold: itself, respelled, and `wrong` answers of other problems."""
    pairs = []
    for gold in golds:
        others = [other for other in rng.sample(golds, min(len(golds), wrong + 4)) if other != gold][:wrong]
        pairs += [(f"{FILLER}\\boxed{{{answer}}}", gold) for answer in (gold, respelled(gold), *others)]
    rng.shuffle(pairs)
    return pairs


def percentile(values: list[float], share: float) -> float:
    """The value below which `share` of the values lie."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def throughput(pool: RewardPool, pairs: list[tuple[str, str]]) -> float:
    """Answers per second of one call."""
    begin = time.perf_counter()
    pool.score(pairs)
    return len(pairs) / (time.perf_counter() - begin)


def latencies_ms(pool: RewardPool, pairs: list[tuple[str, str]]) -> list[float]:
    """Time of single calls, one after the other, ms."""
    times = []
    for pair in pairs:
        begin = time.perf_counter()
        pool.score([pair])
        times.append(1000 * (time.perf_counter() - begin))
    return times


def with_and_without_pathological(pairs: list[tuple[str, str]], workers: int) -> dict[str, Any]:
    """Verdicts and time of the same pairs with one pathological answer among them."""
    spec = VerifierSpec(limits=ScreenLimits(max_exponent=10**300))
    middle = len(pairs) // 2
    bad = (f"\\boxed{{{PATHOLOGICAL}}}", "5 x")
    with RewardPool(spec, workers=workers, timeout_s=TIMEOUT_S) as pool:
        begin = time.perf_counter()
        alone = pool.score(pairs)
        alone_s = time.perf_counter() - begin
        begin = time.perf_counter()
        mixed = pool.score([*pairs[:middle], bad, *pairs[middle:]])
        mixed_s = time.perf_counter() - begin
    others = [*mixed[:middle], *mixed[middle + 1 :]]
    return {
        "pathological_reason": mixed[middle].reason,
        "others_changed": [(a.reason, b.reason) for a, b in zip(alone, others, strict=True) if a != b],
        "alone_s": alone_s,
        "mixed_s": mixed_s,
        "timeout_s": TIMEOUT_S,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared" / "data")
    parser.add_argument("--limit", type=int, default=0, help="golds per data set, 0 for all")
    parser.add_argument("--wrong", type=int, default=2, help="wrong answers per gold")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="write benchmarks/results/verifiers.json")
    args = parser.parse_args()
    if not (args.data / "eval").is_dir():
        print(f"no evaluation data in {args.data}: pass --data", file=sys.stderr)
        return 1
    rng = random.Random(7)
    sets = {name: golds_of(name, args.data) for name in FILES}
    pairs = {name: load(golds[: args.limit or None], rng, args.wrong) for name, golds in sets.items()}
    everything = [pair for part in pairs.values() for pair in part]
    rng.shuffle(everything)
    result: dict[str, Any] = {"workers": args.workers, "cores": os.cpu_count(), "answers": len(everything), "sets": {}}
    with RewardPool("math", workers=args.workers, timeout_s=5.0) as pool:
        for name, golds in sets.items():
            verdicts = pool.score([(f"\\boxed{{{gold}}}", gold) for gold in golds])
            again = pool.score([(f"\\boxed{{{respelled(gold)}}}", gold) for gold in golds])
            times = latencies_ms(pool, pairs[name][:200])
            result["sets"][name] = {
                "golds": len(golds),
                "self_match": sum(v.correct for v in verdicts),
                "respelled_match": sum(v.correct for v in again),
                "p50_ms": statistics.median(times),
                "p95_ms": percentile(times, 0.95),
                "max_ms": max(times),
            }
        rates = [throughput(pool, everything) for _ in range(args.repeats)]
        result |= {"answers_per_s": statistics.median(rates), "rates": rates, "counters": pool.counters}
    with RewardPool("math", workers=args.workers, timeout_s=5.0) as pool:
        result["cold_answers_per_s"] = throughput(pool, everything)
    result["pathological"] = with_and_without_pathological(everything[:400], args.workers)
    show(result)
    if args.json:
        target = ROOT / "benchmarks" / "results" / "verifiers.json"
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(json.dumps(result, indent=1) + "\n")
    return 0


def show(result: dict[str, Any]) -> None:
    """Print the tables."""
    table = Table(title=f"{result['workers']} workers, {result['cores']} cores, {result['answers']} answers")
    for column in ("set", "golds", "self-match", "respelled", "p50 ms", "p95 ms", "max ms"):
        table.add_column(column)
    for name, row in result["sets"].items():
        table.add_row(
            name,
            str(row["golds"]),
            str(row["self_match"]),
            str(row["respelled_match"]),
            *(f"{row[key]:.1f}" for key in ("p50_ms", "p95_ms", "max_ms")),
        )
    console = Console()
    console.print(table)
    console.print(
        f"answers/s: first pass {result['cold_answers_per_s']:.0f}, later {result['answers_per_s']:.0f} (median)"
    )
    console.print(f"one pathological answer among the same pairs: {result['pathological']}")
    console.print(f"counters: {result['counters']}")


if __name__ == "__main__":
    sys.exit(main())
