"""Boxes of tensors in files: what is read of them, and what is refused by name, in whichever format they lie."""

from __future__ import annotations

import hashlib
import os
import pickle
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hf_checkpoints import config_of
from safetensors.torch import save_file
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from megatron_daro.config.model_shape import read_model_shape
from megatron_daro.config.safetensors_header import read_header
from megatron_daro.convert import daro_format, torch_dist
from megatron_daro.convert.daro_format import DaroPieces, StoredShard
from megatron_daro.convert.hf_files import HFCheckpoint
from megatron_daro.convert.mapping import hf_to_megatron
from megatron_daro.convert.megatron_weights import MegatronWeights
from megatron_daro.convert.pieces import BoxIndex, byte_runs
from megatron_daro.convert.safetensors_file import DirectFile, FileWriter, dtype_name
from megatron_daro.convert.torch_dist import TorchDistPieces, WrittenBlob, write_blob
from megatron_daro.errors import CheckpointError, ModelError

WHOLE = torch.arange(24.0).view(6, 4)
ROWS = [(0, 2), (2, 5), (5, 6)]


def daro_directory(directory, rows=ROWS):
    """A checkpoint of one tensor, these rows of it in a file each."""
    shards = []
    for number, (start, stop) in enumerate(rows):
        file = f"{number}.safetensors"
        save_file({"0": WHOLE[start:stop].clone()}, directory / file)
        shards.append(StoredShard("w", file, "0", (start, 0), (stop - start, 4), (6, 4)))
    daro_format.write_index(directory, shards)
    return DaroPieces(directory)


@pytest.mark.parametrize("offset", [(0, 0), (1, 1), (2, 0), (4, 3)])
@pytest.mark.parametrize("shape", [(1, 1), (2, 1), (1, 4), (5, 2), (6, 4)])
def test_any_box_is_read_and_only_its_bytes(tmp_path, offset, shape):
    shape = tuple(min(n, size - o) for n, o, size in zip(shape, offset, (6, 4), strict=True))
    store, (row, column) = daro_directory(tmp_path), offset
    wanted = WHOLE[row : row + shape[0], column : column + shape[1]]
    assert torch.equal(store.read("w", offset, shape), wanted)
    assert store.bytes_read == wanted.nbytes
    for out in (torch.zeros(shape), torch.zeros(shape, dtype=torch.float64), torch.zeros(shape[::-1]).T):
        assert store.read("w", offset, shape, out) is out and torch.equal(out, wanted.to(out.dtype))
    store.close()


def test_no_more_files_are_open_than_some_and_closed_ones_are_opened_again(tmp_path):
    """A checkpoint of thousands of files must not use up the process's descriptors."""

    def open_files():
        return len(list(Path("/proc/self/fd").iterdir()))

    whole, shards = torch.arange(200.0).view(200, 1), []
    for row in range(200):
        save_file({"0": whole[row : row + 1].clone()}, tmp_path / f"{row}.safetensors")
        shards.append(StoredShard("w", f"{row}.safetensors", "0", (row, 0), (1, 1), (200, 1)))
    daro_format.write_index(tmp_path, shards)
    store, before = DaroPieces(tmp_path), open_files()
    for _ in range(2):
        assert torch.equal(store.read("w", (0, 0), (200, 1)), whole)
        assert open_files() - before < 100
    store.close()
    assert open_files() <= before
    assert torch.equal(store.read("w", (0, 0), (200, 1)), whole)
    store.close()


@pytest.mark.parametrize(
    ("rows", "words"),
    [([(0, 2), (3, 6)], "w: 20 of 24"), ([(0, 3), (2, 6)], r"w: .*\(0, 0\) and \(2, 0\)")],
)
def test_a_box_that_is_stored_in_part_or_twice_is_refused(tmp_path, rows, words):
    store = daro_directory(tmp_path, rows)
    with pytest.raises(CheckpointError, match=words):
        store.read("w", (0, 0), (6, 4))
    assert torch.equal(store.read("w", (0, 0), (2, 4)), WHOLE[:2]), "what is whole can be read"


