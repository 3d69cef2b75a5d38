"""What this package adds to bare transformers on a CPU: tokens a second of generation, seconds of a train step.

    python benchmarks/cpu_speed.py runs/smollm2-base/model --rounds 5 --json

Both take turns in one process, on the same prompts and the same packed tokens:

* generation: EmbeddedGenerator and `model.generate` with sampling, both from groups of 8 rollouts of equal prompts, all
  rollouts of the full length. Goal: at least 0.8 of the tokens a second.
* training: MegatronPolicy.train_step and a bare forward, cross-entropy of the response tokens, backward. Rows are of
  equal length, so that neither pads. The step's part without the optimizer is compared; the whole is shown. Goal: at
  most 1.15 times the seconds.

The first round is not timed.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
import warnings
from pathlib import Path
from statistics import median
from typing import Any

import harness

ROLLOUTS = 8
CONFIG = harness.ROOT / "examples/smollm2/config.yaml"
LEAST_GENERATION, MOST_TRAINING = 0.8, 1.15


def parse_arguments() -> argparse.Namespace:
    parser = harness.arguments_of(__doc__)
    parser.add_argument("model", type=Path, help="Hugging Face directory, for example runs/smollm2-base/model")
    parser.add_argument("--rounds", type=int, default=5, help="timed rounds")
    parser.add_argument("--groups", type=int, default=4, help=f"prompts, with {ROLLOUTS} rollouts each")
    parser.add_argument("--prompt-tokens", type=int, default=24)
    parser.add_argument("--response-tokens", type=int, default=8)
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--threads", type=int, default=1)
    return parser.parse_args()


def generation(given: argparse.Namespace, tokens_NS: Any) -> dict[str, list[float]]:
    """Seconds of both, a round each; every row gets the same number of tokens."""
    import torch

    from megatron_daro.engine.generator import EmbeddedGenerator
    from megatron_daro.types import GroupRequest, Prompt, SamplingParams

    embedded = EmbeddedGenerator(
        given.model, seed=0, batch_size=len(tokens_NS), dtype=given.precision, threads=given.threads
    )
    sampling, attempts = SamplingParams(temperature=1.0, max_new_tokens=given.response_tokens), iter(range(10**6))
    prompts = [tuple(row.tolist()) for row in tokens_NS[::ROLLOUTS, : given.prompt_tokens]]
    ids_NS = tokens_NS[:, : given.prompt_tokens]

    def ours() -> float:
        attempt, began = next(attempts), time.perf_counter()
        requests = [
            GroupRequest(g, attempt, Prompt(str(g), "", "", tokens=prompt), tuple(range(ROLLOUTS)), sampling)
            for g, prompt in enumerate(prompts)
        ]
        rollouts = [r for batch in embedded.plan(requests) for r in embedded.generate_rows(batch)]
        seconds = time.perf_counter() - began
        assert all(r.response_length == given.response_tokens for r in rollouts)
        return seconds

    def bare() -> float:
        began = time.perf_counter()
        with torch.inference_mode():
            out = embedded.model.generate(
                input_ids=ids_NS,
                attention_mask=torch.ones_like(ids_NS),
                do_sample=True,
                top_k=0,
                max_new_tokens=given.response_tokens,
                pad_token_id=0,
            )
        seconds = time.perf_counter() - began
        assert out.shape[1] == given.prompt_tokens + given.response_tokens
        return seconds

    return harness.in_turns({"package": ours, "bare": bare}, given.rounds)


def training(given: argparse.Namespace, tokens_NS: Any) -> tuple[dict[str, list[float]], list[float]]:
    """Seconds of forward and backward of both, a round each, and of our whole steps."""
    import torch
    from transformers import AutoModelForCausalLM

    from megatron_daro.actor import parallel
    from megatron_daro.actor.policy import MegatronPolicy
    from megatron_daro.actor.translation import layout_of
    from megatron_daro.config import resolve
    from megatron_daro.runtime import parts

    options = ["actor.data_parallel=1", "engine.replicas=1", f"actor.precision={given.precision}"]
    with tempfile.TemporaryDirectory() as folder:
        named = [f"model.path={given.model}", f"trainer.run_dir={folder}/run", "algorithm.name=dapo"]
        config = resolve(CONFIG, [*options, *named])
    parallel.initialize(layout_of(config.actor), seed=0, timeout_s=600)
    policy = MegatronPolicy(parts.policy_settings(config), config.actor, config.algorithm)
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[given.precision]
    model: Any = AutoModelForCausalLM.from_pretrained(given.model, dtype=dtype).train()
    batch, rows = step_batch(given, tokens_NS), [list(range(len(tokens_NS)))]
    whole: list[float] = []

    def ours() -> float:
        began = time.perf_counter()
        result = policy.train_step(batch, rows, step=1)
        whole.append(time.perf_counter() - began)
        return float(result.metrics["timing/forward_backward_s"])

    def bare() -> float:
        began = time.perf_counter()
        model.zero_grad(set_to_none=False)
        logits = model(tokens_NS, logits_to_keep=given.response_tokens + 1).logits[:, :-1].float()
        labels = tokens_NS[:, given.prompt_tokens :]
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()).backward()
        return time.perf_counter() - began

    try:
        return harness.in_turns({"package": ours, "bare": bare}, given.rounds), whole[1:]
    finally:
        parallel.shutdown()


def step_batch(given: argparse.Namespace, tokens_NS: Any) -> Any:
    """The rows as samples of half-right groups."""
    import numpy as np

    from megatron_daro.types import StepBatch

    num = len(tokens_NS)
    right_N = np.tile(np.arange(ROLLOUTS) % 2, num // ROLLOUTS)
    total = num * given.response_tokens
    return StepBatch(
        tokens_T=tokens_NS.flatten().numpy().astype(np.int32),
        lengths_N=np.full(num, tokens_NS.shape[1], np.int64),
        prompt_lengths_N=np.full(num, given.prompt_tokens, np.int64),
        loss_mask_R=np.ones(total, np.uint8),
        rollout_logprobs_R=np.full(total, -3.0, np.float32),
        rewards_N=right_N.astype(np.float32),
        correct_N=right_N.astype(np.uint8),
        bins_N=np.full(num, ROLLOUTS // 2, np.int64),
        group_ids_N=np.repeat(np.arange(num // ROLLOUTS), ROLLOUTS),
        advantages_N=(2.0 * right_N - 1.0).astype(np.float32),
        truncated_N=np.zeros(num, np.uint8),
        rollouts_per_prompt=ROLLOUTS,
    )


def main() -> None:
    given = parse_arguments()
    os.environ["OMP_NUM_THREADS"] = str(given.threads)
    warnings.simplefilter("ignore")
    import torch
    from transformers import AutoConfig

    torch.set_num_threads(given.threads)
    vocab = AutoConfig.from_pretrained(given.model).vocab_size
    torch.manual_seed(0)
    prompts_GS = torch.randint(3, vocab, (given.groups, given.prompt_tokens)).repeat_interleave(ROLLOUTS, dim=0)
    answers_NS = torch.randint(3, vocab, (given.groups * ROLLOUTS, given.response_tokens))
    tokens_NS = torch.cat([prompts_GS, answers_NS], dim=1)
    generated = answers_NS.numel()
    generating = generation(given, tokens_NS)
    trained, whole = training(given, tokens_NS)
    speed = {side: generated / median(seconds) for side, seconds in generating.items()}
    seconds = {side: median(values) for side, values in trained.items()}
    result: dict[str, Any] = {
        "generation_tokens_per_s": speed,
        "generation_ratio": harness.median_of_ratios(generating["bare"], generating["package"]),
        "forward_backward_s": seconds,
        "train_ratio": harness.median_of_ratios(trained["package"], trained["bare"]),
        "train_step_s": median(whole),
        "settings": harness.setup_of(given),
    }
    rows = {
        "generated tokens/s": [speed["package"], speed["bare"], result["generation_ratio"]],
        "forward and backward, s": [seconds["package"], seconds["bare"], result["train_ratio"]],
        "whole train step, s": [result["train_step_s"], "", ""],
    }
    harness.table(f"{given.model}, {given.precision}", ("package", "bare transformers", "ratio"), rows)
    problems = harness.at_least("tokens a second over bare", result["generation_ratio"], LEAST_GENERATION)
    problems += harness.at_most("forward and backward over bare", result["train_ratio"], MOST_TRAINING)
    harness.conclude("cpu_speed", result, problems, write=given.json)


if __name__ == "__main__":
    main()
