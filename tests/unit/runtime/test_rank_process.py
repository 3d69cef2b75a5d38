"""The process of one rank: what it hands to its policy, what it answers, and what it lets go of. The policy is faked:
real ones are in tests/parallel."""

from __future__ import annotations

import asyncio
import gc
import os
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from ray.exceptions import RayActorError, RayTaskError
from shard_cases import CASES, checkpoint
from test_packing import make_batch

from megatron_daro.actor import compat, device, parallel, weights
from megatron_daro.actor import policy as policy_module
from megatron_daro.config.actor import ActorSection
from megatron_daro.convert.mapping import hf_to_megatron, shard
from megatron_daro.errors import SyncError, WorkerError
from megatron_daro.runtime import workers
from megatron_daro.runtime.shard_export import ShardExport
from megatron_daro.sync import send
from megatron_daro.sync.plan import SendPlan, Target
from megatron_daro.sync.shard_tcp import check_offers
from megatron_daro.types import StepResult

BATCH = make_batch([(2, 3), (1, 2)], old=False)


class Policy:
    """Notes every call; made in the place of the real one."""

    def __init__(self, *arguments, **options):
        self.made, self.calls = (arguments, options), []
        self.reference, self.remarks, self.snapshot_bytes = object(), ("its own remark",), {"weights": 8}

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)

        def call(*arguments, **options):
            self.calls.append((name, arguments, options))
            return self.answer(name)

        return call

    def answer(self, name):
        column = np.arange(5, dtype=np.float32)
        return {
            "train_step": StepResult(3, {"loss": 1.0}, own_s=2.0),
            "run_pass": column,
            "logprobs": column,
            "export": iter([("a", torch.zeros(4)), ("b", torch.ones(2))]),
            "export_critic": iter([("critic", torch.zeros(3))]),
        }.get(name, f"of {name}")


@pytest.fixture
def own(monkeypatch):
    """A process with such a policy, rank 3 of the run."""
    worker = workers.TrainWorker.__ray_metadata__.modified_class(3)
    worker._policy = Policy()
    monkeypatch.setattr(parallel, "answers_for_shard", lambda: True)
    monkeypatch.setattr(workers.ray.util, "get_node_ip_address", lambda: "127.0.0.1")
    return worker


@pytest.mark.parametrize("gpus", [{}, {"GPU": ["2"]}, {"GPU": [0, 3]}])
def test_the_gpus_that_ray_gave_are_told(own, monkeypatch, gpus):
    monkeypatch.setattr(
        workers.ray, "get_runtime_context", lambda: SimpleNamespace(get_accelerator_ids=lambda: {"CPU": ["7"], **gpus})
    )
    assert own.gpu() == ",".join(map(str, gpus.get("GPU", [])))


@pytest.mark.parametrize("answers", [True, False])
def test_only_a_rank_that_answers_says_what_it_computed(own, monkeypatch, answers):
    monkeypatch.setattr(parallel, "answers_for_shard", lambda: answers)
    old = np.full(5, -1.0, np.float32)
    result = own.train(BATCH, ((0, 1),), 3, old_logprobs_R=old)
    assert result == StepResult(3, {"loss": 1.0} if answers else {}, own_s=2.0)
    columns = own.run_pass("old_logprobs", BATCH, ((0,), (1,))), own.score(BATCH, ((1, 0),), 0.7)
    assert all((column is not None) == answers for column in columns)
    (_, (batch, micro_batches), options), passed, scored = own._policy.calls
    assert batch.old_logprobs_R is old and micro_batches == ((0, 1),) and options == {"step": 3}
    assert passed == ("run_pass", ("old_logprobs", BATCH, ((0,), (1,))), {})
    assert scored == ("logprobs", (BATCH, ((1, 0),)), {"temperature": 0.7})


def test_memory_moves_away_and_back_and_checkpoints_go_to_the_policy(own, tmp_path):
    assert own.move(("weights",), True) == "of offload" and own.move(("optimizer",), False) == "of onload"
    own.start_save(tmp_path)
    own.finish_save()
    own.load(tmp_path)
    names = ["offload", "onload", "start_save", "finish_save", "load"]
    arguments = [(("weights",),), (("optimizer",),), (tmp_path,), (), (tmp_path,)]
    assert own._policy.calls == [(name, given, {}) for name, given in zip(names, arguments, strict=True)]
    held, free = own.snapshot_bytes()
    assert held == {"weights": 8} and free > 2**20


