"""A configuration that has only what none may lack, and the sections that a test is about."""

from __future__ import annotations

from megatron_daro.config import Config


def configured(**sections) -> Config:
    return Config.model_validate({"model": {"path": "m"}, "data": {"train": ("t",)}, **sections})
