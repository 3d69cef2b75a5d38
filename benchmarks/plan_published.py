"""The planner's times against published ones, and the constants learned from half of them.

python benchmarks/plan_published.py [--fit [times|sync]] [--rows] [--docs benchmarks/results/plan_published.md]

published.csv: one row for each published number, with the repository, path and commit it stands in. `half`: learn or
test, by the hash of the configuration (not of the release it was measured with), drawn before anything was fitted;
empty where the planner has no such model or precision, with the reason in left_out. Rows of adapters (lora) came after
the fit: all are test. Their rank and targets stand elsewhere, and change the planner's value by 1 %. Prompts of RL rows
have 115 tokens: what their tokens per second give beside the mean length. Layouts of verl's weight syncs are those that
its docs/perf/dpsk.md recommends for as many GPUs.

--fit looks for constants on the learning half alone and prints them. Without it the constants of the package are
compared with both halves.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import itertools
import json
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from megatron_daro.config.lora import LoraSection
from megatron_daro.config.model_shape import ModelShape, read_model_shape
from megatron_daro.workshop.plan.gpus import GPUS
from megatron_daro.workshop.plan.layout import ModelLayout
from megatron_daro.workshop.plan.times import Constants, generation_s, sync_s, train_times
from megatron_daro.workshop.plan.workload import (
    DEFAULT_SPREAD,
    Adapters,
    Practice,
    Workload,
    adapted_weights,
    quantiles,
)

TABLE = Path(__file__).with_name("published.csv")
PROMPT_TOKENS = 115
ADAPTERS = LoraSection(rank=16)
MOST = 1.6
MARKS = (
    "<!-- published: python benchmarks/plan_published.py --docs benchmarks/results/plan_published.md -->",
    "<!-- end of published -->",
)
Row = dict[str, str]
CONFIGURATION = (
    "kind", "model", "gpu", "gpus", "precision", "tensor", "pipeline", "virtual", "context", "expert", "fsdp",
    "sequence", "batch", "micro_batch", "server_gpus", "server_tensor", "staleness", "update_batch",
)  # fmt: skip
"""Columns that make a configuration; the others say where, when and with which software it was measured."""


def _model(
    kind: str, layers: int, hidden: int, heads: int, kv_heads: int, head_dim: int, ffn: int, vocab: int, **experts: int
) -> ModelShape:
    names = {"number": "num_experts", "chosen": "num_experts_per_tok", "width": "moe_intermediate_size"}
    return read_model_shape(
        {
            "model_type": kind,
            "num_hidden_layers": layers,
            "hidden_size": hidden,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "head_dim": head_dim,
            "intermediate_size": ffn,
            "vocab_size": vocab,
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": False,
            "max_position_embeddings": 131072,
            **{names[name]: value for name, value in experts.items()},
        }
    )


MODELS = {
    "llama-3-8b": _model("llama", 32, 4096, 32, 8, 128, 14336, 128256),
    "llama-3.1-8b": _model("llama", 32, 4096, 32, 8, 128, 14336, 128256),
    "llama-3-70b": _model("llama", 80, 8192, 64, 8, 128, 28672, 128256),
    "llama-3.1-405b": _model("llama", 126, 16384, 128, 8, 128, 53248, 128256),
    "qwen2.5-7b": _model("qwen2", 28, 3584, 28, 4, 128, 18944, 152064),
    "qwen2.5-32b": _model("qwen2", 64, 5120, 40, 8, 128, 27648, 152064),
    "qwen3-32b": _model("qwen3", 64, 5120, 64, 8, 128, 25600, 151936),
    "qwen3-30b-a3b": _model("qwen3_moe", 48, 2048, 32, 4, 128, 6144, 151936, number=128, chosen=8, width=768),
    "qwen3-235b-a22b": _model("qwen3_moe", 94, 4096, 64, 4, 128, 12288, 151936, number=128, chosen=8, width=1536),
    # Sizes of models that the package does not train, as far as a weight sync depends on them.
    "glm-4.5-air": _model("qwen3_moe", 46, 4096, 96, 8, 128, 10944, 151552, number=128, chosen=9, width=1408),
    "glm-4.7-flash": _model("qwen3_moe", 47, 2048, 20, 20, 256, 10240, 154880, number=64, chosen=5, width=1536),
    "glm-5": _model("qwen3_moe", 78, 6144, 64, 64, 256, 12288, 154880, number=256, chosen=9, width=2048),
    "kimi-k2": _model("qwen3_moe", 61, 7168, 64, 64, 128, 18432, 163840, number=384, chosen=9, width=2048),
}


def read_rows(*, planned: bool = True) -> list[Row]:
    """Return the rows of the table; planned: without those that are left out."""
    with TABLE.open(encoding="utf-8", newline="") as file:
        return [row for row in csv.DictReader(file) if not (planned and row["left_out"])]


def drawn(row: Row) -> tuple[str, str]:
    """Return the id of a row's configuration, and the half that it belongs to."""
    digest = hashlib.sha256("|".join(row[name] for name in CONFIGURATION).encode()).hexdigest()
    learned = int(digest[:8], 16) % 2 == 0 and row["kind"] != "lora"
    return digest[:8], "learn" if learned else "test"


