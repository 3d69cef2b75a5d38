"""The mean of checkpoints, against float64 sums of whole tensors, and what is refused by name."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
from hf_checkpoints import config_of, make_hf, replace_tensor, tensors_of

from megatron_daro.cli import main
from megatron_daro.errors import ConfigError, ModelError
from megatron_daro.workshop.convert import average

NORM = "model.norm.weight"


@pytest.fixture
def models(tmp_path):
    """Three checkpoints of one shape with other weights, the second in files of another size."""
    folders = [tmp_path / name for name in ("long", "short", "third")]
    for seed, folder in enumerate(folders):
        torch.manual_seed(seed)
        make_hf(folder, config_of(), max_shard_bytes=4000 + 3000 * seed)
        for name, tensor in tensors_of(folder).items():
            replace_tensor(folder, name, torch.randn_like(tensor, dtype=torch.float32).to(tensor.dtype))
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
    assert len(list(out.glob("*.safetensors"))) > 1 and (out / "tokenizer.json").is_file()


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

    def refused(*words, says):
        assert run(*words, out=out) in (1, 2)
        assert says in " ".join(capsys.readouterr().err.split()), says
        assert not out.exists() and not list(tmp_path.glob(".mean*"))

    both = ("--average", a, "--average", b)
    refused("--average", a, says="--average: got 1; allowed: two or more directories")
    refused("--average", a, "--average", a, says="allowed: different directories")
    refused(*both, "--weights", "1", says="allowed: 2 numbers that add up to 1, one for each --average")
    refused(*both, "--weights", "0.5,0.6", says="add up to 1")
    refused(*both, "--weights", "nan,1", says="add up to 1")
    refused(*both, "--hf", a, says="--average: got it with --hf; allowed: alone")
    refused("--weights", "0.5,0.5", says="--average: got 0; allowed: two or more")
    (b / "tokenizer.json").write_text('{"version": "2.0"}')
    refused(*both, says=f"tokenizer.json of {b} is not that of {a}: one token id would stand for two texts")
    (b / "tokenizer.json").write_text('{"version":   "1.0"}')  # spaced otherwise, the same tokenizer
    replace_tensor(b, NORM, torch.zeros(16))
    refused(*both, says=f"{NORM} is torch.float32 [16] in {b}, torch.bfloat16 [16] in {a}")
    replace_tensor(b, NORM, None)
    refused(*both, says=f"{a} holds {NORM}, which {b} does not")
    (third / "config.json").write_text(json.dumps(config_of(num_hidden_layers=3)))
    refused("--average", a, "--average", third, says="describes another model than")


def test_a_sum_beyond_the_dtype_is_refused(models, tmp_path, capsys):
    for model in models[:2]:
        replace_tensor(model, NORM, torch.full((16,), 3e38, dtype=torch.bfloat16))
    both = ("--average", models[0], "--average", models[1])
    assert run(*both, out=tmp_path / "fits") == 0
    replace_tensor(models[1], NORM, torch.full((16,), -3e38, dtype=torch.bfloat16))
    assert run(*both, "--weights", "2,-1", out=tmp_path / "mean") == 1
    assert "the cast would make it infinite" in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "mean").exists()


def test_weights_of_a_mean_are_numbers_that_add_up_to_one():
    assert average.read_weights("", 4) == (0.25,) * 4 and average.read_weights("2,-1", 2) == (2.0, -1.0)
    assert average.read_weights("0.5,0.5000005", 2) == (0.5, 0.5000005)
    for text in ("0.5,0.500002", "0.5", "0.3,0.3,0.4", "inf,1", "a,b"):
        with pytest.raises(ConfigError, match=r"allowed: 2 numbers that add up to 1, .*--weights 0\.5,0\.5$"):
            average.read_weights(text, 2)
    with pytest.raises(ConfigError, match="got 1; allowed: two or more directories"):
        average.read_weights("", 1)


def test_files_of_a_mean_are_filled_to_their_limit():
    sizes = {"a": 4, "b": 6, "c": 1, "d": 30, "e": 1}
    tensors = SimpleNamespace(
        names=lambda: list(sizes), shape=lambda name: (sizes[name],), dtype=lambda name: torch.bfloat16
    )
    assert list(average._files(tensors, 20)) == [["a", "b"], ["c"], ["d"], ["e"]]
    assert list(average._files(tensors, 19)) == [["a"], ["b", "c"], ["d"], ["e"]]


def test_what_a_vocabulary_file_says_is_compared_and_not_its_spaces(tmp_path):
    for name, text in {"a.json": '{"x": 1}', "b.json": '{"x":1}', "torn.json": "{", "m.txt": "a b"}.items():
        (tmp_path / name).write_text(text)
    assert average._content(tmp_path / "a.json") == average._content(tmp_path / "b.json") == {"x": 1}
    assert average._content(tmp_path / "torn.json") == b"{" and average._content(tmp_path / "m.txt") == b"a b"
    assert average._content(tmp_path / "none") is None


@pytest.mark.parametrize("dtype", [torch.int64, torch.float8_e4m3fn])
def test_quantized_tensors_have_no_mean(dtype):
    one = SimpleNamespace(names=lambda: ["w"], shape=lambda name: (2,), dtype=lambda name: dtype, directory="/a")
    with pytest.raises(ModelError, match=rf"--average: w is {dtype}; allowed: fp64, fp32, bf16, fp16"):
        average.check_tensors([one, one])
    with pytest.raises(ModelError, match="/b holds w, which /a does not"):
        average.check_tensors(
            [SimpleNamespace(names=list, directory="/a"), SimpleNamespace(names=lambda: ["w"], directory="/b")]
        )
