"""The lab's tiny world: its task, what is read from a run, and (heavy) a shortest run of the product."""

from __future__ import annotations

import dataclasses
import json
import random
import subprocess
import sys
from pathlib import Path

import chains
import one_process
import problems
import pytest
import tiny_run
import yaml
from worlds import WORLDS

from megatron_daro.config import to_yaml
from megatron_daro.errors import ConfigError, DaroError
from megatron_daro.observe.metrics import comparable, read_metrics

SETTINGS = chains.ChainSettings()


def test_an_answer_is_right_unless_a_slip_was_left_in_and_then_it_lingers():
    rng, seen = random.Random(0), set()
    for _ in range(600):
        problem = problems.draw(rng, SETTINGS.shares)
        text = chains.worked_answer(problem, rng, SETTINGS)
        steps, answer = text.split(problems.MARKER)
        kind = ("," in steps, steps.count(";") > problem.digits)
        seen.add(kind)
        if not kind[0]:
            assert answer == problem.answer
        elif answer == problem.answer:
            # Two slips can cancel: one carries too much and the next adds too little.
            assert problem.digits > 1
    assert len(seen) == 4, "with and without lingering and retries"


def test_a_fact_goes_wrong_as_often_as_it_is_known_badly():
    facts = [(a, b, 0) for a in range(10) for b in range(10)]
    rates = [chains.slip_rate(*fact) for fact in facts]
    assert 0 <= min(rates) < 0.01 and 0.7 < max(rates) < 0.8
    a, b, _ = max(facts, key=lambda fact: chains.slip_rate(*fact))
    rng, never = random.Random(1), dataclasses.replace(SETTINGS, retry=0.0)
    wrong = sum("," in chains.worked_answer(problems.Sum(a, b), rng, never) for _ in range(600)) / 600
    assert wrong == pytest.approx(max(rates), abs=0.06)


def test_longer_sums_are_harder_and_wrong_answers_longer():
    rng, shares = random.Random(5), []
    for digits in (1, 5):
        lengths: dict[bool, list[int]] = {True: [], False: []}
        for _ in range(1500):
            problem = problems.draw(rng, {digits: 1.0})
            text = chains.worked_answer(problem, rng, SETTINGS)
            lengths[text.split(problems.MARKER)[1] == problem.answer].append(len(text))
        right, wrong = (sum(lengths[v]) / len(lengths[v]) for v in (True, False))
        assert wrong > 1.3 * right
        shares.append(len(lengths[True]) / 1500)
    assert shares[0] > 0.65 and shares[1] < 0.4


def test_no_text_is_about_a_held_out_sum(tmp_path):
    settings = chains.ChainSettings(seed=3, batch=300)
    held_out = settings.held_out()
    asked = [tuple(sorted(map(int, text.rstrip("=").split("+")))) for text, _ in settings.texts(1, held_out)]
    assert len(asked) == 300 and not held_out & set(asked)
    assert settings.texts(2, held_out) == settings.texts(2, held_out) != settings.texts(3, held_out)
    settings.write_data(tmp_path)
    trained, kept = (
        {json.loads(line)["problem"] for line in (tmp_path / name).read_text().splitlines()}
        for name in ("train.jsonl", "held_out.jsonl")
    )
    assert len(kept) == len(held_out) and trained and not kept & trained


def test_the_longest_problem_and_answer_fit():
    content = yaml.safe_load(Path(tiny_run.__file__).with_name("chains.yaml").read_text())
    assert content["data"]["max_prompt_tokens"] >= 2 * problems.MAX_DIGITS + 3
    rng = random.Random(2)
    texts = [chains.worked_answer(problems.draw(rng, {5: 1.0}), rng, SETTINGS) for _ in range(2000)]
    assert max(len(t) - 2 for t in texts) <= content["rollout"]["max_response_tokens"]


