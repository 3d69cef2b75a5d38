"""Any of a prompt's gold answers counts as right, with the real verifiers."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_daro.errors import RewardError
from megatron_daro.reward.base import VerifierSpec
from megatron_daro.reward.pool import RewardPool
from megatron_daro.rollout.judging import judge
from megatron_daro.types import Prompt


def prompt(*golds: str) -> Prompt:
    return Prompt(id="p", answer=golds[0], source="s", text="?", alternatives=golds[1:])


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
