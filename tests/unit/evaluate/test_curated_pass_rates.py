"""`megatron-daro curate` that asks a model: pass rates become fields, and drop or keep problems."""

from __future__ import annotations

import json

import numpy as np
import pytest
from model_servers import serving
from weightless import save_tiny_model

from megatron_daro.cli import main
from megatron_daro.data.formats import PassRate
from megatron_daro.data.prompts import load_problems
from megatron_daro.data.stops import Stops
from megatron_daro.data.templates import HeldOut
from megatron_daro.types import Rollout, Verdict
from megatron_daro.workshop.evaluate import measuring
from megatron_daro.workshop.evaluate.answers import Answer, AnswerStore
from megatron_daro.workshop.evaluate.questions import questions_of


@pytest.fixture
def model(tmp_path):
    return save_tiny_model(tmp_path / "base")


@pytest.fixture
def asked(monkeypatch):
    """In place of engines: digit d of 10 is answered right by d of K samples; the last problem fits no template."""
    plans = []

    def ask_all(plan, notices):
        plans.append(plan)
        (one,) = plan.config.data.eval
        prompts, _ = load_problems([one.path], repeats="keep")
        questions = questions_of([HeldOut(one, tuple(prompts[:-1]))], max_new_tokens=1, stops=Stops(()))
        store = AnswerStore(plan.out)
        for question in questions:
            for index in range(one.rollouts_per_prompt + 1):  # one more than is wanted: of an earlier command
                right = index < int(question.prompt.answer)
                rollout = Rollout(
                    question.prompt.id, question.group_id, 0, index, np.array([1, 2], np.int32), 1,
                    np.ones(1, np.uint8), np.zeros(1, np.float32), "stop", 0, "x",
                )  # fmt: skip
                store.add(Answer(question.prompt, rollout, Verdict(right, float(right), "")))
        store.flush()
        return [], questions

    monkeypatch.setattr(measuring, "ask_all", ask_all)
    return plans


def curate(folder, *more):
    folder.joinpath("train.jsonl").write_text(
        "".join(json.dumps({"problem": f"{d}=", "answer": str(d)}) + "\n" for d in range(8))
    )
    words = ["curate", f"{folder}/train.jsonl", "--out", f"{folder}/out", "--verifier", "exact", "--samples", "4"]
    return main([*words, *more])


def test_a_curated_set_carries_its_pass_rates(tmp_path, model, asked):
    """Both ends of the range stay."""
    options = ["engine.seed=3", "rollout.max_response_tokens=5", "--template", "data", "--pass-rate", "0.25:0.75"]
    assert curate(tmp_path, "--hf", str(model), *options) == 0
    (plan,) = asked
    assert plan.config.engine.seed == 3 and plan.config.reward.verifier == "exact"
    assert plan.config.data.eval[0].rollouts_per_prompt == 4 and plan.config.data.eval[0].temperature == 1.0
    prompts, report = load_problems([tmp_path / "out" / "curated.parquet"], strict=True)
    assert [prompt.answer for prompt in prompts] == ["1", "2", "3"]
    rates = [report.pass_rates[prompt.id] for prompt in prompts]
    assert rates == [PassRate(right / 4, 4, "base", rates[0].weights) for right in (1, 2, 3)] and rates[0].weights
    statistics = json.loads((tmp_path / "out" / "statistics.json").read_text())
    assert statistics["dropped"] == {"unsampled": 1, "pass_rate": 4} and statistics["kept"] == 3
    found = statistics["pass_rates"]
    assert found["problems"] == 7 and found["sampling"]["seed"] == 3
    assert found["problems_by_right_answers"] == {"0/4": 1, "1/4": 1, "2/4": 1, "3/4": 1, "4/4": 3}
    assert found["mean"] == pytest.approx((1 + 2 + 3 + 3 * 4) / 28)
    assert list((tmp_path / "out" / "sampling" / "answers").glob("part_*.parquet"))


@pytest.mark.parametrize(("version", "known"), [("default", True), ("3", False)])
def test_weights_of_servers_are_known_where_they_were_never_changed(tmp_path, model, asked, version, known):
    with serving((model, version)) as (url,):
        assert curate(tmp_path, "--urls", url, "--template", "data") == 0
    prompts, report = load_problems([tmp_path / "out" / "curated.parquet"], strict=True)
    assert [prompt.answer for prompt in prompts] == [str(digit) for digit in range(7)]
    assert {bool(report.pass_rates[prompt.id].weights) for prompt in prompts} == {known}
    assert report.pass_rates[prompts[0].id].rate == 0.0


RANGES = ("0.5", "0.9:0.1", "a:b", "-1:1", "nan:1")


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--pass-rate", "0:0.5"], "--pass-rate"),  # without a model
        (["engine.seed=1"], "engine.seed=1"),
        (["--hf", "{model}", "--urls", "http://127.0.0.1:1"], "--urls"),
        (["--hf", "{model}", "--verifier", "none"], "--verifier"),
        (["--hf", "{model}", "--temperature", "0"], "--samples"),
        (["--hf", "{model}", "engine.sed=1"], "engine.sed"),
        (["--hf", "/nowhere"], "/nowhere"),
        *((["--hf", "{model}", "--pass-rate", text], "--pass-rate") for text in RANGES),
    ],
)
def test_what_does_not_go_together(tmp_path, model, asked, capsys, options, named):
    assert curate(tmp_path, *(option.replace("{model}", str(model)) for option in options)) in (1, 2)
    assert named in capsys.readouterr().err and not (tmp_path / "out").exists() and not asked