@pytest.fixture
def groups(monkeypatch):
    """What the process groups of this process are asked for; listens: at which ports, one more with every group."""
    asked = SimpleNamespace(joined=[], listens={1}, closed=[], aborted=[])

    def initialize(layout, **options):
        asked.joined.append((layout, options))
        asked.listens.add(len(asked.joined) + 1)

    monkeypatch.setattr(parallel, "prepare_process", lambda **options: (f"prepared with {options}",))
    monkeypatch.setattr(parallel, "initialize", initialize)
    monkeypatch.setattr(parallel, "listening", lambda: frozenset(asked.listens))
    monkeypatch.setattr(parallel, "gathered_addresses", lambda own: frozenset({*own, "of others"}))
    monkeypatch.setattr(parallel, "abort", lambda *addresses: asked.aborted.append(addresses))
    monkeypatch.setattr(parallel, "shutdown", lambda: asked.closed.append("groups"))
    monkeypatch.setattr(policy_module, "MegatronPolicy", Policy)
    for name in ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "GLOO_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "before")
    yield asked
    gc.unfreeze()


def setup(own, place="file:///here", **options):
    settings = SimpleNamespace(expandable_segments=True)
    own.setup(place, settings, ActorSection(tensor_parallel=2), "algorithm", 5, 77.0, **options)
    return settings


@pytest.mark.parametrize("heals", [True, False])
def test_a_rank_joins_its_groups_and_builds_its_policy(own, groups, heals):
    own._reserved = SimpleNamespace(close=lambda: groups.closed.append("port"))
    settings = setup(own, heals=heals, to_be_restored=True)
    ((layout, options),) = groups.joined
    assert layout.tensor == 2 and options == {"rank": 3, "init_method": "file:///here", "seed": 5, "timeout_s": 77.0}
    assert groups.closed == ["port"]
    arguments, options = own._policy.made
    assert arguments == (settings, ActorSection(tensor_parallel=2), "algorithm")
    assert options == {"to_be_restored": True, "reference": None}
    assert own._remarks == ("prepared with {'expandable_segments': True}",)
    assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == ("0" if heals else "before")
    assert os.environ["GLOO_SOCKET_IFNAME"] == "lo" and gc.get_freeze_count() > 1000
    own.abort()
    assert groups.aborted == [({2}, {2, "of others"}) if heals else (set(), set())]


def test_on_several_nodes_gloo_is_not_told_to_stay_on_loopback(own, groups):
    setup(own, place="tcp://10.0.0.1:7")
    assert os.environ["GLOO_SOCKET_IFNAME"] == "before"


def test_weights_of_the_reference_stay_when_the_policy_is_built_again(own, groups):
    setup(own, heals=True)
    first = own._policy.reference
    setup(own)
    assert own._policy.made[1]["reference"] is first and own._policy.made[1]["to_be_restored"] is False


def test_groups_of_relays_are_closed_with_the_others(own, groups, monkeypatch):
    setup(own, heals=True)
    made = []

    def groups_of(members):
        groups.listens.add("relay")
        made.append(members)
        return {tuple(members[0]): "group"}

    monkeypatch.setattr(send, "groups_of", groups_of)
    own.join_relays([(0, 3)])
    assert own._relays == {(0, 3): "group"} and made == [[(0, 3)]]
    own.abort()
    assert groups.aborted == [({2, "relay"}, {2, "relay", "of others"})]


def test_who_leaves_lets_go_of_everything_but_the_snapshots(own, groups, monkeypatch):
    setup(own, heals=True)
    monkeypatch.setattr(gc, "collect", lambda: groups.closed.append("garbage"))
    monkeypatch.setattr(compat, "forget_rotary_tables", lambda: groups.closed.append("tables"))
    policy, states = own._policy, own._states
    for name in ("_sender", "_shards"):
        setattr(own, name, SimpleNamespace(close=lambda name=name: groups.closed.append(name)))
    own._relays, own._snapshot = {(0, 1): "group"}, (1, "pending")
    own.abort()
    assert groups.closed == ["_shards"]
    own.leave()
    assert [name for name, *_ in policy.calls] == ["end_background_work"]
    assert groups.closed == ["_shards", "_sender", "_shards", "groups", "tables", "garbage"]
    assert (own._policy, own._relays, own._snapshot, own._shards) == (None, {}, None, None)
    own.abort()
    assert groups.aborted[1] == (set(), set()) and own._states is states and gc.get_freeze_count() == 0
    own._sender = None
    own.leave()
    assert groups.closed[6:] == ["groups", "tables", "garbage"]


