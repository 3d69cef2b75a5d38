"""Engines as actors, and the order in which a run's parts start: what each is told, and what a failure ends."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from ray.exceptions import RayActorError
from run_configuration import configured

from megatron_daro.engine.sglang.servers import ExternalServer, LaunchOptions
from megatron_daro.errors import ConfigError, EngineError, WorkerError
from megatron_daro.rollout.deadlines import Deadlines
from megatron_daro.runtime import launch, parts, sglang_group
from megatron_daro.runtime.sglang_group import RayServer, _handles
from megatron_daro.runtime.supervisor import WorkerDiedError


def run(work):
    return asyncio.run(asyncio.wait_for(work, 10))


class Actor:
    """Notes its calls; says: method -> what it answers, or raises."""

    def __init__(self, name="", **says):
        self.name, self.says, self.calls = name, says, []

    def __getattr__(self, method):
        if method.startswith("__"):
            raise AttributeError(method)

        def remote(*arguments):
            self.calls.append((method, *arguments))
            said = self.says.get(method)
            answer = asyncio.get_running_loop().create_future()
            answer.set_exception(said) if isinstance(said, BaseException) else answer.set_result(said)
            return answer

        return SimpleNamespace(remote=remote)


OPTIONS = LaunchOptions(
    python=Path("python"), model_path=Path("model"), tensor_parallel=2, seed=0, arguments={}, env={}, log_path=Path("l")
)


@pytest.fixture
def server(monkeypatch):
    """A server of two parts, and the actors of all its starts."""
    actors, killed, says = [], [], {}

    def remote(options):
        def make(launch_options):
            actors.append(Actor(**says))
            actors[-1].made = options, launch_options
            return actors[-1]

        return make

    monkeypatch.setattr(
        sglang_group, "actor_class", lambda _: SimpleNamespace(options=lambda **o: SimpleNamespace(remote=remote(o)))
    )
    monkeypatch.setattr(sglang_group.ray, "kill", lambda worker, no_restart: killed.append((worker, no_restart)))
    split = [sglang_group.replace(OPTIONS, part=part, parts=2) for part in range(2)]
    one = RayServer(split, lambda part: {"place": part}, lambda: "3,4")
    one.actors, one.killed, one.says = actors, killed, says
    return one


def test_the_parts_of_a_server_meet_where_its_first_one_says(server):
    assert run(server.death()) == "it was not started" and server.restartable
    server.says["launch"] = ("http://a:1", "a:2")
    assert run(server.launch()) == "http://a:1"
    first, second = server.actors
    assert first.calls == [("launch",)] and second.calls == [("launch", "a:2")]
    assert [actor.made[0] for actor in server.actors] == [{"place": 0}, {"place": 1}]
    assert [(actor.made[1].part, actor.made[1].gpus) for actor in server.actors] == [(0, "3,4"), (1, "3,4")]
    second.says["stop"] = RayActorError()
    run(server.launch())
    assert server.killed == [(first, True), (second, True)] and len(server.actors) == 4
    assert first.calls[-1] == second.calls[-1] == ("stop",)
    run(server.stop())
    run(server.stop())
    assert len(server.killed) == 4


def test_a_part_that_cannot_be_asked_is_a_dead_one(server):
    server.says.update(launch=("u", "m"), death="")
    run(server.launch())
    assert run(server.death()) == ""
    server.actors[1].says["death"] = RayActorError()
    assert run(server.death()).startswith("the Ray actor of a server died")


def test_an_actor_that_does_not_answer_in_time_is_an_error(server):
    async def never():
        return await server._call(asyncio.get_running_loop().create_future(), 0.01)

    with pytest.raises(EngineError, match=r"^the Ray actor of a server did not answer within 0.01 s$"):
        run(never())


PLACEMENT = SimpleNamespace(server=lambda number, part=0: {"server": number, "part": part}, gpus_of_server=str)


def handles(reads_text=False, model=None, actor=None, **sglang):
    engine = {"kind": "sglang", "seed": 3, "replicas": 2, "sglang": {"python": sys.executable, **sglang}}
    config = configured(
        engine=engine, actor={"precision": "bf16", **(actor or {})}, model={"path": "m", **(model or {})}
    )
    return _handles(config.engine, config, Path("run"), PLACEMENT, reads_text=reads_text)


@pytest.mark.parametrize(
    ("given", "arguments"),
    [
        ({}, {"skip_tokenizer_init": True}),
        ({"reads_text": True}, {"skip_tokenizer_init": False}),
        ({"model": {"trust_remote_code": True}}, {"skip_tokenizer_init": True, "trust_remote_code": True}),
        ({"actor": {"routing_replay": True}}, {"skip_tokenizer_init": True, "enable_return_routed_experts": True}),
        ({"arguments": {"skip-tokenizer-init": False}}, {"skip_tokenizer_init": False}),
    ],
)
def test_servers_are_launched_with_what_the_run_needs_of_them(given, arguments):
    servers = handles(**given)
    assert list(servers) == ["server 0", "server 1"]
    for number, server in enumerate(servers.values()):
        (part,) = server._parts
        assert part.arguments == {"dtype": "bfloat16", **arguments}
        assert part.seed == 3 + number and part.model_path == Path("m").absolute()
        assert server._place(1) == {"server": number, "part": 1} and server._gpus() == str(number)
        assert part.log_path == Path("run").absolute() / "logs" / f"server_{number}.log"


def test_servers_know_how_they_get_their_weights_and_on_how_many_nodes_they_are():
    found = {
        sync: [
            (part.maps_memory, part.takes_shards, part.parts, part.tensor_parallel, part.env) for part in server._parts
        ]
        for sync in ("tensor", "shards", "disk")
        for server in list(handles(sync=sync, nodes=2, tensor_parallel=4, env={"A": "b"}).values())[:1]
    }
    rest = (2, 4, {"A": "b"})
    assert found == {
        "tensor": [(True, False, *rest)] * 2, "shards": [(False, True, *rest)] * 2, "disk": [(False, False, *rest)] * 2
    }  # fmt: skip


def test_servers_that_run_already_are_those_of_their_addresses():
    servers = handles(urls=("http://h:1", "http://h:2"))
    assert list(servers) == ["server 0 (http://h:1)", "server 1 (http://h:2)"]
    assert all(isinstance(server, ExternalServer) for server in servers.values())


@pytest.mark.parametrize(("vocabulary", "most"), [(31, 31), (None, 40)])
def test_servers_must_have_the_model_and_the_lengths_of_the_run(tmp_path, monkeypatch, vocabulary, most):
    probes = []
    monkeypatch.setattr(sglang_group, "probe_text", lambda tokens, longest: probes.append((tokens, longest)) or [1, 2])
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2", "vocab_size": vocabulary}))
    config = configured(
        engine={"kind": "sglang", "sglang": {"urls": ("http://h:1",)}},
        model={"path": str(tmp_path)},
        data={"train": ("t",), "max_prompt_tokens": 24},
        rollout={"max_response_tokens": 16, "temperature": 0.75},
    )
    text = sglang_group.Text(encode=list, vocabulary=40)
    placement = SimpleNamespace(**vars(PLACEMENT), shares_gpus=True)
    group = sglang_group.SGLangGroup(
        config, text, run_dir=tmp_path, placement=placement, warn=print, deadlines=Deadlines()
    )
    expected = (tmp_path, "qwen2", 24, 40, list, vocabulary, True, False)
    assert dataclasses.astuple(group._expected) == expected
    assert probes == [(most, 24)] and group._probe_tokens == (1, 2) and group._temperature == 0.75
    assert [server.name for server in group.fleet.servers] == ["server 0 (http://h:1)"]


class Started:
    """Policy, engine, verifiers and placement of a run that note in which order they are started."""

    def __init__(self, shares=False, fails=""):
        self.done, self.shares_gpus, self.deadlines = [], shares, Deadlines()
        self.remarks, self.fails, self.cancelled = ["a remark", "another"], fails, []

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)

        async def do(*arguments):
            self.done.append(name)
            if name == self.fails:
                raise EngineError(f"{name} failed")
            if self.fails:
                try:
                    await asyncio.sleep(5)
                except asyncio.CancelledError:
                    self.cancelled.append(name)
                    raise

        return do

    def part(self, name):
        return SimpleNamespace(start=getattr(self, name))


def start_all(one, generates=True):
    """Start it. Returns the remarks."""
    warned = []
    policy = SimpleNamespace(start=one.policy, start_processes=one.processes, build=one.build, remarks=one.remarks)
    engine = SimpleNamespace(start=one.engine, release_memory=one.release, resume_memory=None)
    made = SimpleNamespace(engine=engine, scorer=one.part("verifiers")) if generates else None
    placement = SimpleNamespace(start=one.placement, shares_gpus=one.shares_gpus, deadlines=one.deadlines)

    async def start():
        try:
            await parts.start_all(placement, policy, made, SimpleNamespace(warn=warned.append))
        finally:
            for _ in range(10):
                await asyncio.sleep(0)
            one.cancelled = tuple(one.cancelled)  # what ends later was ended by the event loop

    run(start())
    return warned


def test_all_parts_start_at_once_after_their_places_and_the_policys_remarks_are_told():
    one = Started()
    assert start_all(one) == ["a remark", "another"] and one.done == ["placement", "policy", "engine", "verifiers"]
    one = Started(shares=True)
    start_all(one, generates=False)
    assert one.done == ["placement", "policy"]


def test_in_turns_the_servers_give_their_memory_back_before_the_policy_is_built(monkeypatch):
    monkeypatch.setattr(parts, "SharingEngine", SimpleNamespace)
    one = Started(shares=True)
    start_all(one)
    assert one.done == ["placement", "processes", "engine", "verifiers", "release", "build"]


@pytest.mark.parametrize("fails", ["policy", "engine", "verifiers"])
def test_the_first_start_that_fails_ends_the_others(fails):
    one = Started(fails=fails)
    one.placement = Started().placement
    with pytest.raises(EngineError, match=f"{fails} failed"):
        start_all(one)
    assert sorted(one.cancelled) == sorted({"policy", "engine", "verifiers"} - {fails})


def test_without_a_policy_engine_and_verifiers_start_after_their_places():
    one = Started()
    placement = SimpleNamespace(start=one.placement, deadlines=one.deadlines)
    run(parts.start_engine(placement, one.part("engine"), one.part("verifiers")))
    assert one.done == ["placement", "engine", "verifiers"]


def test_ranks_that_may_be_replaced_have_the_limits_of_the_run(tmp_path, monkeypatch):
    trainer = {"run_dir": tmp_path, "replace_lost_ranks": True, "snapshot_gib": 3.0, "max_replacements": 4}
    config = configured(trainer={**trainer, "hung_rank_s": 70.0})

    monkeypatch.setattr(parts, "PolicyGroup", lambda *sections, **options: options)

    def made(warn):
        return parts.policy_group(config, "where", warn)

    assert made(print)["healing"] == parts.HealingLimits(3.0, 4, 70.0) and made(print)["warn"] is print
    assert not {"healing", "warn"} & made(None).keys()


def test_a_critic_that_no_algorithm_has_cannot_be_exported():
    config = configured(algorithm={"name": "grpo"})
    config = config.model_copy(update={"trainer": config.trainer.model_copy(update={"export_critic": True})})
    with pytest.raises(ConfigError, match=r"trainer.export_critic: got true, but grpo has no critic"):
        parts.policy_group(config, "where")


def test_small_parts_follow_the_configuration(tmp_path):
    config = configured(trainer={"run_dir": tmp_path}, observe={"save_rollouts": True})
    off = configured(trainer={"run_dir": tmp_path}, observe={"save_rollouts": False})
    assert parts.recorder(off) is None and parts.recorder(config) is not None
    assert parts.log_folder(config) == tmp_path / "logs" and parts.run_directory(config) == tmp_path
    kinds = [configured(engine={"kind": kind}) for kind in ("embedded", "sglang")]
    assert [parts.evaluates_beside(one) for one in kinds] == [False, True]
    urls = configured(engine={"kind": "sglang", "replicas": 2, "sglang": {"urls": ("http://a:1",)}})
    assert [parts._servers(one.engine) for one in (configured(engine={"replicas": 2}), urls)] == [2, 1]


def test_turns_are_taken_only_where_gpus_are_shared(monkeypatch):
    monkeypatch.setattr(parts, "SharingEngine", SimpleNamespace)
    made = SimpleNamespace(engine=SimpleNamespace())
    notices = SimpleNamespace(warn=print)
    shared = SimpleNamespace(shares_gpus=True, deadlines=Deadlines())
    apart = SimpleNamespace(shares_gpus=False, deadlines=Deadlines())
    assert parts.colocation("policy", made, apart, notices) is None
    assert parts.colocation("policy", None, shared, notices) is None
    assert isinstance(parts.colocation("policy", made, shared, notices), parts.Colocation)


def test_a_checkpoint_and_a_run_that_continues_it_must_agree_in_these():
    trainer = {"seed": 3, "updates_per_batch": 2, "epochs_per_batch": 4}
    rollout = {"rollouts_per_prompt": 6, "prompts_per_step": 10}
    config = configured(trainer=trainer, rollout=rollout)
    assert launch._identity(config) == {**trainer, **rollout, "algorithm": config.algorithm.name}


def test_checkpoints_and_metrics_are_kept_as_configured(tmp_path, monkeypatch):
    given = []
    monkeypatch.setattr(launch.recovery, "Checkpoints", lambda *a, **k: given.append((a, k)))
    monkeypatch.setattr(launch, "MetricsLog", lambda *a, **k: given.append((a, k)))
    config = configured(
        trainer={"run_dir": tmp_path / "mine", "keep_checkpoints": 3, "keep_every_steps": 40},
        observe={"tensorboard": False, "wandb": {"enabled": True, "project": "p"}},
    )
    launch._checkpoints(config, SimpleNamespace(provenance="provenance"))
    launch._metrics_log(config, tmp_path / "mine")
    assert given == [
        ((tmp_path / "mine",), {"keep": 3, "keep_every": 40, "provenance": "provenance"}),
        ((tmp_path / "mine",), {"tensorboard": False, "wandb": {"enabled": True, "project": "p", "name": "mine"}}),
    ]


@pytest.mark.parametrize(
    ("due", "says"),
    [
        ([], "Nothing to do"),
        ([Path("hf")], "Only hf is left to be written"),
        ([Path("hf"), Path("critic")], "Only hf and critic are left to be written"),
    ],
)
def test_a_run_that_has_all_its_steps_does_at_most_its_export(monkeypatch, tmp_path, due, says):
    noticed, entered = [], []
    monkeypatch.setattr(launch.run_directory, "exports_due", lambda section, step: due)
    finished = SimpleNamespace(
        config=configured(trainer={"run_dir": tmp_path}),
        progress=SimpleNamespace(notice=noticed.append),
        in_cluster=lambda work, *, engines: entered.append(engines),
    )
    outcome = launch._finished_before(finished, SimpleNamespace(step=8))
    assert outcome == launch.RunOutcome("finished", 8) and entered == [False] * bool(due)
    assert noticed == [f"{tmp_path} has all of its 8 steps; raise trainer.steps to go on. {says}"]


@pytest.mark.parametrize(
    "error", [WorkerError("a collective failed"), WorkerDiedError("rank 1 died"), ValueError("x"), None]
)
def test_after_a_loss_of_workers_the_folder_of_logs_is_named_and_signals_are_held_back_in_any_case(
    monkeypatch, tmp_path, error
):
    noticed, done = [], []

    @contextlib.contextmanager
    def no_cluster(processes):
        done.append(processes)
        yield

    monkeypatch.setattr(launch, "cluster", no_cluster)
    config = configured(trainer={"run_dir": tmp_path})
    interrupts = SimpleNamespace(ending=lambda: done.append("ending"))
    one = launch._Run(config, SimpleNamespace(notice=noticed.append), interrupts)

    async def work():
        if error:
            raise error
        return "outcome"

    if error:
        with pytest.raises(type(error)) as raised:
            one.in_cluster(work, engines=True)
        assert str(raised.value).startswith(str(error))
        assert ("--resume goes on" in str(raised.value)) == isinstance(error, WorkerDiedError)
    else:
        assert one.in_cluster(work, engines=True) == "outcome"
    assert done == [launch.demand_of(config, engines=True).processes, "ending"]
    told = isinstance(error, WorkerError)
    assert noticed == [f"what each process wrote is in {tmp_path / 'logs'}"] * told
