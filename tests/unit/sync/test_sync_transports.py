"""The sending ends of weight sync, as far as they need no server: files that appear whole, streams that are read to
their end whatever happens. With servers: tests/sglang."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import pickle
import shutil
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed import distributed_c10d as c10d
from torch.multiprocessing import reductions

from megatron_daro.errors import EngineError, RefusedError, SyncError
from megatron_daro.sync import broadcast, digests, files, handles
from megatron_daro.sync.broadcast import BroadcastSender
from megatron_daro.sync.plan import SendFailure, SendPlan, SendReport, Target, WeightFiles


def named(count=10, numel=16):
    """64 bytes each."""
    return [(f"t{i}", torch.full((numel,), float(i))) for i in range(count)]


class Stream:
    """Tensors, and how many of them were taken. at: (number, call) just before that one is handed out."""

    def __init__(self, tensors, at=(-1, lambda: None)):
        self.tensors, self.at, self.taken = tensors, at, 0

    def __iter__(self):
        for item in self.tensors:
            if self.taken == self.at[0]:
                self.at[1]()
            self.taken += 1
            yield item


@pytest.fixture
def model_path(tmp_path):
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text('{"model_type": "x", "dtype": "bfloat16"}')
    (path / "tokenizer.json").write_text("{}")
    return path


def write_checkpoint(directory, streams, model_path, shard_bytes, step=None):
    """As the ranks and their driver do it."""
    wanted = WeightFiles(directory=directory, file_bytes=shard_bytes, remedy="buy", step=step)
    files.open_checkpoint(wanted)
    report = SendReport()
    for i, stream in enumerate(streams):
        report = report.joined(files.write_weight_files(stream, wanted, f"part{i}"))
    files.complete_checkpoint(wanted, report.files, model_path, "float32")
    return report


def test_files_of_several_ranks_make_one_checkpoint(tmp_path, model_path):
    directory, tensors = tmp_path / "sync" / "version_1", named(10)
    report = write_checkpoint(directory, [tensors[:6], tensors[6:]], model_path, 128)
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == report.num_bytes == 640
    loaded = {}
    for file in set(index["weight_map"].values()):
        part = load_file(directory / file)
        assert len(part) <= 2 and all(index["weight_map"][name] == file for name in part)
        loaded |= part
    assert loaded.keys() == dict(tensors).keys() and all(torch.equal(loaded[name], t) for name, t in tensors)
    assert sorted(path.name for path in directory.glob("*.safetensors")) == [
        f"model-{i + 1:05d}-of-00005.safetensors" for i in range(5)
    ]
    assert [path.name for path in directory.parent.iterdir()] == ["version_1"]


def test_one_file_needs_no_index_and_all_that_a_model_needs_is_beside_it(tmp_path, model_path):
    write_checkpoint(tmp_path / "hf", [named(2)], model_path, 1024, step=7)
    names = ["config.json", "megatron_daro.json", "model.safetensors", "tokenizer.json"]
    assert sorted(path.name for path in (tmp_path / "hf").iterdir()) == names
    assert json.loads((tmp_path / "hf" / "megatron_daro.json").read_text()) == {"step": 7}


@pytest.mark.parametrize(("had", "has"), [("dtype", "dtype"), ("other", "torch_dtype")])
def test_the_configuration_names_the_dtype_of_the_files(tmp_path, model_path, had, has):
    (model_path / "config.json").write_text(json.dumps({"model_type": "x", had: "bfloat16"}))
    write_checkpoint(tmp_path / "hf", [named(1)], model_path, 64)
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert config == {"model_type": "x", had: "bfloat16"} | {has: "float32"}


def test_a_write_that_fails_reads_the_stream_to_its_end_and_leaves_nothing_to_be_read(tmp_path, model_path):
    directory = tmp_path / "sync" / "version_1"
    stream = Stream(named(10), at=(4, lambda: shutil.rmtree(files.partial_directory(directory))))
    with pytest.raises(SyncError, match=r"buy$"):
        write_checkpoint(directory, [stream], model_path, 64)
    assert stream.taken == 10, "other ranks gather along with it"
    assert not directory.exists()


def test_a_directory_that_cannot_be_made_says_what_to_do(tmp_path, model_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(SyncError, match=r"buy$"):
        write_checkpoint(tmp_path / "file" / "version_1", [named()], model_path, 64)


def test_an_earlier_try_is_replaced_as_a_whole(tmp_path, model_path):
    directory = tmp_path / "version_1"
    for path in (directory, files.partial_directory(directory)):
        path.mkdir()
        (path / "old.safetensors").write_text("torn")
    write_checkpoint(directory, [named(1)], model_path, 64)
    assert not (directory / "old.safetensors").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "version_1"]


def test_an_older_checkpoint_stays_until_the_new_one_is_whole(tmp_path, model_path):
    directory = tmp_path / "hf"
    write_checkpoint(directory, [named(1)], model_path, 64, step=1)
    old = (directory / "model.safetensors").read_bytes()
    (model_path / "config.json").unlink()
    with pytest.raises(SyncError, match=r"config\.json.*buy$"):
        write_checkpoint(directory, [named(2)], model_path, 1024, step=2)
    assert (directory / "model.safetensors").read_bytes() == old
    assert json.loads((directory / "megatron_daro.json").read_text()) == {"step": 1}


def plan_of(names, timeout_s=1.0):
    targets = tuple(Target(name, f"http://{name}") for name in names)
    return SendPlan(transport="distributed", targets=targets, bucket_bytes=64, timeout_s=timeout_s)


@pytest.mark.parametrize("error", [EngineError("no room"), RuntimeError("a fault of this program")])
def test_a_broadcast_that_nobody_joins_reads_the_stream_to_its_end(error):
    calls, stream = [], Stream(named(10))

    async def post(url, path, body, timeout_s):
        calls.append((url, path, body["rank_offset"]))
        raise error

    sender = BroadcastSender("127.0.0.1", "gloo", lambda: nullcontext(post))
    try:
        if isinstance(error, EngineError):
            report = sender.send(stream, plan_of(["a", "b"]))
            failure = SendFailure("unanswered", "no room")
            assert report.failures == {"a": failure, "b": failure} and report.num_bytes == 0
        else:
            with pytest.raises(RuntimeError, match="a fault of this program"):
                sender.send(stream, plan_of(["a", "b"]))
    finally:
        sender.close()
    assert stream.taken == 10, "other ranks gather along with it"
    assert sorted(calls) == [(f"http://{n}", "/init_weights_update_group", i) for n, i in (("a", 1), ("b", 2))]


def test_the_senders_store_listens_on_its_host_only():
    store, port = broadcast.listening_store("127.0.0.1", 2, 5.0)
    with open("/proc/net/tcp") as table:  # noqa: PTH123
        rows = [line.split()[1] for line in table if line.split()[3] == "0A"]
    assert [row for row in rows if row.endswith(f":{port:04X}")] == [f"0100007F:{port:04X}"]
    with open("/proc/net/tcp6") as table:  # noqa: PTH123
        assert not [line for line in table if line.split()[1].endswith(f":{port:04X}")]
    del store


def test_handles_of_host_memory_are_refused_and_the_stream_is_read_to_its_end():
    async def post(*arguments):
        raise AssertionError("nothing may be sent: the server would die of it")

    stream = Stream(named(10))
    with pytest.raises(SyncError, match="needs weights on a GPU"):
        handles.HandleSender(lambda: nullcontext(post)).send(stream, plan_of(["a"]))
    assert stream.taken == 10


def cuda_handle(value):
    """What torch makes of a tensor on GPU 1, as far as its place goes; each call has a counter of its own."""
    cuda_handle.calls += 1
    counter = bytes([cuda_handle.calls])
    own = (torch.Tensor, value.size(), value.stride(), value.storage_offset(), torch.UntypedStorage, value.dtype)
    return reductions.rebuild_cuda_tensor, (*own, 1, b"handle", value.nbytes, 0, False, counter, 0, b"event", False)


def test_each_rank_of_a_server_gets_handles_of_its_own_that_name_the_gpu_by_its_uuid(monkeypatch):
    """And none of the storage of a parameter: the server may keep it open while the next step writes to it."""
    cuda_handle.calls, storages = 0, set()

    def reduced(value):
        storages.add(value.untyped_storage().data_ptr())
        return cuda_handle(value)

    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(reductions, "reduce_tensor", reduced)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=f"uuid-{device}"))
    bodies = {}

    async def post(url, path, body, timeout_s):
        bodies[url] = body

    targets, stream = (Target("a", "http://a", 2), Target("b", "http://b")), named(2)
    plan = replace(plan_of(["a"]), targets=targets, bucket_bytes=1000)
    assert handles.HandleSender(lambda: nullcontext(post)).send(stream, plan).failures == {}
    assert storages and not storages & {tensor.untyped_storage().data_ptr() for _, tensor in stream}
    monkeypatch.setattr(reductions, "rebuild_cuda_tensor", lambda *arguments: arguments)
    sent = [
        base64.b64decode(text) for url in ("http://a", "http://b") for text in bodies[url]["serialized_named_tensors"]
    ]
    received = [pickle.loads(handles) for handles in sent]
    assert [[name for name, _ in one] for one in received] == [["t0", "t1"]] * 3
    assert all(arguments[6] == "uuid-1" for one in received for _, arguments in one)
    assert len({arguments[11] for one in received for _, arguments in one}) == 6, "a counter each"


class Peer:
    """Rank 1 of a group as a server makes it, in a process of its own, which stops itself after one broadcast."""

    def __init__(self):
        self._process, self._updates = None, 0

    async def post(self, url, path, body, timeout_s):
        """What a server does about each call; the second bucket never arrives, and the first call says so."""
        if path == "/init_weights_update_group":
            self._process = subprocess.Popen([sys.executable, "-c", PEER, json.dumps(body)], stdout=subprocess.PIPE)
            return
        self._updates += 1
        if self._updates > 1:
            await asyncio.sleep(0.2)
            raise EngineError("the scheduler is gone")
        assert await asyncio.to_thread(self._process.stdout.readline) == b"received\n"

    def end(self):
        self._process.kill()
        self._process.communicate(timeout=30)


PEER = """
import json, os, signal, sys, torch
from datetime import timedelta
from torch import distributed as dist
from torch.distributed import distributed_c10d as c10d
body, limit = json.loads(sys.argv[1]), timedelta(seconds=120)
store = dist.TCPStore(body["master_address"], body["master_port"], body["world_size"], is_master=False, timeout=limit)
store = c10d.PrefixStore(body["group_name"], store)
group, _ = c10d._new_process_group_helper(
    2, body["rank_offset"], [], dist.Backend("gloo"), store, group_name=body["group_name"], timeout=limit
)
c10d._world.pg_group_ranks[group] = {0: 0, 1: 1}
received = torch.zeros(16)
group.broadcast(received.view(torch.uint8), 0).wait()
print("received" if received.sum() == 0 else received, flush=True)
os.kill(os.getpid(), signal.SIGSTOP)
"""


def test_a_peer_that_stops_in_a_broadcast_costs_seconds_and_not_the_limit(monkeypatch):
    monkeypatch.setattr(broadcast, "_AFTER_FAILURE_S", 1.0)
    peer, limit_s = Peer(), 600.0
    sender = BroadcastSender("127.0.0.1", "gloo", lambda: nullcontext(peer.post))
    large = torch.zeros(50_000_000)  # more than the system's buffers take for a reader that does not read
    stream = Stream([*named(1), ("large", large), *named(3)])
    started = time.monotonic()
    try:
        report = sender.send(stream, plan_of(["a"], timeout_s=limit_s))
        assert time.monotonic() - started < limit_s / 2
    finally:
        peer.end()
        sender.close()
    assert stream.taken == 5, "other ranks gather along with it"
    assert report.failures == {"a": SendFailure("unanswered", "the scheduler is gone")}


class Nccl:
    """A group as NCCL's: its wait hangs until it is aborted. Notes what was set while it was made."""

    def __init__(self, *arguments, timeout, **options):
        self.errors, self.timeout = os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING"), timeout
        self.aborted = threading.Event()

    def broadcast(self, data, source):
        return self

    def wait(self, timeout):
        if self.aborted.wait(timeout.total_seconds()):
            raise RuntimeError("NCCL communicator was aborted")

    def abort(self):
        self.aborted.set()


