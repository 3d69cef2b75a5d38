"""Any of a prompt's gold answers counts as right, with the real verifiers: in training and in evaluation."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from loop_fakes import FakeEngine, FakePhases, FakeProgress, FakeSource, make_rollout, make_sampler

from megatron_daro.config import EvalSet
from megatron_daro.data.stops import Stops
from megatron_daro.data.templates import TEMPLATES
from megatron_daro.reward.base import VerifierSpec
from megatron_daro.reward.pool import RewardPool
from megatron_daro.rollout.evaluation import Evaluator, HeldOut
from megatron_daro.rollout.rollouter import SingleTurn, judge
from megatron_daro.types import Prompt, TurnReport, Verdict


def prompt(*golds: str) -> Prompt:
    return Prompt(id="p", answer=golds[0], source="s", text="?", tokens=(3,), alternatives=golds[1:])


@given(st.lists(st.tuples(st.integers(0, 4), st.lists(st.integers(0, 4), min_size=1, max_size=3)), max_size=8))
def test_an_answer_is_right_if_one_gold_is(cases):
    with RewardPool(VerifierSpec("exact", correct_reward=2.0, incorrect_reward=-1.0), workers=0) as pool:
        asked = [(f"#### {answer}", prompt(*map(str, golds))) for answer, golds in cases]
        verdicts = asyncio.run(judge(pool, asked))
    assert [v.correct for v in verdicts] == [answer in golds for answer, golds in cases]
    assert [v.reward for v in verdicts] == [2.0 if answer in golds else -1.0 for answer, golds in cases]


def test_the_verdict_of_a_wrong_answer_is_that_of_the_first_gold():
    with RewardPool("exact", workers=0) as pool:
        verdicts = asyncio.run(judge(pool, [("no marker", prompt("1", "2")), ("#### 3", prompt("", "2"))]))
    assert [v.reason for v in verdicts] == ["no_answer", "gold_empty"]


def answering(group_id: int, index: int, asked: Prompt, text: str = "#### 2"):
    return replace(make_rollout(group_id, 0, index, asked, version=0), text=text)


def trained(scorer, prompts, text="#### 2", **options):
    """The groups of a batch of these prompts, to each of which the model answers the same."""
    engine, source = FakeEngine(), FakeSource()
    engine.version, source.next = 0, lambda n: prompts[:n]
    engine.answer = lambda r: tuple(answering(r.group_id, i, r.prompt, text) for i in r.indices)
    rollout = {"prompts_per_batch": len(prompts), "oversampling": 1.0, "rollouts_per_prompt": 2}
    parts = engine, source, FakeProgress(), FakePhases()
    sampler = make_sampler(*parts, scorer=scorer, rollout=rollout, filter_groups=False, **options)
    return asyncio.run(sampler.sample(0)).groups


def test_training_takes_any_of_the_golds():
    with RewardPool("exact", workers=0) as pool:
        groups = trained(pool, [prompt("1", "2"), prompt("1", "3")])
    assert [[v.correct for v in group.verdicts] for group in groups] == [[True] * 2, [False] * 2]


@pytest.mark.parametrize(
    ("said", "correct"), [("so </think> <answer> 2 </answer>", True), ("2 is \\boxed{2}", False), ("#### 2", False)]
)
def test_training_verifies_what_the_tags_of_its_template_hold(said, correct):
    class Boxed:
        failed_starts = 0

        async def score_async(self, pairs):
            return [Verdict(text == f"\\boxed{{{gold}}}", 0.0, "") for text, gold, _ in pairs]

    (group,) = trained(Boxed(), [prompt("2")], said, template=TEMPLATES["r1"])
    assert [v.correct for v in group.verdicts] == [correct] * 2


def evaluated(answers, *prompts, **section):
    """The metrics of an evaluation on these prompts. answers: request -> rollouts."""

    class Engine:
        async def generate(self, requests):
            for request in requests:
                yield answers(request)

    sets = [HeldOut(EvalSet(name="d", path=Path("x"), **section), prompts)]
    with RewardPool("exact", workers=0) as pool:
        evaluator = Evaluator(sets, SingleTurn(Engine(), pool), max_response_tokens=8, stops=Stops((1,)))
        return asyncio.run(evaluator.evaluate(0))


def test_evaluation_takes_any_of_the_golds():
    def answers(request):
        return tuple(answering(request.group_id, i, request.prompt) for i in request.indices)

    found = evaluated(answers, prompt("1", "2"), prompt("2"), prompt("1", "3"))
    assert found == {"eval/d/accuracy": 2 / 3}


def test_evaluation_counts_turns_and_tool_calls_of_conversations():
    turns = {"2": ((0, 1), (0, 1)), "3": ((0, 2),)}
    reports = {"2": (TurnReport(tool_calls=3), TurnReport()), "3": (TurnReport(),)}

    def answers(request):
        one, gold = answering(request.group_id, 0, request.prompt), request.prompt.answer
        return (replace(one, turns=turns[gold], reports=reports[gold]),)

    found = evaluated(answers, prompt("2"), prompt("3"))
    assert found == {"eval/d/accuracy": 0.5, "eval/d/turns_mean": 1.5, "eval/d/tool_calls_mean": 1.5}


def test_several_answers_to_a_problem_give_pass_at_k():
    """Right answers of four: 4, 0 and 1; pass@2 of the last is 1 - C(3, 2) / C(4, 2) = 1/2."""
    wrong = {"2": 0, "3": 4, "4": 3}

    def answers(request):
        gold = request.prompt.answer
        texts = ["no"] * wrong[gold] + [f"#### {gold}"] * (4 - wrong[gold])
        return tuple(answering(request.group_id, i, request.prompt, texts[i]) for i in request.indices)

    found = evaluated(answers, prompt("2"), prompt("3"), prompt("4"), rollouts_per_prompt=4)
    assert found == pytest.approx({"eval/d/accuracy": 5 / 12, "eval/d/pass_at/2": 0.5, "eval/d/pass_at/4": 2 / 3})