def test_records_are_those_of_the_metrics(tmp_path):
    rows = [
        {
            "step": 0,
            "eval/chains/accuracy": 0.3,
            "eval/chains/accuracy/digits_5": 0.1,
            "eval/chains/accuracy/digits_1": 0.8,
            "eval/chains/pass_at/4": 0.5,
            "eval/chains/pass_at/2": 0.4,
        },
        {"step": 1, "rollout/groups_admitted": 20, "difficulty/weight/1": 1.1, "difficulty/weight/2": 0.9}
        | {"rollout/generated_tokens": 700.0},
        {"step": 2, "rollout/groups_admitted": 41, "difficulty/clamped": 1.0, "eval/chains/accuracy": 0.4}
        | {"rollout/generated_tokens": 55.0},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    first, last = tiny_run.read_records(tmp_path, tiny_run.TinyDials())
    assert (first["step"], first["accuracy"], first["answers"], first["weights"]) == (0, 0.3, 0, [])
    assert first["pass_at"] == [0.3, 0.4, 0.5] and last["pass_at"] == [0.4]
    assert first["bands"][0] == 0.1 and first["bands"][-1] == 0.8
    assert (last["answers"], last["weights"], last["clamped"]) == (328, [1.0, 1.1, 0.9, 1.0], 1)
    assert (first["tokens"], last["tokens"]) == (0, 755)


def test_two_sets_are_one_accuracy_and_the_bands_are_kinds(tmp_path):
    dials = WORLDS["smollm2"].dials
    row = {"step": 5, "eval/numbers/accuracy": 0.4, "eval/wordings/accuracy": 0.2, "rollout/generated_tokens": 9.0}
    row |= {"eval/numbers/accuracy/half": 0.5, "eval/wordings/accuracy/half": 0.1}
    alone = {"step": 6, "eval/numbers/accuracy": 0.9}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(row) + "\n" + json.dumps(alone) + "\n")
    (record,) = tiny_run.read_records(tmp_path, dials)
    assert record["accuracy"] == pytest.approx(0.3) and record["pass_at"] == [record["accuracy"]]
    assert record["bands"][list(dials.bands).index("half")] == pytest.approx(0.3) and len(record["bands"]) == 13
    assert record["tokens"] == 9


def test_options_of_a_run_are_options_of_the_product(tmp_path):
    arms = [(WORLDS[name].dials, arm) for name in ("chains", "smollm2") for arm in WORLDS[name].arms or ()]
    for dials, arm in arms:
        config = tiny_run.config_of(dials, arm, 1e-3, 4, tmp_path, tmp_path / "run")
        assert [one.name for one in config.data.eval] == list(dials.sets) and config.actor.world_size == 1
        assert config.actor.optimizer.learning_rate == 1e-3 and config.trainer.seed == 4
        assert config.rollout.rollouts_per_prompt == 8, "read_records counts answers so"


def test_the_ladders_runs_have_dapos_rewards_and_several_updates_for_each_batch(tmp_path):
    world = WORLDS["chains_ladder"]
    for arm in world.arms or ():
        config = tiny_run.config_of(world.dials, arm, 2e-4, 5, tmp_path, tmp_path / "run")
        assert config.reward.incorrect_reward == -1.0 and config.trainer.minibatches_per_batch == 4
        assert config.trainer.steps == 4 * tiny_run.TinyDials().steps, "as many batches as in chains"


def test_a_failure_that_is_not_about_numbers_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(tiny_run, "base_of", lambda *_: tmp_path / "no base")
    with pytest.raises(DaroError, match="no base"):
        tiny_run.run_arm(tiny_run.TinyDials(steps=1), "grpo", 1e-3, 0, tmp_path)


def test_what_takes_more_than_one_process_is_refused(tmp_path):
    config = tiny_run.config_of(tiny_run.TinyDials(), "grpo", 1e-3, 0, tmp_path, tmp_path / "run")
    engine = config.engine.model_copy(update={"replicas": 2})
    with pytest.raises(ConfigError, match="engine"):
        one_process.train(config.model_copy(update={"engine": engine}))
    assert not (tmp_path / "run").exists()


@pytest.mark.heavy
@pytest.mark.timeout(1200)
def test_a_run_in_one_process_has_the_numbers_of_the_command(tmp_path):
    one_digit = {"shares": {1: 1.0}, "training_shares": {1: 1.0}, "training_draws": 60}  # solved sometimes, so early
    base = chains.ChainSettings(steps=150, batch=32, hidden=48, layers=1, ffn=96, **one_digit)
    dials = tiny_run.TinyDials(steps=3, every=2, evaluated=1, base=base)
    first, again = (tiny_run.run_arm(dials, "daro", 1e-3, 0, tmp_path) for _ in range(2))
    assert not first.ended and [r["step"] for r in first.records] == [0, 2, 3]
    assert json.dumps(first.records) == json.dumps(again.records)
    config = tiny_run.config_of(dials, "daro", 1e-3, 0, tiny_run.base_of(dials, tmp_path), tmp_path / "command")
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    command = [sys.executable, "-W", "ignore", "-m", "megatron_daro", "train", str(tmp_path / "config.yaml")]
    subprocess.run(command, check=True, capture_output=True, timeout=600)
    theirs, own = (metrics_of(tmp_path / name) for name in ("command", "daro-0.001-0"))
    assert theirs == own and len(own) == 4 and "difficulty/weight/1" in own[3]


def metrics_of(run_dir):
    """Lines of metrics without times, and without what a process that dies would leave there."""
    return [comparable(row) for row in read_metrics(run_dir)]
