"""The shape of a model, compared with the one that the installed transformers reads from the same config.json.

Model directory -> ModelShape, before a conversion or a run starts. `config.model_shape` reads config.json without
transformers, in milliseconds; other programs, including the rollout engines, read it with transformers. If the two
differed in a rule, a default or the meaning of a key, the run would silently train another model than the engine
samples from.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_daro.config.model_shape import ModelShape, read_model_shape, read_rope, with_rope_of_full_attention
from megatron_daro.errors import ModelError
from megatron_daro.families import families
from megatron_daro.families.table import ExpertKeys

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def read_compared_shape(directory: Path | Mapping[str, Any]) -> ModelShape:
    """Return the shape of a model, if transformers reads the same from its config.json.

    Args:
        directory: with a config.json; weights are not needed. A mapping, made from the arguments of a Megatron
            checkpoint, is not compared, since there is no file that transformers could read.

    Raises:
        ModelError: `read_model_shape` refuses it, transformers cannot read it, or transformers reads something else;
            the message has each difference, with both readings.
    """
    shape = read_model_shape(directory)
    if isinstance(directory, Mapping):
        return shape
    import transformers

    try:
        resolved = transformers.AutoConfig.from_pretrained(directory, trust_remote_code=False, local_files_only=True)
    except Exception as error:
        # Its classes may raise anything: ValueError, KeyError, TypeError, errors of their own.
        raise ModelError(
            f"{directory}: transformers {transformers.__version__} cannot read config.json ({type(error).__name__}: "
            f"{error}); correct it, or copy the one that came with the model"
        ) from error
    if resolved.model_type != shape.family:
        resolved = resolved.get_text_config()
    differences = [
        f"{name} is {ours!r} here and {theirs!r} there"
        for name, ours, theirs in _readings(shape, resolved, f"{directory}, as transformers reads it")
        if ours != theirs
    ]
    if differences:
        raise ModelError(
            f"{directory}: config.json does not say the same here and in transformers {transformers.__version__}: "
            f"{'; '.join(dict.fromkeys(differences))}. Write the meant value where both "
            "find it (docs/models.md), or use another checkpoint."
        )
    return shape


def _readings(shape: ModelShape, resolved: PreTrainedConfig, where: str) -> Iterator[tuple[str, object, object]]:
    """Yield (name, our reading, transformers' reading) of everything that determines parameters and forward pass."""

    def theirs(name: str, default: object = None) -> object:
        return getattr(resolved, name, default)

    yield "model_type", shape.family, resolved.model_type
    yield "num_hidden_layers", shape.layers, theirs("num_hidden_layers")
    yield "hidden_size", shape.hidden, theirs("hidden_size")
    yield "num_attention_heads", shape.heads, theirs("num_attention_heads")
    yield "num_key_value_heads", shape.kv_heads, theirs("num_key_value_heads")
    if latent := shape.latent:
        yield "q_lora_rank", latent.query_rank, theirs("q_lora_rank")
        yield "kv_lora_rank", latent.kv_rank, theirs("kv_lora_rank")
        yield "qk_nope_head_dim", latent.plain, theirs("qk_nope_head_dim")
        yield "qk_rope_head_dim", latent.rotary, theirs("qk_rope_head_dim")
        yield "v_head_dim", latent.value, theirs("v_head_dim")
        yield "rope_interleave", True, theirs("rope_interleave")
    else:
        yield "head_dim", shape.head_dim, theirs("head_dim") or resolved.hidden_size // resolved.num_attention_heads
    yield "intermediate_size", shape.ffn, theirs("intermediate_size", shape.ffn)
    yield "vocab_size", shape.vocab, theirs("vocab_size")
    yield "rms_norm_eps", shape.rms_eps, theirs("rms_norm_eps")
    yield "tie_word_embeddings", shape.tie, theirs("tie_word_embeddings", False)
    yield "max_position_embeddings", shape.max_positions, theirs("max_position_embeddings")
    yield "hidden_act", "silu", theirs("hidden_act")
    family = families()[shape.family]
    if "attention_bias" not in family.only:
        biases = family.switches.get("qkv_bias") == "attention_bias" and shape.qkv_bias
        yield "attention_bias", biases, theirs("attention_bias", False)
    if key := family.switches.get("query_norm"):
        yield key, shape.qk_norm, theirs(key)
    yield "mlp_bias", False, theirs("mlp_bias", False)
    yield "is_causal", True, theirs("is_causal", True)
    yield "layers with a window", list(shape.windowed), _windowed_layers(resolved)
    if linear := shape.linear:
        kinds = getattr(resolved, "layer_types", None) or []
        linear_layers = [layer for layer, kind in enumerate(kinds) if kind == "linear_attention"]
        yield "layers with linear attention", list(linear.layers), linear_layers
        yield "linear_num_key_heads", linear.key_heads, theirs("linear_num_key_heads")
        yield "linear_num_value_heads", linear.value_heads, theirs("linear_num_value_heads")
        yield "linear_key_head_dim", linear.key, theirs("linear_key_head_dim")
        yield "linear_value_head_dim", linear.value, theirs("linear_value_head_dim")
        yield "linear_conv_kernel_dim", linear.kernel, theirs("linear_conv_kernel_dim")
    if shape.windowed:
        yield "sliding_window", shape.window, theirs("sliding_window")
    for key, allowed in family.only.items():
        yield key, allowed[0], theirs(key, allowed[0])
    for _ in range(2):  # as AutoConfig leaves it, and then as the model's class completes it to compute frequencies
        rope: dict[str, Any] = {key: theirs(key) for key in ("rope_parameters", "max_position_embeddings")}
        rope = with_rope_of_full_attention(rope, where) if family.plain_windows else rope
        yield "rope_theta", shape.rope_theta, rope["rope_parameters"].get("rope_theta")
        ours = (shape.rope_theta, shape.rotary_share, shape.rope_scaling)
        yield "rotary embedding", ours, read_rope(rope, where, partial=family.partial_rotary, latent=family.latent)
        resolved.standardize_rope_params()
    keys = family.experts
    if shape.experts and keys:
        experts = shape.experts
        yield "number of experts", experts.number, theirs(keys.number[0])
        yield keys.chosen, experts.chosen, theirs(keys.chosen)
        yield keys.width, experts.ffn, theirs(keys.width)
        if isinstance(keys.normalize, str):
            yield keys.normalize, experts.normalize, theirs(keys.normalize)
        if "gate_up" in family.tensors:
            yield "layers without experts", list(experts.dense_layers), _dense_layers(resolved, keys)
        if keys.limit:
            yield keys.limit, experts.limit, theirs(keys.limit, experts.limit)
        if keys.shared:
            yield keys.shared, experts.shared_ffn // experts.ffn, theirs(keys.shared)
        if keys.shared_width:
            yield keys.shared_width, experts.shared_ffn, theirs(keys.shared_width)
        if keys.scores == "sigmoid":
            yield "routed_scaling_factor", experts.scale, theirs("routed_scaling_factor")
            groups, chosen = theirs("n_group"), theirs("topk_group")
            limits = (1, 1) if groups == chosen else (groups, chosen)
            yield "n_group and topk_group", (experts.groups, experts.chosen_groups), limits


def _windowed_layers(resolved: PreTrainedConfig) -> list[int]:
    """Return the layers with a window: those that `layer_types` names; or, if the family's class does not have that key
    (Qwen3-MoE, Mixtral, Mistral), all layers if `sliding_window` is a number.

    Source: the layers and masks of transformers' models/NAME/modeling_NAME.py.
    """
    layers, kinds = range(resolved.num_hidden_layers), getattr(resolved, "layer_types", None) or ()
    if not hasattr(type(resolved), "layer_types") and getattr(resolved, "sliding_window", None) is not None:
        return list(layers)
    others = ("full_attention", "linear_attention")
    return [layer for layer, kind in zip(layers, kinds, strict=False) if kind not in others]


def _dense_layers(resolved: PreTrainedConfig, keys: ExpertKeys) -> list[int]:
    """Return the layers without experts. Source: transformers, `Qwen3MoeDecoderLayer` of
    models/qwen3_moe/modeling_qwen3_moe.py, and `Glm4MoeDecoderLayer`."""
    if keys.dense:
        return list(range(min(getattr(resolved, keys.dense), resolved.num_hidden_layers)))
    step, listed = getattr(resolved, "decoder_sparse_step", 1), getattr(resolved, "mlp_only_layers", None) or ()
    return [layer for layer in range(resolved.num_hidden_layers) if layer in listed or (layer + 1) % step]
