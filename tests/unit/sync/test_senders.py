"""One rank's sending end: which transport a plan takes, what is noted on the way, and groups that are kept."""

from __future__ import annotations

import base64
import hashlib
import queue
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import get_args

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed import distributed_c10d as c10d

from megatron_daro.config.transports import TRANSPORTS, SGLangTransport
from megatron_daro.engine.sglang.receiving import RECEIVING
from megatron_daro.errors import EngineError, RefusedError
from megatron_daro.runtime.weight_export import EXPORTS
from megatron_daro.sync import files, handles
from megatron_daro.sync.broadcast import BroadcastSender
from megatron_daro.sync.buckets import bucketize
from megatron_daro.sync.plan import Digest, SendFailure, SendPlan, SendReport, Target, WeightFiles
from megatron_daro.sync.senders import SENDERS, Senders
from megatron_daro.sync.transport_sender import TransportSender

PLAN = SendPlan(transport="ray", targets=(Target("a", "http://a", 2),), bucket_bytes=64, timeout_s=100.0)


def named(count=4):
    """64 bytes each."""
    return [(f"t{i}", torch.full((16,), float(i))) for i in range(count)]


def sha(tensor):
    return hashlib.sha256(tensor.view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


def sent_to_embedded(stream, **changes):
    """The report, and the tensors that were handed over."""
    got = []

    class ToActors(TransportSender):
        def _send(self, tensors, plan, group):
            got.extend(tensors)
            return SendReport(num_bytes=7)

    sender = Senders("127.0.0.1", "gloo", nullcontext, ToActors())
    report = sender.send(stream, replace(PLAN, **changes))
    sender.close()
    sender.close()
    return report, got


@pytest.mark.parametrize(("dtype", "is_cast"), [("bfloat16", True), ("float32", False), ("fp4", False)])
def test_digests_are_of_norms_output_projections_and_the_first_layer_as_both_sides_have_them(dtype, is_cast):
    """Of the first layer, since with LoRA nothing else of these may ever change."""
    names = ["layers.1.input_layernorm.weight", "layers.1.self_attn.o_proj.weight", "layers.0.self_attn.q_proj.weight"]
    tensors = dict(zip([*names, "layers.1.self_attn.q_proj.weight"], torch.randn(4, 4, 4), strict=True))
    report, got = sent_to_embedded(tensors.items(), digest_dtype=dtype)
    received = {name: tensor.bfloat16() if is_cast else tensor for name, tensor in tensors.items()}
    assert report.digests == {name: Digest("float32", sha(tensors[name]), sha(received[name])) for name in names}
    assert len(got) == 4


def test_matrices_of_the_plan_go_as_blocks_and_are_named():
    stream = [("a.0.weight", torch.ones(2, 2)), ("b.weight", torch.ones(2))]
    report, got = sent_to_embedded(stream, fp8_blocks=("a.{layer}.weight",))
    assert report.fp8_blocks == ("a.0.weight",)
    assert [name for name, _ in got] == ["a.0.weight", "a.0.weight_scale_inv", "b.weight"]


def test_every_way_has_both_ends_or_goes_from_rank_to_rank_or_by_files():
    sent = {name: way for name, way in TRANSPORTS.items() if not way.checkpoint}
    assert set(EXPORTS) >= {name for name, way in sent.items() if way.shard_plan or way.maps_memory or way.adapters}
    assert set(SENDERS) == {name for name, way in sent.items() if not way.shard_plan}
    assert set(RECEIVING) == set(get_args(SGLangTransport)) == set(TRANSPORTS) - {"ray"}


def test_files_have_the_label_of_the_rank(tmp_path):
    wanted = WeightFiles(directory=tmp_path / "v1", file_bytes=64, remedy="")
    files.open_checkpoint(wanted)
    report = files.write_weight_files(named(2), wanted, "stage1")
    assert report.files == {"t0": ("stage1-00000.safetensors", 64), "t1": ("stage1-00001.safetensors", 64)}
    assert load_file(tmp_path / ".v1.partial/stage1-00001.safetensors")["t1"].tolist() == [1.0] * 16
    assert report.num_bytes == 128 and report.send_s > 0


def test_handles_are_handed_out_bucket_by_bucket_until_somebody_fails(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(handles, "handles_of", lambda tensors: tensors[0][0].encode())
    calls = []

    async def post(url, path, body, timeout_s):
        calls.append((url, path, body, timeout_s))
        if body["serialized_named_tensors"][0] == base64.b64encode(b"t2").decode() and url != "http://c":
            raise RefusedError("not mine") if url == "http://a" else EngineError("reset")

    targets = tuple(Target(name, f"http://{name}", ranks) for name, ranks in (("a", 2), ("b", 1), ("c", 1)))
    report = handles.HandleSender(lambda: nullcontext(post)).send(named(5), replace(PLAN, targets=targets))
    assert report.failures == {"a": SendFailure("refused", "not mine"), "b": SendFailure("unanswered", "reset")}
    assert (report.num_bytes, len(calls)) == (192, 9)
    handle = base64.b64encode(b"t0").decode()
    body = {"serialized_named_tensors": [handle, handle], "flush_cache": False}
    assert calls[0] == ("http://a", "/update_weights_from_tensor", body, 100.0)


class Wire:
    """What torch.distributed does in a group: `broadcast(tensor, src)` fills the tensor of every rank but src, and
    `broadcast_object_list` the list, with src a number among all ranks (distributed_c10d.py)."""

    def __init__(self, monkeypatch):
        self.sent, self.receives = queue.Queue(), False
        monkeypatch.setattr(dist, "get_global_rank", lambda group, rank: {"hosts": 40}[group] + rank)
        monkeypatch.setattr(dist, "broadcast", self.broadcast)
        monkeypatch.setattr(dist, "broadcast_object_list", self.broadcast_object_list)

    def broadcast(self, tensor, src, group):
        assert (src, group) == (40, "hosts")
        if self.receives:
            tensor.copy_(self.sent.get_nowait())
        else:
            self.sent.put(tensor.clone())

    def broadcast_object_list(self, objects, src, group):
        assert (src, group) == (40, "hosts")
        if self.receives:
            objects[0] = self.sent.get_nowait()
        else:
            self.sent.put(objects[0])


def test_buckets_reach_the_ranks_of_other_hosts_and_so_does_their_end(monkeypatch):
    wire = Wire(monkeypatch)
    passed = list(handles.passed_on(bucketize([*named(2), ("b", torch.ones(3, 2).bfloat16())], 64), "hosts"))
    wire.receives = True
    got = list(handles.received("hosts", torch.device("cpu")))
    assert len(got) == len(passed) == 3 and wire.sent.empty()
    for mine, theirs in zip(got, passed, strict=True):
        assert (mine.names, mine.shapes, mine.dtype) == (theirs.names, theirs.shapes, theirs.dtype)
        assert torch.equal(mine.data, theirs.data) and mine.data.data_ptr() != theirs.data.data_ptr()


def test_the_end_is_told_where_the_stream_breaks(monkeypatch):
    def breaking():
        yield from bucketize(named(1), 64)
        raise RuntimeError("a rank died")

    wire = Wire(monkeypatch)
    with pytest.raises(RuntimeError, match="a rank died"):
        list(handles.passed_on(breaking(), "hosts"))
    wire.receives = True
    assert [bucket.names for bucket in handles.received("hosts", torch.device("cpu"))] == [("t0",)]


class Servers:
    """Of broadcasts that end at once: what they were asked, in order."""

    def __init__(self, monkeypatch):
        self.asked, self.ended = [], []
        work = SimpleNamespace(wait=lambda timeout: None)
        group = SimpleNamespace(broadcast=lambda data, source: work)
        self.made = []
        helper = lambda *a, **options: (self.made.append((a, options)) or self.group(group), 0)
        monkeypatch.setattr(c10d, "_new_process_group_helper", helper)
        monkeypatch.setattr(dist, "destroy_process_group", self.ended.append)
        self.sender = BroadcastSender("127.0.0.1", "gloo", lambda: nullcontext(self.post))

    def group(self, like):
        class Group:
            broadcast = staticmethod(like.broadcast)

        return Group()

    async def post(self, url, path, body, timeout_s):
        self.asked.append((url, path.removeprefix("/"), body, timeout_s))
        if path == "/destroy_weights_update_group":
            raise EngineError("it is being started again")

    def paths(self):
        asked = [(url.removeprefix("http://"), path.partition("_")[0]) for url, path, _, _ in self.asked]
        self.asked.clear()
        return asked


def plan_of(*names):
    targets = tuple(Target(name, f"http://{name}", 2) for name in names)
    return replace(PLAN, transport="distributed", targets=targets)


def test_a_group_is_kept_for_the_same_servers_and_left_on_both_ends_for_others(monkeypatch):
    servers = Servers(monkeypatch)
    report = servers.sender.send(named(2), plan_of("a", "b"))
    assert (report.num_bytes, report.failures) == (128, {})
    init = {path: body for url, path, body, _ in servers.asked if url == "http://b"}["init_weights_update_group"]
    assert (init["world_size"], init["rank_offset"], init["backend"]) == (5, 3, "gloo")
    assert servers.paths() == [("a", "init"), ("b", "init"), *[("a", "update"), ("b", "update")] * 2]
    servers.sender.send(named(1), plan_of("a", "b"))
    assert servers.paths() == [("a", "update"), ("b", "update")] and not servers.ended
    servers.sender.send(named(1), plan_of("b"))
    assert servers.asked[0][2] == {"group_name": init["group_name"]}
    assert servers.paths() == [("a", "destroy"), ("b", "destroy"), ("b", "init"), ("b", "update")]
    assert len(servers.ended) == 1
    servers.sender.close()
    assert len(servers.ended) == 2


def test_what_a_bucket_holds_is_said_as_sglang_reads_it(monkeypatch):
    servers = Servers(monkeypatch)
    servers.sender.send([("t0", torch.ones(4, 2)), ("t1", torch.ones(3))], plan_of("a"))
    servers.sender.close()
    body = servers.asked[-1][2]
    assert (body["names"], body["shapes"], body["dtypes"]) == (("t0", "t1"), ((4, 2), (3,)), ["float32"] * 2)
    assert body["load_format"] == "flattened_bucket" and body["flush_cache"] is False
    assert body["group_name"] == servers.asked[0][2]["group_name"]


def test_a_fault_of_this_program_is_raised_after_the_stream_was_read(monkeypatch):
    servers, taken = Servers(monkeypatch), []
    post = servers.post

    async def faulty(url, path, body, timeout_s):
        if body.get("names") == ("t1",):
            raise KeyError("a fault")
        await post(url, path, body, timeout_s)

    servers.post = faulty
    servers.sender = BroadcastSender("127.0.0.1", "gloo", lambda: nullcontext(faulty))
    with pytest.raises(KeyError, match="a fault"):
        servers.sender.send((taken.append(name) or (name, tensor) for name, tensor in named(5)), plan_of("a"))
    assert len(taken) == 5 and len(servers.ended) == 1, "the group is gone"
