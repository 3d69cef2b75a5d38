"""Weights of a model directory, judged by the headers of their files before anything loads them."""

from __future__ import annotations

import json
import struct

import pytest

from megatron_daro.config.model_files import read_model

GIT_LFS = b"version https://git-lfs.github.com/spec/"


def lines(directory) -> list[str]:
    return [str(problem) for problem in read_model(directory).problems]


def tensor(dtype="I8", shape=(3,), offsets=(0, 3)):
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


@pytest.mark.parametrize(
    ("header", "data", "why"),
    [
        ({}, b"", ""),
        ({"a": tensor(), "b": tensor("BOOL", [2], [3, 5]), "__metadata__": {"x": "y"}}, bytes(5), ""),
        ({"b": tensor("BOOL", [2], [3, 5]), "a": tensor()}, bytes(4), "torn: its header describes"),
        ({"a": tensor("F7")}, bytes(3), "holds a as F7, which is not read; allowed: F64, F32,"),
        ({"a": tensor("F4")}, bytes(3), "fix: take the checkpoint that is not quantized"),
        ({"a": tensor(), "b": tensor(offsets=[2, 5])}, bytes(5), "b is not where it should be"),
        ({"a": tensor(offsets=[-3, 0])}, bytes(3), "a is not where it should be"),
        ({"a": tensor(offsets=[0, 4])}, bytes(3), "a is not where it should be"),
        ({"a": tensor(shape=[2**62], offsets=[0, 2**62])}, b"", "torn: its header describes 46116860"),
        ({"a": tensor(shape=[-1, -3])}, bytes(3), "[-1, -3] is no shape"),
        ({"a": {}}, b"", "(KeyError: 'dtype')"),
        ({"a": tensor(offsets=[0])}, bytes(3), "(IndexError: list index out of range)"),
        ({"a": tensor(offsets=1)}, b"", "(TypeError: "),
        ([], b"", "(AttributeError: "),
        (None, b"\x01\0\0\0\0\0\0\0{", "(JSONDecodeError: "),
        (None, struct.pack("<Q", 100_000) + b"[" * 100_000, "(RecursionError: "),
        (None, b"\x02\0\0\0\0\0\0\0{", "(header of 2 bytes in 9)"),
        (None, b"\0\0\0\0\0\0\0", "(7 bytes)"),
        (None, GIT_LFS + b"v1\noid sha256:00\nsize 9\n", "git-lfs pointer, not the file; allowed: complete"),
    ],
)
def test_a_safetensors_file_is_judged_by_its_header_and_size(run_files, header, data, why):
    text = b"" if header is None else json.dumps(header).encode()
    path = run_files.model / "model.safetensors"
    path.write_bytes((b"" if header is None else struct.pack("<Q", len(text))) + text + data)
    found = lines(run_files.model)
    assert len(found) == bool(why) and all(why in line and str(path) in line for line in found), found


def test_a_header_of_100_megabytes_is_none(run_files):
    path = run_files.model / "model.safetensors"
    path.write_bytes(struct.pack("<Q", 100_000_001))
    with path.open("r+b") as file:
        file.truncate(200_000_000)
    assert "(header of 100000001 bytes in 200000000)" in lines(run_files.model)[0]


SMALL = ["generation_config.json", "tokenizer_config.json", "special_tokens_map.json"]


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", *SMALL])
def test_a_pointer_of_git_lfs_is_called_so(run_files, name):
    (run_files.model / name).write_bytes(GIT_LFS + b"v1\noid sha256:00\nsize 9\n")
    assert "git-lfs pointer, not the file" in lines(run_files.model)[0] and "git lfs pull" in lines(run_files.model)[0]


@pytest.mark.parametrize("name", SMALL)
def test_a_torn_file_of_the_tokenizer_is_called_so_and_not_a_missing_end_token(run_files, name):
    config = json.loads((run_files.model / "config.json").read_text())
    config.pop("eos_token_id", None)
    (run_files.model / "config.json").write_text(json.dumps(config))
    for other in SMALL:
        (run_files.model / other).unlink(missing_ok=True)
    (run_files.model / name).write_text('{"eos_token": "<e')
    found = read_model(run_files.model)
    (line,) = map(str, found.problems)
    assert f"an unreadable {name}" in line and found.has_end_token


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json", *SMALL])
def test_a_link_to_what_is_not_there_is_called_so(run_files, name):
    (run_files.model / name).unlink(missing_ok=True)
    (run_files.model / name).symlink_to("../../blobs/abc")
    (line,) = lines(run_files.model)
    assert name in line and "is a link to '../../blobs/abc', which is not there" in line


def test_an_adapter_without_its_model_is_called_so(run_files):
    (run_files.model / "model.safetensors").rename(run_files.model / "adapter_model.safetensors")
    (run_files.model / "adapter_config.json").write_text("{}")
    (line,) = lines(run_files.model)
    assert "an adapter without its base model" in line and "merge_and_unload" in line