class Cuda:
    """Streams and events of a GPU whose work is done at once: what each call did, in order. now: thread -> stream."""

    def __init__(self, monkeypatch):
        self.log, self.now, self.events = [], {}, 0
        monkeypatch.setattr(torch.cuda, "Stream", lambda: SimpleNamespace(name="send", wait_event=self.wait_event))
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(record_event=self.record_event))
        monkeypatch.setattr(torch.cuda, "stream", self.stream)

    def current(self):
        return self.now.get(threading.get_ident(), "default")

    def record_event(self):
        self.events += 1
        self.log.append(("packed", self.events, self.current()))
        return self.events

    def wait_event(self, event):
        self.log.append(("wait", event, self.current()))

    @contextmanager
    def stream(self, stream):
        self.now[threading.get_ident()] = stream.name
        yield
        del self.now[threading.get_ident()]


def test_a_bucket_is_sent_from_a_stream_of_its_own_that_waits_for_it_alone(monkeypatch):
    """The stream that gathers never waits for a broadcast; a bucket's memory is not written before its broadcast has
    returned."""
    cuda, torn = Cuda(monkeypatch), []

    class Group(Nccl):
        def broadcast(self, data, source):
            cuda.log.append(("broadcast", int(data.view(torch.float32)[0]), cuda.current()))
            self.data, self.before = data, data.clone()
            return self

        def wait(self, timeout):
            time.sleep(0.02)  # meanwhile the next bucket is packed
            torn.append(not torch.equal(self.data, self.before))

    monkeypatch.setattr(c10d, "_new_process_group_helper", lambda *a, **k: (Group(*a, **k), 0))
    monkeypatch.setattr(dist, "destroy_process_group", lambda group: None)

    async def post(url, path, body, timeout_s):
        pass

    sender = BroadcastSender("127.0.0.1", "nccl", lambda: nullcontext(post))
    report = sender.send(Stream(named(5)), plan_of(["a"]))
    assert not report.failures and torn == [False] * 5
    for number in range(5):
        own = [entry for entry in cuda.log if entry[1] == (number if entry[0] == "broadcast" else number + 1)]
        assert own == [("packed", number + 1, "default"), ("wait", number + 1, "send"), ("broadcast", number, "send")]


