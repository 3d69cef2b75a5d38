"""YAML text and overrides as plain values: which scalars are numbers, what is merged, and that a dump reads back."""

from __future__ import annotations

import pytest

from megatron_daro.config import resolve
from megatron_daro.config.loading import resolve_tree
from megatron_daro.config.yaml_text import apply_overrides, dump, parse

TREE = {"model": {"path": "m"}, "data": {"train": ["a"]}}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("a: {<<: {b: 1}, c: 2}", {"a": {"b": 1, "c": 2}}),
        ("x: &x {b: 1}\na: {<<: *x, b: 2}", {"x": {"b": 1}, "a": {"b": 2}}),
        ("[0, 7, -3, +4, 1_000, 010, 0x1, .5, 1., -1e3, 1E-2, .inf, 1e, 1:30]",
         [0, 7, -3, 4, 1000, "010", "0x1", 0.5, 1.0, -1e3, 0.01, float("inf"), "1e", "1:30"]),
        ("[yes, No, on, true, FALSE, ~, null, NULL, nUll, '']", ["yes", "No", "on", True, False, None, None, None,
         "nUll", ""]),
        ("[-01.5, 00, +.5]", ["-01.5", "00", 0.5]),
    ],
)  # fmt: skip
def test_scalars_are_those_of_yaml_1_2(text, value):
    document = parse(text, "x")
    assert document.value == value and not document.problems


def test_a_dump_is_read_by_people():
    text = dump({"z": ["é", "a\nb", True, None, 1e-6], "a": {}, "long": "word " * 40})
    assert text.index("z:") < text.index("a: {}"), "in the order of the sections"
    assert "- é\n" in text and "- true\n" in text and "- null\n" in text and max(map(len, text.splitlines())) <= 125


@pytest.mark.parametrize(
    ("override", "tree"),
    [
        ("a.b=2", {"a": {"b": 2, "c": [1, 2]}}),
        ("a={d: 1}", {"a": {"b": {"x": 1}, "c": [1, 2], "d": 1}}),
        ("a={b: {y: 2}}", {"a": {"b": {"x": 1, "y": 2}, "c": [1, 2]}}),
        ("a.c.1={x: 1}", {"a": {"b": {"x": 1}, "c": [1, {"x": 1}]}}),
        ("e.f.g=h=i", {"a": {"b": {"x": 1}, "c": [1, 2]}, "e": {"f": {"g": "h=i"}}}),
        (" a.b = null ", {"a": {"b": None, "c": [1, 2]}}),
    ],
)
def test_an_override_is_laid_over_the_tree(override, tree):
    before = {"a": {"b": {"x": 1}, "c": [1, 2]}}
    assert apply_overrides(before, [override]) == (tree, [])
    assert before == {"a": {"b": {"x": 1}, "c": [1, 2]}}


def test_values_without_a_file_make_the_same_configuration(tmp_path):
    overrides = ["trainer.steps=3", "rollout.stop=[x]"]
    (tmp_path / "eval.yaml").write_text(dump(TREE))
    assert resolve_tree(TREE, overrides, source="some/eval.yaml") == resolve(tmp_path / "eval.yaml", overrides)
    assert TREE == {"model": {"path": "m"}, "data": {"train": ["a"]}}


@pytest.mark.parametrize(
    ("given", "filled"),
    [
        ([], (4096, 819, "forward", False, 0, "runs/x")),
        (["rollout.max_response_tokens=3", "actor.tensor_parallel=2"], (3, 1, "forward", True, 0, "runs/x")),
        (["algorithm.overlong.max_tokens=50", "trainer.seed=4"], (50, 10, "forward", False, 4, "runs/x")),
        (["algorithm.overlong.cache_tokens=7", "engine.seed=5"], (4096, 7, "forward", False, 5, "runs/x")),
        (["algorithm.old_logprobs=rollout", "trainer.run_dir=a"], (4096, 819, "rollout", False, 0, "a")),
        (["trainer.minibatches_per_batch=2"], (4096, 819, "recompute", False, 0, "runs/x")),
        (["trainer.epochs_per_batch=2"], (4096, 819, "recompute", False, 0, "runs/x")),
    ],
)
def test_what_a_file_leaves_open_is_filled_in(given, filled):
    config = resolve_tree(TREE, given, source="x.y")
    overlong = config.algorithm.overlong
    assert filled == (
        *(overlong.max_tokens, overlong.cache_tokens, config.algorithm.old_logprobs, config.actor.sequence_parallel),
        *(config.engine.seed, str(config.trainer.run_dir)),
    )
