"""Servers that share GPUs with the trainer: who gives memory back when, who takes it, and what becomes of those that do
not, or that die meanwhile. Stubs have no memory; the order and the limits of the calls are SGLang's."""

from __future__ import annotations

import asyncio

import pytest
from sglang_pool import collect, engine_of, expected, group, started
from sglang_stub_fleets import StubHandle, Weights, rig, run
from stub_server import ALL_CALLS, StubServer, answering, times

from megatron_daro.engine.sglang.vetting import MEMORY_CALLS
from megatron_daro.errors import EngineError


def sharing(tmp_path, **options):
    given = {"handles": StubHandle, "updated": Weights(1), "max_restarts": 5, "sync": "disk"}
    return rig(tmp_path, expect=expected(tmp_path, shares_gpus=True), **{**given, **options})


def test_memory_goes_and_comes_in_the_order_that_servers_need(tmp_path):
    async def scenario():
        async with sharing(tmp_path) as fleet:
            await fleet.engine.release_memory()
            for stub in fleet.stubs:
                assert stub.order == ["/pause_generation", "/flush_cache", "/release_memory_occupation"]
                assert stub.released == {"weights", "kv_cache", "cuda_graph"}
                assert stub.said["/pause_generation"] == [{"mode": "abort"}]
                stub.order.clear()
            assert fleet.states == ["joining", "joining"], "they get no request"
            await fleet.engine.release_memory()
            assert fleet.stubs[0].order == [], "what was given back is not given back again: a server dies of that"
            await fleet.publish(Weights(), 2)
            for stub in fleet.stubs:
                assert stub.order == [
                    *("/resume_memory_occupation", "/pause_generation", "/update_weights_from_disk", "/flush_cache"),
                    *("/update_weight_version", "/resume_memory_occupation", "/continue_generation", "/generate"),
                ]
                taken = [body["tags"] for body in stub.said["/resume_memory_occupation"]]
                assert taken == [["weights"], ["kv_cache", "cuda_graph"]]
                assert not stub.released
            assert len(await collect(fleet.engine, [group(0)])) == 4
            await fleet.publish(Weights(), 3)
            assert stub.calls["/resume_memory_occupation"] == 2, "what a server has it does not take again"

    run(scenario())


def test_a_server_that_is_not_idle_yet_is_waited_for(tmp_path):
    async def scenario():
        async with sharing(tmp_path) as fleet:
            fleet.stubs[0].answers["/flush_cache"] = times(3, answering(400), answering(200))
            await fleet.engine.release_memory()
            assert fleet.stubs[0].order == [
                "/pause_generation",
                *["/flush_cache", "/abort_request"] * 3,
                *("/flush_cache", "/release_memory_occupation"),
            ]
            assert fleet.stubs[0].said["/abort_request"] == [{"abort_all": True}] * 3

    run(scenario())


def test_one_that_keeps_its_memory_is_ended_before_the_trainer_comes(tmp_path):
    async def scenario():
        async with sharing(tmp_path) as fleet:
            handles = fleet.handles
            fleet.stubs[0].answers["/release_memory_occupation"] = answering(500)
            stopped = handles[0].stops
            await fleet.engine.release_memory()
            assert handles[0].stops > stopped and handles[0].launches == 1, "it waits for the servers' turn"
            assert fleet.states == ["fenced", "joining"]

    run(scenario())


def test_one_that_dies_in_the_trainers_turn_comes_back_in_the_servers(tmp_path):
    async def scenario():
        async with sharing(tmp_path) as fleet:
            handles, weights = fleet.handles, Weights()
            await fleet.engine.release_memory()
            handles[0].dead = "its process ended with signal 9"
            await fleet.until(lambda: fleet.states[0] == "fenced")
            await asyncio.sleep(0.2)
            assert handles[0].launches == 1, "the trainer has the GPU"
            await fleet.publish(weights, 2)
            assert ["/update_weights_from_disk" in stub.order for stub in fleet.stubs] == [False, True]
            await asyncio.sleep(0.1)
            assert handles[0].launches == 1, "the trainer's weights are still there"
            fleet.stubs[0].released.clear()
            fleet.engine.allow_starts()
            await fleet.until(lambda: fleet.states == ["joining", "serving"])
            await asyncio.sleep(0.1)
            assert len(weights.plans) == 1, "nobody asks for weights that are on the host"
            await fleet.engine.release_memory()
            assert fleet.stubs[0].released == fleet.stubs[1].released == {"weights", "kv_cache", "cuda_graph"}
            await fleet.publish(weights, 3)
            assert fleet.states == ["serving", "serving"]

    run(scenario())


def test_one_that_is_starting_is_waited_for(tmp_path):
    async def scenario():
        async with sharing(tmp_path) as fleet:
            handles = fleet.handles
            ready = asyncio.Event()
            launch = handles[0].launch

            async def slowly():
                await ready.wait()
                return await launch()

            handles[0].launch = slowly
            handles[0].dead = "gone"
            await fleet.until(lambda: fleet.states[0] == "starting")
            releasing = asyncio.create_task(fleet.engine.release_memory())
            await asyncio.sleep(0.1)
            assert not releasing.done()
            ready.set()
            await releasing
            assert fleet.stubs[0].released and fleet.states == ["joining", "joining"]

    run(scenario())


def test_the_last_server_that_fails_ends_the_run(tmp_path):
    async def scenario():
        async with sharing(tmp_path, count=1) as fleet:
            fleet.stubs[0].answers["/release_memory_occupation"] = answering(500)
            with pytest.raises(EngineError, match="server 0"):
                await fleet.engine.release_memory()

    run(scenario())


def test_a_server_without_these_calls_is_refused_at_the_start(tmp_path):
    async def scenario():
        paths = [call for call in ALL_CALLS if call not in MEMORY_CALLS]
        async with StubServer(paths=paths) as stub:
            engine = engine_of([StubHandle(stub.url)], tmp_path, expect=expected(tmp_path, shares_gpus=True))
            with pytest.raises(EngineError, match="/release_memory_occupation"):
                async with started(engine):
                    pass

    run(scenario())
