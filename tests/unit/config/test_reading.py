"""What is read of a file and overrides, in which words the rest is refused, and what a dump and an error look like."""

from __future__ import annotations

import re
from typing import Annotated, Literal

import pytest
from pydantic import Field

from megatron_daro.config import Config, resolve, resolve_and_check, yaml_text
from megatron_daro.config.base import ExpandedPath, OneOf
from megatron_daro.config.loading import allowed, choices, field_allowed, known_paths, resolve_tree, section_of, walk
from megatron_daro.config.problems import (
    Problem,
    check_passthrough,
    concerns,
    config_error,
    did_you_mean,
    nearest_paths,
    show,
    similarity,
)
from megatron_daro.config.sections import EvalSet, ModelSection, WandbSection
from megatron_daro.config.yaml_text import apply_overrides, dump, parse
from megatron_daro.errors import ConfigError

TREE = {"model": {"path": "m"}, "data": {"train": ["a"]}}


def refused(tree, *overrides) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        resolve_tree(tree, overrides, source="x")
    head, *lines = str(caught.value).splitlines()
    assert head == f"x: {len(lines)} problem{'s' if len(lines) > 1 else ''}"
    return [line.strip() for line in lines]


@pytest.mark.parametrize(
    ("annotation", "words"),
    [
        (int, "an integer"),
        (float | None, "a number, or null"),
        (Annotated[float, Field(ge=0, lt=1)], "a number >= 0 and < 1"),
        (Annotated[float, Field(gt=1e-6, le=2.5)], "a number > 1e-06 and <= 2.5"),
        (Annotated[int, Field(ge=2)] | None, "an integer >= 2, or null"),
        (bool, "true or false"),
        (str, "text"),
        (Annotated[str, Field(min_length=1)], "text, not empty"),
        (Annotated[str, Field(pattern="^a$")], "text that matches ^a$"),
        (Annotated[str, OneOf(("a", "b"))], "one of a, b, or module:Class of your own"),
        (Literal["a", "b"], "one of a, b"),
        (ExpandedPath, "a path"),
        (dict[str, int], "a mapping"),
        (WandbSection, "a mapping with the keys enabled, project, name"),
        (tuple[int, ...], "a list, each an integer"),
        (Annotated[tuple[int, ...], Field(min_length=2)], "a list of at least 2, each an integer"),
        (tuple[float, Annotated[float, Field(gt=0)]], "a list of 2: a number, a number > 0"),
    ],
)
def test_what_is_allowed_is_said_from_the_annotation(annotation, words):
    assert allowed(annotation) == words


def test_the_words_of_a_field_have_its_own_bounds():
    fields = dict(walk(Config))
    assert field_allowed(fields["rollout.rollouts_per_prompt"]) == "an integer >= 2 and <= 65536"
    assert field_allowed(fields["data.eval.*.name"]) == "text that matches ^[A-Za-z0-9_.-]+$"
    assert field_allowed(fields["engine.seed"]) == "an integer >= 0 and < 9223372036854775808, or null"
    assert field_allowed(fields["observe.wandb.name"]) == "text, not empty, or null"


def test_paths_of_sections_come_before_their_fields_and_lists_have_a_star():
    paths = known_paths()
    assert paths[:3] == ("model", "model.path", "model.megatron_weights")
    assert paths.index("data.eval") + 1 == paths.index("data.eval.*.name")
    assert "data.curriculum.start" in paths and len(paths) == len(set(paths))
    assert section_of(tuple[EvalSet, ...]) is EvalSet and section_of(ModelSection | None) is ModelSection
    assert section_of(tuple[int, ...]) is None and section_of(int) is None


def test_names_of_a_choice_are_known():
    assert choices(Literal["a", "b"] | None, []) == ("a", "b")
    assert choices(Annotated[str, OneOf(("c",))], []) == ("c",) == choices(str, [OneOf(("c",))])
    assert choices(str, []) == ()


