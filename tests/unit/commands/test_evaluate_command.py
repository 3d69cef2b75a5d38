"""`megatron-daro eval`: which model, which sets, which numbers; what does not go together is refused before a start."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from weightless import save_tiny_model

from megatron_daro import cli
from megatron_daro.errors import ConfigError
from megatron_daro.workshop.evaluate import measuring

SUMMARY: dict[str, Any] = {"sets": {}, "mean": {}}


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The plans that reach the runtime, in place of engines."""

    @dataclass
    class Plan:
        config: Any
        weights: Any
        ks: tuple[int, ...]

    found: list[Any] = []
    monkeypatch.setattr(measuring, "Plan", Plan)
    monkeypatch.setattr(measuring, "measure", lambda plan, notices: found.append(plan) or SUMMARY)
    return found


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return save_tiny_model(tmp_path / "base")


@pytest.fixture
def problems(tmp_path: Path) -> Path:
    path = tmp_path / "mine.jsonl"
    path.write_text('{"problem": "1=", "answer": "1"}\n')
    return path


def test_a_directory_and_a_set_are_enough(plans, model, problems, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["eval", "--hf", str(model), "--set", f"mine={problems}", "--samples", "4"]) == 0
    (plan,) = plans
    (one,) = plan.config.data.eval
    assert (one.name, one.rollouts_per_prompt, one.temperature, one.top_p, one.template) == (
        "mine",
        4,
        0.6,
        0.95,
        "chat",
    )
    assert (plan.config.model.path, plan.config.engine.kind, plan.config.actor.precision) == (model, "embedded", "fp32")
    assert plan.config.trainer.run_dir == Path("evals/base") and plan.ks == (4,)
    assert plan.weights["files"].keys() == {"model.safetensors"}


def test_options_and_overrides_reach_the_plan(plans, model, problems, tmp_path):
    words = ["engine.kind=sglang", "engine.replicas=2", "rollout.max_response_tokens=9", "actor.precision=bf16"]
    sets = ["--set", f"a={problems}", "--set", f"b={problems}", "--samples", "8", "--samples", "b=2"]
    more = ["--temperature", "1", "--top-p", "0.7", "--template", "none", "--k", "2", "--k", "1"]
    out = ["--out", str(tmp_path / "out")]
    assert cli.main(["eval", *words, "--hf", str(model), *sets, *more, *out]) == 0
    config = plans[0].config
    assert [(one.name, one.rollouts_per_prompt) for one in config.data.eval] == [("a", 8), ("b", 2)]
    assert {(one.temperature, one.top_p, one.template) for one in config.data.eval} == {(1.0, 0.7, "none")}
    assert (config.engine.kind, config.engine.replicas, config.rollout.max_response_tokens) == ("sglang", 2, 9)
    assert config.actor.precision == "bf16" and config.trainer.run_dir == tmp_path / "out" and plans[0].ks == (1, 2)


def test_several_templates_ask_each_set_by_each(plans, model, problems, tmp_path):
    words = ["--set", f"a={problems}", "--set", f"b={problems}", "--samples", "8", "--samples", "b=2"]
    out = ["--out", str(tmp_path / "out")]
    assert cli.main(["eval", "--hf", str(model), *words, "--template", "qwen-math,r1,none", *out]) == 0
    sets = plans[0].config.data.eval
    names = [f"{name}.{template}" for template in ("qwen-math", "r1", "none") for name in ("a", "b")]
    assert [one.name for one in sets] == names and [one.rollouts_per_prompt for one in sets] == [8, 2] * 3
    assert [one.template for one in sets] == [name.partition(".")[2] for name in names]


def test_a_configuration_gives_engine_verifier_and_sets(plans, model, problems, tmp_path):
    path = tmp_path / "tiny.yaml"
    data = {"train": [str(problems)], "prompt_template": "plain", "eval": [{"name": "held", "path": str(problems)}]}
    content = {"model": {"path": "/elsewhere"}, "data": data, "reward": {"verifier": "exact"}}
    path.write_text(yaml.safe_dump(content))
    assert cli.main(["eval", str(path), "rollout.max_response_tokens=5", "--hf", str(model)]) == 0
    config = plans[0].config
    assert (config.data.eval[0].name, config.reward.verifier, config.model.path) == ("held", "exact", model)
    assert config.data.prompt_template == "plain" and config.rollout.max_response_tokens == 5 and plans[0].ks == (1,)


