"""Typed values out of a model's config.json, each with an error that names the file, the key and what is allowed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_daro.errors import ModelError


def integer(config: Mapping[str, Any], key: str, where: str, *, default: int | None = None) -> int:
    """Return an integer of at least 1; `default` where the key is missing or null. Raises ModelError."""
    value = _value(config, key, where, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ModelError(f"{where}: {key} must be an integer of at least 1, got {value!r}.")
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
