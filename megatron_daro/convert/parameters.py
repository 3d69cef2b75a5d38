"""The parameters of Megatron-core's decoder, the same for every family, by role.

Names are those of Megatron-core 0.16.1, except `gated_norm` and `post_layernorm`, which it does not have. Each
parameter has its name in Megatron's local layers, and another if Transformer Engine's layers differ: their linear
layers hold the weight of the norm before them, and a rank's experts are numbered weights of one grouped linear layer.
convert/mapping.py joins the table with a family's names (families/table.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron_daro.config.model_shape import ModelShape

Kind = Literal["copy", "vocab", "qkv", "gate_up", "heads", "rows", "columns"]
"""How tensor parallelism cuts a parameter: copy (whole on every rank), vocab (rows, padded), qkv (rows, interleaved by
key-value group), gate_up (rows of gate and rows of up), heads (rows of each section, by key heads), rows, columns."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter.

    name: in Megatron's local layers; fused_name: with Transformer Engine, if it differs; {expert} in a name is the
    expert's number. sizes: the shape of each Hugging Face tensor, by the names in `dimensions`. fp32: ranks hold it in
    fp32, whatever the dtype of the model, and a conversion does not cast it.
    """

    role: str
    name: str
    kind: Kind
    sizes: tuple[tuple[str, ...], ...]
    fused_name: str = ""
    fp32: bool = False


_QKV = ("query", "hidden"), ("key", "hidden"), ("key", "hidden")

EMBEDDING = Parameter("embedding", "embedding.word_embeddings.weight", "vocab", (("vocab", "hidden"),))
FINAL_NORM = Parameter("final_norm", "decoder.final_layernorm.weight", "copy", (("hidden",),))
OUTPUT = Parameter("output", "output_layer.weight", "vocab", (("vocab", "hidden"),))
ATTENTION_OUTPUT = Parameter(
    "attention_output", "self_attention.linear_proj.weight", "columns", (("hidden", "attended"),)
)
ATTENTION = (
    Parameter(
        "attention_norm",
        "input_layernorm.weight",
        "copy",
        (("hidden",),),
        fused_name="self_attention.linear_qkv.layer_norm_weight",
    ),
    Parameter("qkv", "self_attention.linear_qkv.weight", "qkv", _QKV),
    Parameter("gated_qkv", "self_attention.linear_qkv.weight", "qkv", (("query_and_gate", "hidden"), *_QKV[1:])),
    Parameter("qkv_bias", "self_attention.linear_qkv.bias", "qkv", (("query",), ("key",), ("key",))),
    Parameter("query_norm", "self_attention.q_layernorm.weight", "copy", (("normed_query",),)),
    Parameter("key_norm", "self_attention.k_layernorm.weight", "copy", (("normed_key",),)),
    ATTENTION_OUTPUT,
    Parameter("attention_post_norm", "self_attention.post_layernorm.weight", "copy", (("hidden",),)),
    Parameter("attention_output_bias", "self_attention.linear_proj.bias", "copy", (("hidden",),)),
    Parameter("sinks", "self_attention.core_attention.softmax_offset", "rows", (("heads",),)),
)
LINEAR_ATTENTION = (
    Parameter("attention_norm", "input_layernorm.weight", "copy", (("hidden",),)),
    Parameter(
        "linear_in",
        "self_attention.in_proj.weight",
        "heads",
        (("convolved", "hidden"), ("linear_values", "hidden"), *(("linear_heads", "hidden"),) * 2),
    ),
    Parameter(
        "linear_in_by_head",
        "self_attention.in_proj.weight",
        "heads",
        (("convolved_and_gate", "hidden"), ("two_linear_heads", "hidden")),
    ),
    Parameter("linear_conv", "self_attention.conv1d.weight", "heads", (("convolved", "one", "kernel"),)),
    Parameter("linear_decay", "self_attention.A_log", "rows", (("linear_heads",),), fp32=True),
    Parameter("linear_decay_bias", "self_attention.dt_bias", "rows", (("linear_heads",),)),
    Parameter("linear_norm", "self_attention.gated_norm.weight", "copy", (("linear_value",),)),
    Parameter("linear_output", "self_attention.out_proj.weight", "columns", (("hidden", "linear_values"),)),
)
LATENT_ATTENTION = (
    Parameter("attention_norm", "input_layernorm.weight", "copy", (("hidden",),)),
    Parameter("q", "self_attention.linear_q_proj.weight", "rows", (("query", "hidden"),)),
    Parameter("q_down", "self_attention.linear_q_down_proj.weight", "copy", (("query_rank", "hidden"),)),
    Parameter(
        "q_latent_norm",
        "self_attention.q_layernorm.weight",
        "copy",
        (("query_rank",),),
        fused_name="self_attention.linear_q_up_proj.layer_norm_weight",
    ),
    Parameter("q_up", "self_attention.linear_q_up_proj.weight", "rows", (("query", "query_rank"),)),
    Parameter("kv_down", "self_attention.linear_kv_down_proj.weight", "copy", (("kv_rank_and_rotary", "hidden"),)),
    Parameter(
        "kv_latent_norm",
        "self_attention.kv_layernorm.weight",
        "copy",
        (("kv_rank",),),
        fused_name="self_attention.linear_kv_up_proj.layer_norm_weight",
    ),
    Parameter("kv_up", "self_attention.linear_kv_up_proj.weight", "rows", (("plain_and_value", "kv_rank"),)),
    ATTENTION_OUTPUT,
)
DENSE_MLP = (
    Parameter(
        "mlp_norm",
        "pre_mlp_layernorm.weight",
        "copy",
        (("hidden",),),
        fused_name="mlp.linear_fc1.layer_norm_weight",
    ),
    Parameter("gate_up", "mlp.linear_fc1.weight", "gate_up", (("ffn", "hidden"),) * 2),
    Parameter("down", "mlp.linear_fc2.weight", "columns", (("hidden", "ffn"),)),
    Parameter("mlp_post_norm", "mlp.post_layernorm.weight", "copy", (("hidden",),)),
)
ROUTER = (
    Parameter("mlp_norm", "pre_mlp_layernorm.weight", "copy", (("hidden",),)),
    Parameter("router", "mlp.router.weight", "copy", (("experts", "hidden"),)),
    Parameter("router_bias", "mlp.router.expert_bias", "copy", (("experts",),), fp32=True),
    Parameter("router_logit_bias", "mlp.router.bias", "copy", (("experts",),)),
    Parameter("shared_gate_up", "mlp.shared_experts.linear_fc1.weight", "gate_up", (("shared_ffn", "hidden"),) * 2),
    Parameter("shared_down", "mlp.shared_experts.linear_fc2.weight", "columns", (("hidden", "shared_ffn"),)),
    Parameter("shared_gate", "mlp.shared_experts.gate_weight", "copy", (("one", "hidden"),)),
)
EXPERT = (
    Parameter(
        "expert_gate_up",
        "mlp.experts.local_experts.{expert}.linear_fc1.weight",
        "gate_up",
        (("expert_ffn", "hidden"),) * 2,
        fused_name="mlp.experts.linear_fc1.weight{expert}",
    ),
    Parameter(
        "expert_down",
        "mlp.experts.local_experts.{expert}.linear_fc2.weight",
        "columns",
        (("hidden", "expert_ffn"),),
        fused_name="mlp.experts.linear_fc2.weight{expert}",
    ),
    Parameter(
        "expert_gate_up_bias",
        "mlp.experts.local_experts.{expert}.linear_fc1.bias",
        "gate_up",
        (("expert_ffn",),) * 2,
        fused_name="mlp.experts.linear_fc1.bias{expert}",
    ),
    Parameter(
        "expert_down_bias",
        "mlp.experts.local_experts.{expert}.linear_fc2.bias",
        "copy",
        (("hidden",),),
        fused_name="mlp.experts.linear_fc2.bias{expert}",
    ),
)


def dimensions(shape: ModelShape) -> dict[str, int]:
    """Return the size of each dimension that the table names, for a model."""
    experts, latent = shape.experts, shape.latent
    of_latents = (
        {
            "query_rank": latent.query_rank or 0,
            "kv_rank": latent.kv_rank,
            "kv_rank_and_rotary": latent.kv_rank + latent.rotary,
            "plain_and_value": shape.heads * (latent.plain + latent.value),
        }
        if latent
        else {}
    )
    linear = shape.linear
    of_linear = (
        {
            "convolved": 2 * linear.keys + linear.values,
            "convolved_and_gate": 2 * linear.keys + 2 * linear.values,
            "linear_values": linear.values,
            "linear_value": linear.value,
            "linear_heads": linear.value_heads,
            "two_linear_heads": 2 * linear.value_heads,
            "kernel": linear.kernel,
        }
        if linear
        else {}
    )
    return {
        **of_latents,
        **of_linear,
        "one": 1,
        "query_and_gate": 2 * shape.heads * shape.head_dim,
        "hidden": shape.hidden,
        "query": shape.heads * shape.head_dim,
        "key": shape.kv_heads * shape.head_dim,
        "normed_query": shape.head_dim * (shape.heads if shape.whole_qk_norm else 1),
        "normed_key": shape.head_dim * (shape.kv_heads if shape.whole_qk_norm else 1),
        "heads": shape.heads,
        "attended": shape.heads * shape.value_dim,
        "ffn": shape.ffn,
        "vocab": shape.vocab,
        "experts": experts.number if experts else 0,
        "expert_ffn": experts.ffn if experts else 0,
        "shared_ffn": experts.shared_ffn if experts else 0,
    }
