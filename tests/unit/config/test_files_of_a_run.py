"""The model directory, a critic's, and problem files: what is looked at, and how torn or missing ones are named."""

from __future__ import annotations

import json
import shutil
import struct

import pytest

from megatron_daro.config import Hardware, check, check_training, resolve
from megatron_daro.config.check_critic import _numbers, critic_shape
from megatron_daro.config.model_files import _tensor_names, megatron_problems, read_model
from megatron_daro.config.model_shape import read_model_shape
from megatron_daro.config.problems import show


def problems(run_files, *overrides):
    return check(resolve(run_files.file, overrides), Hardware("cpu", 4)).problems


def lines(directory) -> list[str]:
    found = read_model(directory)
    assert all(problem.field == "model.path" for problem in found.problems)
    return [str(problem).removeprefix("model.path: got ") for problem in found.problems]


ALL = "allowed: model.safetensors, or model.safetensors.index.json and all its parts; fix: "
AGAIN = "copy or download the complete model again"


def test_a_whole_directory_has_a_shape_and_an_end_token(run_files):
    found = read_model(run_files.model)
    assert (found.shape.layers, found.has_end_token, found.problems) == (4, True, ())


def test_what_is_no_directory_is_said(run_files):
    kind = "a directory with config.json, *.safetensors and a tokenizer"
    fix = "give the local directory of the model; names of a hub are not downloaded"
    assert lines(run_files.root / "x") == [f"'{run_files.root}/x', which is not there; allowed: {kind}; fix: {fix}"]
    assert lines(run_files.file) == [f"'{run_files.file}', which is a file; allowed: {kind}; fix: {fix}"]


@pytest.mark.parametrize(
    ("file", "key", "there"),
    [
        ("generation_config.json", "eos_token_id", True),
        ("tokenizer_config.json", "eos_token", True),
        ("special_tokens_map.json", "eos_token", True),
        ("config.json", "eos_token_id", True),
        ("tokenizer_config.json", "bos_token", False),
    ],
)
def test_any_of_four_files_may_name_the_end_token(run_files, file, key, there):
    run_files.set_shape(eos_token_id=None)
    assert not read_model(run_files.model).has_end_token
    path = run_files.model / file
    content = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**content, key: 0}))
    assert read_model(run_files.model).has_end_token is there


def test_answers_need_an_end(run_files):
    run_files.set_shape(eos_token_id=None)
    (problem,) = problems(run_files)
    assert (problem.field, problem.also) == ("rollout.stop_token_ids", ("model.path", "rollout.stop"))
    assert not problems(run_files, "rollout.stop=[x]") and not problems(run_files, "rollout.stop_token_ids=[0]")


def index(run_files, weight_map) -> None:
    (run_files.model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_an_index_names_all_files_and_tensors(run_files):
    single = run_files.model / "model.safetensors"
    parts = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    for part in parts:
        shutil.copy(single, run_files.model / part)
    index(run_files, {"w": parts[1], "v": parts[0]})
    here = "which model.safetensors.index.json does not name there; allowed: an index of all tensors"
    assert lines(run_files.model) == [
        f"model.safetensors beside model.safetensors.index.json, which names {parts[0]}; {ALL}remove the one that is "
        "not the model: transformers reads the first",
        f"{parts[0]} with w, {here}; fix: {AGAIN}",
    ]
    single.unlink()
    index(run_files, {"w": parts[1]})
    assert lines(run_files.model) == [
        f"{parts[0]}, which model.safetensors.index.json does not name; {ALL}remove it if an older checkpoint left it, "
        "else copy the index again"
    ]
    (run_files.model / parts[0]).unlink()
    assert lines(run_files.model) == []
    index(run_files, {"w": parts[0], "x": parts[1]})
    assert lines(run_files.model)[0] == f"{parts[0]}: missing; allowed: complete safetensors files; fix: {AGAIN}"


def test_a_single_file_that_the_index_names_is_the_model(run_files):
    index(run_files, {"w": "model.safetensors"})
    assert lines(run_files.model) == []


def test_several_unnamed_tensors_are_counted(run_files):
    header = {name: {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for name in "cab"}
    text = json.dumps(header).encode()
    (run_files.model / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text)
    index(run_files, {"b": "model.safetensors"})
    assert "model.safetensors with a and 1 more, which" in lines(run_files.model)[0]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, None),
        ("{}", "an index without weight_map"),
        ('{"weight_map": {}}', "an index without weight_map"),
        ('{"weight_map": [1]}', "an index without weight_map"),
        ("[]", "a model.safetensors.index.json that is not a JSON object"),
        ("{", "an unreadable model.safetensors.index.json (Expecting property name"),
    ],
)
def test_an_index_that_names_nothing_is_the_only_thing_said_of_weights(run_files, content, words):
    if content is not None:
        (run_files.model / "model.safetensors").unlink()
        (run_files.model / "model.safetensors.index.json").write_text(content)
    found = lines(run_files.model)
    assert len(found) == (words is not None) and all(line.startswith(words) and ALL in line for line in found)