# Override => the line of the error; one that is too long goes on, indented.
WRONG = r"""
trainer.steps=true => trainer.steps (command line): got true; allowed: an integer >= 1; fix: write an allowed value,
  such as trainer.steps=100
actor.optimizer.distributed='yes' => actor.optimizer.distributed (command line): got 'yes'; allowed: true or false;
  fix: write true or false
engine.seed=-1 => engine.seed (command line): got -1; allowed: an integer >= 0 and < 9223372036854775808, or null;
  fix: write an allowed value
algorithm.clip_low='0.2' => algorithm.clip_low (command line): got '0.2'; allowed: a number > 0 and < 1; fix: write
  a plain number, without quotes, units or leading zeros
trainer.steps='3' => trainer.steps (command line): got '3'; allowed: an integer >= 1; fix: write a plain number,
  without quotes, units or leading zeros
reward.marker=3 => reward.marker (command line): got 3; allowed: text, not empty; fix: put the text in quotes
algorithm.std=3 => algorithm.std (command line): got 3; allowed: one of auto, population, sample, batch, none; fix:
  put the text in quotes
actor.optimizer.betas=[0.9,x] => actor.optimizer.betas.1 (command line): got 'x'; allowed: a number >= 0 and < 1;
  fix: write a plain number, without quotes, units or leading zeros
actor.optimizer.betas=[0.9] => actor.optimizer.betas: got [0.9]; allowed: a list of 2: a number >= 0 and < 1, a
  number >= 0 and < 1; fix: write an allowed value, such as actor.optimizer.betas=[0.9, 0.999]
actor.optimizer.betas=3 => actor.optimizer.betas (command line): got 3; allowed: a list of 2: a number >= 0 and < 1,
  a number >= 0 and < 1; fix: write an allowed value, such as actor.optimizer.betas=[0.9, 0.999]
data.pass_rates=[0,2] => data.pass_rates.1 (command line): got 2; allowed: a number >= 0 and <= 1; fix: write an
  allowed value
data.eval=[{name: a}] => data.eval.0.path: got nothing; allowed: a path; fix: set it in the file, or give
  data.eval.0.path=... on the command line
data.eval=[{name: a, path: b, sise: 1}] => data.eval.0.sise: got an unknown key with value 1; allowed: the keys of
  data.eval.0: name, path, format, problem_field, answer_field, rollouts_per_prompt, temperature, top_p, template,
  rows, max_prompts, drop_unusable; fix: remove it; docs/configuration.md has every option
modle.path=x => modle: got an unknown key with value {'path': 'x'}; allowed: the sections model, data, rollout,
  algorithm, actor, engine, environment, reward, trainer, cluster, observe; fix: did you mean model?
trainer.run_dir='' => trainer.run_dir (command line): got ''; allowed: a path that is not empty (. is the working
  directory); fix: write an allowed value
algorithm.name=lambda_grpo => algorithm.name (command line): got 'lambda_grpo'; allowed: one of grpo, grpo_sequence,
  dapo, lite_ppo, dr_grpo, rloo, kimi, daro, maxrl, f_grpo, mgpo, dgpo, ha_dw, ppo, daro_ppo, or module:Class of
  your own; fix: did you mean dr_grpo?
algorithm.daro.magnitude=gradient => algorithm.daro.magnitude (command line): got 'gradient'; allowed: one of abs,
  signed, token, advantage; fix: write one of these names
observe=3 => observe (command line): got 3; allowed: a mapping with the keys progress, tensorboard, save_rollouts,
  wandb; fix: write an allowed value
data.stop=3 => data.stop (command line): got an unknown key with value 3; allowed: the keys of data: train, format,
  problem_field, answer_field, prompt_template, template, max_prompt_tokens, pass_rates, shuffle, order, curriculum,
  prioritised, eval; fix: did you mean rollout.stop?
engine.sglang.env={A: 1} => engine.sglang.env.A: got 1; allowed: text; fix: put the text in quotes
environment.reward_weights={a: x} => environment.reward_weights.a: got 'x'; allowed: a number >= -1000000 and <=
  1000000; fix: write a plain number, without quotes, units or leading zeros
"""


