"""The planner's times against step times that others published: python benchmarks/plan_published.py [--json FILE]

Published: NeMo-RL 0.4, docs/about/performance-summary.md of NVIDIA-NeMo/RL: GRPO on DGX H100, bf16, Megatron-core,
on-policy, all GPUs generate and then all train; 2,048 answers a step in 4 updates of 512. Two passes beside training
(old and reference log-probs). The mean length is theirs (prompt and answer); prompts of 200 tokens and the spread of
lengths are assumed. Nothing is fitted: these are the planner's assumed constants.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path

from megatron_daro.config.model_shape import ModelShape, read_model_shape
from megatron_daro.plan.gpus import GPUS
from megatron_daro.plan.layout import ModelLayout
from megatron_daro.plan.times import Constants, generation_s, train_times
from megatron_daro.plan.workload import DEFAULT_SPREAD, Workload, quantiles

H100 = GPUS["h100-80g"]
PROMPT, LONGEST, SAMPLES, UPDATES, PASSES = 200, 4096, 2048, 4, 2
QWEN3 = {"rms_norm_eps": 1e-6, "tie_word_embeddings": False, "vocab_size": 151936, "max_position_embeddings": 40960}
MODELS = {
    "Llama-3.1-8B": {
        "model_type": "llama",
        "num_hidden_layers": 32,
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 14336,
        "vocab_size": 128256,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "max_position_embeddings": 131072,
    },
    "Qwen3-30B-A3B": {
        **QWEN3,
        "model_type": "qwen3_moe",
        "num_hidden_layers": 48,
        "hidden_size": 2048,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "intermediate_size": 6144,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
    },
    "Qwen3-32B": {
        **QWEN3,
        "model_type": "qwen3",
        "num_hidden_layers": 64,
        "hidden_size": 5120,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 25600,
    },
}


@dataclass(frozen=True, slots=True)
class Published:
    """gpus; mean length of prompt and answer in tokens; GPUs of a server; TP, PP and EP of training; seconds."""

    model: str
    gpus: int
    mean: int
    server: int
    tensor: int
    pipeline: int
    expert: int
    seconds: float


ROWS = (
    Published("Llama-3.1-8B", 16, 1060, 1, 1, 2, 1, 97.7),
    Published("Qwen3-30B-A3B", 32, 3154, 4, 2, 1, 8, 225.0),
    Published("Qwen3-32B", 32, 3206, 4, 4, 4, 1, 393.0),
)


def workload_of(shape: ModelShape, row: Published) -> Workload:
    """Return the published batch."""
    return Workload(
        shape=shape,
        dtype_bytes=2,
        fp8=False,
        samples=SAMPLES,
        generated=SAMPLES,
        updates=UPDATES,
        staleness=0,
        extra_passes=PASSES,
        mean_prompt=PROMPT,
        longest=LONGEST,
        response_Q=quantiles(row.mean - PROMPT, DEFAULT_SPREAD, LONGEST - PROMPT),
        distributed_optimizer=True,
        chunk_tokens=1024,
        bucket_bytes=2**28,
        prompts_shared=32,
    )


def planned(row: Published) -> dict[str, float]:
    """Return the planner's seconds."""
    shape, known = read_model_shape(MODELS[row.model]), Constants()
    workload = workload_of(shape, row)
    layout = ModelLayout(row.tensor, row.pipeline, 1, "none", LONGEST, row.expert)
    times = train_times(workload, layout, row.gpus // layout.ranks, H100, known)
    generation = generation_s(workload, row.server, row.gpus // row.server, H100, known)
    return {"generation": generation, "training": times.total, "step": generation + times.total + known.fixed_s}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description="The planner's times against published ones.")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found = []
    columns = ("model", "GPUs", "published step", "planned step", "error", "of it generation", "training")
    print("| " + " | ".join(columns) + " |")
    print("|---" * len(columns) + "|")
    for row in ROWS:
        plan = planned(row)
        error = plan["step"] / row.seconds - 1
        found.append({"model": row.model, "gpus": row.gpus, "published": row.seconds, **plan, "error": error})
        cells = (f"{row.seconds:g} s", f"{plan['step']:.0f} s", f"{error:+.0%}")
        cells += (f"{plan['generation']:.0f} s", f"{plan['training']:.0f} s")
        print(f"| {row.model} | {row.gpus} | " + " | ".join(cells) + " |")
    if options.json:
        options.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
