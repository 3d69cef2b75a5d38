"""A file and overrides become a configuration: overrides, paths, lists, suggestions, and that it is written exactly."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megatron_daro.config import Config, resolve, to_yaml, yaml_text
from megatron_daro.config.loading import known_paths, walk
from megatron_daro.config.problems import similarity
from megatron_daro.errors import ConfigError

MINIMAL = "model: {path: m}\ndata: {train: [a.jsonl]}\n"


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    return path


def refused(path: Path, *overrides: str) -> list[str]:
    """The problem lines of the error."""
    with pytest.raises(ConfigError) as caught:
        resolve(path, overrides)
    head, *lines = str(caught.value).splitlines()
    assert head.startswith(str(path)) and str(len(lines)) in head
    return [line.strip() for line in lines]


def test_the_resolved_file_gives_the_same_configuration(tmp_path):
    overrides = ["rollout.stop=['yes', '1e-6', '010', 'a: b']", "actor.optimizer.learning_rate=3e-7", "trainer.seed=5"]
    config = resolve(write(tmp_path, MINIMAL), overrides)
    other = tmp_path / "elsewhere.yaml"
    other.write_text(to_yaml(config))
    assert resolve(other) == config
    assert config.rollout.stop == ("yes", "1e-6", "010", "a: b")
    assert to_yaml(resolve(other)) == to_yaml(config)


def test_numbers_follow_yaml_1_2(tmp_path):
    text = MINIMAL + "actor: {optimizer: {learning_rate: 1e-6}}\ntrainer: {steps: 1_000, run_dir: 2024-01-01}\n"
    config = resolve(write(tmp_path, text))
    assert config.actor.optimizer.learning_rate == 1e-6
    assert (config.trainer.steps, config.trainer.run_dir) == (1000, Path("2024-01-01"))


def test_overrides_reach_lists_merge_mappings_and_the_last_wins(tmp_path):
    path = write(tmp_path, MINIMAL + "algorithm: {daro: {clamp: [0.5, 2], parameter: linear}}\nactor:\n")
    config = resolve(
        path,
        [
            "data.train=[b.jsonl, c.jsonl]",
            "data.train.1=d.jsonl",
            "algorithm.daro={learning_rate: 0.5}",
            "trainer.steps=3",
        ]
        + ["trainer.steps=4", "actor.megatron={num_layers_in_first_pipeline_stage: 3}", "actor.precision=fp32"],
    )
    assert config.data.train == (Path("b.jsonl"), Path("d.jsonl"))
    daro = config.algorithm.daro
    assert (daro.learning_rate, daro.clamp, daro.parameter) == (0.5, (0.5, 2.0), "linear")
    assert (config.trainer.steps, config.actor.precision) == (4, "fp32")
    assert config.actor.megatron == {"num_layers_in_first_pipeline_stage": 3}


def test_a_tilde_is_the_home_directory_in_every_path(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", "/home/someone")
    paths = [
        "model.path",
        "model.megatron_weights",
        "trainer.run_dir",
        "engine.sglang.python",
        "engine.sglang.sync_dir",
        "algorithm.critic.path",
        "lora.path",
    ]
    paths += ["data.train.0", "data.eval.0.path"]
    text = MINIMAL.replace("]}", "], eval: [{name: a, path: b}]}")
    config = resolve(write(tmp_path, text), [f"{path}=~/x" for path in paths])
    tree = config.model_dump(mode="json")
    for path in paths:
        found = tree
        for part in path.split("."):
            found = found[int(part) if part.isdecimal() else part]
        assert found == "/home/someone/x", path
    fields = {path.replace("*", "0") for path, field in walk(Config) if "Path" in str(field.annotation)}
    assert fields == {path.removesuffix(".0") for path in paths}


def test_one_value_where_a_list_is_due_is_a_list_of_one(tmp_path):
    text = "model: {path: m}\ndata: {train: a.jsonl, eval: {name: e, path: b.jsonl}}\nrollout: {stop_token_ids: 3}\n"
    config = resolve(write(tmp_path, text), ["rollout.stop=end"])
    assert config.data.train == (Path("a.jsonl"),) and config.data.eval[0].name == "e"
    assert (config.rollout.stop, config.rollout.stop_token_ids) == (("end",), (3,))
    assert resolve(write(tmp_path, MINIMAL), ["data.train=c.jsonl"]).data.train == (Path("c.jsonl"),)
    [one] = resolve(write(tmp_path, MINIMAL), ["environments=[{name: e, sources: s}]"]).environments
    assert one.sources == ("s",)


def test_nothing_can_be_written_afterwards(tmp_path):
    config = resolve(write(tmp_path, MINIMAL))
    with pytest.raises(ValueError, match="steps"):
        config.trainer.steps = 3


def test_every_field_is_documented():
    undocumented = [path for path, field in walk(Config) if not (field.description or "").strip()]
    assert not undocumented


LEAVES = [path for path, _ in walk(Config) if "*" not in path]


@given(st.sampled_from(LEAVES), st.data())
@settings(deadline=None)
def test_a_mistyped_key_is_answered_with_the_right_one(path, data):
    section, _, leaf = path.rpartition(".")
    position = data.draw(st.integers(0, len(leaf) - 1))
    letter = data.draw(st.sampled_from("abcxyz_"))
    kinds = [leaf[:position] + leaf[position + 1 :], leaf[:position] + letter + leaf[position:]]
    wrong = data.draw(st.sampled_from(kinds))
    typed = f"{section}.{wrong}" if section else wrong
    if typed in known_paths() or not wrong:
        return
    lines = resolve_text_refused(f"{typed}=null")
    line = next(line for line in lines if line.startswith(typed))
    assert path in line.partition("did you mean ")[2], line


@given(st.sampled_from(LEAVES), st.text("abcdefghijklmnopqrstuvwxyz_", min_size=1, max_size=20))
@settings(deadline=None)
@example("rollout.max_staleness", "x")
def test_an_unknown_key_gets_suggestions_that_are_like_it_or_none(path, wrong):
    typed = f"{path.rpartition('.')[0]}.{wrong}".lstrip(".")
    if typed in known_paths() or ".megatron." in typed or ".sglang." in typed:
        return
    line = next(line for line in resolve_text_refused(f"{typed}=null") if line.startswith(typed))
    suggested = [name for name in line.partition("did you mean ")[2].rstrip("?").split(" or ") if name]
    assert set(suggested) <= set(known_paths())
    assert all(similarity(wrong, name.rpartition(".")[2]) >= 0.6 for name in suggested)


def resolve_text_refused(*overrides: str) -> list[str]:
    with tempfile.TemporaryDirectory() as directory:
        return refused(write(Path(directory), MINIMAL), *overrides)


VALUES = {
    "rollout.temperature": st.just(0) | st.floats(1e-3, 100),
    "rollout.rollouts_per_prompt": st.integers(2, 65536),
    "rollout.stop": st.lists(st.text(min_size=1), max_size=4),
    "trainer.run_dir": st.text("abc/._- é:#'\"", min_size=1).map(str.strip).filter(bool).map(lambda t: str(Path(t))),
    "data.template": st.text().map(lambda text: text + "{prompt}"),
    "algorithm.daro.clamp": st.tuples(st.floats(1e-30, 1), st.floats(1, 1e30)).map(list),
    "actor.megatron": st.dictionaries(
        st.text("ab_", min_size=1), st.none() | st.booleans() | st.integers() | st.text()
    ),
}


@given(st.fixed_dictionaries({}, optional=VALUES))
@settings(deadline=None, max_examples=60)
def test_overrides_and_the_resolved_file_keep_values_exactly(values):
    with tempfile.TemporaryDirectory() as directory:
        path = write(Path(directory), MINIMAL)
        config = resolve(path, [f"{key}={json.dumps(value)}" for key, value in values.items()])
        tree = config.model_dump(mode="json")
        for key, value in values.items():
            found = tree
            for part in key.split("."):
                found = found[part]
            assert found == value
        path.write_text(to_yaml(config), encoding="utf-8")
        assert resolve(path) == config


SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()


@example({"\x85": "\u2028a\u2029"})
@example(["a\n b\r\n", " x ", "\ufeff", "1e-6", "no", "010", "<<", "=", "2024-01-01", "\t"])
@given(st.recursive(SCALARS, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=10))
@settings(deadline=None)
def test_yaml_text_gives_back_what_it_wrote(value):
    document = yaml_text.parse(yaml_text.dump(value), "x")
    assert not document.problems and document.value == value


def test_config_imports_nothing_heavy():
    code = (
        "import sys; import megatron_daro.config; "
        "print(sorted({m.partition('.')[0] for m in sys.modules} & "
        "{'torch', 'ray', 'megatron', 'transformers', 'numpy', 'pandas', 'pyarrow'}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("section", ["engine", "engine.sglang", "algorithm.daro"])
def test_a_section_with_nothing_below_it_means_its_defaults(run_files, section):
    outer, _, inner = section.partition(".")
    run_files.write({outer: {inner: None} if inner else None})
    config = resolve(run_files.file)
    assert getattr(config, outer) == getattr(resolve(run_files.write({})), outer)
