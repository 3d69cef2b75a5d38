"""Records of a checkpoint that somebody edited by hand: loaded as they say, or refused by name, never a raw error."""

from __future__ import annotations

import asyncio
import copy
import hashlib
import json
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parent / "rollout"))

from lab_names import configured
from loop_fakes import FakeProgress, make_stack, run_stack
from test_saved_checkpoints import save

from megatron_daro.actor.checkpoint import load_algorithm
from megatron_daro.algo.weighting import make_algorithm
from megatron_daro.checkpoints import find_latest_valid, read_provenance, read_state, verify
from megatron_daro.data.orders import Epochs
from megatron_daro.errors import CheckpointError, DaroError
from megatron_daro.runtime.preflight import compared
from megatron_daro.types import Prompt

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.just(10**400) | st.floats() | st.text(max_size=8) | st.just("3"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
PROVENANCE = {
    "config": {
        "data": {"eval": [{"name": "held_out", "path": "a.jsonl"}]},
        "environments": [{"name": "sums", "weight": 1.0}],
        "trainer": {"steps": 4},
    },
    "model": {"model_type": "qwen2", "rope_parameters": {"rope_theta": 1e4}},
    "bound_files": {"tokenizer.json": "ab12"},
    "free_files": {},
    "train_files": ["cd34"],
    "eval_files": {"held_out": "ef56"},
    "recording": "0178",
    "packages": {"torch": "2.11.0"},
    "machine": {"kind": "cpu", "count": 2, "fp8": None, "memory_bytes": 2**30},
}


def places(value: object, path: tuple = ()) -> list[tuple]:
    """Every path in a JSON value, its root included."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, inner in items for place in places(inner, (*path, key)))]


@st.composite
def edited(draw: st.DrawFn, value: Any) -> Any:
    """The value with something else, or nothing, at one place."""
    path = draw(st.sampled_from(places(value)))
    if not path:
        return draw(VALUES)
    value = copy.deepcopy(value)
    around = value
    for key in path[:-1]:
        around = around[key]
    if draw(st.booleans()):
        around[path[-1]] = draw(VALUES)
    else:
        del around[path[-1]]
    return value


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """A run of real prompts that stopped with groups outstanding, and its newest checkpoint."""
    stack = stack_in(tmp_path_factory.mktemp("run"))
    run_stack(stack)
    return stack.run, find_latest_valid(stack.run, stack.progress)[0]


def stack_in(run: Path):
    kinds = ("easy", "mixed", "mixed", "hard", "mixed")
    prompts = [Prompt(f"p{i}", kinds[i % 5], "fake", text=f"problem {i}", tokens=(1, 2 + i % 5)) for i in range(40)]
    return make_stack(run, source=Epochs(prompts), trainer={"steps": 2, "keep_checkpoints": 1})


def equal(a: object, b: object) -> bool:
    return json.dumps(a, sort_keys=True) == json.dumps(b, sort_keys=True)


SLOW = settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])


@SLOW
@given(st.data())
def test_an_edited_manifest_fits_the_files_or_is_refused(stopped, data):
    path = stopped[1] / "manifest.json"
    before = path.read_text()
    try:
        changed = data.draw(edited(json.loads(before)))
        path.write_text(json.dumps(changed))
        try:
            verify(stopped[1])
        except CheckpointError as error:
            assert str(stopped[1]) in str(error)
        else:
            files = json.loads(before)["files"]
            assert changed["files"] == files
    finally:
        path.write_text(before)


@SLOW
@example(changed={**PROVENANCE, "config": {"data": {"eval": [{"path": "a.jsonl"}]}}})
@example(changed={key: value for key, value in PROVENANCE.items() if key != "config"})
@given(changed=edited(PROVENANCE))
def test_an_edited_description_of_the_run_is_compared_or_refused(tmp_path, changed):
    path = tmp_path / "made_with.json"
    path.write_text(json.dumps(changed))
    try:
        assert equal(read_provenance(tmp_path), changed)
        compared(tmp_path, STATE, PROVENANCE, FakeProgress())
    except DaroError as error:
        assert str(path) in str(error)


@SLOW
@given(st.data())
def test_an_edited_state_is_resumed_or_refused(stopped, tmp_path, data):
    """With the manifest made to fit: whoever edits a state by hand and knows of the hashes."""
    run, checkpoint = stopped
    state, manifest = checkpoint / "state.json", checkpoint / "manifest.json"
    before = state.read_bytes(), manifest.read_bytes()
    try:
        changed = json.dumps(data.draw(edited(json.loads(before[0])))).encode()
        state.write_bytes(changed)
        sealed = json.loads(before[1])
        sealed["files"]["state.json"] = {"bytes": len(changed), "sha256": hashlib.sha256(changed).hexdigest()}
        manifest.write_text(json.dumps(sealed))
        stack = stack_in(tmp_path)
        with suppress(CheckpointError):
            found = find_latest_valid(run, stack.progress)
            assert equal(found[1], json.loads(changed))
            asyncio.run(stack.controller.resume(*found))
    finally:
        state.write_bytes(before[0])
        manifest.write_bytes(before[1])


@pytest.mark.parametrize("text", ["[]", "3", "no JSON"])
def test_a_state_that_is_no_object_is_refused(tmp_path, text):
    path = save(tmp_path, 1)
    (path / "state.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"state\.json"):
        read_state(path)


@pytest.mark.parametrize("name", ["manifest.json", "state.json", "made_with.json"])
def test_a_pipe_in_the_place_of_a_file_is_refused_and_not_waited_for(tmp_path, name):
    path = save(tmp_path, 1)
    (path / name).unlink(missing_ok=True)
    os.mkfifo(path / name)
    with pytest.raises(CheckpointError, match=name):
        verify(path)
        read_state(path)
        read_provenance(path)


LEDGER = {"next_id": 0, "admitted": 0, "outstanding": [], "finished": {}, "retries": 0, "late_refused": 0}
STATE = {
    "format": 2, "step": 1, "batches_done": 1, "skipped_steps": 0,
    "sampler": {"source": {"drawn": 0}, "ledger": LEDGER, "counters": {}},
}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"batches_done": -1}, "batches_done"),
        ({"skipped_steps": "0"}, "skipped_steps"),
        ({"sampler": []}, "sampler"),
        ({"sampler": {}}, r"sampler\.source"),
        ({"sampler": {**STATE["sampler"], "ledger": {}}}, r"sampler\.ledger\.next_id"),
    ],
)
def test_a_state_of_this_format_has_everything(tmp_path, change, words):
    path = save(tmp_path, 1)
    (path / "state.json").write_text(json.dumps(STATE))
    assert read_state(path) == STATE
    (path / "state.json").write_text(json.dumps(STATE | change))
    with pytest.raises(CheckpointError, match=words):
        read_state(path)
    (path / "state.json").write_text(json.dumps(STATE | change | {"format": 1}))
    assert read_state(path)["format"] == 1, "one of another format is refused where it is used"


@pytest.mark.parametrize("name", ["manifest.json", "state.json", "made_with.json"])
@pytest.mark.parametrize("text", ["[" * 100_000, '{"files":' * 5000, "9" * 5000, '"\\ud800"', "\xff"], ids=repr)
def test_what_no_reader_takes_is_refused(stopped, name, text):
    path = stopped[1] / name
    before = path.read_bytes() if path.exists() else None
    path.write_text(text, encoding="latin-1")
    try:
        with pytest.raises(CheckpointError, match=f"{name}: "):
            read_provenance(stopped[1]) if name == "made_with.json" else verify(stopped[1])
    finally:
        path.write_bytes(before) if before else path.unlink()


EDITS = {
    "files is a list": (lambda m: {**m, "files": list(m["files"])}, "files"),
    "entry is null": (lambda m: m["files"].update({"state.json": None}), r"state\.json"),
    "no sha256": (lambda m: m["files"]["state.json"].pop("sha256"), r"state\.json\.sha256"),
    "size as text": (lambda m: m["files"]["state.json"].update(bytes="9"), r"state\.json\.bytes"),
    "no state": (lambda m: m["files"].pop("state.json"), r"state\.json"),
    "only the state": (lambda m: [m["files"].pop(name) for name in {*m["files"]} - {"state.json"}], r"\.json"),
    "outside": (lambda m: m["files"].update({"/x": m["files"]["state.json"]}), "'/x'"),
    "long name": (lambda m: m["files"].update({"x" * 999: {"bytes": 1, "sha256": "0" * 64}}), "xxx"),
}


@pytest.mark.parametrize("edit", EDITS)
def test_an_entry_of_another_shape_is_named(stopped, edit):
    path = stopped[1] / "manifest.json"
    before, (change, message) = path.read_text(), EDITS[edit]
    manifest = json.loads(before)
    replaced = change(manifest)
    path.write_text(json.dumps(replaced if edit == "files is a list" else manifest))
    try:
        with pytest.raises(CheckpointError, match=message):
            verify(stopped[1])
    finally:
        path.write_text(before)


@pytest.mark.parametrize("name", ["daro", "ha_dw"])
@SLOW
@given(data=st.data())
def test_an_edited_state_of_an_algorithm_is_taken_over_or_refused(tmp_path, name, data):
    algorithm = make_algorithm(configured(name), rollouts_per_prompt=4, max_response_tokens=8)
    path = tmp_path / "algorithm.json"
    path.write_text(json.dumps(data.draw(edited(algorithm.state_dict()))))
    with suppress(DaroError):
        load_algorithm(algorithm, path)
        json.dumps(algorithm.state_dict())


@pytest.mark.parametrize("content", [b"\xff\xfe", b"step_999999", b"../..", b""], ids=repr)
def test_what_latest_says_is_not_trusted(stopped, content):
    run, newest = stopped
    latest = run / "checkpoints" / "latest"
    before = latest.read_bytes()
    latest.write_bytes(content)
    try:
        assert find_latest_valid(run, FakeProgress())[0] == newest
    finally:
        latest.write_bytes(before)
