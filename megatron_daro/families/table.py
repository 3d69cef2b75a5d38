"""The table of a model family, and the names that most families share.

A role stands for one parameter of a Megatron-core decoder; a family names the Hugging Face tensors from which it is
made. `{layer}` and `{expert}` in a name are numbers, from 0. The roles are:

    embedding, final_norm, output                       one each per model
    attention_norm, qkv (query, key, value), qkv_bias,  for each layer; leave out qkv_bias, query_norm and key_norm if
    query_norm, key_norm, attention_output, mlp_norm    the family has none
    q, or q_down, q_latent_norm, q_up, and              in place of qkv for multi-head latent attention (MLA);
    kv_down, kv_latent_norm, kv_up                      config.json says which of the roles for q a model has
    gated_qkv (query and gate, key, value)              in place of qkv, if a gate multiplies the output of attention
    linear_in (query, key and value; gate; beta;        for each layer with linear attention (gated delta rule), in
    decay) or linear_in_by_head (query, key, value      place of all roles of attention but attention_norm
    and gate; beta and decay; by key head),
    linear_conv, linear_decay, linear_decay_bias,
    linear_norm, linear_output
    gate_up (gate, up), down                            for each dense layer; leave out if every layer has experts
    router, expert_gate_up (gate, up), expert_down      for each layer with experts, and for each expert
    router_bias, shared_gate_up (gate, up),             for each layer with experts; leave out if the family has no bias
    shared_down, shared_gate                            that is added to the choice of experts, no shared experts (which
                                                        see every token), and no gate on their output
    attention_output_bias, router_logit_bias,           for families whose linear layers all have biases: all of these,
    expert_gate_up_bias (gate, up), expert_down_bias    and qkv_bias
    sinks                                               for each layer: one logit per head, which belongs to no token
    attention_post_norm, mlp_post_norm                  in place of attention_norm and mlp_norm, if norms come after
                                                        attention and MLP, before the residual is added

`Family.switches` is for roles that only some models of a family have.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from megatron_daro.errors import ModelError

Names = Mapping[str, tuple[str, ...]]
Value = str | int | float | bool | Mapping[str, str | int | float | bool]

_QKV, _GATE_UP = ("query", "key", "value"), ("gate", "up")
_PARTS = {
    **dict.fromkeys(("qkv", "gated_qkv", "qkv_bias"), _QKV),
    "linear_in": ("query, key and value", "gate", "beta", "decay"),
    "linear_in_by_head": ("query, key, value and gate", "beta and decay"),
    **dict.fromkeys(("gate_up", "expert_gate_up", "expert_gate_up_bias", "shared_gate_up"), _GATE_UP),
}
"""The tensors of a role, in order; every other role has one tensor."""


@dataclass(frozen=True, slots=True)
class Family:
    """One family of decoder models.

    model_type, architecture: as in config.json.
    tensors: role -> Hugging Face names.
    defaults: transformers' values for keys that config.json may leave out.
    window: when layers use sliding-window attention. It is refused in these families: by_width: if `sliding_window` is
        given; switched: if `use_sliding_window` is true as well; switched_from_layer: likewise, in the layers from
        `max_window_layers` on. It is supported in families whose `layer_types` give it layer by layer; if that key is
        missing, alternating: every other layer has a window, beginning with the first; three_of_four: all layers but
        every fourth.
    plain_windows: layers with a window have plain rotary embeddings, whatever scaling the others have.
    whole_qk_norm: norms of queries and keys are over all heads at once.
    experts: keys of a mixture of experts; None for a dense family.
    stacked: role -> the tensor that holds the parameters of all experts of a layer, [experts, columns, rows], or
        [experts, rows] for biases, with the rows of gate and up alternating; the names in `tensors` are then those that
        the single parameters get here (convert/stacked.py).
    switches: role -> the key that says whether a model has it; every model of the family has the other roles in
        `tensors`.
    partial_rotary: `partial_rotary_factor` may be below 1: only the first entries of a head are rotated.
    further_tokens: the key for the number of layers that predict tokens after the next (MTP); in a checkpoint they come
        after the other layers, or have names in `untrained`; they are not trained.
    untrained: beginnings of the names of other tensors that a checkpoint may hold and that are not trained.
    packed: role -> the tensor in which published checkpoints hold the parameters of all experts of a layer, [experts,
        rows, columns], gate before up; it is read, but never written.
    centered_norms: norms multiply by 1 + weight.
    only: key -> the only values that are implemented, in addition to those of all families or in their place.
    harmless: further keys that change nothing.
    loaded_together: roles, in the order of an export, whose tensors SGLang must get in one call, or it drops them.
    quantized: a `quant_method`, besides fp8 blocks, whose checkpoints can be converted to weights that are not
        quantized.

    Raises ModelError if a role has more or fewer tensors than Megatron's parameter is made of.
    """

    model_type: str
    architecture: str
    tensors: Names
    defaults: Mapping[str, Value] = field(default_factory=dict)
    window: Literal["by_width", "switched", "switched_from_layer", "alternating", "three_of_four"] = "by_width"
    plain_windows: bool = False
    whole_qk_norm: bool = False
    experts: ExpertKeys | None = None
    stacked: Mapping[str, str] = field(default_factory=dict)
    switches: Mapping[str, str] = field(default_factory=dict)
    partial_rotary: bool = False
    further_tokens: str = ""
    untrained: tuple[str, ...] = ()
    packed: Mapping[str, str] = field(default_factory=dict)
    centered_norms: bool = False
    only: Mapping[str, tuple[object, ...]] = field(default_factory=dict)
    harmless: frozenset[str] = frozenset()
    loaded_together: tuple[str, ...] = ()
    quantized: str = ""

    @property
    def latent(self) -> bool:
        """Whether attention is latent: keys and values (and maybe queries) are computed from latents of lower rank."""
        return "kv_down" in self.tensors

    @property
    def linear(self) -> bool:
        """Whether there are layers with linear attention."""
        return "linear_conv" in self.tensors

    def __post_init__(self) -> None:
        for role, names in self.tensors.items():
            if len(names) != len(_PARTS.get(role, ("",))):
                raise ModelError(
                    f"family {self.model_type}: {role} has the tensors {', '.join(names)}; allowed: one each for "
                    f"{' and '.join(_PARTS.get(role, (role,)))}. Tensors that hold several of them at once (fused) do "
                    "not fit a table: split them in the checkpoint first."
                )

    def with_head(self, head: str) -> str:
        """Return transformers' name of the architecture with another head than ForCausalLM."""
        return self.architecture.removesuffix("ForCausalLM") + head