class Answering:
    """Servers that answer before the data is there, as those on GPUs do, and the wire. log: (what, bucket), in order.

    until: (log, bucket) -> whether its broadcast ends. breaks: one whose broadcast fails; servers refuse from then.
    """

    def __init__(self, monkeypatch, until, breaks=-1):
        Cuda(monkeypatch)
        self.log, self.until, self.breaks = [], until, breaks
        monkeypatch.setattr(c10d, "_new_process_group_helper", lambda *a, **k: (Wired(self), 0))
        monkeypatch.setattr(dist, "destroy_process_group", lambda group: None)

    async def post(self, url, path, body, timeout_s):
        if path == "/update_weights_from_distributed":
            bucket = int(body["names"][0].removeprefix("t"))
            self.log.append(("call", bucket))
            await asyncio.sleep(0.01 * (url == "http://b"))
            if ("broken", self.breaks) in self.log:
                raise RefusedError("status 400: Failed to receive weights: the group broke")
            self.log.append(("answer", bucket))

    def send(self, count):
        sender, stream = BroadcastSender("127.0.0.1", "nccl", lambda: nullcontext(self.post)), Stream(named(count))
        try:
            return sender.send(stream, plan_of(["a", "b"], timeout_s=30.0)), stream.taken
        finally:
            sender.close()


