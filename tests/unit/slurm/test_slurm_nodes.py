"""What nodes of a job look at before training, and how they find each other."""

from __future__ import annotations

import asyncio
import json
import os
import stat
from pathlib import Path

import pytest

from megatron_daro.errors import DeadlineError, WorkerError
from megatron_daro.workshop.slurm import health
from megatron_daro.workshop.slurm.rendezvous import HEAD_FILE, Greeter, Message, own_address, reach_head, write_private


@pytest.fixture
def tool(tmp_path, monkeypatch):
    """Set what a program does that says which GPUs there are; no other is found."""
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")

    def say(script: str, name: str = "nvidia-smi") -> None:
        (tmp_path / name).write_text(f"#!/bin/bash\n{script}\n")
        (tmp_path / name).chmod(0o755)

    return say


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("echo '0, 81559, 5'; echo '1, 81559, 5, [N/A]'", []),
        ("echo '0, 81559, 5'", ["2 GPUs", "shows 1"]),
        ("echo '0, 81559, 5'; echo '1, 81559, 60000'", ["GPU 1", "60000"]),
        ("echo broken driver >&2; exit 9", ["nvidia-smi", "broken driver"]),
        ("echo '0, 81559, 5, 3'; echo '1, 81559, 5, 0'", ["GPU 0", "3", "ECC"]),
        ("echo 'warning: one, comma'; echo '0, 81559, 1'; echo; echo '1, 81559, 1'", []),
    ],
)
def test_gpus_are_counted_and_must_be_empty_and_without_errors(tmp_path, tool, script, said):
    tool(script)
    problems = health.problems(health.Wanted(2, 0, tmp_path))
    assert len(problems) == bool(said) and all(words in problems[0] for words in said)


def test_gpus_of_amd_are_counted_and_must_be_empty(tool):
    header = "device,VRAM Total Memory (B),VRAM Total Used Memory (B)"
    tool(f"printf '{header}\\ncard0,206141652992,297795584\\ncard1,206141652992,200000000000\\n\\n'", "rocm-smi")
    missing, used = health.gpu_problems(3)
    assert "3 GPUs" in missing and "shows 2" in missing and "GPU 1" in used and "190734" in used
    assert health.gpu_problems(2, used=True) == []


def test_a_node_without_a_tool_that_shows_gpus_is_told(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    (problem,) = health.problems(health.Wanted(8, 0, tmp_path))
    assert "nvidia-smi" in problem and "rocm-smi" in problem
    assert health.problems(health.Wanted(0, 0, tmp_path)) == []


def test_the_disk_must_have_room_be_there_and_take_what_is_written(tmp_path, monkeypatch):
    """A quota or a full disk shows only where something is written."""
    (full,) = health.problems(health.Wanted(0, 1e9, tmp_path))
    assert str(tmp_path) in full and "free_disk_gib" in full
    (gone,) = health.problems(health.Wanted(0, 0, tmp_path / "gone"))
    assert str(tmp_path / "gone") in gone

    def no_quota(number):
        raise OSError(122, "Disk quota exceeded")

    monkeypatch.setattr(os, "fsync", no_quota)
    (refused,) = health.problems(health.Wanted(0, 0, tmp_path))
    assert "Disk quota exceeded" in refused and list(tmp_path.iterdir()) == []


def test_clocks_far_apart_are_a_problem():
    assert health.clock_problems(1.0) == [] and "-60 s" in health.clock_problems(-60.0)[0]


def test_addresses_come_from_the_file_the_card_or_the_host():
    assert own_address("n1", {"n1": "10.0.0.9"}, "lo") == "10.0.0.9"
    assert own_address("n2", {"n1": "10.0.0.9"}, "lo") == "127.0.0.1"
    assert own_address("n2", {}, None)
    with pytest.raises(WorkerError, match=r"n2: network_interface 'ib7'.*lo"):
        own_address("n2", {}, "ib7")


def test_a_private_file_is_replaced_whole_and_never_written_through_a_link(tmp_path):
    for text in ("first", "second é"):
        write_private(tmp_path / "f", text)
        assert (tmp_path / "f").read_text(encoding="utf-8") == text
    assert stat.S_IMODE((tmp_path / "f").stat().st_mode) == 0o600 and [p.name for p in tmp_path.iterdir()] == ["f"]
    (tmp_path / f".g.{os.getpid()}").symlink_to(tmp_path / "f")
    with pytest.raises(FileExistsError):
        write_private(tmp_path / "g", "through a link")


@pytest.mark.parametrize("sent", ["of another job", b"[1]\n", b"{\n", b"\xff\n", b'{"event": "joined"', b""])
def test_a_stranger_is_not_listened_to(tmp_path, sent):
    async def scene() -> list[str]:
        greeter = Greeter(tmp_path, "127.0.0.1", 1)
        await greeter.start()
        head = json.loads((tmp_path / HEAD_FILE).read_text())
        if isinstance(sent, str):
            write_private(tmp_path / HEAD_FILE, json.dumps({**head, "secret": sent}))
            line = await reach_head(tmp_path, "stranger", [], 5)
            async with asyncio.timeout(10):
                assert await line.receive() is None
        else:
            reader, writer = await asyncio.open_connection(head["host"], head["port"])
            writer.write(sent)
            writer.write_eof()
            assert await reader.read() == b""
        there = await greeter.gather(0.1)
        await greeter.close()
        return there

    assert asyncio.run(scene()) == []


def test_a_directory_that_is_not_shared_is_named(tmp_path):
    with pytest.raises(DeadlineError, match=r"n1 .*head\.json"):
        asyncio.run(reach_head(tmp_path, "n1", [], 0.3))


def test_a_first_node_that_does_not_answer_is_named(tmp_path):
    (tmp_path / HEAD_FILE).write_text(json.dumps({"host": "127.0.0.1", "port": 9, "secret": "x"}))
    with pytest.raises(DeadlineError, match=r"n1 .*127\.0\.0\.1:9.*network_interface"):
        asyncio.run(reach_head(tmp_path, "n1", [], 1))


def meeting(place: Path, other):
    """What comes of a first node and another one, which does `other`."""

    async def scene():
        greeter = Greeter(place, "127.0.0.1", 1)
        await greeter.start()
        line = await reach_head(place, "n1", [], 5)
        await greeter.gather(5)
        try:
            return await other(greeter, line)
        finally:
            await greeter.close()

    return asyncio.run(scene())


def test_a_node_that_does_not_join_is_named(tmp_path):
    async def other(greeter, line):
        await greeter.all_joined(0.1)

    with pytest.raises(DeadlineError, match="n1"):
        meeting(tmp_path, other)


def test_a_node_whose_ray_does_not_start_is_not_waited_for(tmp_path):
    async def other(greeter, line):
        await line.send(Message(event="unstarted", why="Ray did not start within 150 s"))
        with pytest.raises(WorkerError, match="n1: Ray did not start within 150 s"):
            await greeter.all_joined(60)

    meeting(tmp_path, other)


def test_an_answer_from_before_is_not_taken_for_a_new_one(tmp_path):
    async def other(greeter, line):
        await line.send(Message(event="checked", problems=["old"]))
        await asyncio.sleep(0.05)
        return await greeter.check(0.05)

    assert meeting(tmp_path, other) == {"n1": None}


def test_the_end_of_a_job_is_no_loss_of_its_nodes(tmp_path):
    async def other(greeter, line):
        await greeter.close()
        told, closed = await line.receive(), await line.receive()
        return told["order"], closed, greeter.trouble.done(), greeter.first_loss.done()

    assert meeting(tmp_path, other) == ("end", None, False, False)
