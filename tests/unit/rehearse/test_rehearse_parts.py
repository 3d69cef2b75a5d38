"""The parts of a rehearsal one by one: what thin ranks answer, canned servers say, and this machine stands for."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from types import SimpleNamespace

import numpy as np
import pytest
from aiohttp.test_utils import make_mocked_request

from megatron_daro.actor.parallel import Layout
from megatron_daro.config import Config
from megatron_daro.errors import ConfigError, EngineError
from megatron_daro.rollout.deadlines import Deadlines
from megatron_daro.runtime.workers import Place
from megatron_daro.types import Prompt
from megatron_daro.workshop.rehearse import canned_server, loop, setting, thin_ranks
from megatron_daro.workshop.rehearse.canned_server import Bodies, CannedAnswers, CannedFleet, CannedServer
from megatron_daro.workshop.rehearse.setting import Asked, NodeMap, PlannedTimes, Setting
from megatron_daro.workshop.rehearse.thin_ranks import Loss, RankHandle, Script, ThinRanks

SCRIPT = Script(
    train_s=0.25,
    logprobs_s=0.5,
    send_s=0.75,
    stages={0: (100, 2), 1: (200, 3)},
    answering=frozenset({1}),
    stage_of={2: 1},
)
BATCH = SimpleNamespace(
    advantages_N=np.array([1.0, 3.0], np.float32), rollout_logprobs_R=np.array([-1.0, -2.0], np.float32)
)


@pytest.fixture
def slept(monkeypatch):
    """Seconds that were waited, in place of waiting."""
    times: list[float] = []

    async def sleep(seconds):
        times.append(seconds)

    monkeypatch.setattr(thin_ranks.asyncio, "sleep", sleep)
    return times


def test_a_thin_rank_takes_its_time_and_answers_only_where_its_answer_counts(slept):
    ranks = ThinRanks(SCRIPT)
    answering, other = (asyncio.run(ranks.train(rank, BATCH, [], 7)) for rank in (1, 0))
    assert (answering.step, answering.metrics) == (7, {"loss/policy": 2.0, "loss/grad_norm": 1.0})
    assert (other.step, other.metrics) == (7, {}) and slept == [0.25, 0.25]
    assert asyncio.run(ranks.run_pass(0, "x", BATCH, [])) is None and len(slept) == 2
    scored = asyncio.run(ranks.run_pass(1, "x", BATCH, []))
    assert scored.dtype == np.float32 and scored.tolist() == pytest.approx([-0.999, -1.998]) and slept[2:] == [0.5]
    assert asyncio.run(ranks.score(1, BATCH, [], 1.0)).tolist() == [-0.5, -0.5]
    assert asyncio.run(ranks.score(0, BATCH, [], 1.0)) is None
    assert thin_ranks.PROBED == -0.5  # as a canned server says


def test_the_sender_of_a_stage_reports_its_bytes(slept):
    ranks = ThinRanks(SCRIPT)
    report = asyncio.run(ranks.export(2, object()))  # type: ignore[arg-type]
    assert report == thin_ranks.SendReport(200, 3, 0.75) and slept == [0.75]
    assert asyncio.run(ranks.export(2, None)) is None and asyncio.run(ranks.export(1, object())) is None  # type: ignore[arg-type]


def test_a_thin_rank_writes_its_file_of_a_checkpoint(tmp_path, slept):
    asyncio.run(ThinRanks(SCRIPT).start_save(12, tmp_path))
    asyncio.run(ThinRanks(SCRIPT).finish_save(12))
    assert [(file.name, file.stat().st_size) for file in tmp_path.iterdir()] == [("shard_00012.safetensors", 0)]
    assert asyncio.run(ThinRanks(SCRIPT).ready()) == thin_ranks.os.getpid()


@pytest.mark.parametrize("how", ["killed", "silent", ""])
def test_a_lost_node_ends_or_falls_silent_in_its_step(monkeypatch, how):
    class DiedError(Exception):
        pass

    def end(code):
        raise DiedError(code)

    monkeypatch.setattr(thin_ranks.os, "_exit", end)
    ranks = ThinRanks(dataclasses.replace(SCRIPT, train_s=0.0, loses_at=2, own_loss=how))

    async def step(number):
        async with asyncio.timeout(0.05):
            return (await ranks.train(1, BATCH, [], number)).step

    assert asyncio.run(step(1)) == 1
    with pytest.raises(DiedError if how == "killed" else TimeoutError) as caught:
        asyncio.run(step(2))
    assert how != "killed" or caught.value.args == (1,)


def test_calls_to_ranks_are_counted_and_the_last_of_each_is_known():
    asked, made = thin_ranks._Asked(), []

    def remote(*given, **named):
        made.append((given, named))
        return len(made)

    host = SimpleNamespace(train=SimpleNamespace(remote=remote), sentinel=SimpleNamespace(remote=remote))
    first, second = (RankHandle(host, rank, asked) for rank in (4, 5))
    assert first.train.remote("a", b=1) == 1 and second.train.remote() == 2 and second.train.remote("c") == 3
    assert second.sentinel.remote() == 4 and made[0] == ((4, "a"), {"b": 1}) and made[2] == ((5, "c"), {})
    assert asked.count == 4 and {rank: call[:2] for rank, call in asked.calls.items()} == {
        4: ("train", 1),
        5: ("train", 3),
    }
    with pytest.raises(AttributeError):
        _ = first._hidden


@pytest.mark.parametrize(
    ("dead", "waiting", "expected"),
    [((), (), None), ((4,), (5,), ("train", (4,), (5,))), ((), (5, 4), ("train", (), (4, 5)))],
)
def test_ranks_that_never_answered_are_told_from_those_that_died(monkeypatch, dead, waiting, expected):
    asked = thin_ranks._Asked()
    assert asked.unanswered() is None
    asked.calls = {4: ("train", "r4", 1.0), 5: ("train", "r5", 2.0), 6: ("train", "r6", 3.0)}
    open_ = [f"r{rank}" for rank in waiting]

    def wait(references, *, num_returns, timeout):
        assert (num_returns, timeout) == (3, 0)
        return [one for one in references if one not in open_], open_

    monkeypatch.setattr(thin_ranks.ray, "wait", wait)
    monkeypatch.setattr(thin_ranks, "_is_dead", lambda reference: reference in {f"r{rank}" for rank in dead})
    monkeypatch.setattr(thin_ranks.time, "perf_counter", lambda: 11.0)
    found = asked.unanswered()
    assert (found and (found.call, found.died, found.waiting)) == expected and (found is None or found.waited_s == 10.0)


@pytest.mark.parametrize(
    ("error", "dead"), [(None, False), (thin_ranks.DEATHS[0](), True), (thin_ranks.RayError(), False)]
)
def test_only_the_death_of_a_process_is_one(monkeypatch, error, dead):
    def get(reference, timeout):
        assert timeout == 0
        if error:
            raise error

    monkeypatch.setattr(thin_ranks.ray, "get", get)
    assert thin_ranks._is_dead("r") is dead


def test_processes_of_thin_ranks_are_ended_once(monkeypatch):
    killed: list[object] = []
    monkeypatch.setattr(thin_ranks.ray, "kill", lambda host, no_restart: killed.append((host, no_restart)))
    workers = thin_ranks.ThinWorkers(["a", "b"])
    workers["x"] = "handle"
    workers.dismiss()
    workers.dismiss()
    assert killed == [("a", True), ("b", True)] and workers.dismissed and not workers.data


def group_of(monkeypatch, loss: Loss | None):
    """A policy group whose processes are named by their scripts."""
    made: list[Script] = []

    class Host:
        def __init__(self, script):
            made.append(script)
            self.ready = SimpleNamespace(remote=lambda: len(made))

    async def gather(calls):
        assert list(calls) == [f"thin ranks {i}" for i in range(len(made))]

    monkeypatch.setattr(thin_ranks, "actor_class", lambda kind: SimpleNamespace(remote=Host))
    monkeypatch.setattr(thin_ranks, "gather", gather)
    group = thin_ranks.ThinPolicyGroup.__new__(thin_ranks.ThinPolicyGroup)
    nodes = NodeMap(5, (0, 0, 1, 2, 3, 3), ((4,),))
    begun: list[int] = []
    group.rehearse(["p"], nodes, SCRIPT, loss, on_begin=lambda: begun.append(1), on_loss=lambda: None)
    asyncio.run(group.start())
    hosts = [handle._host for handle in group.workers.values()]
    return group, made, hosts, begun


def test_three_processes_stand_for_all_ranks_and_one_for_the_lost_node(monkeypatch):
    group, made, hosts, _ = group_of(monkeypatch, None)
    assert made == [SCRIPT] * 3 and hosts[0] is hosts[1] is hosts[4] is hosts[5] and len(set(map(id, hosts))) == 3
    assert list(group.workers) == [f"actor rank {rank}" for rank in range(6)] and group._places == ["p"]
    _, made, hosts, _ = group_of(monkeypatch, Loss(3, 2, "silent"))
    assert made == [dataclasses.replace(SCRIPT, loses_at=2)] * 3 + [
        dataclasses.replace(SCRIPT, loses_at=2, own_loss="silent")
    ]
    assert hosts[4] is hosts[5] and hosts[4] not in hosts[:4] and hosts[0] is hosts[1]
    _, made, _, _ = group_of(monkeypatch, Loss(4, 2))  # of servers only
    assert made == [SCRIPT] * 3


def test_the_loop_begins_with_the_first_sync(monkeypatch):
    group, _, _, begun = group_of(monkeypatch, None)
    seen: list[object] = []

    async def export(self, plan):
        seen.append((plan, len(begun)))

    monkeypatch.setattr(thin_ranks.PolicyGroup, "export", export)
    for plan in "ab":
        asyncio.run(group.export(plan))
    assert seen == [("a", 1), ("b", 1)]


CANNED = CannedAnswers(
    lengths=[[20, 40], [10, 10]], ordinary=(50, 90), endings=[[1, 2], [3, 2]], vocabulary=100, delay_s=2.0
)


def test_bodies_take_turns_and_wait_by_their_longest_sample():
    bodies = Bodies(CANNED)
    (first, one), (second, two), (third, again) = (bodies.next(1, "a", streams=False) for _ in range(3))
    assert (first, second, third) == (2.0, 0.5, 2.0) and one == again != two
    ids = json.loads(one)[0]["output_ids"]
    assert all(50 <= token < 90 for token in ids[:-2]) and len(set(ids)) > 5
    meta = json.loads(one)[0]["meta_info"]
    assert meta["finish_reason"] == {"type": "stop", "matched": 2} and meta["weight_version"] == "a"
    assert meta["weight_versions"] == [{"version": "a", "start": 0, "end": 20}]
    assert [pair[1:] for pair in meta["output_token_logprobs"]] == [[token, None] for token in ids]
    assert all(-1 <= pair[0] <= 0 for pair in meta["output_token_logprobs"])
    bodies.next(1, "b", streams=False)
    assert {key[2] for key in bodies._ready} == {"b"}
    short = CannedAnswers(lengths=[[1]], ordinary=(50, 51), endings=[[1, 2]], vocabulary=100)
    assert json.loads(Bodies(short).next(1, "a", streams=False)[1])[0]["output_ids"] == [50, 1, 2]


def asked(path: str, body: dict[str, object] | None = None, server: CannedServer | None = None):
    """What a canned server answers."""

    async def ask():
        request = make_mocked_request("POST", path)
        given = SimpleNamespace(path=request.path, can_read_body=body is not None, json=lambda: read())

        async def read():
            return body

        return await (server or CannedServer(CANNED, Bodies(CANNED))).answer(given)  # type: ignore[arg-type]

    return asyncio.run(ask())


def test_a_canned_server_answers_every_call():
    facts = json.loads(asked("/server_info").text)
    assert (
        facts["version"] == "0.5.23" and facts["max_total_num_tokens"] == 10**9 and facts["max_req_input_len"] == 10**6
    )
    assert json.loads(asked("/model_info").text) == {"model_type": "qwen2"}
    paths = json.loads(asked("/openapi.json").text)["paths"]
    assert {"/generate", "/begin_weight_update", "/end_weight_update", *canned_server.NEEDED_CALLS} <= set(paths)
    assert json.loads(asked("/pause_generation", {}).text) == {"success": True}


def test_a_canned_server_tells_prompts_from_the_engines_own_questions(monkeypatch):
    waits: list[float] = []

    async def sleep(seconds):
        waits.append(seconds)

    monkeypatch.setattr(canned_server.asyncio, "sleep", sleep)
    server = CannedServer(dataclasses.replace(CANNED, spread=(3.0, 3.0)), Bodies(CANNED))
    asked("/update_weight_version", {"new_version": "9"}, server)
    prompt = {"input_ids": [[1], [1]], "sampling_params": [{"max_new_tokens": 101}] * 2}
    answer = asked("/generate", prompt, server)
    answers = json.loads(answer.body)
    assert len(answers) == 2 and answers[0]["meta_info"]["weight_version"] == "9" and waits == [6.0]
    assert answer.content_type == "application/json"
    assert asked("/generate", {**prompt, "stream": True}, server).content_type == "text/event-stream"
    short = {"input_ids": [[1], [1]], "sampling_params": {"max_new_tokens": 100}}
    answers = json.loads(asked("/generate", short, server).text)
    assert len(answers) == 2 and len(answers[0]["meta_info"]["output_token_logprobs"]) == 100
    assert answers[0]["meta_info"]["output_token_logprobs"][:2] == [[-0.5, 3, None], [-0.5, 4, None]]
    assert answers[0]["meta_info"]["finish_reason"] == {"type": "length"} and len(waits) == 2
    one = json.loads(asked("/generate", {"input_ids": [1], "sampling_params": {}}, server).text)
    assert len(one["meta_info"]["output_token_logprobs"]) == 1
    for token, status in ((99, 200), (100, 400)):
        biased = {"input_ids": [1], "sampling_params": {"logit_bias": {str(token): 1}}}
        answer = asked("/generate", biased, server)
        assert answer.status == status
    assert "logit_bias must has keys" in json.loads(answer.text)["error"]["message"]


def test_servers_of_the_lost_node_are_a_process_of_their_own(monkeypatch):
    started: list[list[int]] = []
    killed: list[object] = []

    class Popen:
        def __init__(self, command, **_):
            ports = json.loads(command[-1])["ports"]
            started.append(ports)
            self.stdout = SimpleNamespace(readline=lambda: " ".join(map(str, ports)) if len(started) < 3 else "")

        def kill(self):
            killed.append(self)

        def wait(self):
            return None

    monkeypatch.setattr(canned_server.subprocess, "Popen", Popen)
    with canned_server.canned_fleet(3, [1], CANNED) as fleet:
        ports = [int(url.rpartition(":")[2]) for url in fleet.urls]
        assert started == [[ports[0], ports[2]], [ports[1]]] and len(fleet.ports) == 6 and fleet.clashes == 0
        assert all(url.startswith("http://127.0.0.1:") for url in fleet.urls) and set(ports) < set(fleet.ports)
        fleet.lose()
        assert killed == [fleet._processes[1]]
    assert killed[1:] == fleet._processes
    with (
        pytest.raises(EngineError, match="the canned servers did not start"),
        canned_server.canned_fleet(1, [], CANNED),
    ):
        pass
    CannedFleet(1, []).lose()


NODES = NodeMap(5, (0, 0, 1), ((2,), (2, 3)))


@pytest.mark.parametrize(
    ("loss", "servers", "said"),
    [
        (None, [], None),
        (Loss(1, 2), [], None),
        (Loss(2, 2), [0, 1], None),
        (Loss(3, 2), [1], None),
        (Loss(0, 2, "silent"), [], None),
        (Loss(3, 2, "silent"), [], "--lose-how silent: node 3 has no ranks; fix: --lose-how killed"),
        (Loss(4, 2), [], "--lose-node: got 4; allowed: a node that something is on, 0 to 3; fix: --lose-node 0"),
    ],
)
def test_only_a_node_that_something_is_on_can_be_lost(loss, servers, said):
    place = SimpleNamespace(nodes=NODES)
    if said is None:
        assert loop._require_loss(place, loss) == servers
    else:
        with pytest.raises(ConfigError) as caught:
            loop._require_loss(place, loss)
        assert said in str(caught.value)
    assert (NODES.used, NODES.idle, NODES.ranks_of(0)) == ([0, 1, 2, 3], 1, [0, 1])


def config(**sections: object) -> Config:
    base = {"model": {"path": "x"}, "data": {"train": ("x",)}, "engine": {"kind": "sglang"}}
    return Config.model_validate(base | sections)


def setting_in(**fields: object) -> Setting:
    times = PlannedTimes(10.0, 1.0, 4.0, 2.0)
    base = {
        "asked": Asked("r", steps=3, pace=0.5),
        "full": config(),
        "shape": SimpleNamespace(layers=4),
        "nodes": NODES,
    }  # type: ignore[arg-type]
    return Setting(
        **base | {"workload": SimpleNamespace(staleness=0, generated=100), "times": times, "warnings": (), **fields}
    )  # type: ignore[arg-type]


def test_the_planned_step_hides_generation_behind_training():
    times = PlannedTimes(10.0, 1.0, 4.0, 2.0)
    assert times.step(0) == 17.0 and times.step(1) == 10.0 and PlannedTimes(5.0, 1.0, 4.0, 2.0).step(2) == 7.0
    usual = Asked("r")  # type: ignore[arg-type]
    assert (usual.nodes, usual.gpus_per_node, usual.steps, usual.gpu, usual.pace) == (1, 8, 3, "h100-80g", 0.01)
    assert usual.mean_response is None and usual.overrides == ()


def test_this_machine_stands_for_the_cluster_by_overrides(tmp_path):
    trainer = {"updates_per_batch": 2, "run_dir": "y"}
    full = config(trainer=trainer, reward={"workers": 1}, actor={"optimizer": {"warmup_steps": 100}})
    place = setting_in(full=full)
    steps = 3 * place.updates
    assert place.updates == full.trainer.steps_per_batch
    changes = place.changes(tmp_path, ["http://a"])
    assert changes == [
        'engine.sglang.urls=["http://a"]', "engine.sglang.verify=false", "engine.sglang.sync=distributed",
        "engine.sglang.fp8_blocks=false", "actor.routing_replay=false", "reward.workers=1",
        f"trainer.run_dir={tmp_path}",
        f"trainer.steps={steps}", f"actor.optimizer.warmup_steps={steps}", f"trainer.save_every_steps={steps}",
        "trainer.eval_every_steps=0", "trainer.export_hf=false", "observe.progress=false", "observe.tensorboard=false",
    ]  # fmt: skip
    assert "reward.workers=2" in setting_in(full=config(reward={"workers": 9})).changes(tmp_path, [])
    assert place.layers == [[range(4)]] and place.bucket_bytes % 2**20 == 0
    own = config(engine={"kind": "sglang", "sglang": {"bucket_mib": 3, "env": {"A": "b"}}})
    assert setting_in(full=own).bucket_bytes == 3 * 2**20 and setting_in(full=own).left_out == [
        "without engine.sglang.env"
    ]


@pytest.mark.parametrize(
    ("verifier", "ending"),
    [("math", " \\boxed{7}"), ("integer", "\nAnswer: 7"), ("exact", "\n## 7"), ("a:B", "\n## 7")],
)
def test_an_answer_ends_as_the_verifier_reads_it(verifier, ending):
    assert setting._ending(config(reward={"verifier": verifier, "marker": "##"}), "7") == ending


def test_canned_answers_are_as_long_as_planned_and_half_are_right(tmp_path):
    (tmp_path / "config.json").write_text('{"vocab_size": 1000, "model_type": "llama"}')

    class Tokenizer:
        all_special_ids = (2, 900, 950)

        def __len__(self):
            return 990

        def encode(self, text, *, add_special_tokens):
            assert not add_special_tokens
            return [int(c) for c in text if c.isdigit()]

    full = config(model={"path": str(tmp_path)}, rollout={"rollouts_per_prompt": 4}, actor={"precision": "bf16"})
    workload = SimpleNamespace(response_Q=np.array([4.0, 200.0]))
    inputs = SimpleNamespace(tokenizer=Tokenizer(), stops=SimpleNamespace(token_ids=(5, 6)))
    found = setting_in(full=full, workload=workload).answers(inputs)
    assert found.ordinary == (450, 900) and found.endings == [[7, 5], [8, 5]] and found.delay_s == 5.0
    assert (found.vocabulary, found.model_type, found.device) == (1000, "llama", "cuda")
    assert found.dtype == full.actor.torch_dtype and found.tensor_parallel == full.engine.sglang.tensor_parallel
    assert [len(body) for body in found.lengths] == [4] * 8 and {n for body in found.lengths for n in body} == {16, 200}
    slow = setting_in(full=full, workload=workload, times=PlannedTimes(4000.0, 1.0, 1.0, 1.0)).answers(inputs)
    assert slow.delay_s == 1800.0


def test_prompts_are_the_recipes_with_an_answer_that_servers_know():
    seen: list[object] = []
    source = SimpleNamespace(
        next=lambda n: [Prompt("p", "3", "s", text="x", alternatives=("4",))] * n,
        observe=seen.append, state_dict=lambda: {"at": 1}, load_state_dict=seen.append,
    )  # fmt: skip
    prompts = setting._OneAnswer(source)
    assert [(one.id, one.answers) for one in prompts.next(2)] == [("p", ("7",))] * 2
    prompts.observe(["g"])
    prompts.load_state_dict({"at": 2})
    assert seen == [["g"], {"at": 2}] and prompts.state_dict() == {"at": 1}


@pytest.mark.parametrize(
    ("engine", "said"),
    [
        ({"kind": "embedded"}, "engine.kind: got 'embedded'; allowed in a rehearsal: 'sglang'"),
        ({"kind": "sglang", "sglang": {"urls": ["http://127.0.0.1:1"]}}, r"engine.sglang.urls: got servers that run"),
        ({"kind": "sglang", "colocate": True}, "engine.colocate: got true; allowed in a rehearsal: false"),
    ],
)
def test_what_cannot_be_rehearsed_is_refused(monkeypatch, engine, said):
    given: list[object] = []

    def resolve(recipe, overrides):
        given.append((recipe, overrides))
        return config(engine=engine), None

    monkeypatch.setattr(setting, "resolve_and_check", resolve)
    with pytest.raises(ConfigError, match=said):
        setting.setting_of(Asked("r", ("a=b",), nodes=4, gpus_per_node=2))  # type: ignore[arg-type]
    assert given == [("r", ["a=b", "cluster.nodes=4", "cluster.gpus_per_node=2"])]


def test_a_layout_is_said_in_words():
    actor = {"tensor_parallel": 2, "data_parallel": 3}
    assert setting.world(config(actor=actor)) == "6 ranks (TP 2, PP 1, CP 1, DP 3, EP 1)"
    virtual = config(actor={"pipeline_parallel": 2, "virtual_pipeline_parallel": 4})
    assert setting.world(virtual) == "2 ranks (TP 1, PP 2 in 4 parts each, CP 1, DP 1, EP 1)"


@pytest.mark.parametrize(
    ("rank", "place"),
    [
        (0, Place(data_parallel=0, stage=0, exports=True, sends=True, answers=False)),
        (1, Place(data_parallel=0, stage=0, exports=True, sends=False, answers=False)),
        (2, Place(data_parallel=0, stage=0, exports=False, sends=False, answers=False)),
        (5, Place(data_parallel=1, stage=0, exports=False, sends=False, answers=False)),
        (8, Place(data_parallel=0, stage=1, exports=True, sends=True, answers=True)),
        (12, Place(data_parallel=1, stage=1, exports=False, sends=False, answers=True)),
        (14, Place(data_parallel=1, stage=1, exports=False, sends=False, answers=False)),
    ],
)
def test_the_place_of_a_rank(rank, place):
    assert loop.place_of(rank, Layout(tensor=2, pipeline=2, context=2, data=2)) == place


def rehearsal(monkeypatch, *, how: str = "", staleness: int = 0):
    one = loop._Rehearsal.__new__(loop._Rehearsal)
    trainer = SimpleNamespace(steps_per_batch=4, updates_per_batch=2)
    one._setting = setting_in(workload=SimpleNamespace(staleness=staleness, generated=100))
    one._loss = Loss(0, 1, how) if how else None  # type: ignore[arg-type]
    one._config = SimpleNamespace(trainer=trainer)  # type: ignore[assignment]
    one.stages = [loop.StagePlan(0, 5, 2, 100, 60), loop.StagePlan(1, 5, 3, 200, 90)]
    monkeypatch.setattr(loop.parts, "deadlines", lambda config: Deadlines())
    return one


def test_thin_ranks_take_their_part_of_the_planned_times(monkeypatch):
    places = [Place(0, 0, True, True, False), Place(0, 0, False, False, False), Place(0, 1, True, True, True)]
    script = rehearsal(monkeypatch)._script(places)
    assert script == Script(
        train_s=0.5, logprobs_s=0.25, send_s=0.5, stages={0: (100, 2), 1: (200, 3)}, answering=frozenset({2}),
        stage_of={0: 0, 2: 1},
    )  # fmt: skip


def test_a_silent_node_shows_within_ten_seconds(monkeypatch):
    usual = rehearsal(monkeypatch)._limits()
    assert usual == loop.paced(Deadlines(), 0.5, 8.5, 100) == rehearsal(monkeypatch, how="killed")._limits()
    assert rehearsal(monkeypatch, how="silent")._limits() == dataclasses.replace(usual, train=10.0)
    assert rehearsal(monkeypatch, staleness=1)._limits() == loop.paced(Deadlines(), 0.5, 5.0, 100)


def test_each_step_knows_what_it_cost(tmp_path, monkeypatch):
    now = [1.0]
    monkeypatch.setattr(loop, "cpu_s", lambda: now[0] / 2)
    monkeypatch.setattr(loop.time, "perf_counter", lambda: now[0])
    with loop.StepMeter(tmp_path, tensorboard=False) as meter:
        assert meter.calls() == 0
        meter.begin()
        meter.calls = lambda: int(10 * now[0])  # type: ignore[method-assign]
        now[0] = 3.0
        meter.write(1, {"a": 1.0})
        now[0] = 4.0
        meter.write(2, {"a": 2.0})
    assert meter.spent == [loop.Spent(1, 1.0, 2.0, 30), loop.Spent(2, 0.5, 1.0, 10)]
    assert meter.lines == [{"a": 1.0}, {"a": 2.0}] and len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2


def test_what_the_run_says_is_kept():
    kept = loop._Notices(total_steps=1, rollouts_per_prompt=1, mode="off")
    kept.said = []
    kept.notice("a")
    kept.warn("b")
    assert kept.said == ["a", "warning: b"]


def test_a_place_is_the_innermost_line_of_the_package(monkeypatch):
    assert loop._own_place(None) == "elsewhere"
    inner = SimpleNamespace(
        f_code=SimpleNamespace(co_filename="/lib/x/queue.py", co_name="get"), f_lineno=7, f_back=None
    )
    assert loop._own_place(inner) == "elsewhere"
    own = SimpleNamespace(
        f_code=SimpleNamespace(co_filename="/a/megatron_daro/b/c.py", co_name="run"), f_lineno=9, f_back=None
    )
    assert loop._own_place(own) == "b/c.py:9 run"
    inner.f_back = own
    assert loop._own_place(inner) == "b/c.py:9 run, in get of queue.py"


@pytest.mark.parametrize("distributed", [True, False])
@pytest.mark.parametrize("dtype_bytes", [2, 4])
def test_files_of_a_checkpoint_hold_weights_once_and_state_by_owner(monkeypatch, distributed, dtype_bytes):
    """1000 other parameters and 100 of experts on each rank of a stage; two stages of four ranks, experts over two."""
    monkeypatch.setattr(loop, "counts", lambda shape, cut, stage: (1000 * (stage + 1), 100))
    layout = Layout(tensor=1, pipeline=2, data=4, expert=2)
    plan = loop.checkpoint_plan(None, layout, dtype_bytes, distributed=distributed)  # type: ignore[arg-type]
    state, sizes = {2: 12, 4: 8}[dtype_bytes], []
    for rank in range(8):
        rest, place = 1000 * (rank // 4 + 1), rank % 4
        first, experts = place < 1, place < 2
        saved = dtype_bytes * (rest * first + 100 * experts)
        saved += state * (rest / 4 + 100 / 2) if distributed else state * (rest * first + 100 * experts)
        sizes.append(saved)
    assert plan == loop.CheckpointPlan(8, min(sizes), max(sizes), sum(sizes))
