"""HF -> Megatron -> HF: bit for bit through either format; casts, cards, checks, processes, going on after a stop."""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from subprocess import PIPE
from types import SimpleNamespace

import psutil
import pytest
import torch
from hf_checkpoints import assert_equal, config_of, make_hf, replace_tensor, tensors_of, to_hf, to_megatron, to_other
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_daro import durable
from megatron_daro.config.model_shape import read_model_shape
from megatron_daro.convert import pieces, plan
from megatron_daro.convert.hf_files import HFCheckpoint
from megatron_daro.convert.megatron_weights import MegatronWeights
from megatron_daro.errors import CheckpointError, ModelError
from megatron_daro.workshop.convert import conversion, jobs
from megatron_daro.workshop.convert.jobs import CARD_FILE, box_name

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
    mixed = {"mlp_only_layers": dense} if model["family"] == "qwen3_moe" else {}
    given_ = make_hf(root / "hf", config_of(**model, **mixed), dtype=dtype)
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


@pytest.mark.parametrize(("first", "second"), [("daro", "torch_dist"), ("torch_dist", "daro")])
@pytest.mark.parametrize("family", ["qwen2", "qwen3_moe"])
def test_one_megatron_format_to_the_other_is_what_hf_gives(tmp_path, first, second, family):
    given_ = make_hf(tmp_path / "hf", config_of(family, **({"mlp_only_layers": []} if family == "qwen3_moe" else {})))
    to_megatron(tmp_path / "hf", tmp_path / "first", format_=first)
    direct = to_other(tmp_path / "first", tmp_path / "second", second)
    assert direct.rows == to_megatron(tmp_path / "hf", tmp_path / "through", format_=second, verify=True).rows
    own = ("common.pt", CARD_FILE)
    files = [path for path in weights_in(tmp_path / "through").iterdir() if path.is_file()]
    names = sorted(path.name for path in files if path.name not in own)
    assert len(names) > 2
    for name in names:
        ours, expected = (weights_in(tmp_path / folder) / name for folder in ("second", "through"))
        assert ours.read_bytes() == expected.read_bytes(), name
    to_hf(tmp_path / "second", tmp_path / "back")
    assert_equal(tensors_of(tmp_path / "back"), given_)


def weights_in(folder: Path) -> Path:
    return folder / "release" if (folder / "release").is_dir() else folder


class _Counted:
    """Counts how often boxes are compared."""

    def __init__(self, monkeypatch):
        self.number, real = 0, pieces.overlap

        def overlap(*boxes):
            self.number += 1
            return real(*boxes)

        monkeypatch.setattr(pieces, "overlap", overlap)


@pytest.mark.parametrize("format_", ["daro", "torch_dist"])
def test_reading_experts_back_looks_at_the_boxes_it_needs(tmp_path, monkeypatch, format_):
    """Twice the experts take twice the comparisons and twice the looks into files, not four times."""
    located = {}
    for experts in (8, 16):
        config = config_of("qwen3_moe", num_experts=experts, mlp_only_layers=[])
        make_hf(tmp_path / f"hf{experts}", config)
        to_megatron(tmp_path / f"hf{experts}", tmp_path / f"megatron{experts}", format_=format_)
        counted = _Counted(monkeypatch)
        with MegatronWeights(tmp_path / f"megatron{experts}", read_model_shape(config)) as weights:
            real, seen = weights.pieces.piece, []
            weights.pieces.piece = lambda key, box, real=real, seen=seen: seen.append(key) or real(key, box)
            for name in weights:
                assert len(weights[name]) == weights.shape(name)[0]
        located[experts] = counted.number, len(seen)
    for few, many in zip(located[8], located[16], strict=True):
        assert 0 < many < 2.2 * few


def test_a_cast_is_torchs_and_its_way_back_too(tmp_path):
    given_ = make_hf(tmp_path / "hf", config_of("qwen3", dtype="bfloat16"))
    card = to_megatron(tmp_path / "hf", tmp_path / "wide", dtype="fp32", verify=True)
    assert {row.change for row in card.rows} == {"cast"} and card.rows[0].megatron.dtype == "float32"
    to_hf(tmp_path / "wide", tmp_path / "back", dtype="bf16", verify=True)
    assert_equal(tensors_of(tmp_path / "back"), given_)
    to_hf(tmp_path / "wide", tmp_path / "kept")
    assert_equal(tensors_of(tmp_path / "kept"), {name: tensor.float() for name, tensor in given_.items()})
    assert json.loads((tmp_path / "kept/config.json").read_text())["dtype"] == "float32"


def test_tensors_of_several_dtypes_become_one_with_a_cast(tmp_path):
    given_ = make_hf(tmp_path / "hf", config_of())
    for name, dtype in (("k_proj.weight", torch.float32), ("q_proj.weight", torch.float64)):
        name = f"model.layers.1.self_attn.{name}"
        replace_tensor(tmp_path / "hf", name, given_[name].to(dtype))
    with pytest.raises(ModelError, match=r"q_proj\.weight float64, .*k_proj\.weight float32.* convert --dtype"):
        to_megatron(tmp_path / "hf", tmp_path / "refused")
    to_megatron(tmp_path / "hf", tmp_path / "megatron", dtype="bf16", verify=True)
    to_hf(tmp_path / "megatron", tmp_path / "back")
    assert_equal(tensors_of(tmp_path / "back"), given_)


