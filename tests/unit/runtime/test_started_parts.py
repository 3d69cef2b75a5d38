"""What servers of a run are launched with, and the order in which a run's parts start."""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import asdict
from types import SimpleNamespace

import pytest
from ray.exceptions import ActorUnavailableError, RayActorError
from run_configuration import configured, run_context
from sglang_pool import required_environment

from megatron_daro.deadlines import INSIDE, Deadlines
from megatron_daro.engine.sglang.engine import SGLangEngine
from megatron_daro.errors import EngineError
from megatron_daro.observe.phases import Phases
from megatron_daro.runtime import parts, ray_servers
from megatron_daro.runtime.context import RunContext
from megatron_daro.runtime.ray_servers import RayServer
from megatron_daro.runtime.sglang_engine import TokenizerFacts, sglang_engine


def run(work):
    return asyncio.run(asyncio.wait_for(work, 10))


class Actor:
    """The process of a server's part, which starts at once, or never."""

    starts = True

    def __init__(self, launch_options):
        self.launched_with = launch_options

    def __getattr__(self, method):
        if method.startswith("__"):
            raise AttributeError(method)

        def remote(*arguments):
            answer = asyncio.get_running_loop().create_future()
            if self.starts:
                answer.set_result(("http://a:1", "a:2"))
            return answer

        return SimpleNamespace(remote=remote)


@pytest.mark.parametrize(
    ("section", "limits", "allowed"),
    [
        ("sglang", {"start_timeout_s": 1e6}, {"server_start": 1e6, "only_server": 3e6}),
        ("sglang", {"request_timeout_s": 1e6}, {"request": 1e6}),
        ("sglang", {"sync_timeout_s": 1e6}, {"update_call": 1e6}),
        ("environment", {"kind": "agent", "timeout_s": 1e6, "workers": 4}, {"conversation": 6e6}),
        ("environment", {"kind": "m:C", "step_timeout_s": 1e6, "max_turns": 9}, {"conversation": 3e7}),
        ("reward", {"timeout_s": 1e5, "workers": 4}, {"verdicts": 8e5}),
    ],
)
def test_a_wait_is_longer_than_all_that_runs_inside_it(section, limits, allowed):
    sections = {"engine": {"kind": "sglang", "sglang": limits}} if section == "sglang" else {section: limits}
    rollout, trainer = {"prompts_per_batch": 4, "rollouts_per_prompt": 8}, {"deadline_scale": 0.001}
    config = configured(rollout=rollout, trainer=trainer, **sections)
    waits = asdict(RunContext.of(config, SimpleNamespace(), Phases()).deadlines)
    inner = waits | allowed
    assert not [(wait, name) for wait in INSIDE for name in INSIDE[wait] if waits[wait] <= inner.get(name, 0.0)]


@pytest.fixture
def launched(monkeypatch, tmp_path):
    """Launch the servers of a run; returns with what options each process was."""
    actors, servers = [], {}
    made = SimpleNamespace(remote=lambda given: actors.append(Actor(given)) or actors[-1])
    monkeypatch.setattr(ray_servers, "actor_class", lambda _: SimpleNamespace(options=lambda **place: made))
    monkeypatch.setattr("megatron_daro.runtime.sglang_engine.check_environments", lambda options: None)
    monkeypatch.setattr(SGLangEngine, "__init__", lambda self, handles, *more, **options: servers.update(handles))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2", "vocab_size": 31}))

    def launch(*, stops=False, gpus=None, model=(), actor=(), deadlines=None, **sglang):
        context = run_context(
            run_dir=tmp_path,
            deadlines=deadlines,
            engine={"kind": "sglang", "seed": 3, "replicas": 2, "sglang": {"python": sys.executable, **sglang}},
            actor={"precision": "bf16", **dict(actor)},
            model={"path": str(tmp_path), **dict(model)},
        )
        placement = SimpleNamespace(
            shares_gpus=gpus is not None,
            server=lambda number, part=0: {},
            gpus_of_server=lambda number: gpus and gpus[number],
        )
        facts = TokenizerFacts(encode=list, vocabulary=40, stops=stops)
        sglang_engine(context, facts, placement)

        async def all_of_them():
            for server in servers.values():
                await server.launch()

        run(all_of_them())
        return [actor.launched_with for actor in actors]

    return launch


@pytest.mark.parametrize(
    ("given", "arguments"),
    [
        ({}, {"skip_tokenizer_init": True}),
        ({"stops": True}, {"skip_tokenizer_init": False}),
        ({"model": {"trust_remote_code": True}}, {"skip_tokenizer_init": True, "trust_remote_code": True}),
        ({"actor": {"routing_replay": True}}, {"skip_tokenizer_init": True, "enable_return_routed_experts": True}),
        ({"arguments": {"skip-tokenizer-init": False}}, {"skip_tokenizer_init": False}),
    ],
)
def test_servers_are_launched_with_what_the_run_needs_of_them(launched, given, arguments):
    servers = launched(**given)
    assert [server.arguments for server in servers] == [{"dtype": "bfloat16", **arguments}] * 2