def group_of(row: Row) -> str:
    """Return the group that a row is reported in."""
    kind = "mixture of experts" if MODELS[row["model"]].experts else "dense"
    if row["kind"] in ("sync", "lora"):
        return {"sync": "weight sync", "lora": "training of adapters"}[row["kind"]]
    return f"{'RL step' if row['kind'] == 'rl' else 'training'}, {kind}"


def _layout(row: Row) -> ModelLayout:
    sizes = {name: int(row[name]) for name in ("tensor", "pipeline", "context", "expert", "virtual")}
    each = int(row["micro_batch"] or 1) * int(row["sequence"] or 4096)
    return ModelLayout(**sizes, recompute="full" if row["recompute"] == "full" else "none", micro_batch_tokens=each)


def _practice(row: Row) -> Practice:
    """Return what the published trainers do: Megatron-Bridge's recipes overlap, NeMo-RL's do not."""
    bridge = row["kind"] != "rl"
    return Practice(
        graphs=row["graphs"] or "none",  # type: ignore[arg-type]
        fused=bridge,
        once=row["dispatch"] == "flex",
        overlaps=bridge,
        overlaps_experts=row["overlap"] == "yes",
        gathers=row["fsdp"] == "yes",
        balanced=bridge,
        gradient_bytes=2 if bridge else 4,
        logprobs_at_once=1 if bridge else _logprob_batch(row),
        # NeMo-RL generates for as many steps at once as answers may be old (max_trajectory_age_steps, grpo.py).
        batches_at_once=int(row["staleness"] or 0),
    )


def _logprob_batch(row: Row) -> int:
    """policy.logprob_batch_size of NeMo-RL's recipes (examples/configs/recipes/llm/performance), up to 0.6."""
    if row["logprob_batch"]:
        return int(row["logprob_batch"])
    if row["model"] == "qwen3-30b-a3b":
        return 2 if row["gpu"].startswith("gb") else 4
    return {"llama-3.1-8b": 2, "qwen3-32b": 4, "qwen3-235b-a22b": 1}[row["model"]]


