"""What must hold on a node, to the last unit; and the line between two nodes: what is sent, kept and given up."""

from __future__ import annotations

import asyncio
import ipaddress
import json
import os
import socket
import stat
import time
from types import SimpleNamespace

import pytest

from megatron_daro.workshop.slurm import rendezvous
from megatron_daro.workshop.slurm.rendezvous import HEAD_FILE, Greeter, Message, own_address, reach_head, write_private


@pytest.fixture
def smi(tmp_path, monkeypatch):
    """Set what nvidia-smi does."""

    def say(script: str) -> None:
        (tmp_path / "nvidia-smi").write_text(f"#!/bin/bash\n{script}\n")
        (tmp_path / "nvidia-smi").chmod(0o755)

    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return say


def test_a_tenth_of_a_gpus_memory_may_be_in_use(smi):
    smi("echo '0, 1000, 100, 0'; echo '1, 1000, 101, 1'")
    in_use = "GPU 1 has 101 of 1000 MiB in use before the job began"
    errors = "GPU 1 has 1 memory errors that could not be corrected (ECC)"
    assert rendezvous.gpu_problems(2) == [in_use, errors]
    assert rendezvous.gpu_problems(2, used=True) == [errors] and rendezvous.gpu_problems(1)[0] == in_use


def test_nvidia_smi_is_asked_for_memory_and_its_errors_and_words_of_it_are_no_gpus(smi, tmp_path):
    smi(f"echo \"$*\" >{tmp_path}/asked; echo 'warning: one, comma'; echo '0, 1000, 1'; echo; echo '1, 1000, 1, 2, 3'")
    assert rendezvous.gpu_problems(2) == ["GPU 1 has 2 memory errors that could not be corrected (ECC)"]
    asked = "--query-gpu=index,memory.total,memory.used,ecc.errors.uncorrected.volatile.total"
    assert (tmp_path / "asked").read_text() == f"{asked} --format=csv,noheader,nounits\n"


def test_a_tool_that_fails_or_hangs_is_named_with_its_words(smi, monkeypatch):
    smi(f"echo out; echo ' {'x' * 300}' >&2; exit 3")
    assert rendezvous.gpu_problems(1) == [f"nvidia-smi failed: {'out' + chr(10) + ' ' + 'x' * 195}"]
    assert rendezvous._TIMEOUT_S == 30
    monkeypatch.setattr(rendezvous, "_TIMEOUT_S", 0.1)
    smi("exec sleep 5")
    assert rendezvous.gpu_problems(1) == ["nvidia-smi gave no answer in 0.1 s: a GPU or its driver hangs"]


def test_the_tool_of_nvidia_counts_where_both_are_there(smi, tmp_path):
    (tmp_path / "rocm-smi").write_text("#!/bin/bash\nexit 1\n")
    (tmp_path / "rocm-smi").chmod(0o755)
    smi("echo '0, 1000, 1'")
    assert rendezvous.gpu_problems(1) == []
    (tmp_path / "nvidia-smi").unlink()
    assert rendezvous.gpu_problems(1) == ["rocm-smi failed: "]


def test_the_disk_is_tried_by_writing_a_mebibyte(tmp_path, monkeypatch):
    """A quota or a full disk shows only then."""
    written: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda number: written.append(os.fstat(number).st_size))
    monkeypatch.setattr(rendezvous.shutil, "disk_usage", lambda path: SimpleNamespace(free=3 * 2**29))
    assert rendezvous.problems(rendezvous.Wanted(0, 1.5, tmp_path)) == []
    assert written == [2**20] and not list(tmp_path.iterdir())
    short = f"{tmp_path} has 1.5 GiB free; free_disk_gib asks for 1.51"
    assert rendezvous.problems(rendezvous.Wanted(0, 1.51, tmp_path)) == [short]


def test_clocks_may_be_five_seconds_apart():
    assert rendezvous.clock_problems(5.0) == rendezvous.clock_problems(-5.0) == []
    said = "its clock is +6 s off the first node's; at most 5 s are allowed"
    assert rendezvous.clock_problems(6.0) == [said] and rendezvous.clock_problems(-5.6)[0].startswith(
        "its clock is -6 s"
    )


def test_an_address_is_one_of_ipv4_and_the_host_names_where_there_is_no_route(monkeypatch):
    assert ipaddress.IPv4Address(own_address("n", {}, None))

    class NoRoute(socket.socket):
        def connect(self, address):
            assert address == ("192.0.2.1", 9) and self.type == socket.SOCK_DGRAM
            raise OSError("Network is unreachable")

    monkeypatch.setattr(rendezvous.socket, "socket", NoRoute)
    monkeypatch.setattr(rendezvous.socket, "gethostname", lambda: "n7")
    monkeypatch.setattr(rendezvous.socket, "gethostbyname", lambda name: f"address of {name}")
    assert own_address("n", {}, None) == "address of n7"


def test_a_card_counts_by_its_ipv4_address(monkeypatch):
    cards = {"b": [SimpleNamespace(family=socket.AF_INET6, address="::1")], "a": []}
    monkeypatch.setattr(rendezvous.psutil, "net_if_addrs", lambda: cards)
    for name in ("a", "b"):
        with pytest.raises(rendezvous.WorkerError, match=f"n: network_interface '{name}' has no .* here; cards: a, b$"):
            own_address("n", {}, name)
    cards["b"] += [SimpleNamespace(family=socket.AF_INET, address="10.0.0.1")]
    assert own_address("n", {}, "b") == "10.0.0.1"


