"""Small Hugging Face models with random weights, saved to disk, and random batches of ragged samples."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from megatron_daro.types import TrainBatch

VOCAB = 50
ROLLOUTS = 4


def save_model(family: str, directory: Path, *, seed: int = 0):
    """family: qwen2, qwen2_tied, qwen3 or llama. Returns the transformers model (fp32, eval)."""
    from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

    common = {
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 96,
        "vocab_size": VOCAB,
        "max_position_embeddings": 256,
    }
    llama3 = {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 3.0,
        "original_max_position_embeddings": 16,
    }
    configs = {
        "qwen2": lambda: Qwen2Config(**common, tie_word_embeddings=False),
        "qwen2_tied": lambda: Qwen2Config(**common, tie_word_embeddings=True),
        "qwen3": lambda: Qwen3Config(**common, head_dim=32),
        "llama": lambda: LlamaConfig(**common, rope_parameters=llama3),
    }
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(configs[family]())
    with torch.no_grad():
        for parameter in model.parameters():  # biases and norms must differ from 0 and 1 to be tested
            parameter.add_(torch.randn_like(parameter) * 0.05)
    model.save_pretrained(directory)
    return model.eval()


def random_batch(*, groups: int = 6, seed: int = 0, with_old: bool = True) -> TrainBatch:
    """Ragged samples in shuffled order, all bins 0..K among them, some tokens and one whole sample masked out."""
    rng = np.random.default_rng(seed)
    num = groups * ROLLOUTS
    prompts = rng.integers(2, 9, num)
    responses = rng.integers(1, 25, num)
    lengths, total = prompts + responses, int(responses.sum())
    group_ids = np.repeat(np.arange(groups) * 7 + 3, ROLLOUTS)
    correct = np.concatenate([np.arange(ROLLOUTS) < (g % (ROLLOUTS + 1)) for g in range(groups)]).astype(np.uint8)
    bins = np.repeat([g % (ROLLOUTS + 1) for g in range(groups)], ROLLOUTS)
    mask = (rng.random(total) > 0.1).astype(np.uint8)
    first = int(responses[0])
    mask[:first] = 0
    rollout_logprobs = (-rng.random(total) * 4).astype(np.float32)
    batch = TrainBatch(
        tokens_T=rng.integers(0, VOCAB, int(lengths.sum())).astype(np.int32),
        lengths_N=lengths,
        prompt_lengths_N=prompts,
        loss_mask_R=mask,
        rollout_logprobs_R=rollout_logprobs,
        rewards_N=correct.astype(np.float32),
        correct_N=correct,
        bins_N=bins.astype(np.int64),
        group_ids_N=group_ids,
        advantages_N=rng.standard_normal(num).astype(np.float32),
        truncated_N=np.zeros(num, np.uint8),
        rollouts_per_prompt=ROLLOUTS,
        old_logprobs_R=(rollout_logprobs + 0.2 * rng.standard_normal(total)).astype(np.float32) if with_old else None,
    )
    return batch.select(rng.permutation(num))
