"""The mean of checkpoints, against float64 sums of whole tensors, and what is refused by name."""

from __future__ import annotations

import json

import pytest
import torch
from hf_checkpoints import config_of, make_hf, replace_tensor, tensors_of

from megatron_daro.cli import main
from megatron_daro.convert.hf_files import write_hf_checkpoint
from megatron_daro.workshop.convert import average

NORM = "model.norm.weight"


@pytest.fixture
def models(tmp_path):
    """Three checkpoints of one shape with other weights, in files of other sizes."""
    folders = [tmp_path / name for name in ("long", "short", "third")]
    names = make_hf(tmp_path / "shapes", config_of())
    for seed, folder in enumerate(folders):
        torch.manual_seed(seed)
        tensors = {name: torch.randn(tensor.shape).bfloat16() for name, tensor in names.items()}
        write_hf_checkpoint(folder, tensors.items(), config_of(), max_shard_bytes=4000 + 3000 * seed)
        (folder / "tokenizer.json").write_text('{"version": "1.0"}')
    return folders


def run(*words, out):
    return main(["convert", *map(str, words), "--out", str(out)])


@pytest.mark.parametrize("weights", ["", "0.75,0.25", "2,-1"])
def test_the_mean_is_the_sum_in_float64_rounded_once(models, tmp_path, weights, monkeypatch):
    monkeypatch.setattr(average, "PIECE_BYTES", 1024)  # several pieces a tensor
    a, b = models[:2]
    words = ["--weights", weights] if weights else []
    out = tmp_path / "mean"
    assert run("--average", a, "--average", b, *words, "--max-shard-size", "5KB", out=out) == 0
    w = [float(x) for x in weights.split(",")] if weights else [0.5, 0.5]
    of_a, of_b, found = map(tensors_of, (a, b, out))
    assert found.keys() == of_a.keys()
    for name, tensor in found.items():
        expected = (w[0] * of_a[name].double() + w[1] * of_b[name].double()).to(torch.bfloat16)
        assert tensor.dtype == torch.bfloat16 and torch.equal(tensor, expected), name
    assert json.loads((out / "config.json").read_text()) == json.loads((a / "config.json").read_text())
    assert [one["weight"] for one in json.loads((out / "average.json").read_text())["average_of"]] == w
    files = list(out.glob("*.safetensors"))
    assert len(files) > 1 and max(path.stat().st_size for path in files) < 5000 + 2000
    assert (out / "tokenizer.json").is_file()


def test_three_models_and_the_mean_is_one_that_can_be_converted(models, tmp_path):
    out = tmp_path / "mean"
    assert run(*[word for model in models for word in ("--average", model)], out=out) == 0
    parts = [tensors_of(model)[NORM].double() for model in models]
    expected = sum(part * (1 / 3) for part in parts).to(torch.bfloat16)
    assert torch.equal(tensors_of(out)[NORM], expected)
    assert run("--hf", out, out=tmp_path / "megatron") == 0


def test_what_cannot_be_averaged_is_refused_by_name_and_nothing_is_left(models, tmp_path, capsys):
    a, b, third = models
    out = tmp_path / "mean"

    def refused(*words, named):
        assert run(*words, out=out) in (1, 2)
        assert named in " ".join(capsys.readouterr().err.split()), named
        assert not out.exists() and not list(tmp_path.glob(".mean*"))

    both = ("--average", a, "--average", b)
    refused("--average", a, named="--average: got 1")
    refused("--average", a, "--average", a, named="--average")
    for weights in ("1", "0.5,0.6", "0.5,0.500002", "0.3,0.3,0.4", "nan,1", "inf,1", "a,b"):
        refused(*both, "--weights", weights, named=f"--weights: got '{weights}'")
    refused(*both, "--hf", a, named="--hf")
    refused("--weights", "0.5,0.5", named="--average: got 0")
    (b / "tokenizer.json").write_text('{"version": "2.0"}')
    refused(*both, named=f"tokenizer.json of {b}")  # one token id would stand for two texts
    (b / "tokenizer.json").write_text('{"version":   "1.0"}')  # spaced otherwise, the same tokenizer
    replace_tensor(b, NORM, torch.zeros(16))
    refused(*both, named=f"{NORM} is torch.float32 [16] in {b}")
    replace_tensor(b, NORM, None)
    refused(*both, named=f"{a} holds {NORM}")
    for model in (a, b):
        replace_tensor(model, NORM, torch.ones(16, dtype=torch.int8))
    refused(*both, named=f"{NORM} is torch.int8")
    (third / "config.json").write_text(json.dumps(config_of(num_hidden_layers=3)))
    refused("--average", a, "--average", third, named=str(third))


def test_a_sum_beyond_the_dtype_is_refused(models, tmp_path, capsys):
    for model in models[:2]:
        replace_tensor(model, NORM, torch.full((16,), 3e38, dtype=torch.bfloat16))
    both = ("--average", models[0], "--average", models[1])
    assert run(*both, out=tmp_path / "fits") == 0
    replace_tensor(models[1], NORM, torch.full((16,), -3e38, dtype=torch.bfloat16))
    assert run(*both, "--weights", "2,-1", out=tmp_path / "mean") == 1
    assert NORM in capsys.readouterr().err and not (tmp_path / "mean").exists()