def workload_of(row: Row) -> Workload:
    """Return the published batch."""
    rl, longest = row["kind"] == "rl", int(row["sequence"] or 4096)
    samples = int(row["batch"] or 512)
    if rl:
        lengths = quantiles(float(row["mean_length"]), DEFAULT_SPREAD, longest - PROMPT_TOKENS)
    else:
        lengths = np.full(256, float(longest))
    return Workload(
        shape=MODELS[row["model"]],
        dtype_bytes=2,
        fp8="tensorwise" if row["precision"] in ("fp8", "mxfp8", "fp8-block") else None,
        samples=samples,
        generated=samples,
        minibatches=samples // int(row["update_batch"]) if rl else 1,
        batches_ahead=int(row["staleness"] or 0),
        # From 0.7 on NeMo-RL's recipes leave out the policy's pass where a step is a batch (force_on_policy_ratio).
        extra_passes=int(row["logprob_passes"] or 2) if rl else 0,
        mean_prompt=float(PROMPT_TOKENS if rl else 0),
        longest=longest,
        response_Q=lengths,
        distributed_optimizer=True,
        chunk_tokens=None,
        bucket_bytes=2**28,
        prompts_shared=32,
        servers_fp8=False,
        cache_fp8=False,
        server_fraction=None,
        server_nodes=None,
        colocated=False,
        practice=_practice(row),
        adapters=Adapters(ADAPTERS.rank, adapted_weights(ADAPTERS, MODELS[row["model"]]), alone=True)
        if row["kind"] == "lora"
        else None,
    )


