"""What cannot be converted, or not there: an error that names the tensor or the file, and nothing under the target's
name; what a hostile checkpoint names is not run."""

from __future__ import annotations

import enum
import json
import os
import pickle
import re
import subprocess

import pytest
import torch
from hf_checkpoints import (
    CARD_FILE,
    RefusedError,
    assert_equal,
    config_of,
    make_hf,
    replace_tensor,
    small_pieces,
    tensors_of,
    to_hf,
    to_megatron,
)
from safetensors.torch import save_file

from megatron_daro.config.model_files import read_model
from megatron_daro.config.model_shape import read_model_shape
from megatron_daro.convert import torch_dist
from megatron_daro.convert.hf_files import write_hf_checkpoint
from megatron_daro.convert.weights_check import check_weights
from megatron_daro.errors import ModelError

GATE = "model.layers.1.mlp.gate_proj.weight"


@pytest.fixture
def hf(tmp_path):
    make_hf(tmp_path / "hf", config_of())
    return tmp_path / "hf"


def refused(source, out, match, convert=to_megatron):
    with pytest.raises(RefusedError, match=match):
        convert(source, out)
    assert not out.exists()


def test_a_missing_shard(hf, tmp_path):
    file = sorted(hf.glob("*.safetensors"))[1]
    file.unlink()
    refused(hf, tmp_path / "out", file.name)


def test_a_truncated_file(hf, tmp_path):
    file = sorted(hf.glob("*.safetensors"))[1]
    os.truncate(file, file.stat().st_size - 1)
    refused(hf, tmp_path / "out", file.name)


def test_a_file_that_is_cut_while_it_is_read(hf, tmp_path, monkeypatch):
    file, real = sorted(hf.glob("*.safetensors"))[0], os.pwrite

    def pwrite(descriptor, data, at):
        os.truncate(file, 900)
        return real(descriptor, data, at)

    monkeypatch.setattr(os, "pwrite", pwrite)
    with small_pieces():
        refused(hf, tmp_path / "out", file.name)


def test_a_tensor_too_few(hf, tmp_path):
    replace_tensor(hf, GATE, None)
    refused(hf, tmp_path / "out", GATE)


def test_a_tensor_too_many(hf, tmp_path):
    replace_tensor(hf, "model.layers.0.mlp.gate_proj.lora_A.weight", torch.zeros(2, 3))
    refused(hf, tmp_path / "out", r"model\.layers\.0\.mlp\.gate_proj\.lora_A\.weight")
    replace_tensor(hf, "model.layers.0.mlp.gate_proj.lora_A.weight", None)
    replace_tensor(hf, "model.layers.0.self_attn.rotary_emb.inv_freq", torch.zeros(4))  # computed, in old checkpoints
    assert to_megatron(hf, tmp_path / "out")["ignored"] == ["model.layers.0.self_attn.rotary_emb.inv_freq"]


def test_a_shape_that_config_json_does_not_have(hf, tmp_path):
    replace_tensor(hf, GATE, torch.zeros(25, 16, dtype=torch.bfloat16))
    refused(hf, tmp_path / "out", rf"{GATE}.*\(25, 16\).*\(24, 16\)")


def test_tied_weights_that_differ(tmp_path):
    given = make_hf(tmp_path / "hf", config_of(tie_word_embeddings=True))
    same = given["model.embed_tokens.weight"]
    replace_tensor(tmp_path / "hf", "lm_head.weight", same)
    assert to_megatron(tmp_path / "hf", tmp_path / "same")["ignored"] == ["lm_head.weight"]
    other = same.clone()
    other[-1, -1] += 1
    replace_tensor(tmp_path / "hf", "lm_head.weight", other)
    refused(tmp_path / "hf", tmp_path / "out", r"lm_head\.weight")


def test_layers_of_different_dtypes(hf, tmp_path):
    replace_tensor(hf, "model.norm.weight", torch.ones(16))  # a tensor of its own: stays as it is
    to_megatron(hf, tmp_path / "mixed")
    to_hf(tmp_path / "mixed", tmp_path / "back")
    assert tensors_of(tmp_path / "back")["model.norm.weight"].dtype == torch.float32
    replace_tensor(hf, "model.layers.1.input_layernorm.weight", torch.ones(16))
    refused(hf, tmp_path / "out", r"model\.layers\.1\.input_layernorm\.weight is float32")


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"model_type": "qwen4"}, "qwen4"),
        ({"num_hidden_layers": 1}, r"model\.layers\.1\."),
        ({"num_hidden_layers": 3}, r"model\.layers\.2\."),
        ({"num_key_value_heads": 4}, r"k_proj\."),
    ],
)
def test_a_config_json_of_another_model(hf, tmp_path, changes, match):
    (hf / "config.json").write_text(json.dumps(config_of(**{"family": "qwen2", **changes})))
    if "model_type" in changes:
        (hf / "config.json").write_text(json.dumps({**config_of(), **changes}))
    refused(hf, tmp_path / "out", match)


