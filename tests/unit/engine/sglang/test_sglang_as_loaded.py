"""Servers that nobody gives other weights: an evaluation through them, with servers that die and come back."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from sglang_stub_fleets import StubHandle, rig, run

from megatron_daro.config.sections import EvalSet
from megatron_daro.data.stops import Stops
from megatron_daro.data.templates import HeldOut
from megatron_daro.errors import EngineError
from megatron_daro.reward.pool import RewardPool
from megatron_daro.types import Prompt
from megatron_daro.workshop.evaluate.answers import AnswerStore, kept
from megatron_daro.workshop.evaluate.asking import Parts, ask
from megatron_daro.workshop.evaluate.questions import questions_of, requests


def ten_questions(samples):
    prompts = tuple(Prompt(str(d), str(d), "file", text=f"echo {d}", tokens=(5, 6, d)) for d in range(10))
    section = EvalSet(name="digits", path=Path("x"), rollouts_per_prompt=samples, temperature=1.0)
    return questions_of([HeldOut(section, prompts)], max_new_tokens=8, stops=Stops((2,)))


def test_a_server_that_dies_loses_no_answer(tmp_path):
    async def scenario():
        async with rig(tmp_path, count=2, decode=lambda ids: "####3") as fleet:
            fleet.engine.serve_as_loaded()
            asked = ten_questions(4)
            fleet.stubs[0].gate.clear()  # the first server takes requests and does not answer
            with RewardPool("exact", workers=0) as pool:
                store = AnswerStore(tmp_path / "out")
                parts = Parts(fleet.engine, pool, store, 40, lambda answer: None, 60.0)
                work = asyncio.create_task(ask(parts, requests(asked, ()), asked))
                await fleet.until(lambda: fleet.stubs[0].running)
                await fleet.stubs[0].stop()
                fleet.engine.fleet.fence(fleet.servers[0], "killed")
                await work
            assert len(kept(tmp_path / "out")) == 40 and fleet.states == ["fenced", "serving"]
            assert fleet.stubs[1].bodies[0]["sampling_params"][0]["sampling_seed"] is not None

    run(scenario())


def test_when_all_servers_are_dead_what_came_is_kept(tmp_path):
    async def scenario():
        async with rig(tmp_path, count=1, decode=lambda ids: "####3") as fleet:
            fleet.engine.serve_as_loaded()
            asked = ten_questions(1)
            with RewardPool("exact", workers=0) as pool:

                def told(answer):
                    if pool is not None and len(fleet.stubs[0].bodies) >= 4:
                        fleet.stubs[0].gate.clear()
                        fleet.engine.fleet.fence(fleet.servers[0], "killed")

                parts = Parts(fleet.engine, pool, AnswerStore(tmp_path / "out"), 2, told, 60.0)
                with pytest.raises(EngineError, match="killed"):
                    await ask(parts, requests(asked, ()), asked)
            assert 0 < len(kept(tmp_path / "out")) < 10

    run(scenario())


def test_a_server_that_comes_back_answers_without_new_weights(tmp_path):
    async def scenario():
        made = []

        def handle(url):
            made.append(StubHandle(url))
            return made[-1]

        async with rig(tmp_path, count=1, handles=handle, max_restarts=3) as fleet:
            fleet.engine.serve_as_loaded()
            fleet.engine.fleet.fence(fleet.servers[0], "killed")
            made[0].dead = "killed"
            await fleet.until(lambda: fleet.states == ["serving"])
            assert made[0].launches == 2

    run(scenario())
