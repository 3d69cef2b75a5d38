"""The parts of a conversion one by one: hashes, windows, casts, cards, folders of unfinished runs, model arguments."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import signal
import threading
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hf_checkpoints import config_of, make_hf, tensors_of, to_megatron

from megatron_daro.config.model_shape import read_model_shape
from megatron_daro.convert import plan as plans
from megatron_daro.convert.hf_files import HFCheckpoint
from megatron_daro.errors import CheckpointError, ConfigError, ModelError
from megatron_daro.workshop.convert import average, conversion, jobs, model_config
from megatron_daro.workshop.convert.conversion import Partial
from megatron_daro.workshop.convert.jobs import Card, FileRecord, Row, RowHash, Scratch, TensorRecord, cast, windows


def sha(values: torch.Tensor) -> str:
    return hashlib.sha256(values.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 1), (), (1, 0), (0, 2), (0, 1, 1)])
def test_a_hash_is_of_all_rows_in_order_whatever_came_first(order):
    values, asked = torch.arange(12, dtype=torch.int16).reshape(6, 2), []
    places = [(0, 1), (1, 3), (3, 4), (4, 6)]
    found = RowHash()
    for i in order:
        found.add(places[i][0], values[slice(*places[i])])

    def read(start, stop):
        asked.append((start, stop))
        return values[start:stop]

    assert found.digest([(0, 2), (2, 4), (4, 6)], read) == sha(values)
    whole = [(0, 2), (2, 4), (4, 6)]
    expected = {(0, 1, 2, 3): [], (0, 1): [(3, 4), (4, 6)], (): whole, (1, 0): whole, (0, 2): whole, (0, 1, 1): whole}
    assert asked == expected[order]


def test_a_hash_may_begin_behind_rows_that_were_taken():
    values = torch.arange(6, dtype=torch.int16).reshape(3, 2)
    taken = hashlib.sha256(values[:2].view(torch.uint8).numpy().tobytes())
    found = RowHash(2, taken)
    found.add(2, values[2:])
    assert found.digest([(0, 3)], lambda start, stop: values[start:stop]) == sha(values)


def test_memory_grows_to_the_largest_piece_only():
    scratch = Scratch(8)
    first = scratch.shaped((2, 2), torch.bfloat16)
    assert first.shape == (2, 2) and scratch.shaped((4,), torch.int16).data_ptr() == first.data_ptr()
    assert scratch.shaped((2, 3), torch.float32).shape == (2, 3) and len(scratch._bytes) == 24
    assert scratch.shaped((1,), torch.float32).numel() == 1 and len(scratch._bytes) == 24


@pytest.mark.parametrize(
    ("shape", "most", "found"),
    [((5, 2), 8, [(0, 2), (2, 4), (4, 5)]), ((5, 2), 7, [(i, i + 1) for i in range(5)]), ((2, 9), 1, [(0, 1), (1, 2)]),
     ((3,), 100, [(0, 3)]), ((2, 0), 8, [(0, 2)]), ((0, 2), 8, [])],
)  # fmt: skip
def test_rows_come_in_windows_of_a_size(shape, most, found):
    assert list(windows(shape, torch.bfloat16, most)) == found


def test_a_cast_makes_no_finite_number_infinite():
    half = torch.empty(2, dtype=torch.float16)
    for value in (65504.0, -65504.0, 65519.0):
        assert cast(torch.tensor([value, 1.0]), half, "w").isfinite().all()
    for value in (65520.0, -65520.0):
        with pytest.raises(
            ModelError, match=r"w holds 6.552e\+04, and the largest number of float16 is 6.55e\+04: the cast"
        ):
            cast(torch.tensor([value, float("inf")]), half, "w")
    assert cast(torch.tensor([float("inf"), float("nan")]), half, "w").isinf().tolist() == [True, False]
    wide = torch.empty(1)
    assert cast(torch.tensor([3e38], dtype=torch.bfloat16), wide, "w") is wide and float(wide) > 2.9e38


def record(
    name: str = "a", shape: tuple[int, ...] = (2, 3), dtype: str = "bfloat16", digest: str = "1"
) -> TensorRecord:
    return TensorRecord(name, shape, dtype, digest)


@pytest.mark.parametrize(
    ("hf", "change"),
    [
        ((record(digest="1"),), "same bytes"),
        ((record(digest="2"),), "padded"),
        ((record(digest="2"), record(digest="1")), "rows rearranged"),
        ((record(digest="1"), record(dtype="float32")), "cast"),
    ],
)
def test_what_a_conversion_changes_is_told_by_the_hashes(hf, change):
    assert jobs._change(record(), hf) == change


def test_a_card_has_a_line_for_each_kind_of_parameter():
    rows = [Row(record(f"layers[{i}]"), (record(),), "padded", "hashed") for i in range(3)]
    card = Card("/s", "daro", 7, (*rows, Row(record("out", (4,)), (), "cast", "hashed")), ("x",))
    assert card.summary() == [
        ("layers", 3, "2 x 3", "bfloat16", "padded", "hashed"), ("out", 1, "4", "bfloat16", "cast", "hashed"),
    ]  # fmt: skip
    assert card.as_json()["kind"] == "megatron-daro conversion 1" and card.as_json()["ignored"] == ("x",)


def test_hashes_of_a_card_are_read_and_a_torn_one_is_named(tmp_path):
    assert jobs.read_hashes(tmp_path) == {}
    card = Card("/s", "daro", 7, (Row(record("m"), (record("h"), record("k")), "padded", "hashed"),), ())
    file = tmp_path / "conversion.json"
    file.write_text(json.dumps(card.as_json()))
    assert jobs.read_hashes(tmp_path) == {"h": record("h"), "k": record("k")}
    file.write_text(json.dumps(card.as_json() | {"kind": "other"}))
    assert jobs.read_hashes(tmp_path) == {}
    for text in ("{", "[]", "{}", '{"kind": "megatron-daro conversion 1", "rows": [{"hf": [{"name": "h"}]}]}'):
        file.write_text(text)
        with pytest.raises(CheckpointError, match=r"conversion\.json cannot be read: .*remove it to convert without"):
            jobs.read_hashes(tmp_path)


def test_only_the_same_tensor_with_another_hash_is_damaged(tmp_path):
    folder = tmp_path / "deep"
    folder.mkdir()
    card = Card("/s", "daro", 7, (Row(record("m"), (record("h"),), "padded", "hashed"),), ())
    (tmp_path / "conversion.json").write_text(json.dumps(card.as_json()))
    megatron = SimpleNamespace(source=folder, source_format="megatron")
    for other in (
        record("x", digest="2"),
        record("h"),
        record("h", digest="2", dtype="f"),
        record("h", (6,), digest="2"),
    ):
        jobs._compare_with_source(megatron, {other.name: other})
    damaged = {"h": record("h", digest="2")}
    with pytest.raises(CheckpointError, match=r"h in .*deep is not what conversion\.json says was written there"):
        jobs._compare_with_source(megatron, damaged)
    jobs._compare_with_source(SimpleNamespace(source=folder, source_format="hf"), damaged)


def test_records_of_parts_are_those_of_the_file():
    parts = [FileRecord("f", 1, [record("a")], [record("b")], ["s"], ["c"]), FileRecord("f", 2, [record("d")])]
    assert jobs.joined(parts, 9) == FileRecord("f", 9, [record("a"), record("d")], [record("b")], ["s"], ["c"])
    assert conversion._written_dtype([FileRecord("f", 1, hf=[record(), record()])]) == "bfloat16"
    assert conversion._written_dtype([FileRecord("f", 1, hf=[record(), record(dtype="float32")])]) is None


@pytest.fixture
def plan(tmp_path):
    make_hf(tmp_path / "hf", config_of())
    return plans.plan_to_megatron(tmp_path / "hf", "daro", None)


def test_an_unfinished_run_is_taken_up_by_the_same_plan_only(tmp_path, plan):
    target, file = tmp_path / "out", FileRecord("w", 3, [record("a")], [record("b")])
    with Partial(target, plan) as partial:
        assert partial.root == tmp_path / ".out.partial" and partial.done == {} and list(partial.folder.iterdir()) == []
        (partial.folder / "w").write_bytes(b"123")
        (partial.folder / "release").mkdir()
        (partial.folder / "release" / "r").write_bytes(b"12")
        for one in (file, replace(file, file="r", num_bytes=2), replace(file, file="gone"), replace(file, file="w2")):
            partial.note(one)
        (partial.root / "done" / "w2.json").write_text("{}")
        with pytest.raises(ModelError, match="another conversion is writing"), Partial(target, plan):
            pass
    with Partial(target, plan) as partial:
        assert partial.done == {"w": file, "r": replace(file, file="r", num_bytes=2)}
        partial.forget("r")
        partial.forget("r")
        (partial.folder / "w").write_bytes(b"1234")
    with Partial(target, plan) as partial:
        assert partial.done == {}
    os.utime(tmp_path / "hf" / "config.json", ns=(1, 1))
    with Partial(target, plan) as partial:
        assert list(partial.folder.iterdir()) == [] and not list((partial.root / "done").iterdir())
        (partial.folder / "x").touch()
        target.mkdir()
        partial.publish()
    assert [path.name for path in target.iterdir()] == ["x"] and not (tmp_path / ".out.partial").exists()


def test_a_target_is_made_beside_nothing_that_is_in_the_way(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert conversion.replaceable(Path("a/b")) == tmp_path / "a" / "b"
    (tmp_path / "empty").mkdir()
    assert conversion.replaceable(Path("empty")) == tmp_path / "empty"
    (tmp_path / "file").touch()
    for out, said in (("file", "exists and is not empty"), ("file/x", "is a file"), (".", "not empty")):
        with pytest.raises(ModelError, match=said):
            conversion.replaceable(Path(out))
    monkeypatch.chdir(tmp_path / "empty")
    with pytest.raises(ModelError, match=r"is the current directory, .*--out .*converted; nothing was written"):
        conversion.replaceable(Path())


def test_results_come_one_by_one_in_this_process_where_there_is_one():
    seen: list[object] = []
    each = conversion._each(
        lambda *task: seen.append(task) or task, [(1, 2, 3), (4, 5, 6)], 1, lambda: seen.append("tick")
    )
    assert next(each) == (1, 2, 3) and seen == ["tick", (1, 2, 3)] and list(each) == [(4, 5, 6)]
    seen.clear()
    assert list(conversion._each(lambda *task: task, [(1, 2, 3)], 8, lambda: seen.append("tick"))) == [(1, 2, 3)]
    assert seen == ["tick"]


def test_the_first_interrupt_is_a_flag_and_the_second_ends():
    before = signal.getsignal(signal.SIGINT)
    with conversion._interruptible() as flag:
        assert not flag.is_set()
        os.kill(os.getpid(), signal.SIGINT)
        assert flag.wait(5) and signal.getsignal(signal.SIGINT) is before
    assert signal.getsignal(signal.SIGINT) is before
    with conversion._interruptible():
        assert signal.getsignal(signal.SIGINT) is not before
    assert signal.getsignal(signal.SIGINT) is before
    inner: list[object] = []

    def other_thread():
        with conversion._interruptible() as flag:
            inner.append((flag.is_set(), signal.getsignal(signal.SIGINT) is before))

    thread = threading.Thread(target=other_thread)
    thread.start()
    thread.join()
    assert inner == [(False, True)]


def test_a_worker_hears_the_stop_and_not_the_interrupt(monkeypatch):
    before, threads, stop = signal.getsignal(signal.SIGINT), [], object()
    monkeypatch.setattr(conversion._Worker, "stop", None)
    monkeypatch.setattr(conversion.torch, "set_num_threads", threads.append)
    try:
        conversion._start_worker(stop)  # type: ignore[arg-type]
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN and threads == [1]
        assert conversion._call(lambda *given: given, (1, 2)) == (1, 2, stop)
    finally:
        signal.signal(signal.SIGINT, before)
    ended: list[object] = []
    monkeypatch.setattr(conversion.os, "_exit", ended.append)
    conversion._end_with_parent()
    assert ended == []
    parent = SimpleNamespace(join=lambda: ended.append("joined"))
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: parent)
    conversion._end_with_parent()
    assert ended == ["joined", 1]


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


def test_progress_is_told_in_bytes_to_the_end(tmp_path):
    make_hf(tmp_path / "hf", config_of())
    told: list[tuple[str, int]] = []
    to_megatron(tmp_path / "hf", tmp_path / "out", verify=True, progress=lambda *one: told.append(one))
    made = plans.plan_to_megatron(tmp_path / "hf", "daro", None)
    written = [done for phase, done in told if phase == "converting"]
    verified = [done for phase, done in told if phase == "verifying"]
    assert written == sorted(written) and written[0] == 0 and written[-1] == made.num_bytes
    assert verified == sorted(verified) and verified[0] == 0 and verified[-1] == sum(job.num_bytes for job in made.jobs)
    card = json.loads((tmp_path / "out" / "conversion.json").read_text())
    assert {row["check"] for row in card["rows"]} == {"hashed; read back and compared"}
    hf = tensors_of(tmp_path / "hf")
    assert all(one["sha256"] == sha(hf[one["name"]]) for row in card["rows"] for one in row["hf"])


def test_the_last_check_sees_the_whole_checkpoint_before_it_has_its_name(tmp_path, plan):
    seen: list[object] = []

    def check(folder):
        seen.append((sorted(path.name for path in folder.iterdir()), (tmp_path / "out").exists()))
        raise CheckpointError("other logits")

    given = {"processes": 1, "verify": False, "progress": lambda *_: None}
    with pytest.raises(CheckpointError, match="other logits"):
        conversion.convert(plan, tmp_path / "out", **given, last_check=check)
    assert seen[0][1] is False and "conversion.json" in seen[0][0] and not (tmp_path / "out").exists()
    card = conversion.convert(plan, tmp_path / "out", **given)
    assert {row.check for row in card.rows} == {"hashed; read back and compared"}  # of an earlier run: not trusted


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


ARGUMENTS = {
    "num_layers": 2, "hidden_size": 16, "ffn_hidden_size": 24, "num_attention_heads": 4, "num_query_groups": 2,
    "padded_vocab_size": 128, "max_position_embeddings": 64, "layernorm_epsilon": 1e-5, "rotary_base": 10000,
    "untie_embeddings_and_output_weights": True,
}  # fmt: skip


def described(**changes: object) -> dict[str, object]:
    return model_config.config_from_arguments(ARGUMENTS | changes, Path("common.pt"))


def test_missing_arguments_have_megatrons_defaults():
    assert described() == {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 2, "hidden_size": 16,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4, "intermediate_size": 24, "vocab_size": 128,
        "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": False,
        "dtype": "float32",
    }  # fmt: skip
    given = described(
        kv_channels=8, vocab_size=100, norm_epsilon=1e-6, fp16=True, untie_embeddings_and_output_weights=False
    )
    assert (given["head_dim"], given["vocab_size"], given["rms_norm_eps"], given["dtype"]) == (8, 100, 1e-6, "float16")
    assert given["tie_word_embeddings"] is True and described(bf16=True, fp16=True)["dtype"] == "bfloat16"
    assert (
        described(group_query_attention=False)["num_key_value_heads"]
        == 4
        == described(num_query_groups=None)["num_key_value_heads"]
    )
    scaled = described(use_rope_scaling=True, rope_scaling_factor=8.0)["rope_scaling"]
    assert scaled == {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }  # fmt: skip


@pytest.mark.parametrize(("name", "allowed"), [(name, values) for name, values in model_config._FIXED.items()])
def test_arguments_that_no_family_has_are_refused(name, allowed):
    right = {
        "swiglu": True, "rotary_percent": 1.0, "moe_router_topk_scaling_factor": 1.0, "normalization": "RMSNorm",
        "position_embedding_type": "rope", "softmax_type": "vanilla", "moe_router_score_function": "softmax",
    }  # fmt: skip
    nothing = ("factor", "freq", "size", "variant", "path", "groups")
    value = right.get(name, None if name.endswith(nothing) else False)
    described(**{name: value})
    for wrong in (not value, 0.5, "x", 2.0):
        with pytest.raises(ModelError, match=rf"common\.pt: the saved arguments ask for .*: {name} "):
            described(**{name: wrong})
    assert value in allowed


def test_the_family_of_experts_follows_from_the_arguments():
    experts = {"num_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 8}
    mixtral = described(**experts)
    assert mixtral["model_type"] == "mixtral" and (mixtral["num_local_experts"], mixtral["num_experts_per_tok"]) == (
        4,
        2,
    )
    qwen = described(**experts, qk_layernorm=True, moe_layer_freq=2)
    assert qwen["model_type"] == "qwen3_moe" and qwen["mlp_only_layers"] == [1] and qwen["norm_topk_prob"] is True
    assert described(**experts, qk_layernorm=True, moe_layer_freq=[0, 1])["mlp_only_layers"] == [0]
    assert described(**experts, qk_layernorm=True, moe_router_pre_softmax=True)["norm_topk_prob"] is False
    wide = described(**(experts | {"moe_ffn_hidden_size": None}), qk_layernorm=True)
    assert wide["moe_intermediate_size"] == 24 and wide["mlp_only_layers"] == []
    assert (
        described(add_qkv_bias=True)["model_type"] == "qwen2" and described(qk_layernorm=True)["model_type"] == "qwen3"
    )
    with pytest.raises(
        ModelError, match="no family has models with qk_layernorm True, add_qkv_bias True, experts False"
    ):
        described(qk_layernorm=True, add_qkv_bias=True)
    with pytest.raises(ModelError, match="no family has models with"):
        described(**experts, moe_router_pre_softmax=True)
    with pytest.raises(ModelError, match=r"common\.pt: the saved arguments have no moe_router_topk\. Name a folder"):
        described(num_experts=4)


@pytest.mark.parametrize("place", ["hf", "step/hf", "huggingface", "step", "."])
def test_the_models_folder_is_looked_for_beside_the_tensors_and_above(tmp_path, monkeypatch, place):
    folder = tmp_path / "step"
    folder.mkdir()
    monkeypatch.setattr(model_config, "checkpoint_directory", lambda megatron: folder)
    with pytest.raises(ModelError, match=r"step has no config\.json of its model with it, nor the arguments"):
        model_config.find_config_folder(tmp_path)
    (tmp_path / place).mkdir(exist_ok=True, parents=True)
    (tmp_path / place / "config.json").write_text("{}")
    assert model_config.find_config(tmp_path) == tmp_path / place


def test_an_inert_record_takes_everything():
    one = model_config._Inert(1, a=2)
    one.append(1)
    one.extend([1])
    one["x"] = 1
    assert isinstance(one, model_config.Record)


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


def test_every_row_is_read_once_and_hashed_on_its_way(tmp_path, monkeypatch):
    make_hf(tmp_path / "hf", config_of())
    real, rows = HFCheckpoint.read, Counter()

    def read(self, name, start, stop, **options):
        rows[name] += stop - start
        return real(self, name, start, stop, **options)

    monkeypatch.setattr(HFCheckpoint, "read", read)
    to_megatron(tmp_path / "hf", tmp_path / "out")
    assert dict(rows) == {name: len(tensor) for name, tensor in tensors_of(tmp_path / "hf").items()}


def test_every_file_and_folder_is_on_the_disk_before_the_target_has_its_name(tmp_path, plan, monkeypatch):
    real, synced = conversion.durable.sync, []
    monkeypatch.setattr(conversion.durable, "sync", lambda path: synced.append(path) or real(path))
    given = {"processes": 1, "verify": False, "progress": lambda *_: None}
    conversion.convert(plan, tmp_path / "out", **given)
    files = tmp_path / ".out.partial" / "files"
    made = {path.relative_to(tmp_path / "out") for path in (tmp_path / "out").rglob("*")}
    missing = {name for name in made if files / name not in synced}
    assert missing <= {Path("conversion.json")} and files in synced and synced[-1] == tmp_path


@pytest.mark.parametrize("error", [conversion.BrokenProcessPool(), EOFError(), ConnectionError()])
def test_a_killed_process_is_said_and_the_others_are_ended(monkeypatch, error):
    ended: list[object] = []

    class Pool:
        def __init__(self, processes, context, *, initializer, initargs):
            ended.append(processes)
            assert initializer is conversion._start_worker
            self.stop = initargs[0]

        def submit(self, call, function, task):
            future: conversion.Future[object] = conversion.Future()
            future.set_exception(error)
            return future

        def shutdown(self, **options):
            ended.append((self.stop.is_set(), options))

    monkeypatch.setattr(conversion, "ProcessPoolExecutor", Pool)
    with pytest.raises(ModelError, match=r"was killed \(out of memory\?\); run again with fewer --processes"):
        list(conversion._each(print, [(1, 2, 3), (4, 5, 6)], 8, lambda: None))
    assert ended == [2, (True, {"wait": True, "cancel_futures": True})]


def test_megatron_is_told_that_a_checkpoint_is_a_release(tmp_path):
    """As `save_checkpoint` of megatron/training/checkpointing.py writes it into its tracker file."""
    make_hf(tmp_path / "hf", config_of())
    to_megatron(tmp_path / "hf", tmp_path / "out", format_="torch_dist")
    assert (tmp_path / "out" / "latest_checkpointed_iteration.txt").read_text() == "release"