def test_templates_and_licences_come_along_and_code_does_not(tmp_path):
    make_hf(tmp_path / "hf", config_of())
    own = ("chat_template.jinja", "additional_chat_templates/tools.jinja", "LICENSE", "LICENSE.txt", "NOTICE")
    for name in (*own, "USE_POLICY.md", "modeling.py", "README.md"):
        (tmp_path / "hf" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "hf" / name).write_text(name)
    to_megatron(tmp_path / "hf", tmp_path / "megatron", format_="torch_dist")
    to_hf(tmp_path / "megatron", tmp_path / "back")
    for folder in (tmp_path / "megatron/hf", tmp_path / "back"):
        assert all((folder / name).read_text() == name for name in (*own, "USE_POLICY.md"))
        assert not (folder / "modeling.py").exists() and not (folder / "README.md").exists()


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
    to_megatron(tmp_path / "hf", tmp_path / "out", verify=True)  # as the message says: the file is written again


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
    from megatron_daro.workshop.convert.conversion import Partial

    with Partial(tmp_path / "out", made), pytest.raises(ModelError, match="another conversion is writing"):
        to_megatron(tmp_path / "hf", tmp_path / "out")


@pytest.mark.parametrize("when", ["working", "starting"])
def test_a_conversion_ends_when_the_process_that_starts_workers_is_killed(when):
    """While they work; and while they are to be started, when its death is an EOF on a socket."""
    script = Path(__file__).with_name("endless_conversion.py")
    first = subprocess.Popen([sys.executable, script, when], stdout=PIPE, stderr=PIPE, text=True)
    workers = []
    if when == "working":
        workers = [psutil.Process(int(first.stdout.readline())) for _ in range(2)]
        workers[0].parent().kill()
    _, errors = first.communicate(timeout=60)
    assert first.returncode == 1 and "ModelError: a conversion process, or the fork server" in errors.splitlines()[-1]
    _, left = psutil.wait_procs(workers, timeout=30)
    assert not left


def test_workers_end_when_their_first_process_is_killed():
    script = Path(__file__).with_name("endless_conversion.py")
    first = subprocess.Popen([sys.executable, script, "working"], stdout=PIPE, text=True)
    workers = [psutil.Process(int(first.stdout.readline())) for _ in range(2)]
    first.kill()
    first.communicate(timeout=30)
    gone, left = psutil.wait_procs(workers, timeout=30)
    for process in left:
        process.kill()
    assert len(gone) == 2 and not left


def test_a_published_target_is_on_disk_under_its_name(tmp_path, monkeypatch):
    """The name itself: its directory is written through after the folder got it, and before the rest is removed."""
    make_hf(tmp_path / "hf", config_of())
    out, synced = tmp_path / "out", []
    monkeypatch.setattr(
        durable, "sync", lambda path: synced.append((path, out.is_dir(), (tmp_path / ".out.partial").is_dir()))
    )
    from megatron_daro.workshop.convert.conversion import Partial

    with Partial(out, plan.plan_to_megatron(tmp_path / "hf", "daro", None)) as partial:
        (partial.folder / "inner").mkdir()
        partial.publish()
    before = [path for path, published, _ in synced if not published]
    assert before == [partial.folder / "inner", partial.folder]
    assert synced[-1] == (tmp_path, True, True)


def test_every_row_is_read_once_and_hashed_on_its_way(tmp_path, monkeypatch):
    make_hf(tmp_path / "hf", config_of())
    real, rows = HFCheckpoint.read, Counter()

    def read(self, name, start, stop, **options):
        rows[name] += stop - start
        return real(self, name, start, stop, **options)

    monkeypatch.setattr(HFCheckpoint, "read", read)
    to_megatron(tmp_path / "hf", tmp_path / "out")
    assert dict(rows) == {name: len(tensor) for name, tensor in tensors_of(tmp_path / "hf").items()}


def test_megatron_is_told_that_a_checkpoint_is_a_release(tmp_path):
    """As `save_checkpoint` of megatron/training/checkpointing.py writes it into its tracker file."""
    make_hf(tmp_path / "hf", config_of())
    to_megatron(tmp_path / "hf", tmp_path / "out", format_="torch_dist")
    assert (tmp_path / "out" / "latest_checkpointed_iteration.txt").read_text() == "release"


class Rows:
    """Tensors by name, as both sides of a comparison read them."""

    def __init__(self, **tensors: torch.Tensor) -> None:
        self.tensors = tensors

    def shape(self, name):
        return tuple(self.tensors[name].shape)

    def dtype(self, name):
        return self.tensors[name].dtype

    def read(self, name, start, stop):
        return self.tensors[name][start:stop]


def test_a_tensor_is_compared_row_by_row_as_the_target_keeps_it():
    values = torch.tensor([[1.0, 2.0], [3.0, float("nan")], [5.0, 6.0]])
    conversion._compare("w", Rows(w=values), Rows(w=values.to(torch.bfloat16)), 8, None)
    wrong = values.clone()
    wrong[2, 1] = -0.0
    with pytest.raises(CheckpointError, match=r"w: rows 2 to 3 are not what the source has"):
        conversion._compare("w", Rows(w=values), Rows(w=wrong), 8, None)
    with pytest.raises(CheckpointError, match=r"w: shape \(2, 3\) was written, \(3, 2\) is the source's"):
        conversion._compare("w", Rows(w=values), Rows(w=values.T), 8, None)
    for raised in (True, False):
        stop = SimpleNamespace(is_set=lambda raised=raised: raised)
        if raised:
            with pytest.raises(jobs.StoppedError):
                conversion._compare("w", Rows(w=values), Rows(w=values), 8, stop)
            with pytest.raises(jobs.StoppedError):
                jobs._check(stop)
        else:
            conversion._compare("w", Rows(w=values), Rows(w=values), 8, stop)
            jobs._check(stop)
    jobs._check(None)
