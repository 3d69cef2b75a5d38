"""Mistral 7B from v0.2 on, Nemo, Small: the models without a sliding window."""

from __future__ import annotations

from megatron_daro.families.table import DECODER, Family

FAMILY = Family(
    model_type="mistral",
    architecture="MistralForCausalLM",
    tensors=DECODER,
    defaults={"max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096},
)