@dataclass(frozen=True, slots=True)
class ExpertKeys:
    """The keys under which config.json describes the experts.

    number: keys for the number of experts; the first that is present counts. width: key for an expert's width.
    normalize: the key that says whether the weights of the chosen experts are scaled to a sum of 1; a bool if the
        family has no such key.
    chosen: key for the number of experts per token.
    scores: function that makes scores of the router's logits; with sigmoid, as in DeepSeek-V3, experts may be chosen
        from some groups only (`n_group`, `topk_group`), and the weights are multiplied by `routed_scaling_factor`.
    dense: key for the number of first layers without experts; empty: `decoder_sparse_step` and `mlp_only_layers` say
        which layers have none, if the family has dense layers.
    shared: key for the number of experts, each as wide as the others, that see every token.
    shared_width: key for the width of the one expert that sees every token.
    limit: key for the bound to which an expert's gate and up are clamped; such an expert computes gate * sigmoid(1.702
        * gate) * (up + 1) in place of SiLU(gate) * up.
    """

    number: tuple[str, ...]
    width: str
    normalize: str | bool
    chosen: str = "num_experts_per_tok"
    scores: Literal["softmax", "sigmoid"] = "softmax"
    dense: str = ""
    shared: str = ""
    shared_width: str = ""
    limit: str = ""


DEEPSEEK_EXPERTS = ExpertKeys(
    number=("n_routed_experts", "num_local_experts"),
    width="moe_intermediate_size",
    normalize="norm_topk_prob",
    scores="sigmoid",
    dense="first_k_dense_replace",
    shared="n_shared_experts",
)
"""The keys of DeepSeek-V3 and GLM-4.5."""
QWEN3_NEXT_EXPERTS = ExpertKeys(
    number=("num_experts", "num_local_experts"),
    width="moe_intermediate_size",
    normalize="norm_topk_prob",
    shared_width="shared_expert_intermediate_size",
)
"""The keys of Qwen3-Next, and of Qwen3.5 except for `normalize`."""

