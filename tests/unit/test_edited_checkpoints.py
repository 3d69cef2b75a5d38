"""Files of a checkpoint that somebody edited by hand: refused by name, never a raw error."""

from __future__ import annotations

import copy
import json
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parent / "rollout"))

from lab_names import configured
from loop_fakes import FakeProgress
from test_saved_checkpoints import save

from megatron_daro.actor.checkpoint import load_algorithm
from megatron_daro.algo.weighting import make_algorithm
from megatron_daro.checkpoints import find_latest_valid, verify
from megatron_daro.errors import CheckpointError, DaroError

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.just(10**400) | st.floats() | st.text(max_size=8) | st.just("3"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


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
def run(tmp_path_factory):
    return tmp_path_factory.mktemp("run")


@pytest.fixture(scope="module")
def checkpoint(run):
    return save(run, 1)


SLOW = settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])


@SLOW
@given(st.data())
def test_an_edited_manifest_fits_the_files_or_is_refused(checkpoint, data):
    path = checkpoint / "manifest.json"
    before = path.read_text()
    try:
        changed = data.draw(edited(json.loads(before)))
        path.write_text(json.dumps(changed))
        try:
            verify(checkpoint)
        except CheckpointError as error:
            assert str(checkpoint) in str(error)
        else:
            files = json.loads(before)["files"]
            assert changed["files"] == files
    finally:
        path.write_text(before)


@pytest.mark.parametrize("name", ["manifest.json", "state.json"])
def test_a_pipe_in_the_place_of_a_file_is_refused_and_not_waited_for(tmp_path, name):
    path = save(tmp_path, 1)
    (path / name).unlink()
    os.mkfifo(path / name)
    with pytest.raises(CheckpointError, match=name):
        verify(path)


@pytest.mark.parametrize(
    "text", ["[" * 100_000, '{"files":' * 5000, "9" * 5000, '"\\ud800"', "\xff", "[]", "3", "no JSON", ""], ids=repr
)
def test_a_manifest_that_no_reader_takes_is_refused(checkpoint, text):
    path = checkpoint / "manifest.json"
    before = path.read_bytes()
    path.write_text(text, encoding="latin-1")
    try:
        with pytest.raises(CheckpointError, match=r"manifest\.json: "):
            verify(checkpoint)
    finally:
        path.write_bytes(before)


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
def test_an_entry_of_another_shape_is_named(checkpoint, edit):
    path = checkpoint / "manifest.json"
    before, (change, message) = path.read_text(), EDITS[edit]
    manifest = json.loads(before)
    replaced = change(manifest)
    path.write_text(json.dumps(replaced if edit == "files is a list" else manifest))
    try:
        with pytest.raises(CheckpointError, match=message):
            verify(checkpoint)
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
def test_what_latest_says_is_not_trusted(run, checkpoint, content):
    latest = run / "checkpoints" / "latest"
    before = latest.read_bytes()
    latest.write_bytes(content)
    try:
        assert find_latest_valid(run, FakeProgress())[0] == checkpoint
    finally:
        latest.write_bytes(before)
