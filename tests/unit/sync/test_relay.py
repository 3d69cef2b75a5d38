"""Which rank hands weights to the servers of which host."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_daro.errors import SyncError
from megatron_daro.sync.plan import Digest, SendFailure, SendPlan, SendReport, Target
from megatron_daro.sync.routes import RankRole, joined_report, one_route, routes

PLAN = SendPlan(
    transport="tensor",
    targets=(Target("s0", "http://10.0.0.1:1"), Target("s1", "http://10.0.0.1:2"), Target("s2", "http://[fd::2]:1")),
    bucket_bytes=1000,
    timeout_s=5.0,
)
FIRST, SECOND = "10.0.0.1", "fd::2"


def world(*ranks):
    """Ranks as (host, exports, sends)."""
    return {rank: RankRole(*standing) for rank, standing in enumerate(ranks)}


def names(plans):
    return {rank: [target.name for target in plan.targets] for rank, plan in plans.items()}


def test_a_rank_of_the_other_host_is_told_each_bucket():
    found = routes(
        PLAN, world((FIRST, True, True), (FIRST, True, False), (SECOND, False, False), (SECOND, False, False))
    )
    assert names(found.plans) == {0: ["s0", "s1"]} and names(found.relays) == {2: ["s2"]}
    assert found.members == (0, 2)


def test_a_rank_that_gathers_along_hands_out_what_it_has():
    """Experts of a stage lie on both hosts: ranks of both have every tensor."""
    found = routes(PLAN, world((FIRST, True, True), (SECOND, True, False), (SECOND, False, False)))
    assert names(found.plans) == {0: ["s0", "s1"], 1: ["s2"]}
    assert not found.relays and found.members == ()


def test_a_later_stage_sends_from_the_other_host():
    found = routes(PLAN, world((FIRST, False, False), (FIRST, False, False), (SECOND, True, True)))
    assert names(found.plans) == {2: ["s2"]} and names(found.relays) == {0: ["s0", "s1"]}
    assert found.members == (2, 0)


def test_a_sender_without_servers_still_sends_to_the_other_hosts():
    plan = replace(PLAN, targets=PLAN.targets[2:])
    found = routes(plan, world((FIRST, True, True), (SECOND, False, False)))
    assert names(found.plans) == {0: []} and names(found.relays) == {1: ["s2"]}


def test_one_rank_sends_to_all_on_one_host_and_where_nothing_is_dealt_out():
    one_host, two_hosts = (world((FIRST, True, True), (host, False, False)) for host in (FIRST, SECOND))
    for found in (routes(PLAN, one_host), one_route(PLAN, two_hosts)):
        assert names(found.plans) == {0: ["s0", "s1", "s2"]} and not found.relays


def test_a_server_on_a_host_without_ranks_is_refused_by_name():
    with pytest.raises(SyncError, match="s2 on fd::2"):
        routes(PLAN, world((FIRST, True, True), ("10.0.0.3", False, False)))


def test_what_was_sent_counts_once_and_every_failure_is_reported():
    found = routes(PLAN, world((FIRST, True, True), (SECOND, False, False)))
    digest = {"w": Digest("bfloat16", "a", "a")}
    own = SendReport(100, 1.0, digests=digest, fp8_blocks=("w",))
    far = SendReport(100, 2.0, failures={"s2": SendFailure("unanswered", "no answer")})
    report = joined_report(found, {0: own, 1: far})
    assert (report.num_bytes, report.send_s, report.fp8_blocks, report.digests) == (100, 2.0, ("w",), digest)
    assert report.failures.keys() == {"s2"}