def test_a_directory_without_weights_says_what_is_there(run_files):
    (run_files.model / "model.safetensors").rename(run_files.model / "x.bin")
    assert lines(run_files.model) == [
        f"no *.safetensors in '{run_files.model}' (only *.bin); {ALL}convert the weights to safetensors; pickled *.bin "
        "files are never read"
    ]
    (run_files.model / "x.bin").unlink()
    assert lines(run_files.model) == [f"no *.safetensors in '{run_files.model}'; {ALL}{AGAIN}"]


@pytest.mark.parametrize(
    ("header", "data", "why"),
    [
        ({}, b"", ""),
        ({"a": {"data_offsets": [0, 3]}, "b": {"data_offsets": [3, 5]}, "__metadata__": {"x": "y"}}, bytes(5), ""),
        (
            {"b": {"data_offsets": [3, 5]}, "a": {"data_offsets": [0, 3]}},
            bytes(4),
            "torn: 74 bytes, its header promises 75",
        ),
        ({"a": {}}, b"", "unreadable header (KeyError: 'data_offsets')"),
        ({"a": {"data_offsets": [1]}}, b"", "unreadable header (IndexError: list index out of range)"),
        ({"a": {"data_offsets": 1}}, b"", "unreadable header (TypeError: "),
        ([], b"", "unreadable header (AttributeError: "),
        (None, b"\x01\0\0\0\0\0\0\0{", "unreadable header (JSONDecodeError: "),
        (None, b"\x02\0\0\0\0\0\0\0{", "torn: 9 bytes are too few for its header"),
        (None, b"\0\0\0\0\0\0\0", "torn: 7 bytes are too few for its header"),
    ],
)
def test_a_safetensors_file_is_judged_by_its_header_and_size(tmp_path, header, data, why):
    text = b"" if header is None else json.dumps(header).encode()
    (tmp_path / "a").write_bytes((b"" if header is None else struct.pack("<Q", len(text))) + text + data)
    names, found = _tensor_names(tmp_path / "a")
    assert found == why if not why or why[-1] not in " " else found.startswith(why), found
    assert set(names) == (
        {name for name in header if name != "__metadata__"} if not found or "promises" in found else set()
    )


def test_a_header_of_100_megabytes_is_none(tmp_path, monkeypatch):
    (tmp_path / "a").write_bytes(struct.pack("<Q", 100_000_001))
    with (tmp_path / "a").open("r+b") as file:
        file.truncate(200_000_000)
    assert _tensor_names(tmp_path / "a") == ([], "torn: 200000000 bytes are too few for its header")


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer.model", "vocab.json"])
def test_a_tokenizer_is_one_of_three_files(run_files, name):
    (run_files.model / "tokenizer.json").unlink()
    assert lines(run_files.model) == [
        f"no tokenizer in '{run_files.model}'; allowed: one of tokenizer.json, tokenizer.model, vocab.json; fix: copy "
        "the tokenizer files of the model into the directory"
    ]
    (run_files.model / name).write_text("{}")
    assert lines(run_files.model) == []