def test_servers_sample_differently_and_all_parts_of_one_alike(launched, tmp_path):
    processes = launched(nodes=2, tensor_parallel=4, env={"A": "b"})
    assert [(one.part, one.parts, one.seed) for one in processes] == [(0, 2, 3), (1, 2, 3), (0, 2, 4), (1, 2, 4)]
    assert len({one.log_path for one in processes}) == 4
    for one in processes:
        assert (one.tensor_parallel, one.env, one.model_path) == (4, {"A": "b"}, tmp_path)


def test_how_long_a_server_may_take_to_be_launched_follows_the_deadlines(launched, monkeypatch):
    monkeypatch.setattr(Actor, "starts", False)
    with pytest.raises(EngineError, match=r"did not answer within 0\.05 s"):
        launched(deadlines=Deadlines(workers_start=0.05))


SAVED = {"enable_memory_saver": True, "cuda_graph_backend_prefill": "disabled"}


@pytest.mark.parametrize(
    ("given", "gpus", "more"),
    [
        ({}, "2,3", {**SAVED, "mem_fraction_static": 0.6}),
        ({"mem-fraction-static": 0.8}, "2,3", {**SAVED, "mem_fraction_static": 0.8}),
        ({"device": "cpu"}, None, {"device": "cpu"}),
    ],
    ids=["by default", "as a person says", "on a CPU"],
)
def test_a_server_that_shares_gpus_with_ranks_leaves_them_room(launched, given, gpus, more):
    first, second = launched(gpus=["2,3", "0,1"], arguments=given)
    assert first.arguments == second.arguments == {"dtype": "bfloat16", "skip_tokenizer_init": True, **more}
    assert first.gpus == gpus and (second.gpus == "0,1") == (gpus is not None)
    assert first.env == ({"SGLANG_MEMORY_SAVER_CUDA_GRAPH": "true"} if gpus else {})


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (None, ""),
        (ActorUnavailableError("the connection was reset", b"1" * 16), ""),
        (RayActorError(), "the Ray actor of a server died"),
    ],
    ids=["silent", "unavailable", "dead"],
)
def test_a_server_whose_actor_says_nothing_is_not_dead(monkeypatch, answer, reason):
    async def death():
        if answer is None:
            await asyncio.Future()
        raise answer

    async def launch(meeting=""):
        return "http://a:1", "a:2"

    methods = {"launch": SimpleNamespace(remote=launch), "death": SimpleNamespace(remote=death)}
    made = SimpleNamespace(remote=lambda given: SimpleNamespace(**methods))
    monkeypatch.setattr(ray_servers, "actor_class", lambda _: SimpleNamespace(options=lambda **place: made))
    monkeypatch.setattr(ray_servers, "_CALL_S", 0.05)

    async def look():
        server = RayServer([SimpleNamespace(part=0)], lambda part: {}, lambda: None, 5.0)
        await server.launch()
        return await server.death()

    assert run(look()).partition(":")[0] == reason


def test_sglang_gives_back_the_graphs_of_the_decode_phase_and_refuses_those_of_the_other():
    (srt,) = required_environment().glob("lib/python3*/site-packages/sglang/srt")
    backends = srt / "model_executor" / "runner_backend"
    decode, prefill = ((backends / f"{name}_cuda_graph_backend.py").read_text() for name in ("full", "breakable"))
    assert 'get_bool_env_var("SGLANG_MEMORY_SAVER_CUDA_GRAPH")' in decode and "tag=GPU_MEMORY_TYPE_CUDA_GRAPH" in decode
    assert '"Breakable CUDA graph is not compatible with memory saver mode"' in prefill
    assert "cuda_graph_backend_prefill" in (srt / "arg_groups" / "fields" / "exec_.py").read_text()


class Started:
    """Policy, engine, verifiers and placement of a run that note in which order they are started."""

    def __init__(self, shares=False, fails=""):
        self.done, self.shares_gpus = [], shares
        self.fails, self.cancelled = fails, []

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)

        async def do(*arguments):
            self.done.append(name)
            if name == self.fails:
                raise EngineError(f"{name} failed")
            if self.fails and name != "placement":
                try:
                    await asyncio.sleep(5)
                except asyncio.CancelledError:
                    self.cancelled.append(name)
                    raise

        return do

    def part(self, name):
        return SimpleNamespace(start=getattr(self, name))


def start_all(one):
    policy = SimpleNamespace(start=one.policy, start_processes=one.processes, build=one.build, remarks=[])
    engine = SimpleNamespace(start=one.engine, release_memory=one.release, resume_memory=None)
    made = SimpleNamespace(engine=engine, scorer=one.part("verifiers"))
    placement = SimpleNamespace(start=one.placement, shares_gpus=one.shares_gpus)

    async def start():
        try:
            await parts.start_all(run_context(), placement, policy, made)
        finally:
            for _ in range(10):
                await asyncio.sleep(0)
            one.cancelled = tuple(one.cancelled)  # what ends later was ended by the event loop

    run(start())


def test_in_turns_the_servers_give_their_memory_back_before_the_policy_is_built(monkeypatch):
    monkeypatch.setattr(parts, "SharingEngine", SimpleNamespace)
    one = Started(shares=True)
    start_all(one)
    assert one.done == ["placement", "processes", "engine", "verifiers", "release", "build"]


def test_the_first_start_that_fails_ends_the_others():
    one = Started(fails="engine")
    with pytest.raises(EngineError, match="engine failed"):
        start_all(one)
    assert sorted(one.cancelled) == ["policy", "verifiers"]
