"""Any of a prompt's gold answers counts as right, with the real verifiers."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from loop_fakes import make_rollout

from megatron_daro.config import EvalSet
from megatron_daro.data.stops import Stops
from megatron_daro.data.templates import TEMPLATES
from megatron_daro.errors import RewardError
from megatron_daro.observe.metrics import Phases
from megatron_daro.observe.progress import Progress
from megatron_daro.reward.base import VerifierSpec
from megatron_daro.reward.pool import RewardPool
from megatron_daro.rollout.deadlines import Deadlines
from megatron_daro.rollout.evaluation import Evaluator, HeldOut
from megatron_daro.rollout.ledger import Ledger
from megatron_daro.rollout.rollouter import Pending, RolloutCollector, SingleTurn, judge
from megatron_daro.types import Prompt, SamplingParams, TurnReport, Verdict


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


def test_a_scorer_that_loses_a_verdict_is_refused():
    class Forgetful:
        async def score_async(self, pairs):
            return []

    with pytest.raises(RewardError, match="gave 0 verdicts for 2 answers"):
        asyncio.run(judge(Forgetful(), [("#### 1", prompt("1", "2"))]))


def answering_two(group_id: int, index: int, asked: Prompt):
    return replace(make_rollout(group_id, 0, index, asked, version=0), text="#### 2")


def test_training_takes_any_of_the_golds():
    with RewardPool("exact", workers=0) as pool:
        collector = RolloutCollector(
            Ledger(),
            rollouter=SingleTurn(None, pool),
            sampling=SamplingParams(),
            rollouts_per_prompt=2,
            deadlines=Deadlines(),
            phases=Phases(),
            notices=Progress(total_steps=1, rollouts_per_prompt=2, mode="off"),
        )
        pending = {0: Pending(prompt("1", "2")), 1: Pending(prompt("1", "3"))}
        for group_id, entry in pending.items():
            asyncio.run(collector.score([answering_two(group_id, i, entry.prompt) for i in range(2)], pending))
    assert [[v.correct for v in entry.verdicts.values()] for entry in pending.values()] == [[True] * 2, [False] * 2]


@pytest.mark.parametrize(
    ("said", "correct"), [("so </think> <answer> 2 </answer>", True), ("2 is \\boxed{2}", False), ("#### 2", False)]
)
def test_training_verifies_what_the_tags_of_its_template_hold(said, correct):
    class Boxed:
        async def score_async(self, pairs):
            return [Verdict(text == f"\\boxed{{{gold}}}", 0.0, "") for text, gold, _ in pairs]

    collector = RolloutCollector(
        Ledger(),
        rollouter=SingleTurn(None, Boxed()),
        sampling=SamplingParams(),
        rollouts_per_prompt=1,
        deadlines=Deadlines(),
        phases=Phases(),
        notices=Progress(total_steps=1, rollouts_per_prompt=1, mode="off"),
        template=TEMPLATES["r1"],
    )
    pending = {0: Pending(prompt("2"))}
    asyncio.run(collector.score([replace(answering_two(0, 0, pending[0].prompt), text=said)], pending))
    assert pending[0].verdicts[0].correct is correct


def test_evaluation_takes_any_of_the_golds():
    class Engine:
        async def generate(self, requests):
            for request in requests:
                yield tuple(answering_two(request.group_id, i, request.prompt) for i in request.indices)

    sets = [HeldOut(EvalSet(name="digits", path=Path("x")), (prompt("1", "2"), prompt("2"), prompt("1", "3")))]
    with RewardPool("exact", workers=0) as pool:
        evaluator = Evaluator(sets, SingleTurn(Engine(), pool), max_response_tokens=8, stops=Stops((1,)))
        assert asyncio.run(evaluator.evaluate(0)) == {"eval/digits/accuracy": 2 / 3}


def test_evaluation_counts_turns_and_tool_calls_of_conversations():
    turns = {"2": ((0, 1), (0, 1)), "3": ((0, 2),)}
    reports = {"2": (TurnReport(tool_calls=3), TurnReport()), "3": (TurnReport(),)}

    class Engine:
        async def generate(self, requests):
            for r in requests:
                one = answering_two(r.group_id, 0, r.prompt)
                yield (replace(one, turns=turns[r.prompt.answer], reports=reports[r.prompt.answer]),)

    sets = [HeldOut(EvalSet(name="d", path=Path("x")), (prompt("2"), prompt("3")))]
    with RewardPool("exact", workers=0) as pool:
        evaluator = Evaluator(sets, SingleTurn(Engine(), pool), max_response_tokens=8, stops=Stops((1,)))
        found = asyncio.run(evaluator.evaluate(0))
    assert found == {"eval/d/accuracy": 0.5, "eval/d/turns_mean": 1.5, "eval/d/tool_calls_mean": 1.5}


def test_several_answers_to_a_problem_give_pass_at_k():
    """Right answers of four: 4, 0 and 1; pass@2 of the last is 1 - C(3, 2) / C(4, 2) = 1/2."""
    wrong = {"2": 0, "3": 4, "4": 3}

    class Engine:
        async def generate(self, requests):
            for r in requests:
                gold = r.prompt.answer
                texts = ["no"] * wrong[gold] + [f"#### {gold}"] * (4 - wrong[gold])
                yield tuple(replace(answering_two(r.group_id, i, r.prompt), text=texts[i]) for i in r.indices)

    sets = [HeldOut(EvalSet(name="d", path=Path("x"), rollouts_per_prompt=4), (prompt("2"), prompt("3"), prompt("4")))]
    with RewardPool("exact", workers=0) as pool:
        found = asyncio.run(
            Evaluator(sets, SingleTurn(Engine(), pool), max_response_tokens=8, stops=Stops((1,))).evaluate(0)
        )
    assert found == pytest.approx({"eval/d/accuracy": 5 / 12, "eval/d/pass_at/2": 0.5, "eval/d/pass_at/4": 2 / 3})
