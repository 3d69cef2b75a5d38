"""`megatron-daro eval`: which model, which sets, which numbers; what does not go together is refused before a start."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import save_file
from weightless import save_tiny_model

from megatron_daro import cli
from megatron_daro.config.model_shape import read_model_shape
from megatron_daro.convert.mapping import hf_tensor_shapes
from megatron_daro.workshop.evaluate import measuring


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The plans that reach the runtime, in place of engines."""
    found: list[Any] = []
    summary: dict[str, Any] = {"sets": {}, "mean": {}}
    monkeypatch.setattr(measuring, "measure", lambda plan, notices: found.append(plan) or summary)
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


def test_a_checkpoint_of_a_run_is_asked_under_the_configuration_of_the_run(plans, problems, tmp_path):
    model = save_tiny_model(tmp_path / "base")
    shapes = hf_tensor_shapes(read_model_shape(model / "config.json"))
    save_file({name: torch.zeros(shape) for name, shape in shapes.items()}, model / "model.safetensors")
    checkpoint = tmp_path / "run/checkpoints/step_000003"
    assert cli.main(["convert", "--hf", str(model), "--out", str(checkpoint), "--processes", "1"]) == 0
    content = {"model": {"path": str(model)}, "data": {"train": ["x"]}, "reward": {"verifier": "exact"}}
    (tmp_path / "run/config.yaml").write_text(yaml.safe_dump(content))
    options = ["--set", f"mine={problems}", "--template", "none", "--out", str(tmp_path / "out")]
    assert cli.main(["eval", "--checkpoint", str(checkpoint), *options]) == 0
    assert plans[0].config.reward.verifier == "exact"


@pytest.mark.parametrize("given", ["", "checkpoints"])
def test_a_run_is_no_checkpoint_and_names_its_own(plans, tmp_path, capsys, given):
    for name in ("step_000002", "step_000010", "step_000012.tmp"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    assert cli.main(["eval", "--checkpoint", str(tmp_path / given)]) == 2
    said = capsys.readouterr().err
    assert "step_000002, step_000010" in said and f"{tmp_path}/checkpoints/step_000010" in said and not plans


MINE = ["--hf", "{model}", "--set", "mine={problems}"]


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (["--set", "mine={problems}"], ["--hf", "--checkpoint", "--urls"]),
        (["--hf", "{model}", "--urls", "http://127.0.0.1:1", "--set", "mine={problems}"], ["--hf", "--urls"]),
        (["--hf", "{model}"], ["data.eval", "--suite", "--set"]),
        (["--hf", "/nowhere", "--set", "mine={problems}"], ["--hf", "/nowhere"]),
        (["--checkpoint", "/nowhere"], ["--checkpoint", "'/nowhere'"]),
        ([*MINE, "--set", "mine={problems}"], ["mine"]),
        ([*MINE, "--samples", "0"], ["--samples", "got 0"]),
        ([*MINE, "--samples", "your=2"], ["--samples", "your=2", "mine"]),
        ([*MINE, "--template", "r2"], ["--template", "'r2'"]),
        ([*MINE, "--template", "r1,none,r1"], ["--template", "r1"]),
        (["reward.verifier=integer", *MINE, "--template", "r1"], ["reward.verifier", "integer", "r1"]),
        ([*MINE, "--top-p", "0"], ["--top-p"]),
        ([*MINE, "--temperature", "0", "--samples", "2"], ["--samples", "temperature 0"]),
        (["environment.kind=my:Game", *MINE], ["environment.kind", "my:Game"]),
        (["rollout.max_tokens=3", *MINE], ["rollout.max_tokens"]),
    ],
)
def test_what_does_not_go_together_is_refused(plans, model, problems, capsys, arguments, names):
    filled = [text.format(model=model, problems=problems) for text in arguments]
    assert cli.main(["eval", *filled]) in (1, 2)
    said = capsys.readouterr().err
    assert all(name in said for name in names) and not plans, said


def test_a_file_as_the_directory_of_the_evaluation_is_named_by_the_option(model, problems, capsys):
    options = ["--set", f"mine={problems}", "--template", "none", "--out", str(problems)]
    assert cli.main(["eval", "--hf", str(model), *options]) == 2
    told = capsys.readouterr().err
    assert f"--out: got {str(problems)!r}, which cannot be written" in told and "run_dir" not in told
