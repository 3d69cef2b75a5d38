"""Who gets the next request, who waits, and that nobody waits for servers that are gone."""

import asyncio

import pytest

from megatron_daro.engine.sglang import fleet as fleet_module
from megatron_daro.engine.sglang.client import ServerFacts, SGLangClient
from megatron_daro.engine.sglang.fleet import Fleet, Server
from megatron_daro.errors import DeadlineError, EngineError

FACTS = ServerFacts("0.5.23", frozenset(), "cpu", "float32", 100, 100, 100, 1, "/model", False)


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 20))


def fleet_of(count=2, limit=10, fenced=None):
    servers = [Server(f"server {i}", SGLangClient("http://x"), FACTS, state="serving") for i in range(count)]
    return Fleet(servers, max_tokens_in_flight=limit, on_fenced=(fenced if fenced is not None else []).append)


def test_the_server_with_the_fewest_tokens_gets_the_next_request():
    async def scenario():
        fleet = fleet_of()
        return [(await fleet.acquire(tokens, timeout_s=5)).name for tokens in (5, 2, 2, 2)]

    # loads before each: 0 0, 5 0, 5 2, 5 4
    assert run(scenario()) == ["server 0", "server 1", "server 1", "server 1"]


def test_a_server_to_avoid_is_taken_only_where_no_other_has_room():
    async def scenario():
        fleet = fleet_of()
        first = fleet.servers[0]
        return [(await fleet.acquire(tokens, timeout_s=5, avoid=first)).name for tokens in (6, 4, 3)]

    assert run(scenario()) == ["server 1", "server 1", "server 0"]


def test_a_preferred_server_is_taken_where_it_has_room_and_did_not_fail():
    async def scenario():
        fleet = fleet_of()
        one = fleet.servers[0]
        taken = [(await fleet.acquire(tokens, timeout_s=5, prefer=one)).name for tokens in (6, 3, 2)]
        return [*taken, (await fleet.acquire(1, timeout_s=5, prefer=one, avoid=one)).name]

    assert run(scenario()) == ["server 0", "server 0", "server 1", "server 1"]


def test_failures_give_a_server_up_when_they_are_many_and_last(monkeypatch):
    server, clock = fleet_of(count=1).servers[0], [100.0]
    monkeypatch.setattr(fleet_module.time, "monotonic", lambda: clock[0])
    assert not any(server.failed() for _ in range(100)), "all at the same moment"
    clock[0] += 2.9
    server.progressed()
    assert server.last_progress == 102.9 and server.failures == 100, "what is no success ends no row"
    assert not server.failed()
    server.succeeded()
    clock[0] += 3.0
    assert [server.failed() for _ in range(4)] == [False] * 4, "that one success ended the row"
    clock[0] += 3.0
    assert server.failed()


def test_never_more_than_the_limit_unless_a_single_one():
    async def scenario():
        fleet = fleet_of(count=1)
        await fleet.acquire(6, timeout_s=5)
        with pytest.raises(DeadlineError, match=r"finished a request within 0\.05 s .*server 0 serving"):
            await fleet.acquire(5, timeout_s=0.05)
        await fleet.acquire(4, timeout_s=5)
        fleet.release(fleet.servers[0], 6)
        fleet.release(fleet.servers[0], 4)
        await fleet.acquire(500, timeout_s=5)
        with pytest.raises(DeadlineError):
            await fleet.acquire(1, timeout_s=0.05)

    run(scenario())


def test_without_a_limit_twice_the_servers_cache_counts():
    async def scenario():
        fleet = fleet_of(count=1, limit=None)
        await fleet.acquire(150, timeout_s=5)
        await fleet.acquire(50, timeout_s=5)
        with pytest.raises(DeadlineError):
            await fleet.acquire(1, timeout_s=0.05)

    run(scenario())


def test_a_release_lets_the_one_who_waits_go_on():
    async def scenario():
        fleet = fleet_of(count=1)
        await fleet.acquire(10, timeout_s=5)
        waiting = asyncio.create_task(fleet.acquire(10, timeout_s=5))
        await asyncio.sleep(0.01)
        assert not waiting.done()
        fleet.release(fleet.servers[0], 10)
        return (await waiting).name

    assert run(scenario()) == "server 0"


def test_first_come_first_served_so_that_small_requests_do_not_starve_a_large_one():
    async def scenario():
        fleet, served = fleet_of(count=1), []

        async def request(name, tokens):
            await fleet.acquire(tokens, timeout_s=5)
            served.append(name)

        await fleet.acquire(6, timeout_s=5)
        async with asyncio.TaskGroup() as tasks:
            for name, tokens in (("large", 9), ("small", 2), ("last", 1)):
                tasks.create_task(request(name, tokens))
                await asyncio.sleep(0.01)
            assert served == [], "the small ones fit, and wait behind the large one"
            fleet.release(fleet.servers[0], 6)
            await asyncio.sleep(0.01)
            assert served == ["large"]
            fleet.release(fleet.servers[0], 9)
        return served

    assert run(scenario()) == ["large", "small", "last"]


