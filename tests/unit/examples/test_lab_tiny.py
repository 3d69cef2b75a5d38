"""The lab's tiny world: its task, what is read from a run, and (heavy) a shortest run of the product."""

from __future__ import annotations

import dataclasses
import json
import random

import chains
import pytest
import tiny_run
from worlds import WORLDS

from megatron_daro.config import resolve
from megatron_daro.errors import DaroError

CAREFUL = chains.ChainSettings(slip=0.0, slip_after_pause=0.0)


def test_answers_without_slips_are_right_and_hesitate_where_a_fact_is_known_badly():
    rng = random.Random(0)
    for _ in range(200):
        chain = chains.draw(rng, CAREFUL.lengths)
        text = chains.worked_answer(chain, rng, CAREFUL)
        assert text.split("####")[1] == chain.answer and text.count(";") == len(chain.operations)
    rates = [chains.hesitation(o, a, b) for o in chains.OPERATIONS for a in range(10) for b in range(10)]
    assert 0 <= min(rates) < 0.01 and 0.8 < max(rates) < 0.9
    badly = max(((o, a, b) for o in "+-*" for a in range(10) for b in range(10)), key=lambda f: chains.hesitation(*f))
    chain = chains.Chain((badly[1], badly[2]), badly[0])
    paused = sum("," in chains.worked_answer(chain, rng, CAREFUL) for _ in range(500)) / 500
    assert paused == pytest.approx(chains.hesitation(*badly), abs=0.06)


def test_a_step_is_its_operation_on_the_last_digit():
    assert [chains.result(o, 3, 7) for o in "+-*"] == [0, 6, 1]
    chain = chains.Chain((7, 5, 3), "+-")
    assert (chain.text, chain.answer) == ("7+5-3=", "9")
    assert (
        chains.worked_answer(chain, random.Random(1), dataclasses.replace(CAREFUL, pause=(0, 0))) == "7+5=2;2-3=9;####9"
    )


def test_slips_make_answers_wrong_and_longer_and_some_are_taken_back():
    settings, rng = chains.ChainSettings(), random.Random(5)
    lengths: dict[bool, list[int]] = {True: [], False: []}
    taken_back = 0
    for _ in range(1500):
        chain = chains.draw(rng, {5: 1.0})
        text = chains.worked_answer(chain, rng, settings)
        lengths[text.split("####")[1] == chain.answer].append(len(text))
        taken_back += "(" in text
    right, wrong = (sum(lengths[v]) / len(lengths[v]) for v in (True, False))
    assert 0.2 < len(lengths[True]) / 1500 < 0.4 and 1.25 < wrong / right < 1.6 and taken_back > 100


def test_no_text_is_about_a_held_out_chain(tmp_path):
    settings = chains.ChainSettings(seed=3, batch=300, lengths={1: 1.0, 2: 1.0})
    held_out = settings.held_out()
    assert len(held_out) == 2 * chains.HELD_OUT_EACH
    assert not held_out & {problem for problem, _ in settings.texts(1, held_out)}
    settings.write_data(tmp_path)
    trained, kept = (
        {json.loads(line)["problem"] for line in (tmp_path / name).read_text().splitlines()}
        for name in ("train.jsonl", "held_out.jsonl")
    )
    assert kept == held_out and trained and not kept & trained
    assert settings.texts(2, held_out) == settings.texts(2, held_out) != settings.texts(3, held_out)


def test_the_longest_problem_and_answer_fit(tmp_path):
    import yaml

    content = yaml.safe_load((tiny_run._HERE / "chains.yaml").read_text())
    assert content["data"]["max_prompt_tokens"] >= 2 * chains.MOST_OPERATIONS + 3
    settings, rng = chains.ChainSettings(), random.Random(2)
    texts = [chains.worked_answer(chains.draw(rng, {7: 1.0}), rng, settings) for _ in range(2000)]
    too_long = sum(len(t) - 3 > content["rollout"]["max_response_tokens"] for t in texts)
    assert too_long < 20


def test_records_are_those_of_the_metrics(tmp_path):
    rows = [
        {
            "step": 0,
            "eval/chains/accuracy": 0.3,
            "eval/chains/accuracy/steps_7": 0.1,
            "eval/chains/accuracy/steps_1": 0.8,
        },
        {"step": 1, "rollout/groups_admitted": 20, "difficulty/weight/1": 1.1, "difficulty/weight/2": 0.9},
        {"step": 2, "rollout/groups_admitted": 41, "difficulty/clamped": 1.0, "eval/chains/accuracy": 0.4},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    first, last = tiny_run.read_records(tmp_path)
    assert (first["step"], first["accuracy"], first["answers"], first["weights"]) == (0, 0.3, 0, [])
    assert first["bands"][0] == 0.1 and first["bands"][-1] == 0.8
    assert (last["answers"], last["weights"], last["clamped"]) == (328, [1.0, 1.1, 0.9, 1.0], 1)


def test_options_of_a_run_are_options_of_the_product(tmp_path):
    for arm in WORLDS["chains"].arms or ():
        options = tiny_run._options(tiny_run.TinyDials(), tmp_path, tmp_path / "run", 1e-3, 4)
        config = resolve(tiny_run._HERE / "chains.yaml", options + tiny_run.command_line(arm))
        assert config.actor.optimizer.learning_rate == 1e-3 and config.trainer.seed == 4
        assert config.rollout.rollouts_per_prompt == 8, "read_records counts answers so"


def test_a_failure_that_is_not_about_numbers_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(tiny_run, "base_of", lambda *_: tmp_path / "no base")
    with pytest.raises(DaroError, match=r"tiny world: grpo, seed 0: the run failed:\n(.|\n)*no base"):
        tiny_run.run_arm(tiny_run.TinyDials(steps=1), "grpo", 1e-3, 0, tmp_path)


@pytest.mark.heavy
def test_a_shortest_run_of_the_product_can_be_repeated(tmp_path):
    base = chains.ChainSettings(steps=30, batch=16, hidden=32, layers=1, ffn=48, training_draws=200)
    dials = tiny_run.TinyDials(steps=2, every=1, evaluated=1, base=base)
    first, again = (tiny_run.run_arm(dials, "grpo", 1e-3, 0, tmp_path) for _ in range(2))
    assert not first.ended and [r["step"] for r in first.records] == [0, 1, 2]
    assert json.dumps(first.records) == json.dumps(again.records)
