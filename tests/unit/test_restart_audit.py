"""The restart audit: every option has a class, every difference is named, and what is refused changes nothing."""

from __future__ import annotations

import copy
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import create_model

sys.path.insert(0, str(Path(__file__).parent.parent))

import tiny_task

from megatron_daro.config import Config, resolve
from megatron_daro.errors import CheckpointError
from megatron_daro.runtime.provenance import provenance
from megatron_daro.runtime.restart_audit import CLASS_OF, audit, classes_of, record

SINGLE = [
    path
    for path, kind in CLASS_OF.items()
    if not path.startswith("data.eval.") and path != "environments.*.name" and kind != "content"
]


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    directory = tmp_path_factory.mktemp("task")
    task = tiny_task.TinyTask(directory)
    tiny_task.save_tokenizer(task.model, ["<pad>", "<bos>", "<eos>", "="])
    (task.model / "config.json").write_text(json.dumps({"model_type": "qwen2", "rope_theta": 10000.0}))
    (task.model / "model.safetensors").write_bytes(bytes(range(256)) * 40)
    for name in ("train", "held_out"):
        (directory / f"{name}.jsonl").write_text('{"problem": "1=", "answer": "1"}\n')
    data = {
        "train": [str(directory / "train.jsonl")],
        "eval": [{"name": "digits", "path": str(directory / "held_out.jsonl")}],
    }
    actor = {"precision": "fp32", "optimizer": {"learning_rate": 1e-3}}
    environments = [{"name": "sums", "weight": 1.0}, {"name": "proofs", "weight": 2.0}]
    tree = {"model": {"path": str(task.model)}, "data": data, "actor": actor, "environments": environments}
    task.config.write_text(json.dumps(tree))
    return resolve(task.config)


@pytest.fixture
def saved(config):
    return json.loads(json.dumps(provenance(config)))


def changes(saved: dict, now: dict) -> dict[str, str]:
    return {change.name: change.kind for change in audit(Path("step_000002"), saved, now).changes}


@pytest.mark.parametrize("section", ["model", "algorithm", "actor", "reward", "trainer"])
def test_a_new_option_has_no_class_by_accident(section):
    longer = create_model("Longer", __base__=Config.model_fields[section].annotation, new_option=(int, 0))
    with pytest.raises(AssertionError, match=rf"{section}\.new_option"):
        classes_of(create_model("Another", __base__=Config, **{section: (longer, ...)}))


def test_a_run_that_did_not_change_has_nothing_to_say(config, saved):
    found = audit(Path("step_000002"), saved, provenance(config))
    assert found.changes == () and found.kept > len(SINGLE)
    found.raise_refused()


def test_a_changed_field_is_in_effect_or_refused_by_its_name(saved):
    """Every field: never neither."""
    for path in SINGLE:
        now = copy.deepcopy(saved)
        *parents, leaf = path.split(".")
        section: Any = now["config"]
        for parent in parents:
            section = section[-1 if parent == "*" else parent]
        assert leaf in section
        section[leaf] = {"changed": "value"} if isinstance(section[leaf], dict) else "another value"
        name = path.replace("*", "proofs")
        assert changes(saved, now) == {name: CLASS_OF[path]}
        found = audit(Path("step_000002"), saved, now)
        assert name in found.text()
        if CLASS_OF[path] == "refused":
            with pytest.raises(CheckpointError, match=re.escape(name)):
                found.raise_refused()
        else:
            found.raise_refused()


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


@pytest.mark.parametrize(
    ("name", "change", "named", "kind"),
    [
        ("base/config.json", ("10000.0", "500000.0"), "model config.json rope_theta", "refused"),
        ("base/tokenizer.json", ('"<bos>"', '"<bas>"'), "model file tokenizer.json", "refused"),
        ("base/tokenizer_config.json", ('"<bos>"', '"<bas>"'), "model file tokenizer_config.json", "trains"),
        ("train.jsonl", ("1=", "2="), "data.train content", "refused"),
        ("held_out.jsonl", ("1=", "2="), "data.eval.digits content", "trains"),
    ],
)
def test_what_files_hold_is_compared(config, saved, name, change, named, kind):
    file = config.model.path.parent / name
    before = file.read_text()
    try:
        edit(file, *change)
        assert changes(saved, provenance(config)) == {named: kind}
    finally:
        file.write_text(before)


def test_other_weights_of_the_same_size_are_refused(config, saved):
    file = config.model.path / "model.safetensors"
    before = file.read_bytes()
    try:
        file.write_bytes(before[:5000] + b"!" + before[5001:])
        assert changes(saved, provenance(config)) == {"model file model.safetensors": "refused"}
    finally:
        file.write_bytes(before)


def test_files_may_lie_elsewhere(config, saved, tmp_path):
    moved = config.model.path.parent.rename(tmp_path / "moved")
    try:
        text = json.dumps(config.model_dump(mode="json")).replace(str(config.model.path.parent), str(moved))
        assert changes(saved, provenance(Config.model_validate_json(text))) == {}
    finally:
        moved.rename(config.model.path.parent)


def test_evaluation_sets_are_compared_by_name(saved):
    now = copy.deepcopy(saved)
    (one,) = now["config"]["data"]["eval"]
    one["temperature"] = 0.7
    now["config"]["data"]["eval"] = [{**one, "name": "more"}, one]
    found = changes(saved, now)
    assert found["data.eval.digits.temperature"] == found["data.eval.more.path"] == "trains"
    assert not any(name.startswith("data.eval.digits") for name in found if not name.endswith("temperature"))
    assert changes(now, saved)["data.eval.more.path"] == "trains", "a set that is gone is named too"


def test_environments_are_compared_by_name_and_another_one_is_refused(saved):
    now = copy.deepcopy(saved)
    now["config"]["environments"].reverse()
    assert changes(saved, now) == {}
    now["config"]["environments"][0]["name"] = "digits"
    found = changes(saved, now)
    assert found["environments.digits.name"] == found["environments.proofs.name"] == "refused"
    assert not any(name.startswith("environments.sums.") for name in found)


def test_versions_and_machine_are_said_and_never_refused(saved):
    now = copy.deepcopy(saved)
    now["packages"]["torch"], now["machine"]["count"] = "0.1", 999
    assert changes(saved, now) == {"packages torch": "runs", "machine count": "runs"}


def test_an_option_that_only_one_of_them_has_is_a_change(saved):
    now = copy.deepcopy(saved)
    del saved["config"]["actor"]["precision"]
    (change,) = audit(Path("step_000002"), saved, now).changes
    assert change.name == "actor.precision" and "fp32" in change.now


def test_long_values_that_differ_late_still_differ_in_the_table(saved):
    now = copy.deepcopy(saved)
    saved["config"]["engine"]["sglang"]["env"] = {"A": "x" * 300 + "1"}
    now["config"]["engine"]["sglang"]["env"] = {"A": "x" * 300 + "2"}
    assert changes(saved, now) == {"engine.sglang.env": "runs"}


def test_the_table_is_kept_in_the_run_directory(saved, tmp_path):
    now = copy.deepcopy(saved)
    now["config"]["actor"]["optimizer"]["learning_rate"] = 1e-9
    found = audit(Path("step_000002"), saved, now)
    for text in (found.text(), found.text()):
        record(tmp_path, text)
    kept = (tmp_path / "restarts.txt").read_text()
    assert kept.count("step_000002") == 2
    assert "actor.optimizer.learning_rate" in kept and "0.001" in kept and "1e-09" in kept