def test_a_file_that_ends_early_or_cannot_be_read_is_named(tmp_path):
    store = daro_directory(tmp_path)
    store.read("w", (0, 0), (1, 1))
    os.truncate(tmp_path / "0.safetensors", (tmp_path / "0.safetensors").stat().st_size - 8)
    with pytest.raises(CheckpointError, match=r"0\.safetensors"):
        store.read("w", (0, 0), (2, 4))
    store.piece("w", store.boxes("w")[1])  # its header is known then
    (tmp_path / "1.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"1\.safetensors"):
        store.read("w", (2, 0), (3, 4))
    with pytest.raises(CheckpointError, match=r"2\.safetensors"):
        (tmp_path / "2.safetensors").unlink()
        store.read("w", (5, 0), (1, 4))


def test_keys_and_shards_that_are_not_there_are_named(tmp_path):
    store = daro_directory(tmp_path)
    assert store.keys() == ["w"] and store.shape("w") == (6, 4) and store.dtype("w") == torch.float32
    with pytest.raises(CheckpointError, match="v is"):
        store.read("v", (0, 0), (1, 1))
    for wrong in ({"0": WHOLE[:1].clone()}, {"1": WHOLE[:2].clone()}):
        save_file(wrong, tmp_path / "0.safetensors")
        with pytest.raises(CheckpointError, match=r"0\.safetensors"):
            DaroPieces(tmp_path).read("w", (0, 0), (2, 4))


def test_boxes_are_looked_up_by_place():
    shards = [
        StoredShard("w", "f", f"{row}{column}", (row, column), (2, 3), (8, 6))
        for row in (0, 2, 4, 6)
        for column in (0, 3)
    ]
    index = BoxIndex(shards)
    for offset, shape, names in [
        ((0, 0), (8, 6), [s.name for s in shards]),
        ((2, 3), (2, 3), ["23"]),
        ((1, 2), (2, 1), ["00", "20"]),
        ((1, 2), (2, 2), ["00", "03", "20", "23"]),
        ((5, 0), (1, 3), ["40"]),
    ]:
        assert [box.name for box in index.near(offset, shape)] == names


def test_rows_of_a_window_are_as_few_runs_as_can_be():
    def runs(*window):
        return list(byte_runs((3, 4, 5), [slice(*part) for part in window], 2))

    assert runs((0, 3), (0, 4), (0, 5)) == [(0, 120)]
    assert runs((1, 3), (0, 4), (0, 5)) == [(40, 80)]
    assert runs((1, 3), (1, 3), (0, 5)) == [(50, 20), (90, 20)]
    assert runs((0, 2), (2, 4), (1, 4)) == [(22, 6), (32, 6), (62, 6), (72, 6)]
    assert list(byte_runs((), [], 2)) == [(0, 2)]


def test_rows_and_columns_of_an_hf_tensor(tmp_path):
    save_file({"w": WHOLE.clone(), "norm": torch.arange(3.0)}, tmp_path / "model.safetensors")
    with HFCheckpoint(tmp_path) as checkpoint:
        assert torch.equal(checkpoint.read("w", 1, 4), WHOLE[1:4])
        assert torch.equal(checkpoint.read("w", 1, 4, (1, 3)), WHOLE[1:4, 1:3])
        assert checkpoint.bytes_read == 4 * (12 + 6)
        assert checkpoint.read("norm", 1, 3).tolist() == [1, 2]
        assert len(checkpoint) == 2 and "w" in checkpoint and list(checkpoint) == ["norm", "w"]


def test_an_hf_file_that_cannot_be_opened_is_named(tmp_path, monkeypatch):
    save_file({"w": WHOLE.clone()}, tmp_path / "model.safetensors")

    def refused(path):
        raise PermissionError("Permission denied")

    monkeypatch.setattr("megatron_daro.convert.hf_files.read_header", refused)
    with pytest.raises(ModelError, match=r"model\.safetensors"):
        HFCheckpoint(tmp_path)


def megatron_directory(directory):
    """A Megatron checkpoint of a small model; its parameters by their keys."""
    shape = read_model_shape(config_of("llama", num_hidden_layers=1))
    tensors, shards = {}, []
    for place, rule in enumerate(hf_to_megatron(shape, fused_norms=True)):
        key, dims = rule.megatron_name.replace("layers.0.", "layers."), rule.local_shape(1)
        sizes = (1, *dims) if rule.layer is not None else dims
        tensors[str(place)] = torch.randn(sizes)
        shards.append(StoredShard(key, "a.safetensors", str(place), (0,) * len(sizes), sizes, sizes))
    save_file(tensors, directory / "a.safetensors")
    daro_format.write_index(directory, shards)
    daro_format.write_metadata(directory)
    return shape, {shard.key: tensors[shard.name] for shard in shards}


def test_columns_of_a_megatron_checkpoint_are_those_of_its_hf_tensors(tmp_path):
    shape, held = megatron_directory(tmp_path)
    with MegatronWeights(tmp_path, shape) as weights:
        down = held["decoder.layers.mlp.linear_fc2.weight"][0]
        name = "model.layers.0.mlp.down_proj.weight"
        assert torch.equal(weights[name], down)
        assert torch.equal(weights.read(name, 2, 9, (3, 7)), down[2:9, 3:7])
        up, name = held["decoder.layers.mlp.linear_fc1.weight"][0][24:], "model.layers.0.mlp.up_proj.weight"
        out = torch.zeros(5, 3)
        assert weights.read(name, 4, 9, (1, 4), out=out) is out and torch.equal(out, up[4:9, 1:4])
        assert weights.num_bytes == sum(4 * weights[name].numel() for name in weights)
        assert len(weights) == len(list(weights)) == 12 and name in weights and "x" not in weights
        with pytest.raises(KeyError, match="x"):
            weights["x"]


def blobs_of(directory, tensor=WHOLE):
    with (directory / "__0_0.distcp").open("wb") as file:
        start, length = write_blob(file, tensor)
    blob = WrittenBlob("w", "__0_0.distcp", start, length, (0, 0), (6, 4), (6, 4), "float32")
    torch_dist.write_metadata(directory, [blob])


def test_a_torch_dist_tensor_is_read_and_another_is_named(tmp_path):
    blobs_of(tmp_path)
    store = TorchDistPieces(tmp_path)
    assert torch.equal(store.read("w", (1, 1), (4, 2)), WHOLE[1:5, 1:3])
    with pytest.raises(CheckpointError, match="v is"):
        store.shape("v")


@pytest.mark.parametrize(
    "tensor",
    [WHOLE.double(), WHOLE.clone().T, WHOLE.clone().T.reshape(4, 6), WHOLE[:5].clone(), WHOLE.clone().T.contiguous().T],
)
def test_a_blob_that_is_not_what_was_announced_is_refused(tmp_path, tensor):
    blobs_of(tmp_path, tensor)
    with pytest.raises(CheckpointError, match=r"torch\.float32 \(6, 4\)"):
        TorchDistPieces(tmp_path).read("w", (0, 0), (6, 4))


def test_a_row_of_one_may_have_any_stride(tmp_path):
    """torch gives an axis of one entry whatever stride it happens to have."""
    with (tmp_path / "__0_0.distcp").open("wb") as file:
        start, length = write_blob(file, torch.arange(8.0).as_strided((1, 8), (3, 1)))
    blob = WrittenBlob("w", "__0_0.distcp", start, length, (0, 0), (1, 8), (1, 8), "float32")
    torch_dist.write_metadata(tmp_path, [blob])
    assert TorchDistPieces(tmp_path).read("w", (0, 2), (1, 3)).tolist() == [[2, 3, 4]]


@pytest.mark.parametrize("content", [b"no pickle", b""])
def test_metadata_that_is_torn_is_named(tmp_path, content):
    (tmp_path / ".metadata").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"\.metadata"):
        TorchDistPieces(tmp_path)