@pytest.mark.parametrize(
    ("number", "match"),
    [(2, r"model\.layers\.1\.mlp\.experts\.2"), (8, r"mlp\.gate\.weight.*\(4, 16\)")],
)
def test_a_config_json_that_lies_about_the_experts(tmp_path, number, match):
    make_hf(tmp_path / "hf", config_of("qwen3_moe"))
    (tmp_path / "hf/config.json").write_text(json.dumps(config_of("qwen3_moe", num_experts=number)))
    refused(tmp_path / "hf", tmp_path / "out", match)


def test_a_directory_that_is_not_empty(hf, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "mine.txt").write_text("keep")
    with pytest.raises(RefusedError, match=str(out)):
        to_megatron(hf, out)
    assert [path.name for path in out.iterdir()] == ["mine.txt"] and not (tmp_path / ".out.partial").exists()
    (out / "mine.txt").unlink()
    to_megatron(hf, out)
    assert (out / CARD_FILE).is_file()


@pytest.mark.parametrize("format_", ["daro", "torch_dist"])
def test_a_torn_megatron_checkpoint(hf, tmp_path, format_):
    to_megatron(hf, tmp_path / "megatron", format_=format_)
    files = (tmp_path / "megatron").rglob("*shard_*" if format_ == "daro" else "*.distcp")
    file = max(files, key=lambda path: path.stat().st_size)
    os.truncate(file, file.stat().st_size // 2)
    refused(tmp_path / "megatron", tmp_path / "back", file.name, to_hf)
    file.unlink()
    refused(tmp_path / "megatron", tmp_path / "back", file.name, to_hf)


def test_a_megatron_checkpoint_of_another_model(hf, tmp_path):
    to_megatron(hf, tmp_path / "megatron")
    for changes, match in (
        ({"num_hidden_layers": 3}, r"decoder\.layers\.\S+ .*\(2, .*\(3,"),
        ({"vocab_size": 500}, r"embedding\.word_embeddings\.weight .*\(128"),
        ({"family": "qwen3"}, r"decoder\.layers\.self_attention\.q_layernorm\.weight"),
        ({"family": "llama"}, r"decoder\.layers\.self_attention\.linear_qkv\.bias"),
        ({"tie_word_embeddings": True}, r"output_layer\.weight"),
    ):
        (tmp_path / "megatron/hf/config.json").write_text(json.dumps(config_of(**changes)))
        refused(tmp_path / "megatron", tmp_path / "back", match, to_hf)


class _Evil:
    """Writes a file where it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


def test_a_pickle_that_runs_code_is_not_run(hf, tmp_path):
    to_megatron(hf, tmp_path / "megatron", format_="torch_dist")
    metadata = tmp_path / "megatron/release/.metadata"
    with metadata.open("rb") as file:
        content = pickle.load(file)  # ours, from a moment ago
    content.planner_data = _Evil(tmp_path / "executed")
    metadata.write_bytes(pickle.dumps(content))
    refused(tmp_path / "megatron", tmp_path / "back", r"posix\.system", to_hf)
    assert not (tmp_path / "executed").exists()
    with metadata.open("rb") as file:
        pickle.load(file)
    assert (tmp_path / "executed").exists(), "the attack must work on a reader that trusts it"


class _EarlyPickler(pickle.Pickler):
    """As Python 3.11.2, Debian 12's, pickles a member of an Enum (its enum.py, `Enum.__reduce_ex__`)."""

    def reducer_override(self, value):
        return (getattr, (type(value), value.name)) if isinstance(value, enum.Enum) else NotImplemented


def test_enums_as_an_early_python_3_11_pickles_them(hf, tmp_path):
    to_megatron(hf, tmp_path / "megatron", format_="torch_dist")
    metadata = tmp_path / "megatron/release/.metadata"
    with metadata.open("rb") as file:
        content = pickle.load(file)  # ours, from a moment ago
    with metadata.open("wb") as file:
        _EarlyPickler(file).dump(content)
    assert b"getattr" in metadata.read_bytes()
    assert torch_dist.read_metadata(metadata)


def test_a_blob_that_is_no_tensor_runs_nothing(hf, tmp_path):
    """torch.save's own pickle inside a .distcp file is read with a list of names too."""
    to_megatron(hf, tmp_path / "megatron", format_="torch_dist")
    file = next(p for p in (tmp_path / "megatron/release").glob("*.distcp") if b"_rebuild_tensor_v2" in p.read_bytes())
    content = file.read_bytes()
    assert content.count(b"ctorch._utils\n_rebuild_tensor_v2\n")
    same_length = b"cposix\nsystem\n"
    padding = len(b"ctorch._utils\n_rebuild_tensor_v2\n") - len(same_length)
    file.write_bytes(
        content.replace(
            b"ctorch._utils\n_rebuild_tensor_v2\n", same_length + b"0N" * (padding // 2) + b"N" * (padding % 2)
        )
    )
    refused(tmp_path / "megatron", tmp_path / "back", r"\.distcp|posix\.system", to_hf)


def test_too_little_space_is_seen_before(hf, tmp_path, monkeypatch):
    """On the file system that will have the files: a target may be a link."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk")
    looked, full = [], os.statvfs_result((4096, 4096, 9, 9, 0, 0, 0, 0, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda path: looked.append(path) or full)
    with pytest.raises(RefusedError, match=r"0\.0 GB"):
        to_megatron(hf, tmp_path / "link")
    assert looked == [tmp_path] and sorted(path.name for path in tmp_path.iterdir()) == ["disk", "hf", "link"]


@pytest.mark.parametrize("kind", ["mount", "bind mount", "current", "under a file"])
def test_targets_that_cannot_be_replaced_are_known_before_any_work(hf, tmp_path, monkeypatch, kind):
    out = tmp_path / "disk"
    out.mkdir()
    if kind == "under a file":
        (tmp_path / "file").write_text("")
        out = tmp_path / "file/out"
    elif kind == "current":
        monkeypatch.chdir(out)
    else:
        # A bind mount within one file system does not show; only a rename finds it.
        (tmp_path / "real").mkdir()
        source = ["--bind", tmp_path / "real"] if kind == "bind mount" else ["-t", "tmpfs", "tmpfs"]
        if os.geteuid() != 0 or subprocess.run(["mount", *source, out], capture_output=True).returncode:
            pytest.skip("this machine does not let this user mount")
    try:
        with pytest.raises(RefusedError, match=str(tmp_path)):
            to_megatron(hf, out)
        assert not list(tmp_path.rglob(CARD_FILE)) and not list(tmp_path.rglob("*.safetensors.json"))
    finally:
        if "mount" in kind:
            subprocess.run(["umount", out], check=True)


def test_a_link_to_an_empty_directory_is_followed(hf, tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk")
    to_megatron(hf, tmp_path / "link")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "disk" / CARD_FILE).is_file()


def test_what_is_no_checkpoint_at_all(hf, tmp_path):
    refused(tmp_path / "hf", tmp_path / "back", str(hf), lambda s, o: to_hf(s, o, config=hf))
    to_megatron(hf, tmp_path / "megatron", format_="torch_dist")
    (tmp_path / "megatron/latest_checkpointed_iteration.txt").write_text("100")
    refused(tmp_path / "megatron", tmp_path / "back", "iter_0000100", to_hf)
    refused(tmp_path, tmp_path / "back", str(tmp_path), lambda s, o: to_hf(s, o, config=hf))


def test_quantized_tensors(hf, tmp_path):
    replace_tensor(hf, "model.norm.weight", torch.ones(16, dtype=torch.int8))
    refused(hf, tmp_path / "out", r"model\.norm\.weight is torch\.int8")


def test_float64_needs_a_cast(hf, tmp_path):
    tensors = tensors_of(hf)
    replace_tensor(hf, "model.norm.weight", tensors["model.norm.weight"].double())
    refused(hf, tmp_path / "out", r"model\.norm\.weight is torch\.float64.* --dtype")
    to_megatron(hf, tmp_path / "out", dtype="bf16")
    to_hf(tmp_path / "out", tmp_path / "back")
    assert_equal(tensors_of(tmp_path / "back"), tensors)


@pytest.mark.parametrize("dtype", ["F8_E8M0", "F4", "C64"])
def test_a_dtype_that_is_not_read_is_named(hf, tmp_path, dtype):
    file = sorted(hf.glob("*.safetensors"))[0]
    header = json.dumps({"scale": {"dtype": dtype, "shape": [2], "data_offsets": [0, 2]}}).encode()
    file.write_bytes(len(header).to_bytes(8, "little") + header + b"ab")
    refused(hf, tmp_path / "out", f"scale as {dtype}")


def test_a_single_file_beside_an_index(hf, tmp_path):
    """transformers reads the single file, the index names the others."""
    save_file(tensors_of(hf), hf / "model.safetensors")
    assert [p.allowed for p in read_model(hf).problems if "beside" in p.got]
    refused(
        hf,
        tmp_path / "out",
        r"model\.safetensors beside model\.safetensors\.index\.json",
    )
    for file in hf.glob("model-*"):
        file.unlink()
    weight_map = dict.fromkeys(tensors_of(hf), "model.safetensors")
    (hf / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert not [p for p in read_model(hf).problems if "beside" in p.got]
    to_megatron(hf, tmp_path / "out")  # an index of this one file does not contradict it


def test_weights_that_the_index_does_not_name(hf, tmp_path):
    index = hf / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    file = content["weight_map"].pop("model.norm.weight")
    index.write_text(json.dumps(content))
    refused(hf, tmp_path / "out", rf"{file} .*model\.norm\.weight")
    content["weight_map"]["model.norm.weight"] = file
    index.write_text(json.dumps(content))
    save_file({"a": torch.ones(2)}, hf / "model-00009-of-00009.safetensors")
    refused(hf, tmp_path / "out", r"model-00009-of-00009\.safetensors")
    (hf / "model-00009-of-00009.safetensors").rename(hf / "consolidated.safetensors")  # as Mistral's own format
    to_megatron(hf, tmp_path / "out")


@pytest.mark.parametrize("format_", ["daro", "torch_dist"])
@pytest.mark.parametrize("back", [False, True])
def test_a_cast_that_makes_a_number_infinite(tmp_path, format_, back):
    large = make_hf(tmp_path / "hf", config_of())[GATE].float()
    large[3, 2] = -65536.0  # what bf16 makes of the largest fp16, 65504, rounded up
    replace_tensor(tmp_path / "hf", GATE, large.bfloat16())
    to_megatron(tmp_path / "hf", tmp_path / "whole", format_=format_)
    source, convert = (tmp_path / "whole", to_hf) if back else (tmp_path / "hf", to_megatron)
    match = rf"{GATE} holds 6\.554e\+04"
    refused(source, tmp_path / "out", match, lambda s, o: convert(s, o, dtype="fp16"))
    large[3, 2], large[4, 1] = float("-inf"), float("nan")  # no cast makes these
    replace_tensor(tmp_path / "hf", GATE, large.bfloat16())
    to_megatron(tmp_path / "hf", tmp_path / "out", dtype="fp16")


def test_fp32_that_bf16_cannot_hold(tmp_path):
    make_hf(tmp_path / "hf", config_of(), dtype=torch.float32)
    largest = torch.full((16,), torch.finfo(torch.float32).max)
    replace_tensor(tmp_path / "hf", "model.norm.weight", largest)
    refused(
        tmp_path / "hf",
        tmp_path / "out",
        r"model\.norm\.weight holds 3\.403e\+38",
        lambda s, o: to_megatron(s, o, dtype="bf16"),
    )


STACKS = "model.layers.1.mlp.experts."


@pytest.mark.parametrize(
    ("name", "value", "named"),
    [
        (f"{STACKS}gate_up_proj_bias", torch.zeros(0), "experts.3.up_proj.bias holds"),
        (f"{STACKS}down_proj", torch.zeros(4, 16, 24), "experts.0.down_proj.weight has shape"),
        (f"{STACKS}down_proj", None, f"{STACKS}down_proj is missing"),
        (f"{STACKS}down_proj_blocks", torch.zeros(4, 16, 1, 16, dtype=torch.uint8), "down_proj_blocks of shape"),
        ("model.layers.0.self_attn.sinks", torch.full((4,), torch.nan), "sinks holds NaN"),
        ("model.layers.0.self_attn.q_norm.weight", torch.ones(8), "q_norm.weight of shape"),
    ],
)
def test_the_headers_of_experts_in_stacks_are_compared_with_config_json(tmp_path, name, value, named):
    config = config_of("gpt_oss")
    tensors, shape = make_hf(tmp_path / "good", config), read_model_shape(config)
    check_weights(tmp_path / "good", shape)
    if named.endswith("up_proj.bias holds"):  # of the last one alone
        value = tensors[name].clone()
        value[3, -1] = torch.inf
    changed = {key: tensor for key, tensor in {**tensors, name: value}.items() if tensor is not None}
    write_hf_checkpoint(tmp_path / "bad", changed.items(), config)
    with pytest.raises(ModelError, match=re.escape(named)):
        check_weights(tmp_path / "bad", shape)