def test_servers_are_asked_as_the_last_model_path_of_the_command_line(plans, problems, monkeypatch):
    asked: list[Any] = []

    def of_servers(urls, path):
        asked.append((tuple(urls), path))
        raise ConfigError("enough")

    monkeypatch.setattr(measuring, "of_servers", of_servers)
    words = ["model.path=/one", "model.path=/two=2", "--urls", "http://127.0.0.1:1", "--set", f"mine={problems}"]
    assert cli.main(["eval", *words]) == 2
    assert asked == [(("http://127.0.0.1:1",), Path("/two=2"))] and not plans


@pytest.mark.parametrize("given", ["", "checkpoints"])
def test_a_run_is_no_checkpoint_and_names_its_own(plans, tmp_path, capsys, given):
    for name in ("step_000002", "step_000010", "step_000012.tmp"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    assert cli.main(["eval", "--checkpoint", str(tmp_path / given)]) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert "which holds 2 checkpoints; allowed: one of step_000002, step_000010; fix: --checkpoint " in last
    assert last.endswith("/checkpoints/step_000010") and not plans


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--set", "mine={problems}"], "eval: got no model"),
        (["--hf", "{model}", "--urls", "http://127.0.0.1:1", "--set", "mine={problems}"], "eval: got --hf and --urls"),
        (
            ["--hf", "{model}"],
            "data.eval: got no set; allowed: at least one for eval; fix: --suite, --set or data.eval",
        ),
        (["--hf", "/nowhere", "--set", "mine={problems}"], "--hf: /nowhere has no config.json"),
        (["--checkpoint", "/nowhere"], "--checkpoint: got '/nowhere'"),
        (["--hf", "{model}", "--set", "mine={problems}", "--set", "mine={problems}"], "the name mine more than once"),
        (["--hf", "{model}", "--set", "mine={problems}", "--samples", "x"], "--samples: got 'x'"),
        (["--hf", "{model}", "--set", "mine={problems}", "--samples", "0"], "--samples: got 0"),
        (["--hf", "{model}", "--set", "mine={problems}", "--samples", "your=2"], "allowed: the sets mine"),
        (["--hf", "{model}", "--set", "mine={problems}", "--template", "r2"], "--template: got 'r2'"),
        (["--hf", "{model}", "--set", "mine={problems}", "--template", "r1,none,r1"], "--template: got r1 twice"),
        (
            ["reward.verifier=integer", "--hf", "{model}", "--set", "mine={problems}", "--template", "r1"],
            "data.eval.0.template: got r1 with reward.verifier=integer",
        ),
        (["--hf", "{model}", "--set", "mine={problems}", "--top-p", "0"], "--top-p: got 0"),
        (
            ["--hf", "{model}", "--set", "mine={problems}", "--temperature", "0", "--samples", "2"],
            "--samples: got 2 for mine at temperature 0, which would all be equal",
        ),
        (["--urls", "http://127.0.0.1:1", "--set", "mine={problems}"], "--urls: http://127.0.0.1:1 does not answer"),
        (
            ["environment.kind=my:Game", "--hf", "{model}", "--set", "mine={problems}"],
            "environment.kind: got my:Game; allowed: single_turn, since eval measures single answers",
        ),
        (["rollout.max_tokens=3", "--hf", "{model}", "--set", "mine={problems}"], "rollout.max_tokens"),
    ],
)
def test_what_does_not_go_together_is_refused(plans, model, problems, capsys, arguments, says):
    filled = [text.format(model=model, problems=problems) for text in arguments]
    assert cli.main(["eval", *filled]) in (1, 2)
    assert says in capsys.readouterr().err and not plans
