"""Reading, overriding, validating: what is accepted, what is refused and in which words."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megatron_daro.config import Config, resolve, resolve_and_check, to_yaml, yaml_text
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


def test_a_minimal_file_gets_every_default_and_what_depends_on_others(tmp_path):
    config = resolve(write(tmp_path, MINIMAL), ["actor.tensor_parallel=2", "trainer.seed=7"])
    assert config.trainer.run_dir == Path("runs/run")
    assert config.engine.seed == 7
    assert config.actor.sequence_parallel is True
    assert config.algorithm.old_logprobs == "forward"
    assert config.algorithm.overlong.max_tokens == config.rollout.max_response_tokens
    assert (config.algorithm.name, config.rollout.max_staleness, config.reward.strict) == ("daro", 0, True)
    for several in ("trainer.updates_per_batch=2", "trainer.epochs_per_batch=2"):
        assert resolve(tmp_path / "run.yaml", [several]).algorithm.old_logprobs == "recompute"


def test_the_resolved_file_gives_the_same_configuration(tmp_path):
    overrides = ["rollout.stop=['yes', '1e-6', '010', 'a: b']", "actor.optimizer.learning_rate=3e-7", "trainer.seed=5"]
    config = resolve(write(tmp_path, MINIMAL), overrides)
    other = tmp_path / "elsewhere.yaml"
    other.write_text(to_yaml(config))
    assert resolve(other) == config
    assert config.rollout.stop == ("yes", "1e-6", "010", "a: b")
    assert to_yaml(resolve(other)) == to_yaml(config)


def test_every_wrong_value_is_reported_at_once_with_field_value_allowed_and_fix(tmp_path):
    path = write(
        tmp_path,
        "model: {path: m}\ndata: {train: [a.jsonl]}\nrollout:\n  rollouts_per_prompt: 1\n  top_p: 1.5\n"
        "algorithm:\n  name: doro\nactor:\n  precision: fp16\n  tensor_paralel: 2\n"
        "trainer:\n  steps: '3'\n",
    )
    lines = refused(path, "trainer.seed=-1")
    assert len(lines) == 7
    for field, place, got, allowed, fix in [
        ("rollout.rollouts_per_prompt", "run.yaml:4", "1", "an integer >= 2", "rollouts_per_prompt=8"),
        ("rollout.top_p", "run.yaml:5", "1.5", "a number >= 1e-06 and <= 1", "rollout.top_p=1.0"),
        ("algorithm.name", "run.yaml:7", "'doro'", "one of grpo, grpo_sequence, dapo", "did you mean daro?"),
        ("actor.precision", "run.yaml:9", "'fp16'", "one of fp32, bf16, fp8", "did you mean bf16?"),
        ("actor.tensor_paralel", "run.yaml:10", "an unknown key", "the keys of actor", "actor.tensor_parallel?"),
        ("trainer.steps", "run.yaml:12", "'3'", "an integer >= 1", "without quotes"),
        ("trainer.seed", "command line", "-1", "an integer >= 0", "an allowed value"),
    ]:
        line = next((line for line in lines if line.startswith(f"{field} ({place}): got {got}")), None)
        assert line is not None, (field, lines)
        assert f"allowed: {allowed}" in line and "fix: " in line and fix in line


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "an empty file"),
        ("# nothing\n", "an empty file"),
        ("- a\n- b\n", "at the top"),
        ("model: {}\ndata:\n", "model.path: got nothing"),
        ("rollout: {}\n", "data.train: got nothing"),
        (MINIMAL + "rollout: 5\n", "rollout (run.yaml:3): got 5; allowed: a mapping with the keys prompts_per_step"),
        ("model: {path: m}\ndata: {train: []}\n", "data.train (run.yaml:2): got []; allowed: a list of at least 1"),
        ("model: {path: m}\ndata: {train: [a, 3]}\n", "data.train.1 (run.yaml:2): got 3; allowed: a path"),
        (MINIMAL + "trainer: {steps: .nan}\n", "trainer.steps (run.yaml:3): got nan"),
        (MINIMAL + "reward: {correct_reward: .inf}\n", "reward.correct_reward (run.yaml:3): got inf"),
        (MINIMAL + "rollout: {temperature: 1,0}\n", "got the key '0'; allowed: keys that are text"),
        (
            MINIMAL + "algorithm: {daro: {clamp: [1]}}\n",
            "algorithm.daro.clamp: got [1]; allowed: a list of 2: a number, a number",
        ),
        (MINIMAL + "actor: {optimizer: {betas: [0.9, 1.0]}}\n", "a number >= 0 and < 1"),
        (MINIMAL + "3: x\n", "got the key '3'; allowed: keys that are text"),
        (
            MINIMAL + "rollout: {top_p: 1, top_p: 1}\n",
            "rollout.top_p (run.yaml:3): got the key twice, in lines 3 and 3",
        ),
        (MINIMAL + "model: {path: n}\n", "model (run.yaml:3): got the key twice, in lines 1 and 3"),
        (MINIMAL + "rollout:\n\ttop_p: 1\n", "run.yaml:4:1: got a YAML syntax error"),
        (MINIMAL + "rollout: {top_p: 1\n", "run.yaml:4:1: got a YAML syntax error"),
        (MINIMAL + "trainer: {run_dir: !!python/object/apply:os.getcwd []}\n", "got the tag 'tag:yaml.org,2002:python"),
        (MINIMAL + "trainer: &a {x: *a}\n", "aliases that unfold to too much"),
    ],
)
def test_a_bad_file_is_refused_in_words(tmp_path, text, expected):
    assert any(expected in line for line in refused(write(tmp_path, text))), refused(write(tmp_path, text))


def test_an_alias_bomb_is_refused_before_it_unfolds(tmp_path):
    levels = ["a0: &a0 [1,1,1,1,1,1,1,1,1]"] + [f"a{i}: &a{i} [{','.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 12)]
    lines = refused(write(tmp_path, "\n".join(levels)))
    assert "aliases that unfold to too much" in lines[0]


def test_a_tag_runs_nothing(tmp_path):
    target = tmp_path / "made"
    refused(write(tmp_path, MINIMAL + f"trainer: {{run_dir: !!python/object/apply:os.mkdir ['{target}']}}\n"))
    assert not target.exists()


def test_a_missing_or_binary_file_is_refused(tmp_path):
    assert "no such file" in refused(tmp_path / "none.yaml")[0]
    assert "Is a directory" in refused(tmp_path)[0]
    (tmp_path / "b.yaml").write_bytes(b"\xff\xfe\x00")
    assert "not UTF-8" in refused(tmp_path / "b.yaml")[0]


def test_numbers_follow_yaml_1_2(tmp_path):
    text = MINIMAL + "actor: {optimizer: {learning_rate: 1e-6}}\ntrainer: {steps: 1_000, run_dir: 2024-01-01}\n"
    config = resolve(write(tmp_path, text))
    assert config.actor.optimizer.learning_rate == 1e-6
    assert (config.trainer.steps, config.trainer.run_dir) == (1000, Path("2024-01-01"))
    assert "without quotes, units or leading zeros" in refused(tmp_path / "run.yaml", "trainer.steps=010")[0]


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


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("trainer.steps", "key.path=value"),
        ("=3", "key.path=value"),
        ("trainer..steps=3", "key.path=value"),
        ("trainer.steps=[1", "command line trainer.steps:1:3: got a YAML syntax error"),
        ("data.train.5=x", "got the position '5' in a list of 1; allowed: a position from 0 to 0"),
        ("data.train.first=x", "got the position 'first'"),
        ("rollout.top_p.x=1", "rollout.top_p: got {'x': 1}; allowed: a number >= 1e-06 and <= 1"),
        ("data.train.0.x=1", "a path through data.train.0, which is 'a.jsonl'"),
        ("data.template={prompt}", "put the text in quotes"),
        ("rolout.top_p=1", "did you mean rollout?"),
        ("engine.sglang.router_python=p", "did you mean engine.sglang.python?"),
        ("actor.learning_rate=1", "actor.optimizer.learning_rate"),
        ("learning_rate=1", "actor.optimizer.learning_rate"),
        ("rollout.x=1", "fix: remove it; docs/configuration.md has every option"),
        ("algorithm.name=x", "fix: write one of these names"),
        ("trainer.seed=18446744073709551616", "allowed: an integer >= 0 and < 9223372036854775808"),
        ("engine.seed=9223372036854775808", "allowed: an integer >= 0 and < 9223372036854775808, or null"),
        ("model.path=~nobody-of-this-name/m", "model.path (command line): got '~nobody-of-this-name/m'"),
        ("data.train=3", "data.train.0 (command line): got 3; allowed: a path"),
        ("rollout.stop_token_ids=x", "rollout.stop_token_ids.0 (command line): got 'x'"),
    ],
)
def test_a_bad_override_is_refused_in_words(tmp_path, override, expected):
    assert any(expected in line for line in refused(write(tmp_path, MINIMAL), override)), refused(
        tmp_path / "run.yaml", override
    )


def test_a_tilde_is_the_home_directory_in_every_path(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", "/home/someone")
    paths = [
        "model.path",
        "model.megatron_weights",
        "trainer.run_dir",
        "engine.sglang.python",
        "engine.sglang.sync_dir",
        "algorithm.critic.path",
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


def test_nothing_can_be_written_afterwards(tmp_path):
    config = resolve(write(tmp_path, MINIMAL))
    with pytest.raises(ValueError, match="frozen"):
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
    assert "unknown key" in line
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
    assert suggested or line.endswith("fix: remove it; docs/configuration.md has every option")


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


def test_section_errors_and_check_errors_come_together(run_files, cpu):
    path = run_files.write({"rollout": {"temperature": 0, "top_p": 2}, "model": {"path": "/nowhere"}})
    with pytest.raises(ConfigError) as caught:
        resolve_and_check(path, ["trainer.steps=x"], cpu)
    text = str(caught.value)
    for field in ("rollout.temperature", "rollout.top_p", "model.path", "trainer.steps"):
        assert f"  {field}" in text
    assert "4 problems" in text


def test_a_check_is_silent_about_fields_that_are_wrong_already(run_files, cpu):
    path = run_files.write({"rollout": {"rollouts_per_prompt": 1}, "trainer": {"updates_per_batch": 7}})
    with pytest.raises(ConfigError, match="1 problem\n"):
        resolve_and_check(path, (), cpu)


@pytest.mark.parametrize("section", ["engine", "engine.sglang", "algorithm.daro"])
def test_a_section_with_nothing_below_it_means_its_defaults(run_files, section):
    outer, _, inner = section.partition(".")
    run_files.write({outer: {inner: None} if inner else None})
    config = resolve(run_files.file)
    assert getattr(config, outer) == getattr(resolve(run_files.write({})), outer)
