"""The shape of a model, read from its Hugging Face `config.json`: Qwen2, Qwen3 and Llama, dense.

Place in the data flow: config.json -> ModelShape -> actor (Megatron configuration), convert.mapping, plan.
Refuses every field that would change the mathematics and that the actor does not implement: silently ignoring one would
train a model that its checkpoint does not describe.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from megatron_daro.errors import ModelError

Family = Literal["qwen2", "qwen3", "llama"]

_ARCHITECTURES = {"qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM", "llama": "LlamaForCausalLM"}
# What transformers assumes for a key that config.json leaves out (models/*/configuration_*.py of 5.23).
_MAX_POSITIONS = {"qwen2": 32768, "qwen3": 32768, "llama": 2048}
_DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """Llama 3's frequency scaling. `original_max_positions` in tokens; the factors have no unit."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Everything about a dense decoder that decides its parameters and its forward pass.

    `ffn` is the width of gate and of up; `head_dim` is per head and need not be hidden / heads; `dtype` is the one the
    checkpoint names (None where it names none); `max_positions` in tokens.
    """

    family: Family
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

    @property
    def num_parameters(self) -> int:
        """Parameters of the whole model, tied embeddings counted once."""
        query, key = self.heads * self.head_dim, self.kv_heads * self.head_dim
        attention = self.hidden * (2 * query + 2 * key) + (query + 2 * key) * self.qkv_bias
        norms = 2 * self.hidden + 2 * self.head_dim * self.qk_norm
        layer = attention + norms + 3 * self.hidden * self.ffn
        return self.layers * layer + self.hidden + self.vocab * self.hidden * (1 if self.tie else 2)


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
    heads, hidden = _integer(config, "num_attention_heads", where), _integer(config, "hidden_size", where)
    kv_heads = _integer(config, "num_key_value_heads", where, default=heads)
    if heads % kv_heads:
        raise ModelError(f"{where}: num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}.")
    theta, scaling = _rope(config, where)
    return ModelShape(
        family=family,
        layers=_integer(config, "num_hidden_layers", where),
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=_head_dim(config, family, hidden, heads, where),
        ffn=_integer(config, "intermediate_size", where),
        vocab=_integer(config, "vocab_size", where),
        rope_theta=theta,
        rope_scaling=scaling,
        rms_eps=_number(config, "rms_norm_eps", where, default=1e-6),
        tie=_flag(config, "tie_word_embeddings", where),
        qkv_bias=family == "qwen2",
        qk_norm=family == "qwen3",
        max_positions=_integer(config, "max_position_embeddings", where, default=_MAX_POSITIONS[family]),
        dtype=_dtype(config, where),
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
    family = config.get("model_type")
    if family not in _ARCHITECTURES:
        raise ModelError(f"{where}: model_type {family!r} is not supported; allowed: {', '.join(_ARCHITECTURES)}.")
    architectures = config.get("architectures") or [_ARCHITECTURES[family]]
    if _ARCHITECTURES[family] not in architectures:
        raise ModelError(f"{where}: architectures {architectures!r}; allowed for {family}: {_ARCHITECTURES[family]}.")
    return family


def _refuse_unsupported(config: dict[str, Any], family: Family, where: str) -> None:
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
    if family != "llama" and _slides(config):
        wrong.append("sliding-window attention in use (allowed: use_sliding_window false)")
    if wrong:
        raise ModelError(f"{where}: not supported: {'; '.join(wrong)}. Use a checkpoint without it.")


def _slides(config: dict[str, Any]) -> bool:
    """Whether any layer uses a window: transformers needs the switch, a width, and layers past max_window_layers."""
    if any(kind != "full_attention" for kind in config.get("layer_types") or ()):
        return True
    windowed = config.get("use_sliding_window") and config.get("sliding_window", 4096) is not None
    return bool(windowed) and config.get("max_window_layers", 28) < config.get("num_hidden_layers", 0)


def _rope(config: dict[str, Any], where: str) -> tuple[float, RopeScaling | None]:
    """Return base frequency and scaling; transformers 5 holds both in `rope_parameters`, 4 in two keys."""
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    theta = _number({"rope_theta": rope.get("rope_theta", config.get("rope_theta"))}, "rope_theta", where, default=1e4)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default" and any(isinstance(value, Mapping) for value in rope.values()):
        raise ModelError(f"{where}: rope_parameters per layer type are not supported; got {sorted(rope)}.")
    if rope.get("partial_rotary_factor", 1.0) not in (1.0, None):
        raise ModelError(
            f"{where}: partial_rotary_factor {rope['partial_rotary_factor']} is not supported (allowed: 1)."
        )
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise ModelError(f"{where}: rope type {kind!r} is not supported; allowed: 'default', 'llama3'.")
    return theta, RopeScaling(
        factor=_number(rope, "factor", where),
        low_freq_factor=_number(rope, "low_freq_factor", where),
        high_freq_factor=_number(rope, "high_freq_factor", where),
        original_max_positions=_integer(rope, "original_max_position_embeddings", where),
    )


def _head_dim(config: dict[str, Any], family: Family, hidden: int, heads: int, where: str) -> int:
    if config.get("head_dim") is None and family == "qwen3":
        return 128  # Qwen3Config's own default; the others divide
    if config.get("head_dim") is None and hidden % heads:
        raise ModelError(
            f"{where}: hidden_size {hidden} is not a multiple of num_attention_heads {heads}; set head_dim."
        )
    return _integer(config, "head_dim", where, default=hidden // heads)


def _dtype(config: dict[str, Any], where: str) -> str | None:
    dtype = config.get("dtype") or config.get("torch_dtype")
    if dtype is not None and dtype not in _DTYPES:
        raise ModelError(f"{where}: dtype {dtype!r} is not supported; allowed: {', '.join(_DTYPES)}.")
    return dtype


def _value(config: Mapping[str, Any], key: str, where: str, default: object) -> object:
    value = config.get(key)
    if value is None and default is None:
        raise ModelError(f"{where}: {key} is missing. A complete config.json of the model is needed.")
    return default if value is None else value


def _integer(config: Mapping[str, Any], key: str, where: str, *, default: int | None = None) -> int:
    value = _value(config, key, where, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ModelError(f"{where}: {key} must be an integer of at least 1, got {value!r}.")
    return value


def _number(config: Mapping[str, Any], key: str, where: str, *, default: float | None = None) -> float:
    value = _value(config, key, where, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise ModelError(f"{where}: {key} must be a number above 0, got {value!r}.")
    return float(value)


def _flag(config: Mapping[str, Any], key: str, where: str) -> bool:
    value = _value(config, key, where, False)
    if not isinstance(value, bool):
        raise ModelError(f"{where}: {key} must be true or false, got {value!r}.")
    return value
