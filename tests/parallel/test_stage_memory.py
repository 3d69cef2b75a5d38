"""The planner's activations of pipeline stages, in one part and in several, against the live bytes of real ranks."""

from __future__ import annotations

import json

import numpy as np
import policy_tasks
import pytest
import transformers

from megatron_daro.types import StepBatch

SIZES = {
    "hidden_size": 256,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 768,
    "vocab_size": 2005,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
}
TOKENS, EACH = 128, 4


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    config = transformers.Qwen2Config(**SIZES)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    return directory


def batch_of(samples: int) -> StepBatch:
    """Samples of one length."""
    rng, responses = np.random.default_rng(0), TOKENS - 8
    return StepBatch(
        tokens_T=rng.integers(0, 2005, samples * TOKENS).astype(np.int32),
        lengths_N=np.full(samples, TOKENS),
        prompt_lengths_N=np.full(samples, 8),
        loss_mask_R=np.ones(samples * responses, np.uint8),
        rollout_logprobs_R=np.full(samples * responses, -2.0, np.float32),
        rewards_N=np.zeros(samples, np.float32),
        correct_N=np.zeros(samples, np.uint8),
        bins_N=np.full(samples, 2),
        group_ids_N=np.arange(samples) // 4,
        advantages_N=np.ones(samples, np.float32),
        truncated_N=np.zeros(samples, np.uint8),
        rollouts_per_prompt=4,
    )


@pytest.mark.parametrize(
    ("virtual", "micro_batches", "recompute"),
    [(1, 6, "none"), (2, 6, "none"), (4, 6, "none"), (2, 5, "none"), (2, 1, "none"), (2, 6, "full")],
)
def test_activations_of_a_stage_are_within_15_percent(
    rank_pool, model, record_property, virtual, micro_batches, recompute
):
    from megatron_daro.actor.parallel import Layout
    from megatron_daro.config import Config
    from megatron_daro.config.model_shape import read_model_shape
    from megatron_daro.workshop.plan import memory
    from megatron_daro.workshop.plan.layout import ModelLayout
    from megatron_daro.workshop.plan.workload import workload_of

    rows = [list(range(i * EACH, (i + 1) * EACH)) for i in range(micro_batches)]
    real = rank_pool.run(
        policy_tasks.live_bytes,
        Layout(pipeline=2, virtual_pipeline=virtual),
        path=model,
        batch=batch_of(micro_batches * EACH),
        micro_batches=rows,
        recompute=recompute,
        logprob_chunk_tokens=256,
    )
    config = {"model": {"path": "x"}, "data": {"train": ("x",)}}
    actor = {"precision": "fp32", "logprob_chunk_tokens": 256}
    shape = read_model_shape(json.loads((model / "config.json").read_text()))
    asked = workload_of(Config.model_validate({**config, "actor": actor}), shape)
    layout = ModelLayout(1, 2, 1, recompute, TOKENS * EACH, virtual=virtual)
    ratios = []
    for stage in (0, 1):
        planned = memory.activations(asked, layout, memory.LOCAL_FP32, stage=stage, micro_batches=micro_batches)
        planned += memory.logits(asked, layout, on_cpu=memory.LOCAL_FP32) if stage else 0
        planned += 2 * TOKENS * EACH * shape.hidden * asked.dtype_bytes  # sent and received
        ratios.append(planned / real[stage])
    record_property("planned over measured", ", ".join(f"{ratio:.3f}" for ratio in ratios))
    assert all(0.85 <= ratio <= 1.15 for ratio in ratios), ratios
