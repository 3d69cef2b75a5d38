"""An adapter added to its base offline: the sum in fp32, rounded once, and what is refused by name."""

from __future__ import annotations

import json

import pytest
import torch
from hf_checkpoints import config_of, make_hf, tensors_of
from safetensors.torch import save_file

from megatron_daro.cli import main
from megatron_daro.convert.hf_files import write_hf_checkpoint

RANK, ALPHA = 4, 6
MATRIX = "model.layers.1.self_attn.v_proj.weight"


def factors_of(base, *names):
    """Random A and B under PEFT's names."""
    torch.manual_seed(1)
    found = {}
    for name in names:
        rows, columns = base[name].shape
        stem = f"base_model.model.{name.removesuffix('weight')}"
        found |= {f"{stem}lora_A.weight": torch.randn(RANK, columns), f"{stem}lora_B.weight": torch.randn(rows, RANK)}
    return found


@pytest.fixture
def base(tmp_path):
    tensors = {name: torch.randn(t.shape).bfloat16() for name, t in make_hf(tmp_path / "shapes", config_of()).items()}
    write_hf_checkpoint(tmp_path / "base", tensors.items(), config_of())
    (tmp_path / "base" / "tokenizer.json").write_text('{"version": "1.0"}')
    return tensors


def merged(tmp_path, factors, **config):
    """The exit code of a merge."""
    (tmp_path / "adapter").mkdir()
    save_file(factors, tmp_path / "adapter" / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "use_rslora": True, **config}
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(config))
    words = ["--merge", tmp_path / "adapter", "--hf", tmp_path / "base", "--out", tmp_path / "out"]
    return main(["convert", *map(str, words), "--max-shard-size", "5KB"])


def test_the_sum_is_made_in_fp32_and_rounded_once(base, tmp_path):
    factors = factors_of(base, MATRIX)
    assert merged(tmp_path, factors) == 0
    a, b = (factors[f"base_model.model.{MATRIX.removesuffix('weight')}lora_{letter}.weight"] for letter in "AB")
    found = tensors_of(tmp_path / "out")
    assert torch.equal(found[MATRIX], (base[MATRIX].float() + ALPHA / RANK**0.5 * (b @ a)).bfloat16())
    assert found.keys() == base.keys() and all(torch.equal(found[name], base[name]) for name in base if name != MATRIX)
    assert (tmp_path / "out" / "tokenizer.json").is_file()


@pytest.mark.parametrize(
    ("factors", "config", "named"),
    [
        (
            lambda base: factors_of({"model.layers.9.x.weight": base[MATRIX]}, "model.layers.9.x.weight"),
            {},
            "layers.9.x",
        ),
        (lambda base: factors_of({MATRIX: torch.zeros(3, 3)}, MATRIX), {}, "v_proj"),
        (lambda base: factors_of(base, MATRIX), {"use_dora": True}, "use_dora"),
        (lambda base: factors_of(base, MATRIX), {"rank_pattern": {"v_proj": 2}}, "rank_pattern"),
        (lambda base: factors_of(base, MATRIX), {"r": "four"}, "adapter"),
    ],
)
def test_what_is_no_adapter_of_this_model_is_refused_and_nothing_is_left(
    base, tmp_path, capsys, factors, config, named
):
    assert merged(tmp_path, factors(base), **config) == 1
    assert named in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_a_quantized_base_is_refused(base, tmp_path, capsys):
    path = tmp_path / "base" / "config.json"
    path.write_text(json.dumps(config_of() | {"quantization_config": {"quant_method": "fp8"}}))
    assert merged(tmp_path, factors_of(base, MATRIX)) == 1
    assert "convert them to bf16 first" in capsys.readouterr().err and not (tmp_path / "out").exists()
