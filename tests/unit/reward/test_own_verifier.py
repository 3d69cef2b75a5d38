"""A verifier of a user's own in real worker processes: its verdicts, its faults, and what it may not return."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import pytest

from megatron_daro.errors import ConfigError, RewardError
from megatron_daro.reward.base import VerifierSpec
from megatron_daro.reward.factory import own_verifier_class, verifier_of
from megatron_daro.reward.pool import RewardPool
from megatron_daro.types import Verdict


def _pool(timeout_s: float = 30.0, **options: object) -> RewardPool:
    spec = VerifierSpec("toy_verifier:LastDigit", incorrect_reward=-1.0, options=options)
    return RewardPool(spec, workers=1, timeout_s=timeout_s)


def test_its_own_rewards_come_back_in_order() -> None:
    with _pool(near=0.25) as pool:
        verdicts = pool.score([("####3", "3", "3="), ("####4", "3", "3="), ("", "3", "3="), (None, "3", "3=")])
    assert verdicts == [
        Verdict(True, 1.0, "match"),
        Verdict(False, 0.25, "near"),
        Verdict(False, 0.0, "no_match"),
        Verdict(False, -1.0, "not_text"),
    ]


def test_equal_answers_to_different_statements_are_not_one_job() -> None:
    with _pool() as pool:
        first, second = pool.score([("####3", "3", "3="), ("####3", "3", "other")])
    assert (first.reason, second.reason) == ("match", "verifier_failed")


@pytest.mark.parametrize(
    ("wrong", "reason", "counter", "timeout_s"),
    [
        ("raises", "verifier_failed", "answered", 30.0),
        ("hangs", "timeout", "timeouts", 0.5),
        ("exits", "crash", "crashes", 30.0),
    ],
)
def test_what_it_does_to_its_process_costs_one_verdict(wrong: str, reason: str, counter: str, timeout_s: float) -> None:
    with _pool(timeout_s=timeout_s, wrong=wrong) as pool:
        assert pool.score([("####3", "3", "3=")]) == [Verdict(False, -1.0, reason)]
        assert pool.counters[counter] >= 1


@pytest.mark.parametrize("wrong", ["type", "reward"])
def test_anything_but_a_verdict_is_refused_by_name(wrong: str) -> None:
    with _pool(wrong=wrong) as pool, pytest.raises(RewardError, match=r"toy_verifier:LastDigit\.verify"):
        pool.score([("####3", "3", "3=")])


class Returns:
    """A verifier that returns what its options say."""

    def __init__(self, **fields: Any) -> None:
        self.verdict = Verdict(**{"correct": True, "reward": 1, "reason": "m", **fields})

    def verify(self, answer_text: str, gold: str, statement: str) -> Verdict:
        return self.verdict


@pytest.mark.parametrize(
    "fields",
    [{"correct": 1}, {"reward": True}, {"reward": "1"}, {"reward": math.inf}, {"reason": ""}, {"reason": None}],
)
def test_a_verdict_with_another_field_is_refused_by_name(fields: dict[str, Any]) -> None:
    verifier = verifier_of(VerifierSpec(f"{__name__}:Returns", options=fields))
    with pytest.raises(RewardError, match=f"{next(iter(fields))} {next(iter(fields.values()))!r}"):
        verifier.verify("answer", "gold")
    assert verifier_of(VerifierSpec(f"{__name__}:Returns")).verify("answer", "gold") == Verdict(True, 1.0, "m")


def test_a_constructor_that_raises_ends_the_start_with_its_words() -> None:
    with pytest.raises(RewardError, match="no such table"):
        _pool(wrong="constructor").start()


@pytest.mark.parametrize(
    ("name", "options", "named"),
    [
        ("no_such_module:X", {}, "no_such_module:X"),
        ("toy_verifier:Missing", {}, "toy_verifier:Missing"),
        ("toy_verifier:time", {}, "toy_verifier:time"),
        ("toy_verifier:OtherSignature", {}, "def verify"),
        ("toy_verifier:Asynchronous", {}, "def verify"),
        ("toy_verifier:LastDigit", {"far": 1}, "far"),
    ],
)
def test_a_class_that_does_not_fit_is_named(name: str, options: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        own_verifier_class(name, options)


def test_answers_that_wait_for_a_worker_hold_no_thread_of_others() -> None:
    async def scored(pool: RewardPool) -> None:
        waiting = [asyncio.create_task(pool.score_async([(f"{i}", "1", "1=")])) for i in range(64)]
        await asyncio.sleep(0)
        try:
            await asyncio.wait_for(asyncio.to_thread(int), 60)
        finally:
            pool.close()
            await asyncio.gather(*waiting, return_exceptions=True)

    asyncio.run(scored(_pool(3600.0, wrong="hangs")))