def test_a_release_does_not_wake_all_who_wait():
    async def scenario():
        fleet, looks = fleet_of(count=1), []
        found = fleet._with_room
        fleet._with_room = lambda tokens, avoid, prefer: looks.append(tokens) or found(tokens, avoid, prefer)
        await fleet.acquire(10, timeout_s=5)
        waiting = [asyncio.create_task(fleet.acquire(10, timeout_s=5)) for _ in range(100)]
        for task in waiting:
            await asyncio.sleep(0)
            fleet.release(fleet.servers[0], 10)
            await task
        return len(looks)

    assert run(scenario()) <= 1 + 2 * 100


@pytest.mark.parametrize("state", ["starting", "joining", "updating", "fenced"])
def test_a_server_that_does_not_serve_gets_nothing_until_it_does(state):
    async def scenario():
        fleet = fleet_of(count=1)
        fleet.set_state(fleet.servers[0], state)
        waiting = asyncio.create_task(fleet.acquire(1, timeout_s=5))
        await asyncio.sleep(0.01)
        assert not waiting.done()
        fleet.set_state(fleet.servers[0], "serving")
        return (await waiting).name

    assert run(scenario()) == "server 0"


def test_fencing_is_told_once_and_drops_the_version():
    async def scenario():
        told = []
        fleet = fleet_of(fenced=told)
        server = fleet.servers[0]
        server.version = 4
        fleet.fence(server, "first")
        fleet.fence(server, "second")
        assert told == [server] and fleet.fenced_count == 1
        assert (server.reason, server.version, server.given_up.is_set()) == ("first", None, True)
        fleet.check()

    run(scenario())


def test_all_gone_is_an_error_for_those_who_wait_and_those_who_come():
    async def scenario():
        fleet = fleet_of(limit=1)
        for _ in fleet.servers:
            await fleet.acquire(1, timeout_s=5)
        waiting = asyncio.create_task(fleet.acquire(1, timeout_s=5))
        ending = asyncio.create_task(fleet.ended())
        await asyncio.sleep(0.01)
        for i, server in enumerate(fleet.servers):
            fleet.fence(server, f"reason {i}")
        expected = "all 2 SGLang servers are gone: server 0: reason 0; server 1: reason 1"
        for error in (await asyncio.gather(waiting, return_exceptions=True))[0], await ending:
            assert isinstance(error, EngineError) and str(error) == expected
        with pytest.raises(EngineError, match="all 2"):
            await fleet.acquire(1, timeout_s=5)

    run(scenario())


def test_the_last_server_in_an_update_or_joining_is_not_all_gone():
    async def scenario(state):
        fleet = fleet_of()
        fleet.set_state(fleet.servers[1], state)
        fleet.fence(fleet.servers[0], "x")
        fleet.check()

    for state in ("updating", "joining"):
        run(scenario(state))


def test_close_wakes_those_who_wait():
    async def scenario():
        fleet = fleet_of(count=1)
        await fleet.acquire(10, timeout_s=5)
        waiting = asyncio.create_task(fleet.acquire(1, timeout_s=5))
        await asyncio.sleep(0.01)
        fleet.close("closed")
        with pytest.raises(EngineError, match="closed"):
            await waiting

    run(scenario())


def test_estimates_follow_the_lengths_of_answers():
    fleet = fleet_of()
    assert fleet.estimate(10, 400) == 10 + 100
    assert fleet.estimate(10, 1) == 11
    fleet.learn_lengths(iter([20] * 5))
    assert fleet.estimate(10, 400) == 10 + 30
    fleet.learn_lengths(iter([200] * 500))
    assert fleet.estimate(10, 400) == 10 + 299
    assert fleet.estimate(10, 50) == 10 + 50


def test_a_line_that_moves_is_waited_in_for_longer_than_any_request_may_take():
    async def scenario():
        fleet, limit_s = fleet_of(count=1, limit=1), 1.0
        await fleet.acquire(1, timeout_s=limit_s)
        waiting = asyncio.create_task(fleet.acquire(5, timeout_s=limit_s))  # room for nothing else
        for _ in range(6):
            await asyncio.sleep(limit_s / 4)
            fleet.set_state(fleet.servers[0], "serving")  # something moves
            assert not waiting.done()
        fleet.release(fleet.servers[0], 1)
        assert await waiting is fleet.servers[0]

    run(scenario())


def test_a_server_that_is_awaited_is_not_gone_until_it_is_awaited_no_longer():
    async def scenario():
        fleet = fleet_of(count=1)
        (server,) = fleet.servers
        server.is_awaited = True
        fleet.fence(server, "signal 9")
        fleet.check()
        returned = asyncio.create_task(fleet.returned())
        await asyncio.sleep(0.01)
        fleet.set_state(server, "joining")
        assert await returned == [server]
        fleet.fence(server, "signal 9")
        server.is_awaited = False
        fleet.end_if_all_gone()
        with pytest.raises(EngineError, match="all 1 SGLang servers are gone: server 0: signal 9"):
            await fleet.returned()

    run(scenario())


