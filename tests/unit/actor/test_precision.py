"""Precision that cannot be had is refused or said aloud, and fp8 packs are whole blocks."""

from __future__ import annotations

import pytest
import torch

from megatron_daro.actor import device, policy
from megatron_daro.actor.forward import fp8_tokens_multiple
from megatron_daro.config.actor import ActorSection
from megatron_daro.errors import ConfigError


def test_fp8_without_transformer_engine_is_refused_and_not_silently_off(monkeypatch):
    with pytest.raises(ConfigError, match=r"actor\.fp8: got true, but Transformer Engine cannot be used here"):
        policy.uses_transformer_engine(ActorSection(fp8=True))
    monkeypatch.setattr(device, "has_transformer_engine", lambda: True)
    assert policy.uses_transformer_engine(ActorSection(fp8=True))
    assert not policy.uses_transformer_engine(ActorSection(dtype="fp32"))


def test_a_gpu_without_transformer_engine_is_said_aloud(monkeypatch):
    assert policy._remarks(ActorSection(), False) == ()  # a CPU
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert policy._remarks(ActorSection(), True) == ()
    (remark,) = policy._remarks(ActorSection(), False)
    assert "without Transformer Engine (it cannot be imported there)" in remark
    (remark,) = policy._remarks(ActorSection(dtype="fp32"), False)
    assert "no packed attention in fp32" in remark


@pytest.mark.parametrize(("recipe", "tokens"), [("tensorwise", 32), ("delayed", 32), ("mxfp8", 32), ("blockwise", 128)])
def test_packs_are_padded_to_whole_blocks_of_the_recipe(recipe, tokens):
    assert fp8_tokens_multiple(recipe) == tokens
