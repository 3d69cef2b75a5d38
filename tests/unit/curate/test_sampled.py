"""Pass rates: which problems are asked and how, how answers on disk become fields, what the range drops or refuses."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from weightless import save_tiny_model

from megatron_daro.cli import main
from megatron_daro.config.sections import RewardSection
from megatron_daro.data.formats import PassRate, pass_rate_of
from megatron_daro.data.prompts import load_problems
from megatron_daro.data.stops import Stops
from megatron_daro.data.templates import HeldOut
from megatron_daro.errors import ConfigError
from megatron_daro.types import Prompt, Rollout, Verdict
from megatron_daro.workshop.curate import pass_rates
from megatron_daro.workshop.curate.pass_rates import Asked, apply, key_of, read_range, summary_of, write_problems
from megatron_daro.workshop.curate.rows import Decisions
from megatron_daro.workshop.evaluate import measuring
from megatron_daro.workshop.evaluate.answers import Answer, AnswerStore, questions_of
from megatron_daro.workshop.evaluate.measuring import MeasuredModel

ASKED = Asked(4, "base", "aa", {"template": "chat"})
MODEL = MeasuredModel(Path("/m/base"), {"served": {"weight_version": "3"}}, ("http://127.0.0.1:1",))


def test_only_rows_that_are_left_are_asked_and_found_again(tmp_path, rows_of):
    rows = rows_of(("a?", "1"), ("b?", "2", "3"), ("c?", "4"), ("d?", "5"))
    decisions = Decisions(4)
    decisions.drop(0, "leak")
    assert write_problems(tmp_path / "sub" / "problems.jsonl", rows, decisions) == 3
    found, _ = load_problems([tmp_path / "sub" / "problems.jsonl"])
    assert [key_of(prompt) for prompt in found] == [key_of(row.prompt) for row in rows[1:]]
    fields = apply(rows, decisions, [(found[0], 1), (found[1], 4)], ASKED, (0.0, 0.9))
    assert fields == {
        1: {
            "pass_rate": 0.25,
            "pass_rate_samples": 4,
            "pass_rate_model": "base",
            "pass_rate_weights": "aa",
            "pass_rate_sampling": '{"template": "chat"}',
        }
    }
    assert decisions.counts() == {"leak": 1, "unsampled": 1, "pass_rate": 1} and decisions.kept() == [1]
    assert decisions.dropped[2].detail == "4 of 4 answers were right"


def test_chats_are_found_again(tmp_path, rows_of):
    chat = ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "a?"})
    (row,) = rows_of(("x", "1"))
    prompt = Prompt(id="", answer="1", source="s", messages=chat)
    object.__setattr__(row, "prompt", prompt)
    write_problems(tmp_path / "problems.jsonl", [row], Decisions(1))
    found, _ = load_problems([tmp_path / "problems.jsonl"])
    assert key_of(found[0]) == key_of(prompt) and key_of(found[0]) != key_of(rows_of(("a?", "1"))[0].prompt)


def test_the_summary_counts_every_problem_that_was_asked():
    prompts = [Prompt(id=str(i), answer="1", source="s", text=str(i)) for i in range(3)]
    found = summary_of(zip(prompts, (0, 4, 1), strict=True), ASKED)
    assert found["problems_by_right_answers"] == {"0/4": 1, "1/4": 1, "2/4": 0, "3/4": 0, "4/4": 1}
    assert found["mean"] == 5 / 12 and found["problems"] == 3


@pytest.mark.parametrize(
    ("text", "found"), [("", None), ("0.1:0.9", (0.1, 0.9)), ("0.05:", (0.05, 1.0)), (":0.5", (0.0, 0.5))]
)
def test_ranges(text, found):
    assert read_range(text) == found


@pytest.mark.parametrize("text", ["0.5", "0.9:0.1", "a:b", "-1:1", "0:2", "nan:1"])
def test_what_is_no_range(text):
    with pytest.raises(ConfigError, match="--pass-rate: got"):
        read_range(text)


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
        questions = questions_of([HeldOut(one, tuple(prompts[:-1]))], seed=0, max_new_tokens=1, stops=Stops(()))
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
    options = ["engine.seed=3", "rollout.max_response_tokens=5", "--template", "data", "--pass-rate", "0.2:0.8"]
    assert curate(tmp_path, "--hf", str(model), *options) == 0
    (plan,) = asked
    assert plan.config.engine.seed == 3 and plan.config.reward.verifier == "exact"
    assert plan.config.data.eval[0].rollouts_per_prompt == 4 and plan.config.data.eval[0].temperature == 1.0
    prompts, report = load_problems([tmp_path / "out" / "curated.parquet"], strict=True)
    assert [prompt.answer for prompt in prompts] == ["1", "2", "3"]
    rates = [report.pass_rates[prompt.id] for prompt in prompts]
    assert rates[0] == PassRate(0.25, 4, "base", rates[0].weights) and rates[0].weights
    statistics = json.loads((tmp_path / "out" / "statistics.json").read_text())
    assert statistics["dropped"] == {"unsampled": 1, "pass_rate": 4} and statistics["kept"] == 3
    assert statistics["pass_rates"]["problems"] == 7 and statistics["pass_rates"]["sampling"]["seed"] == 3
    assert "Pass rates" in (tmp_path / "out" / "page.html").read_text()
    assert list((tmp_path / "out" / "sampling" / "answers").glob("part_*.parquet"))


def test_what_the_model_guesses_goes_before_it_is_sampled(tmp_path, model, asked):
    options = ["--template", "data", "rollout.max_response_tokens=5", "data.template='{prompt}?'"]
    assert curate(tmp_path, "--hf", str(model), *options, "--guess-tries", "2") == 0
    guessing, sampling = (plan.config for plan in asked)
    assert guessing.data.eval[0].rollouts_per_prompt == 2 and not guessing.reward.strict and sampling.reward.strict
    assert guessing.rollout.max_response_tokens == 64 and sampling.rollout.max_response_tokens == 5
    assert guessing.data.prompt_template == "plain" and guessing.data.template.endswith("reasoning.\nAnswer:")
    found = json.loads((tmp_path / "out" / "statistics.json").read_text())
    # Digits 1 to 6 are right at the first try; 0 never is, and the last problem fits no template.
    assert found["dropped"] == {"guessed": 6, "unsampled": 1} and found["kept"] == 1
    assert found["rules"]["guess_tries"] == 2


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--pass-rate", "0:0.5"], "got --pass-rate without a model"),
        (["engine.seed=1"], "got engine.seed=1 without a model"),
        (["--hf", "{model}", "--urls", "http://127.0.0.1:1"], "got --hf and --urls"),
        (["--hf", "{model}", "--verifier", "none"], "--verifier: got none"),
        (["--hf", "{model}", "--temperature", "0"], "--samples: got 4 at temperature 0"),
        (["--hf", "{model}", "engine.sed=1"], "engine.sed"),
        (["--hf", "/nowhere"], "has no config.json"),
    ],
)
def test_what_does_not_go_together(tmp_path, model, asked, capsys, options, said):
    assert curate(tmp_path, *(option.replace("{model}", str(model)) for option in options)) in (1, 2)
    assert said in capsys.readouterr().err and not (tmp_path / "out").exists() and not asked


def test_both_ends_of_the_range_stay_and_a_rate_of_zero_is_one(tmp_path, rows_of):
    rows = rows_of(("a?", "1"), ("b?", "2"), ("c?", "3"), ("d?", "4"))
    right = [(row.prompt, correct) for row, correct in zip(rows, (0, 1, 3, 4), strict=True)]
    decisions = Decisions(4)
    fields = apply(rows, decisions, right, ASKED, (0.25, 0.75))
    assert {index: one["pass_rate"] for index, one in fields.items()} == {1: 0.25, 2: 0.75}
    assert decisions.counts() == {"pass_rate": 2}
    fields = apply(rows, Decisions(4), right, ASKED)
    assert [fields[index]["pass_rate"] for index in range(4)] == [0.0, 0.25, 0.75, 1.0]
    assert pass_rate_of({"pass_rate": 0.0}) == PassRate(0.0) and pass_rate_of({"pass_rate": 1.0}) == PassRate(1.0)


@pytest.fixture
def settings(monkeypatch):
    """What a measurement is asked for."""
    given: list[dict[str, object]] = []

    def configuration(model, sets, out, *, base, overrides, source):
        (one,) = sets
        given.append({"set": one, "out": out, "base": base, "overrides": overrides, "source": source})

    monkeypatch.setattr(pass_rates.measuring, "configuration", configuration)
    return given


@pytest.mark.parametrize(("template", "temperature"), [("chat", 0.0), ("data", 0.7)])
def test_a_model_guesses_in_its_own_template_and_samples_in_the_given(settings, template, temperature):
    overrides = ("data.template=x", "engine.seed=1", "rollout.max_response_tokens=5", "rollout.other=1")
    sampling = pass_rates.Sampling(4, temperature, 0.9, template, "integer", overrides)
    pass_rates.guessing(MODEL, Path("p"), Path("o"), sampling, 3)
    pass_rates.configuration(MODEL, Path("p"), Path("o"), sampling)
    guess, sample = settings
    one = guess["set"]
    assert (one.name, one.path, one.rollouts_per_prompt, one.temperature, one.top_p) == (
        "guess", Path("p"), 3, temperature or 1.0, 0.9,
    )  # fmt: skip
    assert one.drop_unusable and guess["out"] == Path("o") and guess["source"] == sample["source"] == "curate"
    assert guess["overrides"] == ["engine.seed=1", "rollout.other=1", "rollout.max_response_tokens=64"]
    assert guess["base"]["reward"] == {"verifier": "integer", "strict": False}
    data = guess["base"]["data"]
    assert (data["train"], data["max_prompt_tokens"]) == (["p"], 2048)
    assert (data["prompt_template"], data["template"].endswith("\nAnswer:")) == (
        ("chat", False) if template == "chat" else ("plain", True)
    )
    one = sample["set"]
    assert (one.name, one.rollouts_per_prompt, one.temperature, one.top_p, one.template, one.drop_unusable) == (
        "curate", 4, temperature, 0.9, template, True,
    )  # fmt: skip
    assert sample["base"] == {"reward": {"verifier": "integer"}} and sample["overrides"] == overrides


@pytest.mark.parametrize(("version", "known"), [("3", False), ("default", True), ("", True), (None, True)])
def test_weights_of_servers_are_known_where_they_were_never_changed(monkeypatch, version, known):
    monkeypatch.setattr(pass_rates, "weights_digest", lambda path: f"digest of {path.name}")
    one = SimpleNamespace(rollouts_per_prompt=4, template="chat", temperature=1.0, top_p=0.9)
    config = SimpleNamespace(
        data=SimpleNamespace(eval=(one,)),
        rollout=SimpleNamespace(max_response_tokens=7),
        reward=RewardSection(verifier="exact", strict=False),
        engine=SimpleNamespace(seed=5),
    )
    served = {} if version is None else {"served": {"weight_version": version}}
    asked = pass_rates._asked(config, MeasuredModel(Path("/m/base"), served))  # type: ignore[arg-type]
    assert asked == pass_rates.Asked(
        4, "base", "digest of base" if known else "",
        {"template": "chat", "temperature": 1.0, "top_p": 0.9, "max_response_tokens": 7, "verifier": "exact",
         "strict": False, "seed": 5},
    )  # fmt: skip


def test_a_right_guess_is_enough_to_drop_a_row(rows_of):
    rows = rows_of(("a", "1"), ("b", "2"), ("c", "3"))
    decisions = Decisions(3)
    pass_rates.drop_guessed(rows, decisions, [(rows[0].prompt, 1), (rows[1].prompt, 0)], 8)
    assert {row: one.detail for row, one in decisions.dropped.items()} == {0: "1 of 8 guesses were right"}


def test_nothing_asked_has_no_mean_and_a_range_may_be_a_point():
    asked = pass_rates.Asked(2, "base", "", {})
    assert pass_rates.summary_of([], asked)["mean"] is None
    prompt = Prompt(id="", answer="1", source="s", text="a")
    assert pass_rates.summary_of([(prompt, 1), (prompt, 2)], asked)["mean"] == 0.75
    assert pass_rates.read_range("0.5:0.5") == (0.5, 0.5) and pass_rates.read_range(":") == (0.0, 1.0)
    with pytest.raises(ConfigError, match="got 'a'; allowed: LOW:HIGH, both from 0 to 1"):
        pass_rates.read_range("a")