class Wired:
    def __init__(self, servers):
        self.servers = servers

    def broadcast(self, data, source):
        bucket = int(data.view(torch.float32)[0])
        self.servers.log.append(("begin", bucket))
        return SimpleNamespace(wait=lambda timeout: self.wait(bucket))

    def wait(self, bucket):
        deadline = time.monotonic() + 5
        while not self.servers.until(self.servers.log, bucket) and time.monotonic() < deadline:
            time.sleep(0.002)
        self.servers.log.append(("broken" if bucket == self.servers.breaks else "end", bucket))
        if bucket == self.servers.breaks:
            raise RuntimeError("NCCL: remote process exited")

    def abort(self):
        pass


def test_servers_hear_of_the_next_bucket_when_all_have_answered_to_one_that_is_on_its_way(monkeypatch):
    last = 5
    servers = Answering(monkeypatch, lambda log, bucket: bucket == last or ("call", bucket + 1) in log)
    report, _ = servers.send(last + 1)
    at = {entry: (servers.log.index(entry), len(servers.log) - servers.log[::-1].index(entry)) for entry in servers.log}
    for bucket in range(last):
        assert at["call", bucket + 1][0] < at["end", bucket][0], "while it is on its way"
        assert at["answer", bucket][1] <= at["call", bucket + 1][0], "calls on their way together have no order"
        assert at["end", bucket][0] < at["begin", bucket + 1][0]
    for bucket in range(last - 1):
        assert at["end", bucket][0] < at["call", bucket + 2][0], "its memory is that of the next but one"
    assert not report.failures