def planned(row: Row, constants: Constants) -> float:
    """Return the planner's value in the row's unit."""
    gpu, workload, layout = GPUS[row["gpu"]], workload_of(row), _layout(row)
    if row["kind"] == "sync":
        gpus = int(row["gpus"]) + int(row["server_gpus"])
        # verl without its checkpoint engine broadcasts tensor by tensor, and times the pause by itself (param_sync.py).
        own = row["repo"] != "verl-project/verl"
        return sync_s(workload, layout, gpu, constants, near=gpus <= gpu.linked, buckets=own, pauses=own)
    servers = int(row["server_gpus"] or 0)
    gpus = int(row["gpus"])
    training = gpus - servers if workload.batches_ahead else gpus
    times = train_times(workload, layout, training // layout.ranks, gpu, constants)
    if row["kind"] != "rl":
        return workload.tokens / times.total / gpus
    tensor = int(row["server_tensor"])
    at_once = workload.practice.batches_at_once
    generation = generation_s(workload, tensor, servers // tensor, gpu, constants, batches_at_once=at_once)
    both = times.total + generation if workload.batches_ahead == 0 else max(times.total, generation)
    return both + constants.fixed_s


def log_ratios(rows: Sequence[Row], constants: Constants) -> np.ndarray:
    """Return log(planned / published) of each row."""
    return np.array([np.log(planned(row, constants) / float(row["value"])) for row in rows])


FITTED = {
    "times": (
        "matrices", "matrices_fp8", "attention", "passes", "passes_fp8", "expert_links", "hidden", "expert_layer_s",
        "expert_call_s", "fused", "schedule", "decoding", "expert_decoding", "decode_layer_s", "network_latency_s",
        "routing", "fixed_s",
    ),
    "sync": ("sync_links", "tensor_s", "walk_s"),
}  # fmt: skip
"""Constants by the kind of rows that they are learned from, in this order."""


def fit(rows: Sequence[Row], start: Constants, kinds: Sequence[str]) -> Constants:
    """Return constants with the least mean absolute error of logarithms; each configuration counts once, however many
    releases measured it. A constant that the rows do not need stays near its start."""
    known = start
    for kind in kinds:
        names = FITTED[kind]
        own = [row for row in rows if (row["kind"] == "sync") == (kind == "sync")]
        counts: dict[str, int] = defaultdict(int)
        for row in own:
            counts[row["id"]] += 1
        weights = np.array([1 / counts[row["id"]] for row in own])

        def loss(logs: np.ndarray, known=known, own=own, weights=weights, names=names) -> float:
            values = scaled(start, names, logs)
            shares = (
                "matrices",
                "matrices_fp8",
                "attention",
                "decoding",
                "expert_decoding",
                "expert_links",
                "hidden",
                "fused",
                "sync_links",
            )
            if any(values.get(name, 0) > 0.95 for name in shares):
                return 1e9
            errors = np.sqrt(log_ratios(own, replace(known, **values)) ** 2 + 0.05**2)
            return float((errors * weights).sum() / weights.sum()) + 0.002 * float((logs**2).sum())

        best = _simplex(loss, len(names))
        known = replace(known, **scaled(start, names, best))
    return known


def scaled(start: Constants, names: Sequence[str], logs: np.ndarray) -> dict[str, Any]:
    """These constants times the exponentials."""
    return {name: float(getattr(start, name) * np.exp(value)) for name, value in zip(names, logs, strict=True)}


def _simplex(loss: Callable[[np.ndarray], float], size: int, rounds: int = 400) -> np.ndarray:
    """Minimize by Nelder and Mead's simplex, started again from what it finds."""
    best = np.zeros(size)
    for step in (0.3, 0.15, 0.05):
        points = [best, *(best + step * direction for direction in np.eye(size))]
        values = [loss(point) for point in points]
        for _ in range(rounds):
            order = np.argsort(values)
            points, values = [points[i] for i in order], [values[i] for i in order]
            if values[-1] - values[0] < 1e-6:
                break
            centre = np.mean(points[:-1], axis=0)
            for factor in (1.0, 2.0, 0.5, -0.5):
                point = centre + factor * (centre - points[-1])
                value = loss(point)
                limit = values[0] if factor == 2.0 else values[-2] if factor == 1.0 else values[-1]
                if factor == 1.0 and value < values[0]:
                    further = centre + 2 * (centre - points[-1])
                    if (there := loss(further)) < value:
                        point, value = further, there
                if value < limit:
                    points[-1], values[-1] = point, value
                    break
            else:
                points = [points[0], *(points[0] + 0.5 * (point - points[0]) for point in points[1:])]
                values = [values[0], *(loss(point) for point in points[1:])]
        best = points[int(np.argmin(values))]
    return best


def summary(rows: Sequence[Row], constants: Constants) -> list[dict[str, Any]]:
    """Return for each group: rows of the learning half and the factor that nine tenths of them are within; of the test
    half rows, median absolute error, geometric mean, largest factor, rows beyond 1.6 and rows within that factor."""
    groups: dict[str, dict[str, list[float]]] = defaultdict(lambda: {"learn": [], "test": []})
    for row, log in zip(rows, log_ratios(rows, constants), strict=True):
        groups[group_of(row)][row["half"]].append(float(log))
        groups["all"][row["half"]].append(float(log))
    entries = []
    for group, halves in sorted(groups.items(), key=lambda item: (item[0] == "all", item[0])):
        learned, tested = np.abs(halves["learn"]), np.abs(halves["test"])
        factor = float(np.exp(np.quantile(learned, 0.9, method="higher"))) if len(learned) else math.inf
        entries.append(
            {
                "group": group,
                "learned": len(learned),
                "learned_error": float(np.median(np.abs(np.expm1(halves["learn"])))) if len(learned) else math.inf,
                "factor": factor,
                "tested": len(tested),
                "error": float(np.median(np.abs(np.expm1(halves["test"])))),
                "mean": float(np.exp(np.mean(halves["test"]))),
                "largest": float(np.exp(tested.max())),
                "beyond": int((tested > np.log(MOST)).sum()),
                "within": int((tested <= np.log(factor)).sum()),
            }
        )
    return entries


def beyond(rows: Sequence[Row], constants: Constants) -> list[tuple[Row, float]]:
    """Return the rows of the test half beyond a factor of MOST, with planned / published."""
    tested = [row for row in rows if row["half"] == "test"]
    logs = log_ratios(tested, constants)
    return [(row, float(np.exp(log))) for row, log in zip(tested, logs, strict=True) if abs(log) > np.log(MOST)]


_SAME = ("kind", "model", "gpu", "gpus", "precision", "sequence", "batch", "staleness")


def pairs(rows: Sequence[Row], constants: Constants) -> list[tuple[Row, Row, bool]]:
    """Return each pair of layouts of the test half that are published for the same model on the same GPUs, further than
    5 % apart, and whether the planner has them in the published order. A layout has the median over its releases."""
    layouts: dict[tuple[str, ...], dict[str, list[Row]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        if row["half"] == "test" and row["kind"] != "sync":
            layouts[tuple(row[name] for name in _SAME)][row["id"]].append(row)
    found = []
    for same in layouts.values():
        for one, other in itertools.combinations(same.values(), 2):
            published = [float(np.median([float(row["value"]) for row in group])) for group in (one, other)]
            ours = [float(np.median([planned(row, constants) for row in group])) for group in (one, other)]
            if abs(np.log(published[0] / published[1])) > np.log(1.05):
                found.append((one[0], other[0], (published[0] > published[1]) == (ours[0] > ours[1])))
    return found


def text(rows: Sequence[Row], constants: Constants) -> str:
    """Return the tables as benchmarks/results/plan_published.md has them."""
    lines = [
        "| group | learned from | error | 9 of 10 within | tested on | error | mean ratio | largest | beyond 1.6 | "
        "within the learned factor |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for entry in summary(rows, constants):
        learned = f"{entry['learned']} rows | {entry['learned_error']:.0%} | x {entry['factor']:.2f}"
        lines.append(
            f"| {entry['group']} | {learned if entry['learned'] else 'no row | |'} | "
            f"{entry['tested']} rows | {entry['error']:.0%} | {entry['mean']:.2f} | {entry['largest']:.2f} | "
            f"{entry['beyond']} | {entry['within'] if entry['learned'] else ''} |"
        )
    lines += ["", "Rows of the test half beyond a factor of 1.6:", "", "| row | published | planned |", "|---|---|---|"]
    for row, ratio in beyond(rows, constants):
        value = float(row["value"])
        lines.append(f"| {_named(row)} | {value:g} {row['unit']} | {value * ratio:.3g} |")
    both = pairs(rows, constants)
    right = sum(agrees for _, _, agrees in both)
    lines += [
        "",
        f"Pairs of layouts for the same model and GPUs in the test half: {len(both)}, {right} in the right order.",
    ]
    lines += [f"Not so: {_named(one)}; {_named(other)}." for one, other, agrees in both if not agrees]
    return "\n".join(lines) + "\n"


def _named(row: Row) -> str:
    sizes = " ".join(
        f"{name} {row[key]}"
        for name, key in (("TP", "tensor"), ("PP", "pipeline"), ("VPP", "virtual"), ("CP", "context"), ("EP", "expert"))
        if row[key] not in ("", "1")
    )
    where = f"{row['repo'].rpartition('/')[2]} {row['release']}".strip()
    what = {"rl": "step", "sync": "weight sync"}.get(row["kind"], f"micro-batch {row['micro_batch']}")
    return f"{where}: {row['model']} on {row['gpus']} {row['gpu']}, {row['precision']}, {sizes or 'DP'}, {what}"


def write_docs(page: Path, tables: str) -> None:
    """Put the tables between the marks of a page."""
    before, _, rest = page.read_text(encoding="utf-8").partition(MARKS[0])
    _, _, after = rest.partition(MARKS[1])
    page.write_text(f"{before}{MARKS[0]}\n{tables}{MARKS[1]}{after}", encoding="utf-8")


def main() -> None:
    """Print the tables, or put them into a page."""
    parser = argparse.ArgumentParser(description="The planner's times against published ones.")
    parser.add_argument(
        "--fit", nargs="*", choices=list(FITTED), help="look for these constants; all where none is named"
    )
    parser.add_argument("--rows", action="store_true", help="print each row of the learning half")
    parser.add_argument("--docs", type=Path, help="put the tables into this page")
    options = parser.parse_args()
    rows, known = read_rows(), Constants()
    learned = [row for row in rows if row["half"] == "learn"]
    if options.fit is not None:
        known = fit(learned, known, options.fit or list(FITTED))
        print(json.dumps({name: getattr(known, name) for names in FITTED.values() for name in names}, indent=2))
    if options.rows:
        for row, log in zip(learned, log_ratios(learned, known), strict=True):
            print(f"{np.exp(log):6.2f}  {_named(row)}")
    if options.docs:
        write_docs(options.docs, text(rows, known))
    else:
        print(text(rows, known), end="")


if __name__ == "__main__":
    main()