def test_its_place_says_what_part_it_has(own, monkeypatch):
    for name, value in (("data_parallel_rank", 2), ("pipeline_parallel_rank", 1), ("weights_key", (4, 5))):
        monkeypatch.setattr(parallel, name, lambda value=value: value)
    monkeypatch.setattr(weights, "exports_weights", lambda: True)
    monkeypatch.setattr(weights, "sends_for_stage", lambda: False)
    own._remarks = ("of the process",)
    assert own.place() == workers.Place(
        2, 1, exports=True, sends=False, answers=True, device="cpu", host="127.0.0.1",
        remarks=("of the process", "its own remark"), weights_key=(4, 5),
    )  # fmt: skip


def test_a_snapshot_counts_when_it_is_whole_and_its_peer_has_it(own):
    waited, sent = [], []
    own._policy.answer = lambda name: SimpleNamespace(wait=lambda: waited.append(name))
    own._states.send = lambda *arguments: sent.append((list(waited), arguments))
    own.start_snapshot(4, 3)
    ((name, (slot, serial), _),) = own._policy.calls
    assert (name, serial) == ("start_snapshot", 4) and slot.serial is None
    own.finish_snapshot(4, 3, "peer", ("weights",))
    assert sent == [(["start_snapshot"], (3, 4, 3, "peer", ("weights",)))]
    own.finish_snapshot(4, 3, None, ())
    assert len(waited) == 2 and len(sent) == 1
    with pytest.raises(WorkerError, match=r"snapshot 3 was given up; the newest is \(4, "):
        own.finish_snapshot(3, None, None, ())
    own._snapshot = None
    with pytest.raises(WorkerError, match="snapshot 4 was given up; the newest is None"):
        own.finish_snapshot(4, None, None, ())


def test_copies_and_snapshots_are_those_of_the_process(own):
    calls = []

    class States:
        kept = "kept"

        def __getattr__(self, name):
            return lambda *arguments: calls.append((name, arguments)) or f"of {name}"

    own._states = States()
    own.keep_own_twice(True)
    own.open_copy(1, 2, 3)
    own.take_block(1, 2, "weights", 0, "block")
    own.seal_copy(1, 2, "layout", "rest")
    assert own.describe(None, 2) == "of describe" and own.block(1, 2, "weights", 0) == "of block"
    own.adopt(2, ("source",))
    own.restore(2)
    assert own.kept() == "kept"
    wanted = [("keep_own_twice", (True,)), ("open_copy", (1, 2, 3)), ("take_block", (1, 2, "weights", 0, "block"))]
    wanted += [("seal_copy", (1, 2, "layout", "rest")), ("describe", (None, 2)), ("block", (1, 2, "weights", 0))]
    assert calls == [*wanted, ("adopt", (2, ("source",))), ("whole", (2,))]
    assert own._policy.calls == [("restore", ("of whole",), {})]


ACTOR_PLAN = SendPlan(transport="actor", targets=(), bucket_bytes=16, timeout_s=5.0)


class Receiver:
    """An engine that takes buckets; says: what it raises at the bucket of this number."""

    def __init__(self, **says):
        self.got, self.says = [], {int(number[1:]): error for number, error in says.items()}
        self.receive = SimpleNamespace(remote=self._receive)

    def _receive(self, bucket):
        self.got.append(bucket.names)
        return self.says.get(len(self.got))


@pytest.fixture
def store(monkeypatch):
    def get(answer, timeout):
        assert timeout == 5.0
        if answer is not None:
            raise answer

    monkeypatch.setattr(workers.ray, "get", get)
    monkeypatch.setattr(workers.ray, "put", lambda bucket: bucket)