def test_a_broadcast_that_breaks_while_servers_hear_of_the_next_bucket_is_no_servers_own_fault(monkeypatch):
    servers = Answering(monkeypatch, lambda log, bucket: bucket != 2 or ("call", 3) in log, breaks=2)
    report, taken = servers.send(8)
    assert ("call", 3) in servers.log and ("begin", 3) not in servers.log and ("call", 4) not in servers.log
    assert report.failures and {failure.kind for failure in report.failures.values()} == {"group"}
    assert taken == 8, "other ranks gather along with it"


def test_a_server_that_says_nothing_after_the_broadcast_broke_costs_seconds_and_not_the_limit(monkeypatch):
    monkeypatch.setattr(broadcast, "_AFTER_FAILURE_S", 0.5)
    servers = Answering(monkeypatch, lambda log, bucket: bucket != 1 or ("call", 2) in log, breaks=1)
    answer = servers.post

    async def post(url, path, body, timeout_s):
        if url == "http://b" and body.get("names") == ("t2",):
            servers.log.append(("call", 2))
            await asyncio.sleep(timeout_s)  # its scheduler is dead, and the process before it is not
            raise EngineError("no answer within the limit")
        await answer(url, path, body, timeout_s)

    monkeypatch.setattr(servers, "post", post)
    started = time.monotonic()
    report, taken = servers.send(4)
    assert time.monotonic() - started < 20 and taken == 4
    assert report.failures["b"].kind == "group"


def test_the_last_broadcast_is_waited_for_and_its_failure_told(monkeypatch):
    report, _ = Answering(monkeypatch, lambda log, bucket: log.count(("answer", bucket)) == 2, breaks=3).send(4)
    assert {(failure.kind, "remote process exited" in failure.text) for failure in report.failures.values()} == {
        ("group", True)
    }