OUTSIDE: Names = {
    "embedding": ("model.embed_tokens.weight",),
    "final_norm": ("model.norm.weight",),
    "output": ("lm_head.weight",),
}
ATTENTION: Names = {
    "attention_norm": ("model.layers.{layer}.input_layernorm.weight",),
    "qkv": tuple(f"model.layers.{{layer}}.self_attn.{part}_proj.weight" for part in "qkv"),
    "attention_output": ("model.layers.{layer}.self_attn.o_proj.weight",),
    "mlp_norm": ("model.layers.{layer}.post_attention_layernorm.weight",),
}
LATENT_ATTENTION: Names = {
    "attention_norm": ATTENTION["attention_norm"],
    "q": ("model.layers.{layer}.self_attn.q_proj.weight",),
    "q_down": ("model.layers.{layer}.self_attn.q_a_proj.weight",),
    "q_latent_norm": ("model.layers.{layer}.self_attn.q_a_layernorm.weight",),
    "q_up": ("model.layers.{layer}.self_attn.q_b_proj.weight",),
    "kv_down": ("model.layers.{layer}.self_attn.kv_a_proj_with_mqa.weight",),
    "kv_latent_norm": ("model.layers.{layer}.self_attn.kv_a_layernorm.weight",),
    "kv_up": ("model.layers.{layer}.self_attn.kv_b_proj.weight",),
    "attention_output": ATTENTION["attention_output"],
    "mlp_norm": ATTENTION["mlp_norm"],
}
QKV_BIAS: Names = {"qkv_bias": tuple(f"model.layers.{{layer}}.self_attn.{part}_proj.bias" for part in "qkv")}
QK_NORM: Names = {
    "query_norm": ("model.layers.{layer}.self_attn.q_norm.weight",),
    "key_norm": ("model.layers.{layer}.self_attn.k_norm.weight",),
}
DENSE_MLP: Names = {
    "gate_up": ("model.layers.{layer}.mlp.gate_proj.weight", "model.layers.{layer}.mlp.up_proj.weight"),
    "down": ("model.layers.{layer}.mlp.down_proj.weight",),
}
EXPERTS: Names = {
    "router": ("model.layers.{layer}.mlp.gate.weight",),
    "expert_gate_up": tuple(f"model.layers.{{layer}}.mlp.experts.{{expert}}.{part}_proj.weight" for part in _GATE_UP),
    "expert_down": ("model.layers.{layer}.mlp.experts.{expert}.down_proj.weight",),
}
EXPERT_BIASES: Names = {
    f"{role}_bias": tuple(name.removesuffix("weight") + "bias" for name in names)
    for role, names in EXPERTS.items()
    if role != "router"
}
SHARED_EXPERTS: Names = {
    "router_bias": ("model.layers.{layer}.mlp.gate.e_score_correction_bias",),
    "shared_gate_up": tuple(f"model.layers.{{layer}}.mlp.shared_experts.{part}_proj.weight" for part in _GATE_UP),
    "shared_down": ("model.layers.{layer}.mlp.shared_experts.down_proj.weight",),
}
GATED_ATTENTION: Names = {
    **{"gated_qkv" if role == "qkv" else role: names for role, names in ATTENTION.items()},
    **QK_NORM,
}
_LINEAR = "model.layers.{layer}.linear_attn."
LINEAR_ATTENTION: Names = {
    "linear_conv": (_LINEAR + "conv1d.weight",),
    "linear_decay": (_LINEAR + "A_log",),
    "linear_decay_bias": (_LINEAR + "dt_bias",),
    "linear_norm": (_LINEAR + "norm.weight",),
    "linear_output": (_LINEAR + "out_proj.weight",),
}
LINEAR_DEFAULTS: Mapping[str, Value] = {
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
}
SHARED_EXPERT: Names = {
    "shared_gate_up": tuple(f"model.layers.{{layer}}.mlp.shared_expert.{part}_proj.weight" for part in _GATE_UP),
    "shared_down": ("model.layers.{layer}.mlp.shared_expert.down_proj.weight",),
    "shared_gate": ("model.layers.{layer}.mlp.shared_expert_gate.weight",),
}
DECODER: Names = {**OUTSIDE, **ATTENTION, **DENSE_MLP}
"""A dense decoder with Llama's names."""
