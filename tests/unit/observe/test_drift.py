"""When engine and trainer drift apart: one warning per drift, at which limits, and the reason that is suggested."""

from __future__ import annotations

import math

import pytest

from megatron_daro.observe.drift import BASELINE_STEPS, PATIENCE, DriftWatch

KL, ABS, CORRECTED, AGE = (
    "mismatch/kl",
    "mismatch/logprob_abs_mean",
    "mismatch/corrected_fraction",
    "rollout/staleness_mean",
)
NORMAL = {KL: 0.005, ABS: 0.02, CORRECTED: 0.0, AGE: 0.0, "loss/policy": 1.0}


def feed(watch, *changes, first=1):
    """Observes NORMAL with each change; the warnings as (number of the change, text)."""
    texts = [watch.observe(first + i, NORMAL | change) for i, change in enumerate(changes)]
    return [(i, text) for i, text in enumerate(texts) if text]


def settled(**options):
    watch = DriftWatch(**options)
    assert not feed(watch, *[{}] * BASELINE_STEPS)
    return watch


def test_growth_for_several_steps_is_warned_of_once():
    warnings = feed(settled(), *[{KL: 0.02}] * 20, first=9)
    ((number, text),) = warnings
    assert number == PATIENCE - 1
    assert all(fact in text for fact in ("step 11", "mismatch/kl", "0.02", "0.015"))


def test_a_single_odd_step_is_nothing():
    assert not feed(settled(), *[{KL: 1.0}, {KL: 1.0}, {}] * 10)


def test_it_warns_again_after_a_recovery_and_not_after_a_short_one():
    drift, normal = [{KL: 0.02}] * PATIENCE, [{}] * PATIENCE
    assert len(feed(settled(), *drift, *normal, *drift)) == 2
    assert len(feed(settled(), *drift, *normal[1:], *drift)) == 1


def test_growth_below_the_floor_is_nothing():
    watch = DriftWatch()
    assert not feed(watch, *[{KL: 1e-6, ABS: 1e-4}] * BASELINE_STEPS, *[{KL: 0.009, ABS: 0.049}] * 10)


def test_a_constant_mismatch_is_nothing_below_the_ceiling_and_warned_of_above():
    assert not feed(DriftWatch(), *[{KL: 0.09, ABS: 0.2}] * 30)
    ((number, text),) = feed(DriftWatch(), *[{KL: 0.11}] * 30)
    assert number == PATIENCE - 1 and "0.1" in text
    ((number, _),) = feed(DriftWatch(), *[{KL: 0.09}] * BASELINE_STEPS, *[{KL: 0.11}] * 30)
    assert number == BASELINE_STEPS + PATIENCE - 1


def test_odd_steps_in_the_baseline_do_not_move_it():
    watch = DriftWatch()
    feed(watch, *[{KL: 0.09}] * 2, *[{}] * (BASELINE_STEPS - 2))
    assert feed(watch, *[{KL: 0.02}] * PATIENCE)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_is_warned_of_at_once(value):
    ((number, text),) = feed(DriftWatch(), {ABS: value}, {ABS: value})
    assert number == 0 and "mismatch/logprob_abs_mean" in text


@pytest.mark.parametrize(
    ("correction", "change", "remedy"),
    [
        ("none", {KL: 0.05, AGE: 1.0}, "algorithm.correction.kind=tis"),
        ("tis", {KL: 0.05, AGE: 1.0}, "rollout.max_staleness"),
        ("none", {ABS: 0.2}, "engine"),
        ("mis", {CORRECTED: 0.3, AGE: 1.0}, "cap, low, high"),
    ],
)
def test_the_remedy_follows_the_circumstances(correction, change, remedy):
    ((_, text),) = feed(settled(correction=correction), *[change] * PATIENCE)
    assert remedy in text


def test_steps_without_mismatch_say_nothing_and_change_nothing():
    watch = settled()
    feed(watch, *[{KL: 0.05}] * (PATIENCE - 1))
    assert watch.observe(50, {"loss/policy": 1.0}) is None
    assert feed(watch, {KL: 0.05})


def warned(values: list[float], key: str = "mismatch/kl", **more: float) -> list[int]:
    """Steps, from 1, at which the watch warns."""
    watch = DriftWatch()
    return [step for step, value in enumerate(values, 1) if watch.observe(step, {key: value, **more})]


def test_the_watch_warns_at_its_limits_only():
    assert warned([0.1] * 9) == [] and warned([0.11] * 9) == [3]
    assert warned([0.3] * 9, "mismatch/logprob_abs_mean") == [] and warned([0.31] * 3, "mismatch/logprob_abs_mean") == [
        3
    ]
    assert warned([0.2] * 9, "mismatch/corrected_fraction") == [] and warned(
        [0.21] * 3, "mismatch/corrected_fraction"
    ) == [3]
    # The baseline is the median of eight: three times as much is allowed, and no less than the floor.
    assert warned([0.02] * 8 + [0.06] * 5) == [] and warned([0.02] * 8 + [0.0601] * 5) == [11]
    assert warned([0.02] * 7 + [0.07] * 5) == [11] and warned([0.02] * 6 + [0.07] * 5) == [11]
    assert warned([0.001] * 8 + [0.01] * 5) == [] and warned([0.001] * 8 + [0.0101] * 5) == [11]
    assert warned([0.05] * 8 + [0.101] * 5) == [11]
    # A drift is over after three steps below.
    assert warned([0.2] * 3 + [0.0] * 2 + [0.2] * 4) == [3] and warned([0.2] * 3 + [0.0] * 3 + [0.2] * 4) == [3, 9]
    assert warned([0.2, 0.2, 0.0, 0.2, 0.2]) == [] and warned([float("nan")] * 3) == [1]


def test_a_warning_has_its_numbers():
    watch = DriftWatch("tis")
    said = [watch.observe(step, {"mismatch/kl": 0.25, "rollout/staleness_mean": 1.5}) for step in (5, 6, 7)]
    assert said[:2] == [None, None] and said[2].startswith(
        "step 7: engine and trainer disagree about the same tokens for 3 steps: mismatch/kl 0.25 (limit 0.1). Likely "
        "the age of the rollouts (1.5 batches), which the correction tis cannot make good"
    )
    watch = DriftWatch()
    said = [watch.observe(1, {"mismatch/kl": float("inf"), "mismatch/logprob_abs_mean": float("nan")})]
    assert said[0].startswith("step 1: mismatch/kl and mismatch/logprob_abs_mean not finite. A log-prob of")