@pytest.mark.parametrize("case", re.sub(r"\n +", " ", WRONG.strip()).splitlines())
def test_a_wrong_value_is_answered_with_what_is_allowed_and_a_fix(case):
    override, line = case.split(" => ")
    assert refused(TREE, override) == [line]


@pytest.mark.parametrize("field", ["model", "data", "data.train", "model.path"])
def test_the_rest_of_a_file_without_a_required_value_is_judged_too(run_files, cpu, field):
    """With stand-ins for what is required, of which no check then speaks."""
    with pytest.raises(ConfigError) as caught:
        resolve_and_check(run_files.file, [f"{field}=3", "trainer.updates_per_batch=7"], cpu)
    lines = [line.split(" ")[2] for line in str(caught.value).splitlines()[1:]]
    assert lines == [{"data.train": "data.train.0"}.get(field, field), "trainer.updates_per_batch:"]


def test_a_list_with_wrong_items_is_not_also_called_too_short():
    lines = refused(TREE, "data.train=[3, 4]", "trainer.steps=0", "data.eval=[{name: a, path: 3, rows: 0}]")
    assert [line.split(" (")[0].split(": ")[0] for line in lines] == [
        *("data.train.0", "data.train.1", "data.eval.0.path", "data.eval.0.rows", "trainer.steps"),
    ]


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({"stop": "a"}, ("a",)),
        ({"stop": ["a", "b"]}, ("a", "b")),
        ({"stop_token_ids": 3}, (3,)),
        ({"stop_token_ids": []}, ()),
    ],
)
def test_a_list_of_one_may_be_its_item(given, found):
    (name,) = given
    assert getattr(resolve_tree({**TREE, "rollout": given}, (), source="x").rollout, name) == found


def test_lists_of_a_fixed_length_are_no_lists_of_one():
    assert "got 0.5; allowed: a list of 2" in refused(TREE, "algorithm.daro.clamp=0.5")[0]
    eval_set = resolve_tree({**TREE, "data": {"train": "a", "eval": {"name": "b", "path": "c"}}}, (), source="x").data
    assert eval_set.eval[0].name == "b" and len(eval_set.train) == 1


def test_values_without_a_file_make_the_same_configuration(tmp_path):
    config = resolve_tree(TREE, ["trainer.steps=3", "rollout.stop=[x]"], source="some/eval.yaml")
    (tmp_path / "eval.yaml").write_text(dump(TREE))
    assert config == resolve(tmp_path / "eval.yaml", ["trainer.steps=3", "rollout.stop=[x]"])
    assert TREE == {"model": {"path": "m"}, "data": {"train": ["a"]}}
    assert refused({"model": {}}) == [
        "model.path: got nothing; allowed: a path; fix: set it in the file, or give model.path=... on the command line",
        "data.train: got nothing; allowed: a list of at least 1, each a path; fix: set it in the file, or give "
        "data.train=... on the command line",
    ]


@pytest.mark.parametrize(
    ("given", "filled"),
    [
        ([], (4096, 819, "forward", False, 0, "runs/x")),
        (["rollout.max_response_tokens=3", "actor.tensor_parallel=2"], (3, 1, "forward", True, 0, "runs/x")),
        (["algorithm.overlong.max_tokens=50", "trainer.seed=4"], (50, 10, "forward", False, 4, "runs/x")),
        (["algorithm.overlong.cache_tokens=7", "engine.seed=5"], (4096, 7, "forward", False, 5, "runs/x")),
        (["algorithm.old_logprobs=rollout", "trainer.run_dir=a"], (4096, 819, "rollout", False, 0, "a")),
    ],
)
def test_what_a_file_leaves_open_is_filled_in(given, filled):
    config = resolve_tree(TREE, given, source="x.y")
    overlong = config.algorithm.overlong
    assert filled == (
        *(overlong.max_tokens, overlong.cache_tokens, config.algorithm.old_logprobs, config.actor.sequence_parallel),
        *(config.engine.seed, str(config.trainer.run_dir)),
    )


