"""Who gets the next request, and who waits for how long."""

import asyncio

import pytest

from megatron_daro.engine.sglang.client import ServerFacts, SGLangClient
from megatron_daro.engine.sglang.fleet import Fleet, Server
from megatron_daro.errors import DeadlineError

FACTS = ServerFacts("0.5.23", frozenset(), "cpu", "float32", 100, 100, 100, 1, False)


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 20))


def fleet_of(count=2, limit=10):
    servers = [Server(f"server {i}", SGLangClient("http://x"), FACTS, state="serving") for i in range(count)]
    return Fleet(servers, max_tokens_in_flight=limit, on_fenced=lambda server: None)


def test_the_server_with_the_fewest_tokens_gets_the_next_request():
    async def scenario():
        fleet = fleet_of()
        return [(await fleet.acquire(tokens, timeout_s=5)).name for tokens in (5, 2, 2, 2)]

    # loads before each: 0 0, 5 0, 5 2, 5 4
    assert run(scenario()) == ["server 0", "server 1", "server 1", "server 1"]


def test_never_more_than_the_limit_unless_a_single_one():
    async def scenario():
        fleet = fleet_of(count=1)
        await fleet.acquire(6, timeout_s=5)
        with pytest.raises(DeadlineError, match="server 0"):
            await fleet.acquire(5, timeout_s=0.05)
        await fleet.acquire(4, timeout_s=5)
        fleet.release(fleet.servers[0], 6)
        fleet.release(fleet.servers[0], 4)
        await fleet.acquire(500, timeout_s=5)
        with pytest.raises(DeadlineError):
            await fleet.acquire(1, timeout_s=0.05)

    run(scenario())


def test_nobody_waits_for_one_that_joins_longer_than_for_a_request():
    async def scenario():
        fleet = fleet_of(count=1)
        fleet.hold_back(fleet.servers[0])
        with pytest.raises(DeadlineError, match="server 0 joining"):
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


def test_a_request_waits_for_the_only_server_as_long_as_that_is_started_again():
    async def scenario():
        fleet = fleet_of(count=1)
        (server,) = fleet.servers
        server.awaited_restarts = 1
        fleet.serve(server, 0)
        fleet.fence(server, "its process ended")
        server = fleet.start_again(server)
        request = asyncio.create_task(fleet.acquire(1, timeout_s=0.2))
        await asyncio.sleep(0.5)
        assert not request.done()
        fleet.hold_back(server)
        fleet.begin_update(server)
        fleet.serve(server, 1)
        assert await request is server

    run(scenario())


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
            fleet.serve(fleet.servers[0], 0)  # something moves
            assert not waiting.done()
        fleet.release(fleet.servers[0], 1)
        assert await waiting is fleet.servers[0]

    run(scenario())
