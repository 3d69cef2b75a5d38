"""The process of one rank: what it hands to engines, and what it tells servers of its shards. The policy is faked: real
ones are in tests/parallel."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from ray.exceptions import RayActorError, RayTaskError
from shard_cases import CASES, checkpoint

from megatron_daro.actor import parallel
from megatron_daro.actor import policy as policy_module
from megatron_daro.config.actor import ActorSection
from megatron_daro.config.nccl_environment import nccl_of_rank
from megatron_daro.convert.mapping import hf_to_megatron, shard
from megatron_daro.errors import SyncError
from megatron_daro.runtime import shard_export, train_worker
from megatron_daro.runtime.shard_export import ShardExport
from megatron_daro.sync.plan import SendPlan, SendReport, Target
from megatron_daro.sync.shard_sender import check_offers

pytestmark = pytest.mark.slow


class Policy:
    """Made in the place of the real one. read: the names of the tensors that were taken from its export."""

    reference = None

    def __init__(self, *arguments, **options):
        self.read = []

    def export(self):
        for name in "abcdef":
            self.read.append(name)
            yield name, torch.zeros(4)


@pytest.fixture
def joined(monkeypatch):
    """Start a rank that has joined its groups; returns it and its policy."""
    made = []
    monkeypatch.setattr(parallel, "configure_process", lambda **options: ())
    monkeypatch.setattr(parallel, "initialize", lambda layout, **options: None)
    monkeypatch.setattr(parallel, "listening", frozenset)
    monkeypatch.setattr(parallel, "gathered_addresses", lambda own: own)
    monkeypatch.setattr(parallel, "pipeline_parallel_rank", lambda: 0)
    monkeypatch.setattr(policy_module, "MegatronPolicy", lambda *a, **k: made.append(Policy()) or made[-1])
    monkeypatch.setattr(train_worker.ray.util, "get_node_ip_address", lambda: "127.0.0.1")
    for name in ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "GLOO_SOCKET_IFNAME", *nccl_of_rank({})):
        monkeypatch.setenv(name, "before")

    def join(**options):
        rank = train_worker.TrainWorker.__ray_metadata__.modified_class(3)
        settings = SimpleNamespace(expandable_segments=True)
        rank.setup("file:///here", settings, ActorSection(), "algorithm", 5, 77.0, **options)
        return rank, made[-1]

    yield join
    gc.unfreeze()


@pytest.mark.parametrize("heals", [True, False])
def test_only_where_lost_ranks_are_replaced_nccl_leaves_a_process_alive_whose_peer_is_gone(joined, heals):
    """Gloo stays on loopback where ranks meet in a file."""
    joined(heals=heals)
    assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == ("0" if heals else "before")
    assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"


_FIRST_CALLS = """
import os, torch
first = []
there = torch.cuda.is_available
torch.cuda.is_available = lambda: first.append(os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS")) or there()
from megatron_daro.runtime import train_worker
rank = train_worker.TrainWorker.__ray_metadata__.modified_class(0)
rank.load_code()
print(*first[:1])
"""


def test_a_rank_has_the_environment_of_cuda_before_it_first_calls_it(monkeypatch):
    """A context reads it once, and imports make that context."""
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    done = subprocess.run([sys.executable, "-c", _FIRST_CALLS], capture_output=True, text=True, check=True, timeout=300)
    assert done.stdout.split() == ["1"]


class Receiver:
    """An engine that takes buckets, and fails at the bucket of this number."""

    def __init__(self, fails_at=0, error=None):
        self.buckets, self.fails_at, self.error = [], fails_at, error
        self.receive = SimpleNamespace(remote=self.take)

    def take(self, bucket):
        self.buckets.append(bucket.names)
        return self.error if len(self.buckets) == self.fails_at else None


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (RayTaskError("receive", "traceback", SyncError("not my weights")), "refused"),
        (RayActorError(), "unanswered"),
        (None, None),
    ],
)
def test_after_an_engine_that_failed_nothing_is_handed_over_and_the_export_is_read_to_its_end(
    joined, monkeypatch, error, kind
):
    """Exports are collective: a rank that stopped reading would leave the others waiting for it."""

    def get(answer, timeout):
        if answer is not None:
            raise answer

    monkeypatch.setattr(train_worker.ray, "get", get)
    monkeypatch.setattr(train_worker.ray, "put", lambda bucket: bucket)
    first, second = Receiver(), Receiver(1, error)
    targets = Target("a", worker=first), Target("b", worker=second)
    rank, policy = joined()
    report = rank.export(SendPlan(transport="ray", targets=targets, bucket_bytes=16, timeout_s=5.0))
    handed_over = 1 if error else 6
    assert {name: failure.kind for name, failure in report.failures.items()} == ({"b": kind} if error else {})
    assert len(first.buckets) == len(second.buckets) == handed_over
    assert policy.read == list("abcdef")


CASE = CASES[0]


def exported(tensor_parallel=1):
    """The shards of a whole tiny model on one rank, to be sent, and the policy that holds them."""
    tensors = checkpoint(CASE)
    rules = hf_to_megatron(CASE.shape, fused_norms=True)
    padded = {rule.megatron_name: 208 if rule.kind == "vocab" else None for rule in rules}
    local = [
        (SimpleNamespace(rule=rule), shard(rule, tensors, 0, 1, padded_vocab=padded[rule.megatron_name]))
        for rule in rules
    ]
    policy = SimpleNamespace(shape=CASE.shape, weight_shards=lambda: local)
    return policy, ShardExport(policy, ActorSection(tensor_parallel=tensor_parallel), 0, "127.0.0.1", "calls")


def shards_plan(servers, **options):
    targets = tuple(Target(f"s{number}") for number in range(servers))
    details = {"layout": CASE.server_layout}
    return SendPlan(transport="shards", targets=targets, bucket_bytes=1, timeout_s=1.0, details=details, **options)


def test_a_rank_offers_each_server_what_it_needs_also_when_their_number_changes():
    _, export = exported()
    try:
        for servers in (1, 2):
            offer = export.offer(shards_plan(servers))
            check_offers([offer], servers)
            assert {server for server, _ in offer.entries} == set(range(servers)) and offer.host == "127.0.0.1"
    finally:
        export.close()


@pytest.mark.parametrize(("tensor_parallel", "digested"), [(1, {"norm", "o_proj"}), (2, {"norm"})])
def test_a_rank_takes_digests_of_tensors_that_it_has_whole(monkeypatch, tensor_parallel, digested):
    sent = []

    class Sender:
        def __init__(self, host, calls): ...

        def send(self, tensors, plan, offers):
            sent.append(tensors)
            return SendReport(num_bytes=7)

    monkeypatch.setattr(shard_export, "ShardSender", Sender)
    policy, export = exported(tensor_parallel)
    report = export.send(shards_plan(1, digest_dtype="bfloat16"), ("offer",), digests=True)
    names = {name.rpartition(".weight")[0].split(".")[-1] for name in report.digests}
    assert {name.removeprefix("input_layer").removeprefix("post_attention_layer") for name in names} == digested
    assert sent[0].keys() == {local.rule.megatron_name for local, _ in policy.weight_shards()}