def test_an_override_of_a_section_hides_where_its_fields_were_written(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("model: {path: m}\ndata: {train: [a]}\nrollout:\n  top_p: 2\n  temperature: -1\n")
    with pytest.raises(ConfigError) as caught:
        resolve(path, [" rollout ={top_p: 3}"])
    places = [line.split(": got ")[0].strip() for line in str(caught.value).splitlines()[1:]]
    assert places == ["rollout.temperature", "rollout.top_p"]


def test_a_key_of_a_list_is_found_where_the_list_is(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("model: {path: m}\ndata:\n  train:\n  - a\n  - 3\n  eval:\n  - name: a\n    path: 5\n")
    with pytest.raises(ConfigError, match=r"data.train.1 \(run.yaml:5\): got 3[^$]*data.eval.0.path \(run.yaml:8\)"):
        resolve(path)


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


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a: 1\na: 2\nb: !t 3",
         ["a (x:2): got the key twice, in lines 1 and 2; allowed: each key once; fix: remove one "
         "of the two", "b (x:3): got the tag '!t'; allowed: plain values without tags; fix: remove the tag"]),
        ("a: &a [*a]", ["a.0 (x:1): got aliases that unfold to too much; allowed: at most 10000 values; fix: write the "
         "values out"]),
        ("? [a]\n: 1\n? 3\n: 2", ["x (x:1): got the key a list or mapping; allowed: keys that are text; fix: put it in "
         "quotes", "x (x:3): got the key '3'; allowed: keys that are text; fix: put it in quotes"]),
        ("a:\n  2: b", ["a (x:2): got the key '2'; allowed: keys that are text; fix: put it in quotes"]),
        ("a\0b", ["x: got a YAML syntax error (special characters are not allowed); allowed: YAML; fix: indent with "
         "spaces, write `key: value`, and put text that holds : # { [ or quotes into quotes"]),
        ("a: 1\n b: 2", ["x:2:3: got a YAML syntax error (mapping values are not allowed here); allowed: YAML; fix: "
         "indent with spaces, write `key: value`, and put text that holds : # { [ or quotes into quotes"]),
        ("a: [1\n", ["x:2:1: got a YAML syntax error (while parsing a flow sequence: expected ',' or ']', but got "
         "'<stream end>'); allowed: YAML; fix: indent with spaces, write `key: value`, and put text that holds : # { [ "
         "or quotes into quotes"]),
        ("9" * 5000, ["x: got Exceeds the limit (4300 digits)"]),
    ],
)  # fmt: skip
def test_what_is_no_plain_yaml_is_named_by_its_line(text, problem):
    document = parse(text, "x")
    found = [str(one) for one in document.problems]
    assert document.value is None and len(found) == len(problem)
    assert all(line.startswith(words) for line, words in zip(found, problem, strict=True)), found


def test_a_document_has_at_most_so_many_values(monkeypatch):
    """With the list itself."""
    monkeypatch.setattr(yaml_text, "_MOST_VALUES", 5)
    assert parse("[1, 2, 3, 4]", "x").value == [1, 2, 3, 4]
    assert [problem.got for problem in parse("[1, 2, 3, 4, 5, 6]", "x").problems] == ["aliases that unfold to too much"]


def test_lines_of_paths_are_known():
    assert parse("a:\n  b: 1\n  c:\n  - 2\n  -\n    d: 3\n", "x").lines == {
        "": 1,
        "a": 1,
        "a.b": 2,
        "a.c": 3,
        "a.c.0": 4,
        "a.c.1": 6,
        "a.c.1.d": 6,
    }


