"""Reading and writing HF checkpoint directories: transformers as the judge, and files torn on purpose."""

from __future__ import annotations

import errno
import json
import weakref

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, Qwen2Config

from megatron_daro.convert import hf_files
from megatron_daro.convert.hf_files import HFCheckpoint, write_hf_checkpoint
from megatron_daro.errors import ModelError

CONFIG = Qwen2Config(
    vocab_size=61,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIG)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    return model


def tensors_of(model):
    return [(name, parameter.detach()) for name, parameter in model.named_parameters()]


def assert_same(directory, model):
    with HFCheckpoint(directory) as checkpoint:
        assert checkpoint.names() == sorted(dict(model.named_parameters()))
        for name, parameter in model.named_parameters():
            assert torch.equal(checkpoint.tensor(name), parameter)
            assert checkpoint.shape(name) == tuple(parameter.shape)


@pytest.mark.parametrize("shard_size", ["5GB", "20KB"])
def test_reads_what_transformers_writes(shard_size, model, tmp_path):
    model.save_pretrained(tmp_path, max_shard_size=shard_size)
    assert (tmp_path / "model.safetensors.index.json").exists() == (shard_size == "20KB")
    assert_same(tmp_path, model)


@pytest.mark.parametrize("max_shard_bytes", [10**9, 20_000])
def test_transformers_reads_what_is_written(max_shard_bytes, model, tmp_path):
    target = tmp_path / "new" / "checkpoint"
    write_hf_checkpoint(target, iter(tensors_of(model)), CONFIG.to_dict(), max_shard_bytes=max_shard_bytes)
    assert_same(target, model)
    loaded, info = AutoModelForCausalLM.from_pretrained(target, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    tokens = torch.arange(10)[None]
    assert torch.equal(loaded(tokens).logits, model(tokens).logits)
    files = sorted(target.glob("*.safetensors"))
    assert (len(files) > 1) == (max_shard_bytes == 20_000)
    largest_tensor = max(parameter.nbytes for parameter in model.parameters())
    assert all(file.stat().st_size <= max(max_shard_bytes, largest_tensor) + 4096 for file in files)
    assert [p.name for p in target.parent.iterdir()] == ["checkpoint"]


def test_views_of_one_buffer_and_bf16_are_written(tmp_path):
    buffer = torch.arange(12, dtype=torch.bfloat16)
    write_hf_checkpoint(tmp_path / "c", [("a", buffer[:4]), ("b", buffer[4:].view(2, 4).t())], {})
    with HFCheckpoint(tmp_path / "c") as checkpoint:
        assert torch.equal(checkpoint["a"], buffer[:4])
        assert torch.equal(checkpoint["b"], buffer[4:].view(2, 4).t())


def test_tokenizer_files_come_along_but_no_code(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    for name in ("tokenizer.json", "generation_config.json", "modeling_x.py", "model.safetensors"):
        (source / name).write_text("{}")
    write_hf_checkpoint(tmp_path / "c", [("a", torch.ones(2))], {"x": 1}, source)
    assert sorted(p.name for p in (tmp_path / "c").iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
    ]
    assert json.loads((tmp_path / "c" / "config.json").read_text()) == {"x": 1}
    assert HFCheckpoint(tmp_path / "c").names() == ["a"]


def test_only_one_file_of_tensors_is_alive_while_writing(tmp_path):
    given, alive = [], []

    def stream():
        for i in range(9):
            tensor = torch.ones(1000)
            given.append(weakref.ref(tensor))
            alive.append(sum(one() is not None for one in given))
            yield f"t{i}", tensor
            del tensor

    write_hf_checkpoint(tmp_path / "c", stream(), {}, max_shard_bytes=8000)
    assert len(HFCheckpoint(tmp_path / "c").names()) == 9
    assert max(alive) <= 4  # two that fill a file, the one being handed over, and the next


@pytest.mark.parametrize("error", [RuntimeError("stream broke"), KeyboardInterrupt()])
def test_nothing_is_left_when_the_stream_breaks(error, tmp_path):
    def stream():
        yield "a", torch.ones(4)
        raise error

    with pytest.raises(type(error)):
        write_hf_checkpoint(tmp_path / "c", stream(), {}, max_shard_bytes=1)
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_a_clear_error_and_leaves_nothing(tmp_path, monkeypatch):
    original, calls = hf_files.save_file, []

    def full_at_the_second_file(tensors, path, **options):
        calls.append(path)
        if len(calls) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        original(tensors, path, **options)

    monkeypatch.setattr(hf_files, "save_file", full_at_the_second_file)
    with pytest.raises(ModelError, match="No space left"):
        write_hf_checkpoint(tmp_path / "c", [(f"t{i}", torch.ones(4)) for i in range(3)], {}, max_shard_bytes=16)
    assert len(calls) == 2
    assert list(tmp_path.iterdir()) == []


def test_writer_refusals(tmp_path):
    with pytest.raises(ModelError, match=str(tmp_path)):
        write_hf_checkpoint(tmp_path, [("a", torch.ones(1))], {})
    with pytest.raises(ModelError, match="tensor a"):
        write_hf_checkpoint(tmp_path / "c", [("a", torch.ones(1))] * 2, {})
    with pytest.raises(ModelError):
        write_hf_checkpoint(tmp_path / "c", [], {})
    assert list(tmp_path.iterdir()) == []


def test_truncated_files_are_refused_wherever_they_are_cut(tmp_path):
    whole = tmp_path / "model.safetensors"
    save_file({"a": torch.arange(100.0), "b": torch.ones(3)}, whole)
    content = whole.read_bytes()
    for length in (0, 4, 30, len(content) // 2, len(content) - 1):
        whole.write_bytes(content[:length])
        with pytest.raises(ModelError, match=r"model\.safetensors"):
            HFCheckpoint(tmp_path)
    whole.write_bytes(content)
    assert HFCheckpoint(tmp_path).names() == ["a", "b"]


def test_reader_names_what_is_missing(model, tmp_path):
    with pytest.raises(ModelError, match="nowhere"):
        HFCheckpoint(tmp_path / "nowhere")
    with pytest.raises(ModelError, match=r"model\.safetensors"):
        HFCheckpoint(tmp_path)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    with pytest.raises(ModelError, match=r"model\.layers\.7"):
        HFCheckpoint(tmp_path).tensor("model.layers.7.x")
    with pytest.raises(KeyError):
        HFCheckpoint(tmp_path)["model.layers.7.x"]
    shards = sorted(tmp_path.glob("*.safetensors"))
    kept = shards[1].read_bytes()
    shards[1].unlink()
    with pytest.raises(ModelError, match=shards[1].name):
        HFCheckpoint(tmp_path)
    save_file({"other": torch.ones(1)}, shards[1])
    with pytest.raises(ModelError, match=shards[1].name):
        HFCheckpoint(tmp_path)
    shards[1].write_bytes(kept)
    (tmp_path / "model.safetensors.index.json").unlink()
    with pytest.raises(ModelError, match=r"model\.safetensors\.index\.json"):
        HFCheckpoint(tmp_path)


@pytest.mark.parametrize(
    "index", ["{", "{}", '{"weight_map": []}', '{"weight_map": {"a": "../x.safetensors"}}', '{"weight_map": {"a": 3}}']
)
def test_a_bad_index_is_refused(index, tmp_path):
    directory = tmp_path / "checkpoint"
    directory.mkdir()
    save_file({"a": torch.ones(1)}, tmp_path / "x.safetensors")  # where the index must not reach
    (directory / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ModelError, match=r"index\.json"):
        HFCheckpoint(directory)


def test_pickles_are_refused(tmp_path):
    torch.save({"a": torch.ones(1)}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"\.bin"):
        HFCheckpoint(tmp_path)