def test_a_torn_tokenizer_is_named_also_beside_another(run_files):
    (run_files.model / "tokenizer.model").write_bytes(b"x")
    (run_files.model / "tokenizer.json").write_text("[]")
    assert lines(run_files.model) == [
        "a tokenizer.json that is not a JSON object; allowed: a complete tokenizer.json; fix: copy or download the "
        "tokenizer again"
    ]


def test_a_config_that_cannot_be_used_comes_before_the_weights(run_files):
    (run_files.model / "model.safetensors").unlink()
    (run_files.model / "config.json").write_text("{}")
    found = read_model(run_files.model)
    assert found.shape is None and found.problems[0].got.startswith("a config.json that cannot be used")
    assert len(found.problems) == 2 and "model_type 'None' is not supported" in found.problems[0].got


def test_a_megatron_checkpoint_has_one_of_two_files(tmp_path):
    assert list(megatron_problems(None)) == []
    (problem,) = megatron_problems(tmp_path)
    assert str(problem) == (
        f"model.megatron_weights: got '{tmp_path}'; allowed: a Megatron checkpoint: a directory with metadata.json or "
        "latest_checkpointed_iteration.txt; fix: give what `megatron-daro convert --out` or a run wrote "
        "(RUN/checkpoints/step_...)"
    )
    for name in ("metadata.json", "latest_checkpointed_iteration.txt"):
        (tmp_path / name).touch()
        assert list(megatron_problems(tmp_path)) == []
        (tmp_path / name).unlink()


def test_weights_of_megatron_are_looked_for(run_files):
    (problem,) = problems(run_files, f"model.megatron_weights={run_files.root}")
    assert problem.field == "model.megatron_weights"


VOCABULARY = {"model": {"vocab": {"a": 0, "b": 1}}, "added_tokens": [{"content": "<x>", "id": 7}]}


@pytest.mark.parametrize(
    ("content", "numbers"),
    [
        (json.dumps(VOCABULARY), {"a": 0, "b": 1, "<x>": 7}),
        (json.dumps({"model": {"vocab": [["a", -1.0], ["b", -2.0]]}, "added_tokens": None}), {"a": 0, "b": 1}),
        (json.dumps({"model": {"vocab": None}}), {}),
        ("{}", {}),
        ("{", {}),
        ("[]", {}),
        (json.dumps({"added_tokens": [{"id": 7}]}), {}),
        (json.dumps({"added_tokens": 3}), {}),
    ],
)
def test_the_numbers_of_tokens_are_read_where_the_tokenizer_has_them(tmp_path, content, numbers):
    assert _numbers(tmp_path) == {}
    (tmp_path / "tokenizer.json").write_text(content)
    assert _numbers(tmp_path) == numbers


def critic(run_files, name="critic", **shape):
    directory = run_files.root / name
    shutil.copytree(run_files.model, directory)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | shape))
    return directory


def test_a_critic_of_another_model_is_one_for_this_layout(run_files):
    path = critic(run_files, num_hidden_layers=3)
    ppo = ["algorithm.name=ppo", f"algorithm.critic.path={path}"]
    (problem,) = problems(run_files, *ppo, "actor.pipeline_parallel=2")
    assert problem.field == "algorithm.critic.path" and problem.also == ("actor.pipeline_parallel",)
    assert "with which actor.pipeline_parallel is 2" in problem.got and problem.allowed == "one of 1, 3 there"
    assert problem.fix == "name such a model, or leave it unset: the critic then begins as the policy"
    config, policy = resolve(run_files.file, ppo), read_model_shape(run_files.model)
    assert critic_shape(config, policy).layers == 3
    assert critic_shape(resolve(run_files.file, ppo[:1]), policy) is policy
    assert critic_shape(resolve(run_files.file, ppo[1:]), policy) is None


