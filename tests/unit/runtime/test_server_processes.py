"""The processes of a server: arguments of those that share GPUs with ranks, and the parts of one on several nodes."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from ray.exceptions import ActorDiedError

from megatron_daro.config import Config
from megatron_daro.config.sections import SGLangSection
from megatron_daro.engine.sglang.servers import LaunchOptions
from megatron_daro.errors import EngineError
from megatron_daro.runtime.sglang_group import RayServer, _handles, _parts, _sharing


def options(**arguments):
    return LaunchOptions(
        python=Path("python"), model_path=Path("model"), tensor_parallel=2, seed=0, arguments=arguments, env={},
        log_path=Path("log"),
    )  # fmt: skip


def test_one_that_shares_gpus_can_give_its_memory_back_and_leaves_room():
    made = _sharing(options(dtype="bfloat16"), "2,3")
    assert made.gpus == "2,3"
    assert made.arguments == {"dtype": "bfloat16", "enable_memory_saver": True, "mem_fraction_static": 0.6}


@pytest.mark.parametrize("name", ["mem_fraction_static", "mem-fraction-static"])
def test_what_a_person_gave_stays_however_it_is_spelled(name):
    given = SGLangSection(arguments={name: 0.8}).named_arguments
    assert _sharing(options(**given), "0").arguments == {"enable_memory_saver": True, "mem_fraction_static": 0.8}


@pytest.mark.parametrize(("given", "gpus"), [({}, None), ({"device": "cpu"}, "0")], ids=["apart", "on a CPU"])
def test_others_are_as_they_were(given, gpus):
    assert _sharing(options(**given), gpus) == options(**given)


def test_each_part_has_its_number_and_log_and_all_have_the_seed_of_their_server():
    parts = _parts(replace(options(), seed=7, parts=2, log_path=Path("logs")), 3)
    assert [(part.part, part.parts, part.seed) for part in parts] == [(0, 2, 10), (1, 2, 10)]
    assert [part.log_path.name for part in parts] == ["server_3.log", "server_3_part_1.log"]


@pytest.mark.parametrize("gone", [0, 1])
def test_the_end_of_one_part_is_the_end_of_the_server(gone):
    server = RayServer([], lambda part: {}, lambda: None)
    server._workers = [worker("signal 9" if part == gone else "") for part in range(2)]
    assert asyncio.run(server.death()) == "signal 9"
    server._workers = [worker(""), worker("")]
    assert asyncio.run(server.death()) == ""


def worker(reason):
    """What a Ray actor is to its owner: an answer to `death`, later."""

    async def answer():
        return reason

    return SimpleNamespace(death=SimpleNamespace(remote=answer))


def test_what_ray_says_of_a_lost_actor_is_an_error_of_the_server():
    async def lost():
        raise ActorDiedError()

    with pytest.raises(EngineError, match="the Ray actor of a server died"):
        asyncio.run(RayServer._call(None, lost(), 5.0))


def test_every_part_of_every_server_runs_the_interpreter_of_the_configuration():
    config = Config.model_validate(
        {
            "model": {"path": "m"},
            "data": {"train": ("t",)},
            "engine": {"kind": "sglang", "seed": 1, "replicas": 2, "sglang": {"python": sys.executable}},
        }
    )
    placement = SimpleNamespace(server=dict, gpus_of_server=str)
    servers = _handles(config.engine, config, Path("run"), placement, reads_text=False)
    parts = [part for server in servers.values() for part in server._parts]
    assert [part.python for part in parts] == [Path(sys.executable)] * 2