def test_a_servers_death_in_an_nccl_broadcast_aborts_the_communicator_and_ends_no_process(monkeypatch):
    """What NCCL itself does then needs a GPU: here the order of calls, and what the group is made with."""
    Cuda(monkeypatch)
    made, destroyed = [], []
    monkeypatch.setattr(c10d, "_new_process_group_helper", lambda *a, **k: (made.append(Nccl(*a, **k)) or made[-1], 0))
    monkeypatch.setattr(dist, "destroy_process_group", lambda group: destroyed.append(group))
    monkeypatch.setattr(broadcast, "_AFTER_FAILURE_S", 20.0)
    monkeypatch.delenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", raising=False)

    async def post(url, path, body, timeout_s):
        if path == "/update_weights_from_distributed":
            if url == "http://dead":
                raise EngineError("connection refused")
            while not made[0].aborted.is_set():  # its rank hangs in the broadcast until the group breaks
                await asyncio.sleep(0.01)
            raise RefusedError("status 400: the group broke")

    sender = BroadcastSender("127.0.0.1", "nccl", lambda: nullcontext(post))
    started = time.monotonic()
    report = sender.send(Stream(named(4)), plan_of(["alive", "dead"], timeout_s=300.0))
    assert time.monotonic() - started < 20, "neither the limit of 300 s nor that of the others was waited for"
    assert {name: failure.kind for name, failure in report.failures.items()} == {"alive": "group", "dead": "unanswered"}
    deadline = time.monotonic() + 20
    while not destroyed and time.monotonic() < deadline:
        time.sleep(0.01)
    assert destroyed == made and made[0].aborted.is_set()
    assert made[0].errors == "0", "or a thread of torch's would end the trainer"
    assert "TORCH_NCCL_ASYNC_ERROR_HANDLING" not in os.environ


def test_a_server_that_dies_before_its_first_bucket_costs_seconds_though_nccl_joins_for_ever(monkeypatch):
    """NCCL joins at the first broadcast, without a limit, and nothing ends that: its thread is left behind."""
    Cuda(monkeypatch)
    for_ever, groups = threading.Event(), []

    class Joining(Nccl):
        def broadcast(self, data, source):
            if self is groups[0]:
                for_ever.wait(60)
            return SimpleNamespace(wait=lambda timeout: None)

    monkeypatch.setattr(
        c10d, "_new_process_group_helper", lambda *a, **k: (groups.append(Joining(*a, **k)) or groups[-1], 0)
    )
    monkeypatch.setattr(dist, "destroy_process_group", lambda group: None)
    monkeypatch.setattr(broadcast, "_AFTER_FAILURE_S", 0.5)

    async def post(url, path, body, timeout_s):
        if path == "/update_weights_from_distributed" and url == "http://dead":
            raise EngineError("connection refused")

    sender = BroadcastSender("127.0.0.1", "nccl", lambda: nullcontext(post))
    started = time.monotonic()
    report = sender.send(Stream(named(4)), plan_of(["alive", "dead"], timeout_s=300.0))
    again = sender.send(Stream(named(4)), plan_of(["alive"], timeout_s=300.0))
    assert time.monotonic() - started < 20
    assert report.failures["dead"].kind == "unanswered" and not again.failures
    for_ever.set()
    sender.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_a_digest_on_the_device_changes_with_any_bit_and_any_order(dtype, monkeypatch):
    monkeypatch.setattr(digests, "_DIGEST_PART", 7)
    numbers = torch.randn(5, 6).to(dtype)
    whole = int(digests.device_digest(numbers))
    assert int(digests.device_digest(numbers.clone())) == whole
    others = [numbers.flip(0), numbers[:-1], torch.zeros_like(numbers.float()).to(dtype)]
    for place in range(30):
        for bit in range(8 * dtype.itemsize):
            changed = numbers.clone()
            octets = changed.view(torch.uint8).view(-1)
            octets[place * dtype.itemsize + bit // 8] ^= 1 << bit % 8
            others.append(changed)
    sums = [int(digests.device_digest(other)) for other in others]
    assert whole not in sums and len(set(sums)) == len(sums)
    monkeypatch.setattr(digests, "_DIGEST_PART", 1000)
    assert int(digests.device_digest(numbers)) == whole