def plan(**receivers):
    return SendPlan(
        transport="actor",
        targets=tuple(Target(name, actor=receiver) for name, receiver in receivers.items()),
        bucket_bytes=16,
        timeout_s=5.0,
    )


@pytest.mark.usefixtures("store")
def test_buckets_are_handed_to_every_engine_and_counted(own, monkeypatch):
    monkeypatch.setattr(parallel, "pipeline_parallel_rank", lambda: 0)
    first, second = Receiver(), Receiver()
    report = own.export(plan(a=first, b=second))
    assert first.got == second.got == [("a",), ("b",)]
    assert (report.num_bytes, report.num_buckets, report.failures) == (24, 2, {}) and report.send_s > 0
    sender = own._sender
    report = own.export(plan(a=first), critic=True)
    assert first.got[2:] == [("critic",)] and own._sender is sender


@pytest.mark.usefixtures("store")
@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (RayTaskError("receive", "traceback", SyncError("not my weights")), "refused", "not my weights"),
        (RayActorError(), "unanswered", "b died: "),
    ],
)
@pytest.mark.parametrize("at", [1, 2])
def test_after_an_engine_that_failed_nothing_is_handed_over_and_the_stream_is_read_to_its_end(
    own, monkeypatch, error, kind, text, at
):
    monkeypatch.setattr(parallel, "pipeline_parallel_rank", lambda: 0)
    read = []

    def stream():
        for name in "abc":
            read.append(name)
            yield name, torch.zeros(4)

    own._policy.export = stream
    first, second = Receiver(), Receiver(**{f"n{at}": error})
    report = own.export(plan(a=first, b=second))
    assert report.failures.keys() == {"b"}
    assert (report.failures["b"].kind, str(report.failures["b"])[: len(text)]) == (kind, text)
    assert len(first.got) == at and read == ["a", "b", "c"] and report.num_buckets == at


def test_a_rank_without_a_plan_gathers_along_and_says_nothing(own):
    tensors = iter([("a", torch.zeros(1)), ("b", torch.zeros(1))])
    own._policy.export = lambda: tensors
    assert own.export(None) is None and list(tensors) == [] and own._sender is None


def test_a_rank_sends_with_its_stages_label_and_group(own, monkeypatch):
    made, sent = [], []

    class Sender:
        def __init__(self, *arguments):
            made.append(arguments)

        def send(self, stream, given, **options):
            sent.append(([name for name, _ in stream], given, options))
            return "report"

    monkeypatch.setattr(send, "Sender", Sender)
    monkeypatch.setattr(parallel, "pipeline_parallel_rank", lambda: 2)
    monkeypatch.setattr(device, "prepare", lambda: SimpleNamespace(type="cuda"))
    own._relays = {(0, 3): "group"}
    assert own.export(ACTOR_PLAN, (0, 3)) == "report" and own.export(ACTOR_PLAN) == "report"
    assert made == [("127.0.0.1", "nccl", workers.calls_to_servers, workers._hand_over)]
    assert sent == [
        (["a", "b"], ACTOR_PLAN, {"label": "stage2", "group": "group"}),
        (["a", "b"], ACTOR_PLAN, {"label": "stage2", "group": None}),
    ]


def test_a_relay_hands_on_what_its_group_gets(own, monkeypatch):
    monkeypatch.setattr(send, "received", lambda group, target: (group, target))
    monkeypatch.setattr(send, "push_buckets", lambda *arguments: arguments)
    own._relays = {(0, 3): "group"}
    assert own.relay("plan", (0, 3)) == (("group", torch.device("cpu")), "plan", workers.calls_to_servers)


CASE = CASES[0]


def shard_export(tensor_parallel=1):
    """Of a whole tiny model on one rank."""
    tensors = checkpoint(CASE)
    rules = hf_to_megatron(CASE.shape, fused_norms=True)
    padded = {rule.megatron_name: 208 if rule.kind == "vocab" else None for rule in rules}
    local = [
        (SimpleNamespace(rule=rule), shard(rule, tensors, 0, 1, padded_vocab=padded[rule.megatron_name]))
        for rule in rules
    ]
    policy = SimpleNamespace(shape=CASE.shape, shards=lambda: local)
    actor = ActorSection(tensor_parallel=tensor_parallel)
    return policy, ShardExport(policy, actor, 0, "127.0.0.1", "calls")


