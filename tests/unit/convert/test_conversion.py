"""HF -> Megatron -> HF: bit for bit through either format; casts, cards, processes, and going on after a stop."""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch
from hf_checkpoints import assert_equal, config_of, make_hf, tensors_of, to_hf, to_megatron
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_daro.config.model_shape import read_model_shape
from megatron_daro.convert import conversion, plan
from megatron_daro.convert.card import CARD_FILE
from megatron_daro.convert.hf_reader import HFCheckpoint
from megatron_daro.convert.jobs import box_name
from megatron_daro.convert.megatron_weights import MegatronWeights
from megatron_daro.errors import ModelError

FAMILIES = ("qwen2", "qwen3", "llama", "qwen3_moe")


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    """Tensors of a few hundred bytes are split, as those of gigabytes are."""
    monkeypatch.setattr(plan.Plan.__init__, "__defaults__", ((), 300))
    monkeypatch.setattr(os, "fsync", lambda file: None)  # hundreds of small files
    monkeypatch.setattr(plan, "_LEAST_FILE_BYTES", 6000)


models = st.fixed_dictionaries(
    {
        "family": st.sampled_from(FAMILIES),
        "num_hidden_layers": st.integers(1, 3),
        "num_key_value_heads": st.sampled_from([1, 2, 4]),
        "intermediate_size": st.integers(1, 20),
        "vocab_size": st.sampled_from([1, 61, 128, 130]),
        "tie_word_embeddings": st.booleans(),
    }
)


