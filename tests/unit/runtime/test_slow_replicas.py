"""The replica that all wait for is named, once, and only where it stays slow."""

from __future__ import annotations

import pytest

from megatron_daro.runtime.rank_info import RankInfo
from megatron_daro.runtime.slow_replicas import METRIC, STEPS, SlowReplicas

# Two tensor-parallel ranks of each of three replicas, a node each.
PLACES = [
    RankInfo(rank // 2, 0, exports=False, sends=False, reports=rank % 2 == 0, host=f"10.0.0.{rank // 2}")
    for rank in range(6)
]


def seconds(*replicas):
    """The second rank of a replica decides: the first one's passes wait for it."""
    return [part for own in replicas for part in (0.9 * own, own)]


def warnings(watch, steps):
    return [warning for step in steps if (warning := watch.observe(seconds(*step), PLACES)[1])]


def test_a_replica_that_stays_slow_is_named_once():
    watch = SlowReplicas()
    assert warnings(watch, [(10, 14, 10.5)] * (STEPS - 1)) == []
    (said,) = warnings(watch, [(10, 14, 10)] * 30)
    assert all(fact in said for fact in ("replica 1", "ranks 2, 3", "10.0.0.1", "1.40", "4.0 s"))
    warnings(watch, [(10, 10, 10)])
    assert len(warnings(watch, [(10, 14, 10)] * STEPS)) == 1, "it became slow again"


@pytest.mark.parametrize(
    "steps",
    [
        [(10, 12, 10)] * 30,  # less than a quarter
        [(0.10, 0.14, 0.10)] * 30,  # fractions of a second
        [(10, 14, 10), (14, 10, 10)] * 15,  # now this one, now that one
        ([(10, 14, 10)] * (STEPS - 1) + [(10, 10, 10)]) * 3,
    ],
)
def test_nothing_is_said_of_what_may_be_chance(steps):
    assert warnings(SlowReplicas(), steps) == []


def test_the_metric_compares_with_the_median_of_the_others():
    watch = SlowReplicas()
    assert watch.observe(seconds(4, 6, 5), PLACES)[0] == {METRIC: pytest.approx(6 / 4.5)}
    assert watch.observe(seconds(4, 6), PLACES[:4])[0] == {METRIC: pytest.approx(1.5)}
    assert watch.observe(seconds(4), PLACES[:2]) == ({}, None)
    assert watch.observe(seconds(4, 0, 5), PLACES) == ({}, None), "a step that was refused"