def test_a_dump_is_read_by_people():
    text = dump({"z": ["é", "a\nb", True, None, 1e-6], "a": {}, "long": "word " * 40})
    assert text.startswith('z:\n  - é\n  - "a\\nb"\n  - true\n  - null\n  - 1.0e-06\na: {}\nlong: ')
    assert all(100 < len(line) <= 125 for line in text.splitlines()[7:8]) and parse(text, "x").value["a"] == {}


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


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("a.c.2=1", "a.c.2: got the position '2' in a list of 2; allowed: a position from 0 to 1; fix: override"),
        ("a.c.-1=1", "a.c.-1: got the position '-1' in a list of 2; allowed: a position from 0 to 1"),
        ("a.d.0=1", "a.d.0: got the position '0' in a list of 0; allowed: nothing: the list is empty"),
        ("a.b.x.y=1", "a.b.x.y: got a path through a.b.x, which is 1; allowed: a path through mappings and lists; fix: "
         "shorten the path"),
        ("a", "command line: got 'a'; allowed: key.path=value, such as"),
        ("a.=1", "command line: got 'a.=1'; allowed: key.path=value, such as"),
        (" a =[", "command line a:1:2: got a YAML syntax error"),
    ],
)  # fmt: skip
def test_an_override_that_has_no_place_is_refused(override, problem):
    tree = {"a": {"b": {"x": 1}, "c": [1, 2], "d": []}}
    kept, (found,) = apply_overrides(tree, [override])
    assert str(found).startswith(problem) and kept == tree
    assert apply_overrides(tree, [override, "z=1"])[0] == {**tree, "z": 1}


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "null"),
        (True, "true"),
        (1.5, "1.5"),
        ("a", "'a'"),
        ("x" * 118, f"'{'x' * 118}'"),
        ("x" * 119, "'" + "x" * 116 + "..."),
    ],
)
def test_a_value_is_shown_on_one_line(value, text):
    assert show(value) == text and len(text) <= 120


def test_a_problem_and_an_error_are_lines():
    one = Problem("a.b", "1", "2", "write 2", also=("c",))
    assert str(one) == "a.b: got 1; allowed: 2; fix: write 2"
    assert str(Problem("a", "1", "2", "3", place="f:4")) == "a (f:4): got 1; allowed: 2; fix: 3"
    assert str(config_error("f", [one])) == f"f: 1 problem\n  {one}"
    assert str(config_error("f", [one, one])) == f"f: 2 problems\n  {one}\n  {one}"


@pytest.mark.parametrize(
    ("fields", "does"),
    [(["a.b"], True), (["a"], True), (["a.b.c"], True), (["c"], True), (["a.bc"], False), (["b"], False), ([], False)],
)
def test_a_problem_rests_on_fields_around_and_inside_its_own(fields, does):
    assert concerns(Problem("a.b", "", "", "", also=("c.d",)), fields) is does


def test_names_are_alike_whatever_their_case_and_hyphens():
    assert similarity("Tensor-Parallel", "tensor_parallel") == 1.0
    assert similarity("ab", "cd") == 0.0


def test_the_nearest_paths_are_of_the_same_section_and_few():
    known = ["a.size", "b.size", "a.c.size", "a.seize", "size"]
    assert nearest_paths("a.sise", known, at_most=1) == ["a.size"]
    assert nearest_paths("q", known) == []
    assert did_you_mean(["a", "b"], "no") == "did you mean a or b?" and did_you_mean([], "no") == "no"


def test_names_that_are_handed_on_are_those_that_upstream_has():
    assert check_passthrough("s", {"b": 1}, ["a", "b"]) == []
    (problem,) = check_passthrough("s", {"b": 1, "zzz": True}, iter(["c", "b", "a"]))
    assert str(problem) == (
        "s.zzz: got the unknown key 'zzz' with value true; allowed: the 3 names that upstream has and no other option "
        "sets; fix: remove it, or look its name up in upstream's documentation"
    )


def test_a_file_is_read_once_and_closed(monkeypatch):
    """The parser of a text that is refused is disposed of, too."""
    ended = []
    dispose = yaml_text._Loader.dispose
    monkeypatch.setattr(yaml_text._Loader, "dispose", lambda self: ended.append(dispose(self)))
    parse("a: [", "x")
    assert ended == [None]
