"""The forward passes before and after a conversion: which logits are too far apart, and when none are compared."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hf_checkpoints import config_of, make_hf

from megatron_daro.config.model_shape import read_model_shape
from megatron_daro.errors import CheckpointError


def test_the_forward_passes_are_compared_relative_to_the_largest_logit(tmp_path, monkeypatch):
    from megatron_daro.workshop.convert import forward_check  # takes seconds: Megatron

    hf = tmp_path / "hf"
    make_hf(hf, config_of())
    shape = read_model_shape(hf)
    seen: list[object] = []

    def passes(expected: torch.Tensor, found: torch.Tensor) -> str:
        monkeypatch.setattr(
            forward_check,
            "_transformers_logits",
            lambda hf, tokens, rounding: seen.append((len(tokens), int(tokens.max()), rounding)) or expected,
        )
        monkeypatch.setattr(forward_check, "_megatron_logits", lambda megatron, shape, tokens, rounding: found)
        return forward_check.compare_logits(hf, Path("/m"), "bfloat16" if len(seen) else None)

    ones = torch.full((64, 61), 0.5)
    said = passes(ones, ones + 0.00009)
    assert said.startswith("forward pass: logits of 64 tokens differ by at most 9.0e-05 (largest logit 0.5), fp32")
    assert passes(100 * ones, 100 * ones + 0.0049).startswith("forward pass: logits of 64")
    for scale, off in ((1, 0.00011), (100, 0.0051), (1, float("nan"))):
        with pytest.raises(CheckpointError, match=r"the logits of /m and .* differ by"):
            passes(scale * ones, scale * ones + off)
    assert (
        [one[2] for one in seen[:2]] == [torch.float32, torch.bfloat16]
        and seen[0][0] == 64
        and seen[0][1] < shape.vocab
    )
    with pytest.raises(CheckpointError, match="are not finite in fp32, though all weights are"):
        passes(ones / 0, ones)
    memory = SimpleNamespace(available=10 * shape.num_parameters)
    monkeypatch.setattr(forward_check.psutil, "virtual_memory", lambda: memory)
    assert passes(ones, ones).startswith("forward pass: logits")
    memory.available -= 1
    assert passes(ones, ones).startswith("forward pass not compared: it needs 0.0 GB of memory, and 0.0 GB are free")
