"""`megatron-daro eval`: which model is asked of a checkpoint or servers, and how two evaluations are compared."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from megatron_daro.cli import main
from megatron_daro.commands import evaluate
from megatron_daro.config import EvalSet
from megatron_daro.errors import ConfigError
from megatron_daro.workshop.convert import model_config
from megatron_daro.workshop.evaluate import compare, measuring


def base_file(path: Path, model: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump({"model": {"path": model}, "data": {"train": ["x"]}}))
    return path


@pytest.fixture
def asked(monkeypatch) -> list[Any]:
    """The models that would be asked."""
    calls: list[Any] = []
    for name in ("of_checkpoint", "of_directory", "of_servers"):
        monkeypatch.setattr(measuring, name, lambda *given, name=name: calls.append((name, *given)) or name)
    monkeypatch.setattr(model_config, "find_config_folder", lambda checkpoint: Path("found"))
    return calls


def model_and_base(hf=None, checkpoint=None, urls=(), file=None, overrides=()):
    return evaluate._model_and_base(hf, checkpoint, urls, file, overrides, Path("out"), "notices")


def test_a_checkpoint_has_the_configuration_of_its_run(tmp_path, asked):
    checkpoint = tmp_path / "run" / "checkpoints" / "step_000001"
    checkpoint.mkdir(parents=True)
    assert model_and_base(checkpoint=checkpoint) == ("of_checkpoint", None)
    assert asked[-1] == ("of_checkpoint", checkpoint, Path("found"), Path("out"), "notices")
    base_file(tmp_path / "run" / "config.yaml", "/of-the-run")
    _, base = model_and_base(checkpoint=checkpoint, overrides=["trainer.steps=3"])
    assert asked[-1][2] == Path("/of-the-run") == base.model.path and base.trainer.steps == 3
    _, base = model_and_base(checkpoint=checkpoint, file=base_file(tmp_path / "own.yaml", "/own"))
    assert base.model.path == Path("/own") and len(asked) == 3


def test_a_directory_is_asked_with_or_without_a_configuration(tmp_path, asked):
    assert model_and_base(hf=Path("m")) == ("of_directory", None)
    _, base = model_and_base(hf=Path("m"), file=base_file(tmp_path / "own.yaml", "/own"))
    assert base.model.path == Path("/own") and asked == [("of_directory", Path("m"))] * 2


def test_servers_have_the_model_that_is_named_or_configured(tmp_path, asked):
    file = base_file(tmp_path / "own.yaml", "/own")
    model_and_base(urls=["u"])
    model_and_base(urls=["u"], file=file)
    model_and_base(urls=["u"], file=file, overrides=["model.path=/a", "model.path=/b=c"])
    paths = [None, Path("/own"), Path("/b=c")]
    assert asked == [("of_servers", ["u"], path) for path in paths]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, "eval: got no model; allowed"),
        (
            {"hf": Path("a"), "checkpoint": Path("b"), "urls": ["c"]},
            "eval: got --hf and --checkpoint and --urls; allowed",
        ),
        ({"checkpoint": Path("b"), "urls": ["c"]}, "eval: got --checkpoint and --urls; allowed"),
    ],
)
def test_one_model_is_asked(asked, given, words):
    with pytest.raises(ConfigError, match=words):
        model_and_base(**given)
    assert not asked


@pytest.mark.parametrize(
    ("arguments", "file", "overrides"),
    [
        ([], None, []),
        (["a=1", "b"], None, ["a=1", "b"]),
        (["f.yaml", "a=1"], Path("f.yaml"), ["a=1"]),
        (["f.yaml"], Path("f.yaml"), []),
    ],
)
def test_the_first_argument_may_be_a_file(arguments, file, overrides):
    assert evaluate._split(arguments) == (file, overrides)


@pytest.mark.parametrize(
    ("hf", "checkpoint", "out"),
    [
        (None, None, "evals/servers"),
        (Path("/a/b"), None, "evals/b"),
        (None, Path("/r/run/checkpoints/step_000001"), "evals/run_step_000001"),
        (Path(), None, f"evals/{Path.cwd().name}"),
    ],
)
def test_results_have_a_place_named_after_the_model(hf, checkpoint, out):
    assert evaluate._default_out(hf, checkpoint) == Path(out)


def test_a_checkpoint_is_a_directory_without_steps(tmp_path):
    evaluate.require_checkpoint(tmp_path)
    (tmp_path / "step_000001").touch()
    (tmp_path / "step_000002.tmp").mkdir()
    evaluate.require_checkpoint(tmp_path)
    with pytest.raises(
        ConfigError, match=r"which is not there; allowed: a checkpoint directory such as RUN/checkpoints"
    ):
        evaluate.require_checkpoint(tmp_path / "x")
    (tmp_path / "step_000003").mkdir()
    with pytest.raises(
        ConfigError, match=r"which holds 1 checkpoints; allowed: one of step_000003; fix: --checkpoint "
    ):
        evaluate.require_checkpoint(tmp_path)


ONE, TWO = (EvalSet(name=name, path=Path("x"), rollouts_per_prompt=3, temperature=0.5) for name in ("one", "two"))


def changed(*, templates=None, samples=(), temperature=None, top_p=None):
    found = evaluate._under_templates([ONE, TWO], templates, samples, temperature, top_p)
    return [(one.name, one.rollouts_per_prompt, one.temperature, one.top_p, one.template) for one in found]


def test_what_the_command_line_says_of_sets_counts():
    assert changed() == [("one", 3, 0.5, 1.0, "data"), ("two", 3, 0.5, 1.0, "data")]
    assert changed(samples=["two=5", "4"], temperature=1.0, top_p=0.5, templates=" r1 ") == [
        ("one", 4, 1.0, 0.5, "r1"),
        ("two", 4, 1.0, 0.5, "r1"),
    ]
    assert changed(samples=["4", "two=5"])[1][1] == 5
    assert [one[0] for one in changed(templates="r1, none")] == ["one.r1", "two.r1", "one.none", "two.none"]
    assert changed(samples=["1"], temperature=0.0)[0][1:3] == (1, 0.0)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"samples": ["one=x"]}, "--samples: got 'x'; Input should be a valid integer"),
        ({"top_p": 2.0}, "--top-p: got 2.0; Input should be less than or equal to 1"),
        ({"temperature": -1.0}, "--temperature: got -1.0; "),
        ({"templates": "x"}, "--template: got 'x'; "),
        ({"templates": "r1,x,r1"}, "--template: got r1 twice; allowed: each name once; fix: leave one out"),
        ({"temperature": 0.0}, "--samples: got 3 for one at temperature 0, which would all be equal"),
    ],
)
def test_what_no_set_can_have_is_refused_by_its_option(given, words):
    with pytest.raises(ConfigError) as refused:
        changed(**given)
    assert str(refused.value).startswith(words)


def test_samples_of_a_set_that_is_not_asked_are_refused():
    evaluate._check_samples(["3", "one=2"], [ONE, TWO])
    with pytest.raises(ConfigError, match=r"^--samples: got 'x=3'; allowed: the sets one, two; fix: name one of them$"):
        evaluate._check_samples(["one=2", "x=3"], [ONE, TWO])


def test_sets_of_the_command_line_count_before_those_of_a_configuration(tmp_path, monkeypatch):
    from megatron_daro.workshop.evaluate import asking

    monkeypatch.setattr(asking, "suite_sets", lambda name, folder: [(name, folder)])
    monkeypatch.setattr(asking, "named_sets", list)
    monkeypatch.setattr(asking, "check_names", lambda chosen: None)
    base = SimpleNamespace(data=SimpleNamespace(eval=(TWO,)))
    assert evaluate._chosen_sets(base, "math6", Path("d"), [ONE]) == [("math6", Path("d")), ONE]
    assert evaluate._chosen_sets(base, None, Path("d"), []) == [TWO]
    with pytest.raises(ConfigError, match=r"data.eval: got no set; allowed: at least one for eval"):
        evaluate._chosen_sets(None, None, Path("d"), [])
    with monkeypatch.context() as patched, pytest.raises(ConfigError, match="twice"):
        patched.setattr(asking, "check_names", lambda chosen: (_ for _ in ()).throw(ConfigError("twice")))
        evaluate._chosen_sets(base, None, Path("d"), [])


def test_two_evaluations_are_compared_without_a_model(tmp_path, monkeypatch, capsys, asked):
    calls = []
    lines = [SimpleNamespace(cells=["s", "m", *map(str, range(len(compare.HEAD) - 2))])]
    result = SimpleNamespace(lines=lines, remarks=["seeds", "engines"])
    monkeypatch.setattr(compare, "compare", lambda *given: calls.append(given) or result)
    monkeypatch.setattr(compare, "write_comparison", lambda *given: calls.append(given))
    monkeypatch.setattr(compare, "line_cells", lambda line: line.cells)
    a, b = tmp_path / "a", tmp_path / "b"
    assert main(["eval", "--compare", str(a), str(b)]) == 0
    assert calls == [(a, b), (result, b / "compare.html")] and not asked
    out = capsys.readouterr().out.splitlines()
    assert out[-4:] == [
        "B - A in percentage points, paired by problem; p: sign-flip permutation test",
        "differs: seeds",
        "differs: engines",
        f"written: {b}/compare.html",
    ]
    row = next(line for line in out if line.startswith(" s "))
    assert row.index("m") == out[0].index("metric") and row.index("0") > out[0].index("problems"), (
        "names are left, numbers right"
    )
    assert main(["eval", "--compare", str(a), str(b), "--out", "x.html"]) == 0
    assert calls[3] == (result, Path("x.html"))


def test_a_person_is_told_on_stderr(capsys):
    evaluate._Terminal().notice("one")
    evaluate._Terminal().warn("two")
    assert capsys.readouterr() == ("", "one\nwarning: two\n")


def test_a_measurement_says_where_it_is(tmp_path, monkeypatch, capsys, asked):
    from megatron_daro.workshop.evaluate import tables

    plans = []
    monkeypatch.setattr(measuring, "of_directory", lambda path: SimpleNamespace(weights={"w": 1}))
    monkeypatch.setattr(measuring, "configuration", lambda *given, **named: plans.append((given, named)) or "config")
    monkeypatch.setattr(measuring, "measure", lambda plan, notices: plans.append(plan) or "summary")
    monkeypatch.setattr(tables, "summary_text", lambda summary: f"text of {summary}")
    problems = tmp_path / "p.jsonl"
    problems.write_text('{"problem": "1", "answer": "1"}\n')
    words = ["a.b=1", "--hf", str(tmp_path), "--set", f"x={problems}", "--set", f"y={problems}"]
    assert main(["eval", *words, "--samples", "4", "--samples", "y=2"]) == 0
    (model, chosen, target), named = plans[0]
    assert model.weights == {"w": 1} and [one.name for one in chosen] == ["x", "y"]
    assert target == Path("evals") / tmp_path.name and named == {"base": {}, "overrides": ["a.b=1"], "source": "eval"}
    assert plans[1].config == "config" and plans[1].weights == {"w": 1} and plans[1].ks == (2,)
    printed = f"text of summary\nwritten: {target}/summary.json, problems.parquet, answers/\n"
    assert capsys.readouterr().out == printed
    assert main(["eval", *words, "--samples", "4", "--k", "4", "--k", "1", "--k", "4"]) == 0 and plans[3].ks == (1, 4)