def test_a_private_file_is_replaced_whole(tmp_path):
    for text in ("first", "second é"):
        write_private(tmp_path / "f", text)
        assert (tmp_path / "f").read_text(encoding="utf-8") == text
    assert stat.S_IMODE((tmp_path / "f").stat().st_mode) == 0o600 and [p.name for p in tmp_path.iterdir()] == ["f"]
    (tmp_path / f".g.{os.getpid()}").symlink_to(tmp_path / "f")
    with pytest.raises(FileExistsError):
        write_private(tmp_path / "g", "through a link")


@pytest.mark.parametrize(
    ("sent", "message"),
    [
        (b'{"event": "alive"}\n', {"event": "alive"}),
        (b'{"event": "alive"}', None),  # cut off
        (b"[1]\n", None),
        (b"{\n", None),
        (b"\xff\n", None),
        (b"", None),
    ],
)
def test_only_a_whole_line_is_a_message(sent, message):
    async def read():
        reader = asyncio.StreamReader()
        reader.feed_data(sent)
        reader.feed_eof()
        return await rendezvous._receive(reader)

    assert asyncio.run(read()) == message


def scene(place, other, **fields):
    """What comes of a first node and another, with a line between them."""

    async def meet():
        greeter = Greeter(place, "127.0.0.1", 1)
        await greeter.start()
        line = await reach_head(place, "n1", ["bad"], 10)
        await greeter.gather(10)
        try:
            return await other(greeter, line)
        finally:
            await greeter.close()

    return asyncio.run(meet())


def test_a_connection_is_probed_until_a_dead_machine_shows(tmp_path):
    async def other(greeter, line):
        of = line._writer.get_extra_info("socket")
        names = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
        probes = [of.getsockopt(socket.IPPROTO_TCP, name) for name in names]
        return of.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE), probes

    on, (idle, every, times) = scene(tmp_path, other)
    assert on == 1 and (idle, every, times) == (30, 10, 6) and idle + every * times == rendezvous.FROZEN_S == 90


def test_signs_of_life_come_in_time_and_change_nothing(tmp_path, monkeypatch):
    assert rendezvous.BEAT_S == 10
    monkeypatch.setattr(rendezvous, "BEAT_S", 0.01)

    async def other(greeter, line):
        heard = []
        monkeypatch.setattr(greeter, "_hear", lambda member, message: heard.append(message))
        while len(heard) < 2:
            await asyncio.sleep(0.01)
        monkeypatch.undo()
        await asyncio.sleep(0.05)
        return heard[0], greeter.trouble.done(), greeter.members["n1"].joined.is_set()

    assert scene(tmp_path, other) == ({"event": "alive"}, False, False)


@pytest.mark.parametrize(("message", "said"), [({"event": "failed"}, "n1: ended"), ({"why": "so"}, "n1: so")])
def test_any_other_word_of_a_node_is_its_end(tmp_path, message, said):
    async def other(greeter, line):
        await line.send(message)
        return await asyncio.wait_for(greeter.trouble, 10)

    assert scene(tmp_path, other) == said


def test_a_clock_that_is_off_is_reported_beside_the_nodes_own_problems(tmp_path):
    async def meet():
        greeter = Greeter(tmp_path, "127.0.0.1", 1)
        await greeter.start()
        head = json.loads((tmp_path / HEAD_FILE).read_text())
        _, writer = await asyncio.open_connection(head["host"], head["port"])
        hello = Message(node="n1", secret=head["secret"], time=time.time() + 60, problems=["bad"])
        await rendezvous._send(writer, hello)
        await greeter.gather(10)
        await greeter.close()
        return greeter.members["n1"].problems

    bad, clock = asyncio.run(meet())
    assert bad == "bad" and clock.startswith("its clock is +60 s off")


def test_an_answer_from_before_is_not_taken_for_a_new_one(tmp_path):
    async def other(greeter, line):
        await line.send(Message(event="checked", problems=["old"]))
        while not greeter.members["n1"].checked.is_set():
            await asyncio.sleep(0.01)
        silent = await greeter.check(0.05)
        assert await line.receive() == {"order": "check", "address": "", "temporary": ""}
        await line.send(Message(event="checked"))
        while not greeter.members["n1"].checked.is_set():
            await asyncio.sleep(0.01)
        return silent, greeter.members["n1"].problems

    assert scene(tmp_path, other) == ({"n1": None}, [])


def test_a_first_node_alone_has_nobody_to_ask(tmp_path):
    async def alone():
        greeter = Greeter(tmp_path, "127.0.0.1", 0)
        await greeter.start()
        found = await greeter.gather(10), await greeter.check(10)
        await greeter.all_joined(10)
        await greeter.close()
        head = json.loads((tmp_path / HEAD_FILE).read_text())
        with pytest.raises(OSError):
            await asyncio.open_connection(head["host"], head["port"])
        return found

    assert asyncio.run(alone()) == ([], {})


def test_the_end_of_a_job_is_no_loss_of_its_nodes(tmp_path):
    async def other(greeter, line):
        await greeter.close()
        told, closed = await line.receive(), await line.receive()
        await line.send(Message(event="failed"))  # to nobody: no error
        return told["order"], closed, greeter.trouble.done(), greeter.first_loss.done(), len(greeter._lines)

    assert scene(tmp_path, other) == ("end", None, False, False, 0)


def test_those_that_do_not_join_are_all_named_in_order(tmp_path):
    async def late():
        greeter = Greeter(tmp_path, "127.0.0.1", 3)
        await greeter.start()
        lines = [await reach_head(tmp_path, name, [], 10) for name in ("n3", "n1", "n2")]
        await greeter.gather(10)
        await lines[1].send(Message(event="joined"))
        await asyncio.sleep(0.05)
        try:
            await greeter.all_joined(0.05)
        finally:
            await greeter.close()

    with pytest.raises(rendezvous.DeadlineError, match=r"^n2, n3 did not join Ray within 0\.05 s$"):
        asyncio.run(late())
