"""The shape of a model, read from its Hugging Face `config.json`, with the table of its family (families/).

Place in the data flow: config.json -> ModelShape -> actor (Megatron configuration), convert.mapping, plan.
Refuses every field that would change the mathematics and that the actor does not implement: silently ignoring one would
train a model that its checkpoint does not describe.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_daro.config.model_values import flag, integer, number
from megatron_daro.config.rope import RopeScaling, read_rope
from megatron_daro.errors import ModelError
from megatron_daro.families import families
from megatron_daro.families.table import ExpertKeys, Family

_DTYPES = ("float32", "bfloat16", "float16")


_TRANSFORMERS_BALANCING = 0.001  # what Qwen3-MoE and Mixtral have there where config.json says nothing


@dataclass(frozen=True, slots=True)
class ExpertShape:
    """A mixture of experts. `ffn` is the width of each expert's gate and up; `chosen` experts see each token.

    normalize: their weights are scaled to a sum of 1. dense_layers: layers that have one MLP in place of experts.
    balancing: the coefficient with which transformers would add a loss that balances them; 0: it would not.
    """

    number: int
    chosen: int
    ffn: int
    normalize: bool
    dense_layers: tuple[int, ...]
    balancing: float = 0.0


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Everything about a decoder that decides its parameters and its forward pass.

    `ffn` is the width of gate and of up in dense layers; `head_dim` is per head and need not be hidden / heads; `dtype`
    is the one the checkpoint names (None where it names none); `max_positions` in tokens; `experts`: None for a dense
    model.
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

    def has_experts(self, layer: int) -> bool:
        """Whether a layer, counted from 0, has experts in place of one MLP."""
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
        """Parameters that one token is multiplied with, embeddings as in `num_parameters`."""
        return self._count(self.experts.chosen if self.experts else 0)

    def _count(self, experts_counted: int) -> int:
        query, key = self.heads * self.head_dim, self.kv_heads * self.head_dim
        attention = self.hidden * (2 * query + 2 * key) + (query + 2 * key) * self.qkv_bias
        norms = 2 * self.hidden + 2 * self.head_dim * self.qk_norm
        mlps = (self.layers - self.expert_layers) * 3 * self.hidden * self.ffn
        if self.experts:
            router, expert = self.hidden * self.experts.number, 3 * self.hidden * self.experts.ffn
            mlps += self.expert_layers * (router + experts_counted * expert)
        outside = self.hidden + self.vocab * self.hidden * (1 if self.tie else 2)
        return self.layers * (attention + norms) + mlps + outside


def read_model_shape(source: str | Path | Mapping[str, Any]) -> ModelShape:
    """Return the shape that a `config.json` describes.

    Args:
        source: the checkpoint directory, the path of a config.json, or its content. Keys of transformers 4
            (`rope_theta`, `rope_scaling`, `torch_dtype`) and 5 (`rope_parameters`, `dtype`) are both understood.

    Returns:
        The shape, checked.

    Raises:
        ModelError: the file is missing or not JSON, a required key is missing or of the wrong type, or a value asks
            for something that is not implemented.
    """
    if isinstance(source, Mapping):
        config, where = dict(source), "the model configuration"
    else:
        config, where = _read_json(Path(source))
    family = _family(config, where)
    _refuse_unsupported(config, family, where)
    config = {**family.defaults, **{key: value for key, value in config.items() if value is not None}}
    heads, hidden = integer(config, "num_attention_heads", where), integer(config, "hidden_size", where)
    kv_heads = integer(config, "num_key_value_heads", where, default=heads)
    if heads % kv_heads:
        raise ModelError(f"{where}: num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}.")
    theta, scaling = read_rope(config, where)
    return ModelShape(
        family=family.model_type,
        layers=integer(config, "num_hidden_layers", where),
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=_head_dim(config, hidden, heads, where),
        ffn=integer(config, "intermediate_size", where),
        vocab=integer(config, "vocab_size", where),
        rope_theta=theta,
        rope_scaling=scaling,
        rms_eps=number(config, "rms_norm_eps", where, default=1e-6),
        tie=flag(config, "tie_word_embeddings", where),
        qkv_bias=family.qkv_bias,
        qk_norm=family.qk_norm,
        max_positions=integer(config, "max_position_embeddings", where),
        dtype=_dtype(config, where),
        experts=_experts(config, family, family.experts, where) if family.experts else None,
    )


def _read_json(path: Path) -> tuple[dict[str, Any], str]:
    file = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{file} does not exist. model.path must be a directory with a config.json.") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ModelError(f"{file} cannot be read as JSON: {error}. Copy the checkpoint again.") from None
    if not isinstance(config, dict):
        raise ModelError(f"{file} holds a JSON {type(config).__name__}, not an object. Copy the checkpoint again.")
    return config, str(file)


def _family(config: dict[str, Any], where: str) -> Family:
    kind, known = str(config.get("model_type")), families()
    if kind not in known:
        near = difflib.get_close_matches(kind, known, n=1)
        meant = f" Did you mean {near[0]!r}?" if near else ""
        raise ModelError(f"{where}: model_type {kind!r} is not supported; allowed: {', '.join(sorted(known))}.{meant}")
    family = known[kind]
    architectures = config.get("architectures") or [family.architecture]
    if family.architecture not in architectures:
        raise ModelError(f"{where}: architectures {architectures!r}; allowed for {kind}: {family.architecture}.")
    return family


def _refuse_unsupported(config: Mapping[str, Any], family: Family, where: str) -> None:
    """Raise, naming all of them, if values ask for a forward pass that is not implemented."""
    wrong = []
    if config.get("hidden_act", "silu") != "silu":
        wrong.append(f"hidden_act {config['hidden_act']!r} (allowed: 'silu')")
    wrong += [f"{key} true (allowed: false)" for key in ("attention_bias", "mlp_bias") if config.get(key)]
    if config.get("attention_dropout"):
        wrong.append(f"attention_dropout {config['attention_dropout']} (allowed: 0)")
    if config.get("partial_rotary_factor", 1.0) not in (1.0, None):
        wrong.append(f"partial_rotary_factor {config['partial_rotary_factor']} (allowed: 1)")
    if config.get("quantization_config"):
        wrong.append("quantization_config (allowed: none; convert the checkpoint to bf16 first)")
    if _slides(config, family):
        switch = "use_sliding_window false" if family.window == "switched" else "sliding_window null"
        wrong.append(f"sliding-window attention in use (allowed: {switch})")
    if config.get("router_jitter_noise"):
        wrong.append(f"router_jitter_noise {config['router_jitter_noise']} (allowed: 0)")
    if wrong:
        raise ModelError(f"{where}: not supported: {'; '.join(wrong)}. Use a checkpoint without it.")


def _slides(config: Mapping[str, Any], family: Family) -> bool:
    """Whether any layer uses a window. Where it is switched, transformers needs the switch, a width, and layers past
    max_window_layers."""
    if family.window == "none":
        return False
    if any(kind != "full_attention" for kind in config.get("layer_types") or ()):
        return True
    if family.window == "by_width":
        return config.get("sliding_window") is not None
    windowed = config.get("use_sliding_window") and config.get("sliding_window", 4096) is not None
    return bool(windowed) and config.get("max_window_layers", 28) < config.get("num_hidden_layers", 0)


def _experts(config: Mapping[str, Any], family: Family, keys: ExpertKeys, where: str) -> ExpertShape:
    given = {key: config[key] for key in keys.number if key in config}
    if len(set(given.values())) > 1:
        raise ModelError(f"{where}: {' and '.join(f'{k} {v}' for k, v in given.items())} contradict each other.")
    count = integer(config, next(iter(given), keys.number[0]), where)
    chosen = integer(config, keys.chosen, where)
    if chosen > count:
        raise ModelError(f"{where}: {keys.chosen} {chosen} is more than the {count} experts there are.")
    normalize = keys.normalize if isinstance(keys.normalize, bool) else flag(config, keys.normalize, where)
    return ExpertShape(
        number=count,
        chosen=chosen,
        ffn=integer(config, keys.width, where),
        normalize=normalize,
        dense_layers=_dense_layers(config, where) if "gate_up" in family.tensors else (),
        balancing=_balancing(config, where),
    )


def _balancing(config: Mapping[str, Any], where: str) -> float:
    """Return the coefficient of the balancing loss; transformers computes it with output_router_logits only."""
    if not config.get("output_router_logits") or config.get("router_aux_loss_coef") == 0:
        return 0.0
    return number(config, "router_aux_loss_coef", where, default=_TRANSFORMERS_BALANCING)


def _dense_layers(config: Mapping[str, Any], where: str) -> tuple[int, ...]:
    """Return the layers without experts: those listed, and all but each decoder_sparse_step-th."""
    layers, step = integer(config, "num_hidden_layers", where), integer(config, "decoder_sparse_step", where, default=1)
    listed = config.get("mlp_only_layers") or []
    if not isinstance(listed, list) or any(type(layer) is not int or not 0 <= layer < layers for layer in listed):
        raise ModelError(f"{where}: mlp_only_layers must list layers from 0 to {layers - 1}, got {listed!r}.")
    dense = tuple(layer for layer in range(layers) if layer in listed or (layer + 1) % step)
    if len(dense) == layers:
        raise ModelError(f"{where}: mlp_only_layers and decoder_sparse_step {step} leave no layer with experts.")
    return dense


def _head_dim(config: Mapping[str, Any], hidden: int, heads: int, where: str) -> int:
    if config.get("head_dim") is None and hidden % heads:
        raise ModelError(
            f"{where}: hidden_size {hidden} is not a multiple of num_attention_heads {heads}; set head_dim."
        )
    return integer(config, "head_dim", where, default=hidden // heads)


def _dtype(config: Mapping[str, Any], where: str) -> str | None:
    dtype = config.get("dtype") or config.get("torch_dtype")
    if dtype is not None and dtype not in _DTYPES:
        raise ModelError(f"{where}: dtype {dtype!r} is not supported; allowed: {', '.join(_DTYPES)}.")
    return dtype