@pytest.mark.parametrize(
    ("tokenizer", "shape", "words"),
    [
        ({}, {"vocab_size": 101}, "with an embedding of 101 tokens (the policy: 100)"),
        ({}, {}, None),
        ({"model": {"vocab": {"a": 50}}}, {"vocab_size": 51}, None),
        ({"model": {"vocab": {"a": 50}}}, {"vocab_size": 50}, "with an embedding of 50 tokens"),
        ({}, {"max_position_embeddings": 5119}, "with max_position_embeddings 5119"),
        ({}, {"max_position_embeddings": 5120}, None),
        ({}, {"model_type": "x"}, "which cannot be used"),
    ],
)
def test_a_critic_reads_the_tokens_of_the_policy(run_files, tokenizer, shape, words):
    (run_files.model / "tokenizer.json").write_text(json.dumps(tokenizer))
    found = problems(run_files, "algorithm.name=ppo", f"algorithm.critic.path={critic(run_files, **shape)}")
    assert len(found) == (words is not None)
    if found:
        assert words in found[0].got and found[0].also == (() if "cannot" in words else ("model.path",))


def test_a_critic_with_other_numbers_for_tokens_is_refused(run_files):
    path = critic(run_files)
    (path / "tokenizer.json").write_text('{"model": {"vocab": {"a": 1}}}')
    (problem,) = problems(run_files, "algorithm.name=ppo", f"algorithm.critic.path={path}")
    assert problem.got == f"'{path}', whose tokenizer has other tokens" and problem.also == ("model.path",)


def train(run_files, content: bytes, *overrides):
    (run_files.root / "train.jsonl").write_bytes(content)
    return [str(problem).split(": got ")[1] for problem in problems(run_files, *overrides)]


@pytest.mark.parametrize(
    ("content", "form", "words"),
    [
        (b"PAR1xPAR1", "auto", None),
        (b"PAR1xPAR1", "parquet", None),
        (
            b"PAR1xPAR1",
            "jsonl",
            "which is a Parquet file, with format jsonl; allowed: a jsonl file; fix: set the format to",
        ),
        (
            b"{}",
            "parquet",
            "which is no Parquet file, with format parquet; allowed: a parquet file; fix: set the format",
        ),
        (b"{}", "jsonl", None),
        (b"PAR1x", "gsm8k", "a torn Parquet file; allowed: a file of problems that is not empty; fix: copy or write"),
        (
            b"\n ",
            "auto",
            "an empty file; allowed: a file of problems that is not empty; fix: write one problem per line",
        ),
        (b"", "auto", "an empty file"),
    ],
)
def test_a_problem_file_is_of_its_format(run_files, content, form, words):
    found = train(run_files, content, f"data.format={form}")
    assert len(found) == (words is not None) and all(words in line for line in found)


def test_problem_files_that_are_no_files_are_said(run_files):
    found = [str(p) for p in problems(run_files, f"data.train=[{run_files.root},/x]")]
    assert [line.split("; allowed")[0] for line in found] == [
        f"data.train.0: got '{run_files.root}', which is not a file",
        "data.train.1: got '/x', which is not there",
    ]


def test_a_problem_file_that_may_not_be_read_is_said(run_files, monkeypatch):
    def forbid(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(check_training.Path, "open", forbid)
    found = list(check_training._file_problems("f", run_files.file, "auto"))
    assert [str(problem) for problem in found] == [
        f"f: got '{run_files.file}': Permission denied; allowed: a file of problems that is not empty; fix: make the "
        "file readable"
    ]


@pytest.mark.parametrize(("template", "times"), [("'{prompt} {prompt}'", 2), ("'{prompt}'", 1)])
def test_a_template_has_the_prompt_once(run_files, template, times):
    found = problems(run_files, f"data.template={template}")
    assert len(found) == (times != 1)
    if found:
        assert found[0].got == f"{show('{prompt} {prompt}')}, with 2 times {{prompt}}"


def test_a_file_given_twice_is_counted(run_files):
    path = run_files.root / "train.jsonl"
    other = shutil.copy(path, run_files.root / "b.jsonl")
    (problem,) = problems(run_files, f"data.train=[{path},{other},{path},{path}]")
    assert problem.got == f"'{path}' 3 times"
