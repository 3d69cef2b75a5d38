"""A verifier of a user's own in real worker processes: its verdicts, its faults, and what it may not return."""

from __future__ import annotations

import pytest

from megatron_daro.errors import ConfigError, RewardError
from megatron_daro.reward.base import VerifierSpec
from megatron_daro.reward.factory import own_verifier_class
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
    ("wrong", "reason", "counter"),
    [("raises", "verifier_failed", "failures"), ("hangs", "timeout", "timeouts"), ("exits", "crash", "crashes")],
)
def test_what_it_does_to_its_process_costs_one_verdict(wrong: str, reason: str, counter: str) -> None:
    with _pool(timeout_s=2.0, wrong=wrong) as pool:
        assert pool.score([("####3", "3", "3=")]) == [Verdict(False, -1.0, reason)]
        assert pool.counters[counter] >= 1


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ("type", "returned a float; allowed: megatron_daro.types.Verdict"),
        ("reward", "returned reward nan; allowed: a finite number"),
    ],
)
def test_anything_but_a_verdict_is_refused_by_name(wrong: str, words: str) -> None:
    with _pool(wrong=wrong) as pool, pytest.raises(RewardError, match=r"toy_verifier:LastDigit\.verify") as caught:
        pool.score([("####3", "3", "3=")])
    assert words in str(caught.value)


def test_a_constructor_that_raises_ends_the_start_with_its_words() -> None:
    with pytest.raises(RewardError, match=r"cannot be made \(RuntimeError: no such table\)"):
        _pool(wrong="constructor").start()


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("no_such_module:X", {}, "got 'no_such_module:X', which cannot be imported"),
        ("toy_verifier:Missing", {}, "got 'toy_verifier:Missing', which cannot be imported"),
        ("toy_verifier:time", {}, "got 'toy_verifier:time', which is no class"),
        ("toy_verifier:OtherSignature", {}, "write it as `def verify(self, answer_text"),
        ("toy_verifier:Asynchronous", {}, "write it as `def verify(self, answer_text"),
        ("toy_verifier:LastDigit", {"far": 1}, "unexpected keyword argument 'far'"),
    ],
)
def test_a_class_that_does_not_fit_is_named(name: str, options: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        own_verifier_class(name, options)
    assert words in str(caught.value)