def test_a_server_that_serves_has_nothing_against_it_any_more(monkeypatch):
    monkeypatch.setattr(fleet_module.time, "monotonic", lambda: 50.0)
    fleet = fleet_of(count=1)
    (server,) = fleet.servers
    server.given_up.set()
    server.failures, server.last_progress, server.unserved_starts, server.is_awaited = 4, 1.0, 2, True
    fleet.set_state(server, "joining")
    assert server.given_up.is_set() and (server.failures, server.has_served, server.is_awaited) == (4, False, True)
    fleet.set_state(server, "serving")
    assert not server.given_up.is_set() and (server.failures, server.last_progress) == (0, 50.0)
    assert (server.has_served, server.unserved_starts, server.is_awaited) == (True, 0, False)


def test_a_server_of_which_nothing_is_known_yet():
    server = Server("server 0", SGLangClient("http://x/"))
    assert (server.url, server.state, server.version, server.versions) == ("http://x", "starting", None, set())
    assert (server.tokens_in_flight, server.failures, server.restarts, server.unserved_starts) == (0, 0, 0, 0)
    assert not server.has_served and not server.is_awaited and not server.released


def test_the_first_error_of_a_fleet_is_the_one_that_everybody_gets():
    async def scenario():
        fleet = fleet_of()
        impatient = asyncio.create_task(fleet.ended())
        await asyncio.sleep(0)
        impatient.cancel()
        await asyncio.wait({impatient})
        fleet.fail(EngineError("first"))
        fleet.fail(EngineError("second"))
        assert str(await fleet.ended()) == "first"
        with pytest.raises(EngineError, match="first"):
            fleet.check()
        assert fleet.failure is not None and not fleet.failure.cancelled(), "one who waits no longer ends no other's"

    run(scenario())


@pytest.mark.parametrize("state", ["fenced", "starting", "joining"])
def test_only_servers_that_are_away_are_awaited(state):
    async def scenario():
        fleet = fleet_of()
        first, second = fleet.servers
        first.is_awaited = second.is_awaited = True
        assert not fleet.awaits()
        fleet.set_state(first, state)
        first.is_awaited = True
        assert fleet.awaits() == (state != "joining")
        if state == "joining":
            assert await fleet.returned() == [first]
        first.is_awaited = False
        assert not fleet.awaits()
        if state != "joining":
            assert await fleet.returned() == []

    run(scenario())


def test_reasons_are_those_of_servers_that_have_one():
    fleet = fleet_of(count=3)
    fleet.servers[0].reason = "memory"

    async def scenario():
        for server in fleet.servers:
            server.state = "fenced"
        fleet.end_if_all_gone()
        return str(await fleet.ended())

    assert run(scenario()) == "all 3 SGLang servers are gone: server 0: memory"


def test_what_is_given_back_twice_leaves_nothing_below_zero():
    async def scenario():
        fleet = fleet_of(count=1)
        server = await fleet.acquire(6, timeout_s=5)
        fleet.release(server, 4)
        assert server.tokens_in_flight == 2
        fleet.release(server, 4)
        assert server.tokens_in_flight == 0

    run(scenario())


def test_a_server_of_unknown_size_gets_one_request_at_a_time():
    async def scenario():
        fleet = fleet_of(count=1, limit=None)
        fleet.servers[0].facts = None
        await fleet.acquire(1, timeout_s=5)
        with pytest.raises(DeadlineError):
            await fleet.acquire(1, timeout_s=0.02)

    run(scenario())


def test_an_estimate_is_at_least_one_token_and_moves_by_a_twentieth_of_each_new_length():
    fleet = fleet_of()
    assert fleet.estimate(0, 3) == 1 and fleet.estimate(7, 8) == 9
    fleet.learn_lengths(iter([100, 200]))
    assert fleet.estimate(0, 1000) == 157  # 1.5 * (100 + 0.05 * 100)
    fleet = fleet_of()
    fleet.learn_lengths(iter([0]))
    assert fleet.estimate(4, 1000) == 5


def test_an_error_from_elsewhere_reaches_those_who_wait_for_room_or_for_a_server_that_is_away():
    async def scenario():
        fleet = fleet_of(count=2, limit=1)
        first, second = fleet.servers
        await fleet.acquire(1, timeout_s=5)
        await fleet.acquire(1, timeout_s=5)
        room = asyncio.create_task(fleet.acquire(1, timeout_s=5))
        first.is_awaited = True
        fleet.fence(first, "signal 9")
        back = asyncio.create_task(fleet.returned())
        await asyncio.sleep(0.01)
        fleet.fail(EngineError("supervision failed"))
        for waiting in (room, back):
            with pytest.raises(EngineError, match="supervision failed"):
                await asyncio.wait_for(waiting, 2)
        assert second.state == "serving"

    run(scenario())