@settings(max_examples=20, deadline=None)
@given(models, st.sampled_from(["daro", "torch_dist"]), st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
def test_there_and_back_is_the_same_bit_for_bit(tmp_path_factory, model, format_, dtype):
    root = tmp_path_factory.mktemp("round")
    dense = [0] if model["num_hidden_layers"] > 2 else []  # dense layers before those with experts
    given_ = make_hf(root / "hf", config_of(**model, mlp_only_layers=dense), dtype=dtype)
    card = to_megatron(root / "hf", root / "megatron", format_=format_, verify=True)
    assert {row.check for row in card.rows} == {"hashed; read back and compared"}
    to_hf(root / "megatron", root / "back", verify=True)
    assert_equal(tensors_of(root / "back"), given_)
    assert json.loads((root / "back/config.json").read_text()) == json.loads((root / "hf/config.json").read_text())
    assert (root / "back/tokenizer.json").read_bytes() == (root / "hf/tokenizer.json").read_bytes()
    shutil.rmtree(root)


def parameter_hash(weights, rule):
    values = weights.read_parameter(rule, 0, weights.parameter_shape(rule)[0])
    return hashlib.sha256(values.view(torch.uint8).numpy()).hexdigest()


@pytest.mark.parametrize("format_", ["daro", "torch_dist"])
def test_files_are_as_large_as_their_tensors(tmp_path, format_):
    make_hf(tmp_path / "hf", config_of())
    card = to_megatron(tmp_path / "hf", tmp_path / "megatron", format_=format_)
    tensors = [row.megatron for row in card.rows]
    own = sum(math.prod(t.shape) * getattr(torch, t.dtype).itemsize for t in tensors)
    files = [*(tmp_path / "megatron").rglob("*.distcp"), *(tmp_path / "megatron").glob("*.safetensors")]
    # Names and places of each, in the other format pickled; and of the modules whose state is empty.
    assert own <= sum(file.stat().st_size for file in files) < own + 12_000 * len(tensors)


def test_the_other_format_in_between_and_the_card_of_each(tmp_path):
    given_ = make_hf(tmp_path / "hf", config_of())
    to_megatron(tmp_path / "hf", tmp_path / "one", format_="torch_dist")
    to_hf(tmp_path / "one", tmp_path / "two")
    to_megatron(tmp_path / "two", tmp_path / "three", format_="daro")
    to_hf(tmp_path / "three", tmp_path / "four")
    assert_equal(tensors_of(tmp_path / "four"), given_)
    with MegatronWeights(tmp_path / "one", read_model_shape(tmp_path / "hf")) as weights:
        own = {box_name((box := weights.box(r)).key, box.index): parameter_hash(weights, r) for r in weights.rules}
    for folder in ("one", "two", "three", "four"):
        rows = json.loads((tmp_path / folder / CARD_FILE).read_text())["rows"]
        hashes = {tensor["name"]: tensor["sha256"] for row in rows for tensor in row["hf"]}
        assert hashes == {n: hashlib.sha256(t.view(torch.uint8).numpy()).hexdigest() for n, t in given_.items()}
        assert {row["megatron"]["name"]: row["megatron"]["sha256"] for row in rows} == own
        qkv = next(row for row in rows if row["megatron"]["name"].endswith("linear_qkv.weight[1]"))
        assert qkv["megatron"]["shape"] == [64, 16] and qkv["change"] == "rows rearranged"


def test_a_cast_is_torchs_and_its_way_back_too(tmp_path):
    given_ = make_hf(tmp_path / "hf", config_of("qwen3", dtype="bfloat16"))
    card = to_megatron(tmp_path / "hf", tmp_path / "wide", dtype="fp32", verify=True)
    assert {row.change for row in card.rows} == {"cast"} and card.rows[0].megatron.dtype == "float32"
    to_hf(tmp_path / "wide", tmp_path / "back", dtype="bf16", verify=True)
    assert_equal(tensors_of(tmp_path / "back"), given_)
    to_hf(tmp_path / "wide", tmp_path / "kept")
    assert_equal(tensors_of(tmp_path / "kept"), {name: tensor.float() for name, tensor in given_.items()})
    assert json.loads((tmp_path / "kept/config.json").read_text())["dtype"] == "float32"


def test_several_processes_write_what_one_writes(tmp_path, monkeypatch):
    given_ = make_hf(tmp_path / "hf", config_of(num_hidden_layers=3))
    done = []
    to_megatron(tmp_path / "hf", tmp_path / "one")
    to_megatron(tmp_path / "hf", tmp_path / "two", processes=2, progress=lambda phase, number: done.append(number))
    files = sorted(path.name for path in (tmp_path / "one").glob("shard_*"))
    assert len(files) > 1
    assert [(tmp_path / "two" / f).read_bytes() for f in files] == [(tmp_path / "one" / f).read_bytes() for f in files]
    assert done[-1] >= sum(t.nbytes for t in given_.values())
    monkeypatch.setattr(conversion, "PART_BYTES", 2500)
    to_hf(tmp_path / "two", tmp_path / "back", processes=2, max_shard_bytes=10**6)
    assert_equal(tensors_of(tmp_path / "back"), given_)


def test_parts_of_a_file_are_written_by_themselves(tmp_path, monkeypatch):
    given_ = make_hf(tmp_path / "hf", config_of(num_hidden_layers=3))
    to_megatron(tmp_path / "hf", tmp_path / "megatron")
    whole = to_hf(tmp_path / "megatron", tmp_path / "whole", max_shard_bytes=12_000)
    monkeypatch.setattr(conversion, "PART_BYTES", 2500)
    made = plan.plan_to_hf(tmp_path / "megatron", tmp_path / "hf", None, 12_000)
    assert [len(job.parts(2500)) for job in made.jobs] == [6, 5]
    parts = to_hf(tmp_path / "megatron", tmp_path / "parts", max_shard_bytes=12_000)
    assert parts.rows == whole.rows
    names = sorted(path.name for path in (tmp_path / "whole").glob("*.safetensors"))
    for name in names:
        assert (tmp_path / "parts" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    assert_equal(tensors_of(tmp_path / "parts"), given_)


def test_a_file_counts_as_written_when_all_its_parts_are(tmp_path, monkeypatch):
    given_ = make_hf(tmp_path / "hf", config_of(num_hidden_layers=3))
    to_megatron(tmp_path / "hf", tmp_path / "megatron")
    monkeypatch.setattr(conversion, "PART_BYTES", 2500)
    with monkeypatch.context() as patch:
        real, count = conversion.write_file, iter(range(1000))

        def write(*task):
            if next(count) == 8:  # the first file has six parts, the second five
                raise _StoppedAtError
            return real(*task)

        patch.setattr(conversion, "write_file", write)
        with pytest.raises(_StoppedAtError):
            to_hf(tmp_path / "megatron", tmp_path / "back", max_shard_bytes=12_000)
    done = [path.name for path in (tmp_path / ".back.partial/done").iterdir()]
    assert done == ["model-00001-of-00002.safetensors.json"]
    to_hf(tmp_path / "megatron", tmp_path / "back", max_shard_bytes=12_000)
    assert_equal(tensors_of(tmp_path / "back"), given_)


def test_files_of_hf_are_as_large_as_asked(tmp_path):
    given_ = make_hf(tmp_path / "hf", config_of())
    to_megatron(tmp_path / "hf", tmp_path / "megatron")
    to_hf(tmp_path / "megatron", tmp_path / "large", max_shard_bytes=10**9)
    assert [path.name for path in (tmp_path / "large").glob("*.safetensors")] == ["model.safetensors"]
    to_hf(tmp_path / "megatron", tmp_path / "small", max_shard_bytes=5000)
    with HFCheckpoint(tmp_path / "small") as checkpoint:
        assert checkpoint.names() == sorted(given_)
    assert all(path.stat().st_size < 5000 + 2000 for path in (tmp_path / "small").glob("*.safetensors"))


class _StoppedAtError(Exception):
    """In the place of a Ctrl-C."""


def stop_after(number: int, monkeypatch) -> None:
    """The file number `number` (from 0) is not written."""
    real, count = conversion.write_file, iter(range(1000))

    def write(*task):
        if next(count) == number:
            (task[2] / task[1].file).write_bytes(b"half of it")
            raise _StoppedAtError
        return real(*task)

    monkeypatch.setattr(conversion, "write_file", write)


@pytest.mark.parametrize("format_", ["daro", "torch_dist"])
def test_a_second_run_goes_on_and_compares_what_it_finds(tmp_path, monkeypatch, format_):
    given_ = make_hf(tmp_path / "hf", config_of(num_hidden_layers=3))
    with monkeypatch.context() as patch:
        stop_after(2, patch)
        with pytest.raises(_StoppedAtError):
            to_megatron(tmp_path / "hf", tmp_path / "out", format_=format_)
    assert not (tmp_path / "out").exists() and (tmp_path / ".out.partial").is_dir()
    written = []
    with monkeypatch.context() as patch:
        real = conversion.write_file
        patch.setattr(conversion, "write_file", lambda *task: written.append(task[1].file) or real(*task))
        card = to_megatron(tmp_path / "hf", tmp_path / "out", format_=format_)
    assert len(written) == len(plan.plan_to_megatron(tmp_path / "hf", format_, None).jobs) - 2
    assert {row.check for row in card.rows} == {"hashed", "hashed; read back and compared"}
    assert not (tmp_path / ".out.partial").exists()
    to_hf(tmp_path / "out", tmp_path / "back")
    assert_equal(tensors_of(tmp_path / "back"), given_)


def test_a_file_that_changed_after_the_stop_is_found(tmp_path, monkeypatch):
    make_hf(tmp_path / "hf", config_of(num_hidden_layers=3))
    with monkeypatch.context() as patch:
        stop_after(2, patch)
        with pytest.raises(_StoppedAtError):
            to_megatron(tmp_path / "hf", tmp_path / "out")
    file = tmp_path / ".out.partial/files/shard_00000.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(Exception, match=r"model\.\S+: rows \d+ to \d+ are not what the source has"):
        to_megatron(tmp_path / "hf", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_other_options_begin_again(tmp_path, monkeypatch):
    given_ = make_hf(tmp_path / "hf", config_of(num_hidden_layers=3))
    with monkeypatch.context() as patch:
        stop_after(2, patch)
        with pytest.raises(_StoppedAtError):
            to_megatron(tmp_path / "hf", tmp_path / "out", dtype="fp32")
    card = to_megatron(tmp_path / "hf", tmp_path / "out")
    assert {row.check for row in card.rows} == {"hashed"}
    to_hf(tmp_path / "out", tmp_path / "back")
    assert_equal(tensors_of(tmp_path / "back"), given_)


def test_two_conversions_into_one_directory_are_refused(tmp_path):
    make_hf(tmp_path / "hf", config_of())
    made = plan.plan_to_megatron(tmp_path / "hf", "daro", None)
    from megatron_daro.convert.progress_files import Partial

    with Partial(tmp_path / "out", made), pytest.raises(ModelError, match="another conversion is writing"):
        to_megatron(tmp_path / "hf", tmp_path / "out")


def test_workers_end_when_their_first_process_is_killed():
    script = Path(__file__).with_name("endless_conversion.py")
    first = subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True)
    workers = [psutil.Process(int(first.stdout.readline())) for _ in range(2)]
    first.kill()
    first.communicate(timeout=30)
    gone, left = psutil.wait_procs(workers, timeout=30)
    for process in left:
        process.kill()
    assert len(gone) == 2 and not left
