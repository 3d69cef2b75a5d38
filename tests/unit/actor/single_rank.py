"""What tests of one rank share: small models without transformers, policies of one process, passes and steps."""

from __future__ import annotations

import json
from dataclasses import replace

import torch
from safetensors.torch import save_file
from small_models import random_batch

GRPO = {"name": "grpo"}
ROWS = [[0, 1, 2], list(range(3, 24))]
CONFIG = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "vocab_size": 50,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "max_position_embeddings": 256,
    "rope_theta": 1e4,
    "hidden_act": "silu",
    "dtype": "float32",
}


def save_random_model(directory, *, seed=0, head=False, **changes):
    """A checkpoint as Hugging Face's; head: with the one of a critic."""
    from megatron_daro.config.model_shape import read_model_shape
    from megatron_daro.convert.mapping import hf_tensor_shapes

    (directory / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    generator = torch.Generator().manual_seed(seed)
    shapes = hf_tensor_shapes(read_model_shape(directory))
    if head:
        shapes["score.weight"] = (1, CONFIG["hidden_size"])
    tensors = {name: torch.randn(shape, generator=generator) * 0.2 for name, shape in shapes.items()}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def policy_of(path, algorithm, **options):
    """A policy of this process; needs the fixture `world`."""
    from policy_tasks import build_policy

    from megatron_daro.actor.parallel import Layout

    return build_policy(path, Layout(), algorithm, **options)


def with_passes(policy, batch, micro_batches):
    """The batch with the columns that the algorithm asks for."""
    if policy.reference:
        batch = replace(batch, ref_logprobs_R=policy.run_pass("ref_logprobs", batch, micro_batches))
    if policy.critic:
        batch = replace(batch, values_R=policy.run_pass("values", batch, micro_batches))
    return batch


def rates(policy, number, first=1):
    batch = random_batch()
    results = [policy.train_step(batch, ROWS, step=n) for n in range(first, first + number)]
    return [result.metrics["optimizer/learning_rate"] for result in results]
