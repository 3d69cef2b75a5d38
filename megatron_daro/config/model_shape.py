"""The shape of a model, read from its Hugging Face `config.json` by the table of its family (families/).

The actor, conversion and the planner all read models through `ModelShape`. Rotary embeddings may be plain, Llama 3's
or YaRN, in the keys of transformers 4 (`rope_theta`, `rope_scaling`) or 5 (`rope_parameters`). Every field that would
change the mathematics in a way that the actor does not implement is refused: ignoring it silently would train another
model than the checkpoint describes.
"""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from megatron_daro.config.problems import show
from megatron_daro.config.safetensors_header import GIT_LFS
from megatron_daro.errors import ModelError
from megatron_daro.families import families
from megatron_daro.families.table import ExpertKeys, Family

_VOCABULARY_MULTIPLE = 16


def names(text: str) -> frozenset[str]:
    """Return the words of a text, as a set of keys."""
    return frozenset(text.split())


def integer(config: Mapping[str, Any], key: str, where: str, *, default: int | None = None, least: int = 1) -> int:
    """Return an integer of at least `least`; `default` where the key is missing or null. Raises ModelError."""
    value = _value(config, key, where, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ModelError(f"{where}: {key} must be an integer of at least {least}, got {value!r}.")
    return value


def number(config: Mapping[str, Any], key: str, where: str, *, default: float | None = None) -> float:
    """Return a finite number above 0; `default` where the key is missing or null. Raises ModelError."""
    value = _value(config, key, where, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise ModelError(f"{where}: {key} must be a number above 0, got {value!r}.")
    return float(value)


def flag(config: Mapping[str, Any], key: str, where: str, *, default: bool = False) -> bool:
    """Return true or false; `default` where the key is missing or null. Raises ModelError."""
    value = _value(config, key, where, default)
    if not isinstance(value, bool):
        raise ModelError(f"{where}: {key} must be true or false, got {value!r}.")
    return value


def _value(config: Mapping[str, Any], key: str, where: str, default: object) -> object:
    value = config.get(key)
    if value is None and default is None:
        raise ModelError(f"{where}: {key} is missing. A complete config.json of the model is needed.")
    return default if value is None else value


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Llama 3's frequency scaling. `original_max_positions` in tokens; the factors have no unit."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """YaRN (arXiv 2309.00071). `original_max_positions` in tokens; beta_fast and beta_slow in rotations.

    attention_factor: cosine and sine are multiplied by it. truncate: whether bounds of the ramp are rounded to whole
    dimensions. score_factor: the scores of latent attention are multiplied by its square; 1 for other attention.
    """

    factor: float
    original_max_positions: int
    beta_fast: float
    beta_slow: float
    attention_factor: float
    truncate: bool
    score_factor: float = 1.0


RopeScaling = Llama3Scaling | YarnScaling

_LAYER_TYPES = ("sliding_attention", "full_attention")


_KEYS = names(
    """
    rope_type type rope_theta partial_rotary_factor factor original_max_position_embeddings low_freq_factor
    high_freq_factor attention_factor beta_fast beta_slow mscale mscale_all_dim truncate finetuned
    mrope_section mrope_interleaved
    """
)
"""The last two keys are for images: a token of text has the same position in each section."""


def read_rope(
    config: Mapping[str, Any], where: str, *, partial: bool = False, latent: bool = False
) -> tuple[float, float, RopeScaling | None]:
    """Return the base frequency, the share of a head's entries that is rotated, and the scaling.

    Args:
        config: of the model. where: names the file in messages. partial: whether the share may be below 1. latent:
            whether attention is latent; Megatron-core scales its rotary part in its own way.

    Raises:
        ModelError: the configuration asks for something that is not implemented.
    """
    rope, base = _section(config, where)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if rope.get("type", kind) != kind:
        raise ModelError(f"{where}: rope_type {kind!r} and type {rope['type']!r} contradict each other; remove one.")
    if any(isinstance(value, Mapping) for value in rope.values()):
        raise ModelError(f"{where}: rope_parameters per layer type are not supported; got {sorted(rope)}.")
    share = number({**config, **rope}, "partial_rotary_factor", where, default=1.0)
    if share != 1 and (not partial or share > 1 or kind == "yarn"):
        allowed = "1 with yarn, whose factor scales all of a head" if partial and share < 1 else "1"
        raise ModelError(f"{where}: partial_rotary_factor {share:g} is not supported (allowed: {allowed}).")
    if kind not in ("default", "llama3", "yarn"):
        raise ModelError(f"{where}: rope type {kind!r} is not supported; allowed: 'default', 'llama3', 'yarn'.")
    if unknown := sorted(map(str, rope.keys() - _KEYS)):
        raise ModelError(f"{where}: rope type {kind!r} with {', '.join(unknown)}, which is not known; remove it.")
    if kind == "default":
        return base, share, None
    if kind == "llama3" and latent:
        raise ModelError(f"{where}: rope type 'llama3' is not supported with latent attention; allowed: 'yarn'.")
    return base, share, _llama3(rope, config, where) if kind == "llama3" else _yarn(rope, config, where, latent=latent)


def _section(config: Mapping[str, Any], where: str) -> tuple[Mapping[str, Any], float]:
    """Return the object that describes the rotary embedding, and the base frequency. `rope_scaling` comes before
    `rope_parameters`, as in transformers (`convert_rope_params_to_dict`)."""
    for key in ("rope_scaling", "rope_parameters"):
        if not isinstance(config.get(key) or {}, Mapping):
            raise ModelError(f"{where}: {key} must be an object such as {{'rope_type': 'yarn'}}, got {config[key]!r}.")
    scaling, parameters = config.get("rope_scaling") or {}, config.get("rope_parameters") or {}
    rope = scaling or parameters
    base = number({"rope_theta": rope.get("rope_theta", config.get("rope_theta"))}, "rope_theta", where, default=1e4)
    if scaling and parameters.get("rope_theta", base) != base:
        raise ModelError(
            f"{where}: rope_scaling stands beside rope_parameters, which transformers drops then, with its rope_theta "
            f"{parameters['rope_theta']!r} (it would be {base}). Move the keys of rope_scaling into rope_parameters, "
            "in place of its rope_type, and remove rope_scaling."
        )
    return rope, base


def with_rope_of_full_attention(config: dict[str, Any], where: str) -> dict[str, Any]:
    """Return the configuration of a family whose layers with a window have plain rotary embeddings; if its
    `rope_parameters` are given by layer type, those of the other layers take their place.

    Raises:
        ModelError: layers with a window would have a scaling, or another base frequency than the others.
    """
    by_type = config.get("rope_parameters")
    if not isinstance(by_type, Mapping) or not by_type.keys() & set(_LAYER_TYPES):
        return config
    windowed, full = (by_type.get(kind) or {} for kind in _LAYER_TYPES)
    base, default = full.get("rope_theta"), config.get("rope_theta")
    allowed = {"rope_type": "default", "rope_theta": default if base is None else base}
    if {**allowed, **windowed} != allowed:
        raise ModelError(f"{where}: rope_parameters of sliding_attention {dict(windowed)!r}; allowed: {allowed!r}.")
    return {**config, "rope_parameters": full}


def _original_positions(rope: Mapping[str, Any], config: Mapping[str, Any], where: str) -> int:
    """Return the length before scaling, in tokens; max_position_embeddings if it is not given, as in transformers.

    A different number at the top level is refused: the model classes of transformers use that one, while its AutoConfig
    and therefore SGLang use the one in the section (both call `standardize_rope_params`, but one before and the other
    after the top level is set).
    """
    key = "original_max_position_embeddings"
    positions = integer(rope, key, where, default=config.get("max_position_embeddings"))
    if config.get(key, positions) != positions:
        raise ModelError(
            f"{where}: {key} is {config[key]!r} at the top level and {positions} for the rotary embedding; programs "
            "differ in which one counts. Write the right one into rope_scaling or rope_parameters and remove the other."
        )
    return positions


def _llama3(rope: Mapping[str, Any], config: Mapping[str, Any], where: str) -> Llama3Scaling:
    return Llama3Scaling(
        factor=number(rope, "factor", where),
        low_freq_factor=number(rope, "low_freq_factor", where),
        high_freq_factor=number(rope, "high_freq_factor", where),
        original_max_positions=_original_positions(rope, config, where),
    )


def _yarn(rope: Mapping[str, Any], config: Mapping[str, Any], where: str, *, latent: bool) -> YarnScaling:
    factor = number(rope, "factor", where)
    attention_factor = _attention_factor(rope, factor, where)
    if factor <= 1 and attention_factor != 1:
        raise ModelError(
            f"{where}: yarn with factor {factor} and attention_factor {attention_factor} is not supported: "
            "Megatron-core applies an attention factor with a factor above 1 only."
        )
    if "truncate" in rope and rope["truncate"] is None:
        raise ModelError(f"{where}: truncate must be true or false, got null, which transformers takes as false.")
    truncate = flag(rope, "truncate", where, default=True)
    if latent and not truncate:
        raise ModelError(f"{where}: truncate false is not supported with latent attention; allowed: true.")
    all_of_head = rope.get("mscale_all_dim")
    return YarnScaling(
        factor=factor,
        original_max_positions=_original_positions(rope, config, where),
        beta_fast=number(rope, "beta_fast", where, default=32.0),
        beta_slow=number(rope, "beta_slow", where, default=1.0),
        attention_factor=attention_factor,
        truncate=truncate,
        score_factor=_mscale(factor, number(rope, "mscale_all_dim", where)) if latent and all_of_head else 1.0,
    )


def _attention_factor(rope: Mapping[str, Any], factor: float, where: str) -> float:
    """Return the given attention factor; else 0.1 * ln(factor) + 1, or the quotient of two such terms with the weights
    mscale and mscale_all_dim."""
    if rope.get("attention_factor") is not None:
        return number(rope, "attention_factor", where)
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        return _mscale(factor, number(rope, "mscale", where)) / _mscale(factor, number(rope, "mscale_all_dim", where))
    return _mscale(factor, 1.0)


def _mscale(factor: float, weight: float) -> float:
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


LM_HEAD = "ForCausalLM"
CRITIC_HEADS = (LM_HEAD, "ForSequenceClassification", "ForTokenClassification")
"""Architectures of a critic's checkpoint: a policy, or a reward or value model whose head is `score.weight`."""
_DTYPES = ("float32", "bfloat16", "float16")
_TRANSFORMERS_BALANCING = 0.001  # transformers' default for Qwen3-MoE and Mixtral

_READ = names(
    """
    model_type architectures num_hidden_layers hidden_size num_attention_heads num_key_value_heads head_dim
    intermediate_size vocab_size rms_norm_eps tie_word_embeddings max_position_embeddings dtype torch_dtype rope_theta
    rope_scaling rope_parameters original_max_position_embeddings layer_types sliding_window use_sliding_window
    max_window_layers
    """
)
_READ_OF_EXPERTS = names("num_experts_per_tok output_router_logits router_aux_loss_coef")
_READ_OF_DENSE_LAYERS = names("decoder_sparse_step mlp_only_layers")
_READ_OF_SIGMOID = names("n_group topk_group routed_scaling_factor")
_READ_OF_LINEAR = names(
    """
    linear_num_key_heads linear_num_value_heads linear_key_head_dim linear_value_head_dim linear_conv_kernel_dim
    full_attention_interval
    """
)
_READ_OF_LATENT = names("q_lora_rank kv_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim qk_head_dim")
_ONLY: Mapping[str, tuple[object, ...]] = {
    "hidden_act": ("silu",),
    "activation": ("swiglu", "silu"),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "attention_dropout": (0,),
    "partial_rotary_factor": (1,),
    "router_jitter_noise": (0,),
    "is_causal": (True,),
    "use_mrope": (False,),
    "rope_interleaved": (False,),
    "pruned_heads": ({},),
    "add_cross_attention": (False,),
    "is_encoder_decoder": (False,),
}
"""Key -> the only values that are implemented."""
_HARMLESS = names(
    """
    _name_or_path name_or_path _commit_hash transformers_version transformers.js_config model_name model_max_length
    max_sequence_length tokenizer_class unsloth_fixed unsloth_version is_llama_config is_decoder pretraining_tp
    initializer_range use_cache use_return_dict return_dict output_attentions output_hidden_states torchscript
    use_bfloat16 tf_legacy_loss chunk_size_feed_forward tie_encoder_decoder cross_attention_hidden_size
    gradient_checkpointing neftune_noise_alpha attn_implementation _attn_implementation _attn_implementation_internal
    _attn_implementation_autoset _flash_attn_2_enabled experts_implementation _experts_implementation_internal
    id2label label2id num_labels problem_type finetuning_task task_specific_params classifier_dropout
    bos_token_id eos_token_id pad_token_id unk_token_id sep_token_id cls_token_id mask_token_id decoder_start_token_id
    prefix max_length min_length max_new_tokens min_new_tokens do_sample early_stopping num_beams num_beam_groups
    diversity_penalty temperature top_k top_p min_p typical_p repetition_penalty length_penalty no_repeat_ngram_size
    encoder_no_repeat_ngram_size bad_words_ids num_return_sequences output_scores return_dict_in_generate
    forced_bos_token_id forced_eos_token_id remove_invalid_values exponential_decay_length_penalty suppress_tokens
    begin_suppress_tokens
    """
)
"""Keys that do not change the log-probabilities of these families, whatever their value."""
_FUSED = ("phi3", "glm", "glm4", "chatglm", "internlm2")
"""Decoders whose checkpoints hold query, key and value, or gate and up, as one fused tensor."""


@dataclass(frozen=True, slots=True)
class ExpertShape:
    """A mixture of experts.

    number: experts per layer. chosen: how many of them each token is sent to. ffn: width of an expert's gate and up.
    normalize: whether the weights of the chosen experts are scaled to a sum of 1.
    dense_layers: layers that have one MLP in place of experts.
    balancing: coefficient with which transformers would add a loss that balances the experts; 0: it would add none.
    shared_ffn: width of the shared MLP, which sees every token beside the experts; 0: there is none.
    scores: function that makes scores of the router's logits; with sigmoid a bias is added to choose the experts, but
        not in their weights.
    groups, chosen_groups: the experts are divided into groups, and a token chooses experts from the best
        chosen_groups of them. scale: factor of the weights.
    limit: bound of gate and up, see `ExpertKeys`; 0: there is none, and experts compute as dense MLPs do.
    shared_gate: whether a gate multiplies the output of the shared MLP.
    """

    number: int
    chosen: int
    ffn: int
    normalize: bool
    dense_layers: tuple[int, ...]
    balancing: float = 0.0
    shared_ffn: int = 0
    scores: Literal["softmax", "sigmoid"] = "softmax"
    groups: int = 1
    chosen_groups: int = 1
    scale: float = 1.0
    limit: float = 0.0
    shared_gate: bool = False


@dataclass(frozen=True, slots=True)
class LatentShape:
    """Multi-head latent attention. query_rank, kv_rank: sizes of the latents from which queries, and keys and values,
    are computed; query_rank None: queries are computed from the hidden state. rotary: entries of a head that are
    rotated; in keys they are the same for all heads. plain: entries of a head before them. value: entries of a head's
    value."""

    query_rank: int | None
    kv_rank: int
    plain: int
    rotary: int
    value: int


@dataclass(frozen=True, slots=True)
class LinearShape:
    """Linear attention by a gated delta rule (arXiv 2412.06464). layers: those that have it. key: entries of a head of
    queries and keys; value: entries of a head of values; each key head serves value_heads / key_heads value heads.
    kernel: tokens that the convolution before the attention sees, including the present one."""

    layers: tuple[int, ...]
    key_heads: int
    value_heads: int
    key: int
    value: int
    kernel: int

    @property
    def keys(self) -> int:
        """Entries of all key heads together."""
        return self.key_heads * self.key

    @property
    def values(self) -> int:
        """Entries of all value heads together."""
        return self.value_heads * self.value


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Everything about a decoder that determines its parameters and its forward pass.

    head_dim: entries of a head, which need not be hidden / heads; with latent attention, of queries and keys.
    ffn: width of gate and of up in dense layers.
    max_positions: in tokens. dtype: the one that the checkpoint names; None if it names none.
    experts, latent, linear: the mixture of experts, latent attention and linear attention; None: the model has none.
    rotary_share: share of a head's entries that is rotated: the first ones.
    further_layers: layers that predict tokens after the next; the checkpoint has them after the others, and they are
        not computed here.
    sinks: each head has a logit that belongs to no token.
    biases: all linear layers have biases, including the router and the experts.
    window: number of tokens that a token sees in `windowed` layers, itself included. plain_windows: these layers do not
        use `rope_scaling`.
    post_norm: norms come after attention and MLP. whole_qk_norm: norms of queries and keys are over all heads at once.
    gated: the output of attention that is not linear is multiplied by a gate.
    centered_norms: norms multiply by 1 + weight, except that of linear attention.
    """

    family: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    rope_theta: float
    rope_scaling: RopeScaling | None
    rms_eps: float
    tie: bool
    qkv_bias: bool
    qk_norm: bool
    max_positions: int
    dtype: str | None
    experts: ExpertShape | None = None
    rotary_share: float = 1.0
    further_layers: int = 0
    latent: LatentShape | None = None
    sinks: bool = False
    biases: bool = False
    window: int = 0
    windowed: tuple[int, ...] = ()
    plain_windows: bool = False
    post_norm: bool = False
    whole_qk_norm: bool = False
    linear: LinearShape | None = None
    gated: bool = False
    centered_norms: bool = False

    @property
    def linear_layers(self) -> tuple[int, ...]:
        """The layers with linear attention."""
        return self.linear.layers if self.linear else ()

    @property
    def local_layers(self) -> bool:
        """Whether Megatron's local layers are used on GPUs too: for this kind Transformer Engine's were never
        compared."""
        return self.sinks or self.post_norm

    @property
    def value_dim(self) -> int:
        """Entries of a head's value."""
        return self.latent.value if self.latent else self.head_dim

    def padded_vocab(self, tensor_parallel: int) -> int:
        """Return the rows of the whole embedding. They are the same for TP 1, 2, 4, 8 and 16, so checkpoints have one
        shape."""
        multiple = math.lcm(_VOCABULARY_MULTIPLE, tensor_parallel)
        return -(-self.vocab // multiple) * multiple

    def has_role(self, role: str) -> bool:
        """Return whether a model of this shape has the tensors that its family's table names for a role."""
        low_rank = self.latent is not None and self.latent.query_rank is not None
        switched = {"qkv_bias": self.qkv_bias, "query_norm": self.qk_norm, "key_norm": self.qk_norm, "q": not low_rank}
        return (switched | dict.fromkeys(("q_down", "q_latent_norm", "q_up"), low_rank)).get(role, True)

    def has_experts(self, layer: int) -> bool:
        """Return whether a layer, counted from 0, has experts in place of one MLP."""
        return self.experts is not None and layer not in self.experts.dense_layers

    @property
    def expert_layers(self) -> int:
        """Number of layers with experts."""
        return self.layers - len(self.experts.dense_layers) if self.experts else 0

    @property
    def num_parameters(self) -> int:
        """Parameters of the whole model, tied embeddings counted once."""
        return self._count(self.experts.number if self.experts else 0)

    @property
    def num_active_parameters(self) -> int:
        """Parameters that are used for one token; embeddings count as in `num_parameters`."""
        return self._count(self.experts.chosen if self.experts else 0)

    def _count(self, experts_counted: int) -> int:
        query, key = self.heads * self.head_dim, self.kv_heads * self.head_dim
        attention = self.hidden * ((2 + self.gated) * query + 2 * key) + (query + 2 * key) * self.qkv_bias
        attention += self.hidden * self.biases + self.heads * self.sinks
        normed = query + key if self.whole_qk_norm else 2 * self.head_dim
        norms = 2 * self.hidden + normed * self.qk_norm
        if self.latent:
            queries, kv_rank, value = self.latent.query_rank or 0, self.latent.kv_rank, self.heads * self.latent.value
            attention = queries * (self.hidden + query) if queries else self.hidden * query
            attention += self.hidden * (kv_rank + self.latent.rotary + value)
            attention += kv_rank * (self.heads * self.latent.plain + value)
            norms = 2 * self.hidden + queries + kv_rank
        mlps = (self.layers - self.expert_layers) * 3 * self.hidden * self.ffn
        if self.experts:
            router = (self.hidden + (self.experts.scores == "sigmoid" or self.biases)) * self.experts.number
            width = experts_counted * self.experts.ffn + self.experts.shared_ffn
            biases = experts_counted * (2 * self.experts.ffn + self.hidden) * self.biases
            biases += self.hidden * self.experts.shared_gate
            mlps += self.expert_layers * (router + 3 * self.hidden * width + biases)
        outside = self.hidden + self.vocab * self.hidden * (1 if self.tie else 2)
        whole = (self.layers - len(self.linear_layers)) * (attention + norms)
        if linear := self.linear:
            own = self.hidden * (2 * linear.keys + 3 * linear.values + 2 * linear.value_heads + 2)
            own += linear.kernel * (2 * linear.keys + linear.values) + 2 * linear.value_heads + linear.value
            whole += len(linear.layers) * own
        return whole + mlps + outside


def read_model_shape(source: str | Path | Mapping[str, Any], endings: Sequence[str] = (LM_HEAD,)) -> ModelShape:
    """Return the shape that a `config.json` describes.

    Args:
        source: the checkpoint directory, the path of a config.json, or its content. Keys of transformers 4
            (`rope_theta`, `rope_scaling`, `torch_dtype`) and 5 (`rope_parameters`, `dtype`) are both understood.
        endings: allowed endings of the architecture's name, such as `CRITIC_HEADS`.

    Returns:
        The shape, checked.

    Raises:
        ModelError: the file is missing or not JSON, a required key is missing or of the wrong type, or a value asks
            for something that is not implemented.
    """
    if isinstance(source, Mapping):
        config, where = dict(source), "the model configuration"
    else:
        alone = not Path(source).is_dir()
        file = Path(source) if alone else Path(source) / "config.json"
        config, where = text_part(read_json(file, alone=alone)), str(file)
    family = _family(config, where, endings)
    config = _completed(config, family)
    _refuse_unsupported(config, family, where)
    heads, hidden = integer(config, "num_attention_heads", where), integer(config, "hidden_size", where)
    kv_heads = integer(config, "num_key_value_heads", where, default=heads)
    if heads % kv_heads:
        raise ModelError(f"{where}: num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}.")
    config = with_rope_of_full_attention(config, where) if family.plain_windows else config
    theta, rotary_share, scaling = read_rope(config, where, partial=family.partial_rotary, latent=family.latent)
    latent = _latent(config, heads, kv_heads, where) if family.latent else None
    windowed = _windowed_layers(config, _PERIODS[family.window], where) if family.window in _PERIODS else ()
    return ModelShape(
        family=family.model_type,
        layers=integer(config, "num_hidden_layers", where),
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=latent.plain + latent.rotary if latent else _head_dim(config, hidden, heads, where),
        ffn=integer(config, _width(config, family), where),
        vocab=integer(config, "vocab_size", where),
        rope_theta=theta,
        rope_scaling=scaling,
        rms_eps=number(config, "rms_norm_eps", where, default=1e-6),
        tie=flag(config, "tie_word_embeddings", where),
        qkv_bias=_has(config, family, "qkv_bias", where),
        qk_norm=_has(config, family, "query_norm", where),
        max_positions=integer(config, "max_position_embeddings", where),
        dtype=_dtype(config, where),
        experts=_experts(config, family, family.experts, where) if family.experts else None,
        rotary_share=rotary_share,
        further_layers=integer(config, family.further_tokens, where, least=0) if family.further_tokens else 0,
        latent=latent,
        sinks="sinks" in family.tensors,
        biases="router_logit_bias" in family.tensors,
        window=integer(config, "sliding_window", where) if windowed else 0,
        windowed=windowed,
        linear=_linear(config, where) if family.linear else None,
        gated="gated_qkv" in family.tensors,
        centered_norms=family.centered_norms,
        plain_windows=family.plain_windows,
        post_norm="attention_post_norm" in family.tensors,
        whole_qk_norm=family.whole_qk_norm,
    )


def text_part(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of config.json that describes the text model: `text_config` of a model that also sees images, if
    that is of a supported family; else all of it."""
    text = config.get("text_config")
    family = families().get(str(text.get("model_type"))) if isinstance(text, Mapping) else None
    if family is None or not isinstance(text, Mapping):
        return dict(config)
    outside = {key: config[key] for key in ("tie_word_embeddings", "quantization_config") if key in config}
    return {**text, **outside, "architectures": [family.architecture]}


def without_further_layers(config: Mapping[str, Any]) -> dict[str, int]:
    """Return the changes to config.json for a checkpoint without the layers that predict tokens after the next."""
    family = families().get(str(config.get("model_type")))
    return {family.further_tokens: 0} if family and family.further_tokens in config else {}


def require_regular_files(place: Path) -> None:
    """Raise ModelError for a pipe, a socket or a device, or a folder that contains one: reading it may never end."""
    for path in place.iterdir() if place.is_dir() else (place,):
        if path.exists() and not (path.is_file() or path.is_dir()):
            raise ModelError(f"{path} is a pipe, a socket or a device, not a file. Put the model's own file there.")


def dangling_link(path: Path) -> str:
    """Return a description of a link whose file is missing, as in a model copied from the hub's cache without the
    blobs."""
    return f"{path.name} is a link to {str(path.readlink())!r}, which is not there"


def read_json(file: Path, *, alone: bool = False) -> dict[str, Any]:
    """Return the object in a JSON file. Raises ModelError, which names the file. Args: alone: whether only the file,
    and not the rest of its directory, belongs to the model."""
    require_regular_files(file if alone else file.parent)
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if file.is_symlink():
            raise ModelError(f"{dangling_link(file)}. Copy what it points to as well.") from None
        raise ModelError(f"{file} does not exist. Give a model's directory with config.json, or that file.") from None
    except (OSError, ValueError, RecursionError) as error:
        if file.is_file() and file.read_bytes().startswith(GIT_LFS):
            raise ModelError(f"{file} is a git-lfs pointer, not the file. Run `git lfs pull` in its folder.") from None
        advice = "Save it as UTF-8 without a byte order mark" if "BOM" in str(error) else "Copy the checkpoint again"
        raise ModelError(f"{file} cannot be read as JSON: {error}. {advice}.") from None
    if not isinstance(content, dict):
        raise ModelError(f"{file} holds a JSON {type(content).__name__}, not an object. Copy the checkpoint again.")
    return content


def _family(config: dict[str, Any], where: str, endings: Sequence[str]) -> Family:
    kind, by_kind = str(config.get("model_type")), families()
    if kind not in by_kind:
        near = difflib.get_close_matches(kind, by_kind, n=1)
        meant = f" Did you mean {near[0]!r}?" if near and kind not in _FUSED else ""
        if kind in _FUSED:
            meant = (
                " Its checkpoints hold query, key and value, or gate and up, as one fused tensor, which a table of "
                "megatron_daro/families cannot describe: split them first, as a model of another family."
            )
        raise ModelError(
            f"{where}: model_type {kind!r} is not supported; allowed: {', '.join(sorted(by_kind))}.{meant}"
        )
    family = by_kind[kind]
    architectures = config.get("architectures") or [family.architecture]
    allowed = [family.with_head(head) for head in endings]
    if not isinstance(architectures, list) or not set(allowed).intersection(map(str, architectures)):
        raise ModelError(f"{where}: architectures {architectures!r}; allowed for {kind}: {', '.join(allowed)}.")
    return family


def _completed(config: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """Return the configuration with transformers' defaults for missing keys.

    A null is kept if it means something else than a missing key: no window, as many key-value heads as heads, queries
    without a latent, and, in transformers, no causal mask, and no original length for a scaling that needs one.
    """
    telling = names("sliding_window num_key_value_heads q_lora_rank is_causal original_max_position_embeddings")
    return {**family.defaults, **{key: value for key, value in config.items() if value is not None or key in telling}}


def _width(config: Mapping[str, Any], family: Family) -> str:
    """Return the key of a dense MLP's width; if a family has no dense MLP and config.json no such key, that of an
    expert's width."""
    key = "intermediate_size"
    return key if key in config or "gate_up" in family.tensors or not family.experts else family.experts.width


def _has(config: Mapping[str, Any], family: Family, role: str, where: str) -> bool:
    switch = family.switches.get(role)
    return role in family.tensors if switch is None else flag(config, switch, where)


def _refuse_unsupported(config: Mapping[str, Any], family: Family, where: str) -> None:
    """Raise ModelError, which names all of them, if keys ask for a forward pass that is not implemented or are
    unknown."""
    wrong = [
        f"{key} {show(config[key])} (allowed: {' or '.join(map(show, allowed))})"
        for key, allowed in {**_ONLY, **family.only}.items()
        if key in config and key not in _own_keys(family) and not any(_same(config[key], value) for value in allowed)
    ]
    if (method := quantization(config)) and method not in (FP8_BLOCKS, family.quantized):
        allowed = f"fp8 e4m3 in blocks of 128 x 128{f' or {family.quantized}' if family.quantized else ''}"
        wrong.append(f"quantization_config (allowed: none, or {allowed}, which are converted)")
    wrong += _windows(config, family, where)
    wrong += [
        f"{key} {show(config[key])} (not known; if it changes nothing about the model, remove it from config.json)"
        for key in sorted(config.keys() - _known(family))
    ]
    if wrong:
        raise ModelError(f"{where}: not supported: {'; '.join(wrong)}. Use a checkpoint without it.")


FP8_BLOCKS = "fp8 blocks"


def quantization(config: Mapping[str, Any]) -> str:
    """Return how the matrices of a checkpoint are quantized: `FP8_BLOCKS` (128 x 128, one scale each), or its
    `quant_method`; empty if they are not."""
    given = config.get("quantization_config")
    if not isinstance(given, Mapping):
        return str(given) if given else ""
    wanted = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
    if {"fmt": "e4m3", **given} == {"fmt": "e4m3", **given, **wanted}:
        return FP8_BLOCKS
    return str(given.get("quant_method", "?")) if given else ""


def _same(value: object, allowed: object) -> bool:
    """Return whether two values are equal; true and false are not equal to numbers."""
    return value == allowed and isinstance(value, bool) == isinstance(allowed, bool)


def _known(family: Family) -> frozenset[str]:
    """Return the keys of config.json that are read, whose values are restricted, or that change nothing."""
    known = _READ | _ONLY.keys() | family.only.keys() | _HARMLESS | family.harmless
    return known | {"quantization_config"} | _own_keys(family)


def _own_keys(family: Family) -> frozenset[str]:
    """Return the keys that are read for this family, but not for all."""
    own = {family.further_tokens, *family.switches.values()}
    own |= {"partial_rotary_factor"} if family.partial_rotary else set()
    if keys := family.experts:
        own |= _READ_OF_EXPERTS | {*keys.number, keys.width, keys.chosen, keys.dense, keys.shared, keys.limit}
        own |= {keys.shared_width}
        own |= {keys.normalize} if isinstance(keys.normalize, str) else set()
        own |= _READ_OF_SIGMOID if keys.scores == "sigmoid" else set()
        own |= _READ_OF_DENSE_LAYERS if "gate_up" in family.tensors and not keys.dense else set()
    own |= _READ_OF_LATENT if family.latent else set()
    own |= _READ_OF_LINEAR if family.linear else set()
    return frozenset(own - {""})


def _windows(config: Mapping[str, Any], family: Family, where: str) -> list[str]:
    """Return what makes layers use a window that is not supported, by the rules of the family's class in transformers;
    empty if nothing does."""
    kinds = config.get("layer_types")
    if kinds is not None and not (isinstance(kinds, list) and all(isinstance(kind, str) for kind in kinds)):
        raise ModelError(f"{where}: layer_types must be a list of names, one for each layer; got {show(kinds)}.")
    if family.window in _PERIODS:
        return []
    allowed = ["full_attention", *(["linear_attention"] if family.linear else [])]
    others = sorted(set(kinds or ()) - set(allowed))
    if others:
        return [f"layers of {' and '.join(others)} (allowed: layer_types {' and '.join(allowed)} throughout)"]
    width = config.get("sliding_window")
    windowed = width is not None
    if family.window.startswith("switched"):
        windowed = windowed and flag(config, "use_sliding_window", where)
    if family.window == "switched_from_layer":
        first = config["max_window_layers"]
        if isinstance(first, bool) or not isinstance(first, int):
            raise ModelError(f"{where}: max_window_layers must be an integer, got {show(first)}.")
        windowed = windowed and kinds is None and first < integer(config, "num_hidden_layers", where)
    if not windowed:
        return []
    off = "use_sliding_window false" if family.window.startswith("switched") else "sliding_window null"
    return [f"sliding-window attention in use, of {show(width)} tokens (allowed: {off})"]


_PERIODS = {"alternating": 2, "three_of_four": 4}
"""If `layer_types` is missing, the last of each so many layers has no window."""


def _windowed_layers(config: Mapping[str, Any], period: int, where: str) -> tuple[int, ...]:
    """Return the layers with a window: those that `layer_types` names, else all but the last of each `period`."""
    layers = integer(config, "num_hidden_layers", where)
    kinds = config.get("layer_types") or [_LAYER_TYPES[(layer + 1) % period == 0] for layer in range(layers)]
    if len(kinds) != layers or not set(kinds) <= set(_LAYER_TYPES):
        raise ModelError(
            f"{where}: layer_types must be {' or '.join(_LAYER_TYPES)} for each of the {layers} layers; "
            f"got {show(kinds)}."
        )
    return tuple(layer for layer, kind in enumerate(kinds) if kind == _LAYER_TYPES[0])


def _linear(config: Mapping[str, Any], where: str) -> LinearShape:
    """Return the sizes of linear attention and its layers: those that `layer_types` names, else all but every
    full_attention_interval-th."""
    layers = integer(config, "num_hidden_layers", where)
    interval = integer(config, "full_attention_interval", where, default=4)
    usual = [("linear" if (layer + 1) % interval else "full") + "_attention" for layer in range(layers)]
    kinds = config.get("layer_types") or usual
    if len(kinds) != layers or (kinds != usual and config.get("full_attention_interval") is not None):
        raise ModelError(
            f"{where}: layer_types {show(kinds)} for {layers} layers with full_attention_interval {interval}; allowed: "
            "one kind for each layer, and what the interval says where it is given. Remove full_attention_interval."
        )
    shape = LinearShape(
        layers=tuple(layer for layer, kind in enumerate(kinds) if kind == "linear_attention"),
        key_heads=integer(config, "linear_num_key_heads", where),
        value_heads=integer(config, "linear_num_value_heads", where),
        key=integer(config, "linear_key_head_dim", where),
        value=integer(config, "linear_value_head_dim", where),
        kernel=integer(config, "linear_conv_kernel_dim", where),
    )
    if shape.value_heads % shape.key_heads:
        raise ModelError(
            f"{where}: linear_num_value_heads {shape.value_heads} is not a multiple of linear_num_key_heads "
            f"{shape.key_heads}."
        )
    return shape


def _experts(config: Mapping[str, Any], family: Family, keys: ExpertKeys, where: str) -> ExpertShape:
    given = {key: integer(config, key, where) for key in keys.number if key in config}
    if len(set(given.values())) > 1:
        raise ModelError(f"{where}: {' and '.join(f'{k} {v}' for k, v in given.items())} contradict each other.")
    count = integer(config, next(iter(given), keys.number[0]), where)
    chosen = integer(config, keys.chosen, where)
    if chosen > count:
        raise ModelError(f"{where}: {keys.chosen} {chosen} is more than the {count} experts there are.")
    normalize = keys.normalize if isinstance(keys.normalize, bool) else flag(config, keys.normalize, where)
    if chosen == 1 and normalize:
        raise ModelError(
            f"{where}: {keys.chosen} 1 with weights scaled to a sum of 1 is not supported: every weight would be "
            "1, and the router would never learn. Allowed: at least 2."
        )
    width = integer(config, keys.width, where)
    sigmoid = keys.scores == "sigmoid"
    if sigmoid and not normalize and chosen > 1:
        raise ModelError(
            f"{where}: {keys.normalize} false is not supported: Megatron-core scales the weights of a sigmoid router "
            "to a sum of 1 (moe/moe_utils.py, 0.16.1 to 0.19.2). Allowed: true."
        )
    groups, chosen_groups = _groups(config, count, chosen, where) if sigmoid else (1, 1)
    return ExpertShape(
        number=count,
        chosen=chosen,
        ffn=width,
        normalize=normalize,
        dense_layers=_dense_layers(config, keys, where) if "gate_up" in family.tensors else (),
        balancing=0.0 if sigmoid else _balancing(config, where),
        shared_ffn=width * integer(config, keys.shared, where)
        if keys.shared
        else (integer(config, keys.shared_width, where) if keys.shared_width else 0),
        scores=keys.scores,
        groups=groups,
        chosen_groups=chosen_groups,
        scale=number(config, "routed_scaling_factor", where) if sigmoid else 1.0,
        limit=number(config, keys.limit, where) if keys.limit else 0.0,
        shared_gate="shared_gate" in family.tensors,
    )


_BEST_OF_A_GROUP = 2
"""The score of a group is the sum of its best so many expert scores (transformers, `Glm4MoeTopkRouter`)."""


def _groups(config: Mapping[str, Any], count: int, chosen: int, where: str) -> tuple[int, int]:
    """Return into how many groups the experts are divided, and from how many of them a token chooses; 1 and 1 if it may
    choose from all.

    Raises:
        ModelError: the groups do not divide the experts, or Megatron-core would choose other groups: it adds up the
            best chosen // topk_group scores of each (moe/moe_utils.py, `group_limited_topk`, 0.16.1 to 0.19.2).
    """
    groups, allowed = integer(config, "n_group", where), integer(config, "topk_group", where)
    got = f"{where}: n_group {groups} and topk_group {allowed} with {count} experts, {chosen} for each token"
    if count % groups or allowed > groups or chosen > count // groups * allowed:
        raise ModelError(f"{got}: the groups must divide the experts, and those that are chosen must hold enough.")
    if allowed == groups:
        return 1, 1
    if chosen // allowed != _BEST_OF_A_GROUP or count // groups < _BEST_OF_A_GROUP:
        raise ModelError(
            f"{got} is not supported: Megatron-core adds up the best {chosen // allowed} scores of a group, the model "
            f"{_BEST_OF_A_GROUP}. Allowed: num_experts_per_tok // topk_group {_BEST_OF_A_GROUP}, or all groups."
        )
    return groups, allowed


def _balancing(config: Mapping[str, Any], where: str) -> float:
    """Return the coefficient of the balancing loss, which transformers computes only with output_router_logits."""
    if not config.get("output_router_logits") or config.get("router_aux_loss_coef") == 0:
        return 0.0
    return number(config, "router_aux_loss_coef", where, default=_TRANSFORMERS_BALANCING)


def _dense_layers(config: Mapping[str, Any], keys: ExpertKeys, where: str) -> tuple[int, ...]:
    """Return the layers without experts: the first ones, or those in mlp_only_layers and all but every
    decoder_sparse_step-th."""
    layers = integer(config, "num_hidden_layers", where)
    if keys.dense:
        first, said = integer(config, keys.dense, where, least=0), keys.dense
        dense = tuple(range(min(first, layers)))
    else:
        step = integer(config, "decoder_sparse_step", where, default=1)
        listed, said = config.get("mlp_only_layers") or [], "mlp_only_layers and decoder_sparse_step"
        if not isinstance(listed, list) or any(type(layer) is not int or not 0 <= layer < layers for layer in listed):
            raise ModelError(f"{where}: mlp_only_layers must list layers from 0 to {layers - 1}, got {listed!r}.")
        dense = tuple(layer for layer in range(layers) if layer in listed or (layer + 1) % step)
    if len(dense) == layers:
        raise ModelError(f"{where}: {said} leave no layer with experts.")
    return dense


def _head_dim(config: Mapping[str, Any], hidden: int, heads: int, where: str) -> int:
    if config.get("head_dim") is None and hidden % heads:
        raise ModelError(
            f"{where}: hidden_size {hidden} is not a multiple of num_attention_heads {heads}; set head_dim."
        )
    return integer(config, "head_dim", where, default=hidden // heads)


_LATENT_NORM_EPS = 1e-6


def _latent(config: Mapping[str, Any], heads: int, kv_heads: int, where: str) -> LatentShape:
    """Return the sizes of latent attention.

    Raises:
        ModelError: keys contradict each other, or programs would compute different models: the norms of the latents use
            an epsilon of 1e-6 in transformers whatever rms_norm_eps is, but rms_norm_eps in Megatron-core and SGLang.
    """
    shape = LatentShape(
        query_rank=None if config.get("q_lora_rank") is None else integer(config, "q_lora_rank", where),
        kv_rank=integer(config, "kv_lora_rank", where),
        plain=integer(config, "qk_nope_head_dim", where),
        rotary=integer(config, "qk_rope_head_dim", where),
        value=integer(config, "v_head_dim", where),
    )
    allowed: dict[str, object] = {
        "num_key_value_heads": heads,
        "head_dim": shape.rotary,
        "qk_head_dim": shape.plain + shape.rotary,
        "rms_norm_eps": _LATENT_NORM_EPS,
    }
    for key, value in allowed.items():
        got = kv_heads if key == "num_key_value_heads" else config.get(key)
        if got is not None and got != value:
            raise ModelError(f"{where}: {key} {show(got)} is not supported with latent attention; allowed: {value}.")
    if shape.rotary % 2:
        raise ModelError(f"{where}: qk_rope_head_dim {shape.rotary} is odd; its entries are rotated in pairs.")
    return shape


def _dtype(config: Mapping[str, Any], where: str) -> str | None:
    dtype = config.get("dtype") or config.get("torch_dtype")
    if dtype is not None and dtype not in _DTYPES:
        raise ModelError(f"{where}: dtype {dtype!r} is not supported; allowed: {', '.join(_DTYPES)}.")
    return dtype
