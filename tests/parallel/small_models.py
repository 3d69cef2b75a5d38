"""Small Hugging Face models with random weights, saved to disk, and random batches of ragged samples."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import torch

from megatron_daro.types import StepBatch

VOCAB = 50
ROLLOUTS = 4


COMMON = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": VOCAB,
    "max_position_embeddings": 256,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 3.0,
    "original_max_position_embeddings": 16,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "attention_factor": 1.3,
}
QWEN3 = {"head_dim": 32}
EXPERTS = {**QWEN3, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
GLM = {
    "head_dim": 32,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "routed_scaling_factor": 2.5,
    "num_nextn_predict_layers": 0,
    "rms_norm_eps": 1e-5,
}
# Windows that are shorter than most samples, and a limit that many gates are above.
GPT_OSS = {
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "head_dim": 32,
    "sliding_window": 6,
    "swiglu_limit": 0.2,
    "rope_parameters": {**YARN, "truncate": False},
}
DEEPSEEK = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 32,
    "num_nextn_predict_layers": 0,
    "rope_parameters": {**YARN, "attention_factor": None, "mscale": 1.0, "mscale_all_dim": 0.7},
}
# Two value heads for a key head, more ranks than key-value heads with TP 4; every second layer has full attention.
QWEN_NEXT = {
    "num_attention_heads": 4,
    "head_dim": 32,
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 16,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
}
SHARED_EXPERT = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
SHARED_EXPERT |= {"shared_expert_intermediate_size": 48}
# Windows that are shorter than most samples, in three of four layers; the fourth has YaRN.
OLMO3 = {
    "pad_token_id": None,  # with one, the reference gives a row of the embedding no gradient
    "sliding_window": 6,
    "rope_parameters": {
        "full_attention": YARN,
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    },
}
MODELS = {
    "qwen2": ("Qwen2Config", {"tie_word_embeddings": False}),
    "qwen2_tied": ("Qwen2Config", {"tie_word_embeddings": True}),
    "qwen2_deep": ("Qwen2Config", {"tie_word_embeddings": True, "num_hidden_layers": 8}),
    "qwen2_narrow": ("Qwen2Config", {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 8}),
    "qwen3": ("Qwen3Config", QWEN3),
    "qwen3_yarn": ("Qwen3Config", {**QWEN3, "rope_parameters": YARN}),
    # Heads of 128 and whole blocks of 128 on every side, as published models have them.
    "qwen3_wide": (
        "Qwen3Config",
        {"hidden_size": 256, "head_dim": 128, "intermediate_size": 384, "num_hidden_layers": 2}
        | {"max_position_embeddings": 16_384},
    ),
    "llama": ("LlamaConfig", {"rope_parameters": LLAMA3}),
    "mistral": ("MistralConfig", {"sliding_window": None, "head_dim": 32}),
    "llama_one_group": ("LlamaConfig", {"num_key_value_heads": 1}),
    "qwen3_moe": ("Qwen3MoeConfig", {**EXPERTS, "norm_topk_prob": True}),
    # Every second layer is dense, and the weights of the chosen experts do not sum to 1.
    "qwen3_moe_mixed": ("Qwen3MoeConfig", {**EXPERTS, "norm_topk_prob": False, "decoder_sparse_step": 2}),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    # A first dense layer, biases; experts in two groups, of which a token sees those of one.
    "glm4_moe": ("Glm4MoeConfig", {**GLM, "attention_bias": True, "n_group": 2, "topk_group": 1}),
    # Norms of queries and keys; experts that are not in groups, two that every token sees.
    # Queries of a latent; experts in four groups, of which a token sees those of two.
    "deepseek_v3": ("DeepseekV3Config", {**DEEPSEEK, "q_lora_rank": 40, "n_group": 4, "topk_group": 2}),
    # Queries of the hidden state, plain rotary embeddings; experts that are not in groups.
    "deepseek_v3_plain": (
        "DeepseekV3Config",
        {**DEEPSEEK, "q_lora_rank": None, "n_group": 1, "topk_group": 1, "rope_parameters": None},
    ),
    "glm4_moe_normed": ("Glm4MoeConfig", {**GLM, "use_qk_norm": True, "n_shared_experts": 2}),
    "gpt_oss": ("GptOssConfig", GPT_OSS),
    "qwen3_next": ("Qwen3NextConfig", {**QWEN_NEXT, **SHARED_EXPERT}),
    "qwen3_5": ("Qwen3_5TextConfig", QWEN_NEXT),
    "qwen3_5_moe": ("Qwen3_5MoeTextConfig", {**QWEN_NEXT, **SHARED_EXPERT}),
    "olmo3": ("Olmo3Config", OLMO3),
    "olmo3_one_group": ("Olmo3Config", {**OLMO3, "num_key_value_heads": 1}),
}


def save_model(family: str, directory: Path, *, seed: int = 0):
    """family: a key of MODELS. Returns the transformers model (fp32, eval)."""
    import transformers
    from transformers import AutoModelForCausalLM

    config_class, changes = MODELS[family]
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(getattr(transformers, config_class)(**{**COMMON, **changes}))
    with torch.no_grad():
        for parameter in model.parameters():  # biases and norms must differ from 0 and 1 to be tested
            parameter.add_(torch.randn_like(parameter) * 0.05)
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):  # a state that outlives many tokens
                parameter.sub_(3)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):  # large enough to choose other experts
                buffer.add_(torch.randn_like(buffer) * 0.05)
    model.save_pretrained(directory)
    return model.eval()


def as_in_checkpoint(model, tensors: dict[str, torch.Tensor], directory: Path) -> dict[str, np.ndarray]:
    """Tensors that belong to the model's parameters (gradients), named and cut as its checkpoint is: transformers keeps
    all experts of a layer in one parameter, and takes them apart when it saves."""
    from safetensors.torch import load_file

    holder = copy.deepcopy(model)
    with torch.no_grad():
        for name, parameter in holder.named_parameters():
            parameter.copy_(tensors[name])
    holder.save_pretrained(directory)
    buffers = dict(model.named_buffers())
    saved = load_file(directory / "model.safetensors")
    return {name: tensor.numpy() for name, tensor in saved.items() if name not in buffers}


def random_batch(*, groups: int = 6, seed: int = 0, with_old: bool = True) -> StepBatch:
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
    trained = np.array([part.sum() for part in np.split(mask, np.cumsum(responses)[:-1])], dtype=np.int64)
    rollout_logprobs = (-rng.random(total) * 4).astype(np.float32)
    batch = StepBatch(
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
        group_lengths_NK=np.repeat(trained.reshape(groups, ROLLOUTS), ROLLOUTS, axis=0),
    )
    return batch.select(rng.permutation(num))