@pytest.mark.parametrize("file", ["../__0_0.distcp", "/etc/passwd", 3])
def test_metadata_that_names_files_elsewhere_is_refused(tmp_path, file):
    blobs_of(tmp_path)
    with (tmp_path / ".metadata").open("rb") as opened:
        metadata = pickle.load(opened)  # ours, from a moment ago
    (index,) = metadata.storage_data
    moved = {MetadataIndex(index.fqn, index.offset): replace(metadata.storage_data[index], relative_path=file)}
    content = pickle.dumps(Metadata(metadata.state_dict_metadata, storage_data=moved))
    (tmp_path / ".metadata").write_bytes(content)
    with pytest.raises(CheckpointError, match=re.escape(str(file))):
        TorchDistPieces(tmp_path)


def written(path, tensors, announced=None, **options):
    announced = announced or {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    with FileWriter(path, [(name, *row) for name, row in announced.items()], **options) as writer:
        for tensor in tensors.values():
            writer.write(tensor)
    return writer


@pytest.mark.parametrize("rows", [5, 7])
def test_a_file_that_did_not_get_what_its_header_says_is_refused(tmp_path, rows):
    with pytest.raises(ModelError, match=r"x: .*16 bytes"):
        written(tmp_path / "x", {"w": WHOLE}, {"w": (torch.float32, (rows, 4))})


def test_an_error_of_the_block_is_not_covered_by_missing_bytes(tmp_path):
    with pytest.raises(KeyError), FileWriter(tmp_path / "x", [("w", torch.float32, (6, 4))]):
        raise KeyError("mine")


def test_names_come_once_and_dtypes_are_those_of_the_format(tmp_path):
    with pytest.raises(ModelError, match="tensor w"):
        FileWriter(tmp_path / "x", [("w", torch.float32, (1,))] * 2)
    with pytest.raises(ModelError, match=r"torch\.complex64"):
        dtype_name(torch.complex64)


def test_a_header_is_as_long_as_it_says_and_the_hash_that_of_the_file(tmp_path):
    for length in range(1, 9):
        tensors = {"n" * length: WHOLE.clone(), "b": torch.ones(3, dtype=torch.bfloat16)}
        writer = written(tmp_path / "x", tensors, metadata={"format": "pt"}, hashed=True)
        content = (tmp_path / "x").read_bytes()
        assert int.from_bytes(content[:8], "little") % 8 == 0
        assert writer.sha256 == hashlib.sha256(content).hexdigest()
        assert read_header(tmp_path / "x")["b"].num_bytes == 6
        assert {name: entry.shape for name, entry in read_header(tmp_path / "x").items()} == {
            "n" * length: (6, 4),
            "b": (3,),
        }
    assert written(tmp_path / "x", {"w": WHOLE}).sha256 is None


@pytest.mark.parametrize(
    "change",
    [
        lambda content: content + b"x",
        lambda content: content.replace(b"[0,96]", b"[8,96]"),
        lambda content: content.replace(b'"shape"', b'"shapes'),
        lambda content: content.replace(b'"F32"', b'"X32"'),
        lambda content: b"\xff" * 8 + content[8:],  # a header of 2**64 bytes
        lambda content: content[:7],
    ],
)
def test_a_header_that_does_not_fit_its_file_is_refused(tmp_path, change):
    written(tmp_path / "x", {"w": WHOLE})
    (tmp_path / "x").write_bytes(change((tmp_path / "x").read_bytes()))
    with pytest.raises(ModelError, match=str(tmp_path / "x")):
        read_header(tmp_path / "x")


def test_a_closed_file_takes_nothing(tmp_path):
    file = DirectFile(tmp_path / "x", buffer_bytes=4096)
    file.write(b"abc")
    file.close()
    file.close()
    with pytest.raises((ValueError, RuntimeError), match="closed"):
        file.finish()
