"""When the engine gets weights: with an engine only; after a batch that trained nothing, only where GPUs are shared."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

sys.path.insert(0, str(Path(__file__).parent / "rollout"))

from loop_fakes import make_stack, run_stack

from megatron_daro.controller import Controller
from megatron_daro.errors import DataError


def test_a_batch_that_trained_nothing_is_synced_again_only_where_gpus_are_shared(tmp_path):
    stack = make_stack(tmp_path)
    answer = stack.engine._answer
    stack.engine._answer = lambda request: tuple(replace(r, weight_version=-1) for r in answer(request))
    with pytest.raises(DataError, match="5 batches in a row"):
        run_stack(stack)
    assert [event for event in stack.events if event[0] == "sync"] == [("sync", 0)]


def test_a_policy_without_an_engine_syncs_nothing(tmp_path):
    stack = make_stack(tmp_path)
    controller = Controller(stack.section, replace(stack.parts, engine=None), max_staleness=0)
    assert asyncio.run(controller._publish("x")) == {}


def test_where_gpus_are_shared_the_engine_gets_them_back_after_a_batch_that_trained_nothing(tmp_path, noted):
    stack = make_stack(tmp_path, deadlines=noted)
    answer, events = stack.engine._answer, []
    stack.engine._answer = lambda request: tuple(replace(r, weight_version=-1) for r in answer(request))

    async def publish(sync, version):
        events.append(version)
        return {}

    async def to_policy():
        events.append("policy")

    shared = SimpleNamespace(publish=publish, to_policy=to_policy)
    controller = Controller(stack.section, replace(stack.parts, colocation=shared), max_staleness=0)
    with pytest.raises(DataError, match="5 batches in a row"):
        asyncio.run(controller.run())
    assert events == [0, *["policy", 0] * 4, "policy"]
    assert noted.waits.count(("sync", "again, after a batch that trained nothing")) == 4
