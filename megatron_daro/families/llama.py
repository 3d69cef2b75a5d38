"""Llama 2, 3, 3.1, 3.2 (text) and 3.3."""

from __future__ import annotations

from megatron_daro.families.table import DECODER, Family

FAMILY = Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    tensors=DECODER,
    defaults={"max_position_embeddings": 2048},
)