def shards_plan(servers, **options):
    targets = tuple(Target(f"s{number}") for number in range(servers))
    return SendPlan(
        transport="shards", targets=targets, bucket_bytes=1, timeout_s=1.0, layout=CASE.server_layout, **options
    )


def test_a_rank_offers_what_servers_need_and_plans_anew_for_other_servers():
    _, export = shard_export()
    try:
        with pytest.raises(AssertionError, match="a plan of shards has the servers' layout"):
            export.offer(ACTOR_PLAN)
        check_offers([export.offer(shards_plan(1))], 1)
        writes = export._writes
        check_offers([export.offer(shards_plan(1))], 1)
        assert export._writes is writes, "the plan is kept"
        offer = export.offer(shards_plan(2))
        check_offers([offer], 2)
        assert {server for server, _ in offer.entries} == {0, 1} and offer.host == "127.0.0.1"
    finally:
        export.close()
        export.close()


@pytest.mark.parametrize(
    ("tensor_parallel", "digests", "dtype"),
    [(1, True, "bfloat16"), (2, True, "bfloat16"), (1, False, "bfloat16"), (1, True, "")],
)
def test_a_rank_takes_digests_of_tensors_that_it_has_whole(tensor_parallel, digests, dtype):
    policy, export = shard_export(tensor_parallel)
    sent = []

    def send_(tensors, plan, offers):
        sent.append((tensors, offers))
        return workers.SendReport(num_bytes=7)

    export._sender = SimpleNamespace(send=send_)
    report = export.send(shards_plan(1, digest_dtype=dtype), ("offer",), digests=digests)
    names = {name.rpartition(".weight")[0].split(".")[-1] for name in report.digests}
    expected = {(1, True, "bfloat16"): {"norm", "o_proj"}, (2, True, "bfloat16"): {"norm"}}
    assert {name.removeprefix("input_layer").removeprefix("post_attention_layer") for name in names} == expected.get(
        (tensor_parallel, digests, dtype), set()
    )
    assert report.num_bytes == 7
    ((tensors, offers),) = sent
    assert offers == ("offer",) and tensors.keys() == {local.rule.megatron_name for local, _ in policy.shards()}
    assert all(tensors[local.rule.megatron_name] is values for local, values in policy.shards())


def test_shards_are_offered_by_one_export_and_digests_come_from_who_sends_for_the_stage(own, monkeypatch):
    with pytest.raises(AssertionError, match="offer_shards comes first"):
        own.send_shards("plan", ())
    made, sent = [], []

    class Export:
        def __init__(self, *arguments):
            made.append(arguments)

        def offer(self, given):
            return f"offer of {given}"

        def send(self, *arguments, **options):
            sent.append((arguments, options))
            return "report"

    monkeypatch.setattr(workers, "ShardExport", Export)
    monkeypatch.setattr(weights, "sends_for_stage", lambda: True)
    own._actor = "actor"
    assert [own.offer_shards(number) for number in (1, 2)] == ["offer of 1", "offer of 2"]
    assert made == [(own._policy, "actor", 3, "127.0.0.1", workers.calls_to_servers)]
    assert own.send_shards("plan", ("offer",)) == "report"
    assert sent == [(("plan", ("offer",)), {"digests": True})]


def test_an_engine_worker_hands_every_call_to_its_engine():
    calls = []

    class Engine:
        def open_update(self):
            calls.append(("open_update", ()))

        def __getattr__(self, name):
            async def call(*arguments):
                calls.append((name, arguments))

            return call

        async def generate(self, requests):
            for request in requests:
                yield (request,)

    worker_class = workers.EngineWorker.__ray_metadata__.modified_class
    worker = worker_class.__new__(worker_class)
    worker._engine = Engine()

    async def scenario():
        await worker.start()
        assert [rollouts async for rollouts in worker.generate([1, 2])] == [(1,), (2,)]
        await worker.abort([1])
        await worker.open_update()
        await worker.receive("bucket")
        await worker.commit_update(7)

    asyncio.run(scenario())
    wanted = [("start", ()), ("abort", ([1],)), ("open_update", ()), ("receive", ("bucket",)), ("commit_update", (7,))]
    assert calls == wanted
