"""What nodes of a job do before training: health, finding each other, and what is said when that fails."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import stat
import sys
from pathlib import Path

import psutil
import pytest
import ray

from megatron_daro.errors import DeadlineError, WorkerError
from megatron_daro.workshop.slurm import node, rendezvous, training
from megatron_daro.workshop.slurm.rendezvous import HEAD_FILE, Greeter, Message, own_address, reach_head, write_private
from megatron_daro.workshop.slurm.training import SlowStartError


def fake_nvidia_smi(directory: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    tool = directory / "nvidia-smi"
    tool.write_text(f"#!/bin/bash\n{script}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{directory}:{os.environ['PATH']}")


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("echo '0, 81559, 5'; echo '1, 81559, 5'", []),
        ("echo '0, 81559, 5'", ["2 GPUs were asked for, and nvidia-smi shows 1"]),
        ("echo '0, 81559, 5'; echo '1, 81559, 60000'", ["GPU 1 has 60000 of 81559 MiB in use before the job began"]),
        ("echo broken driver >&2; exit 9", ["nvidia-smi failed: broken driver"]),
        ("echo '0, 81559, 5, 0'; echo '1, 81559, 5, [N/A]'", []),
        (
            "echo '0, 81559, 5, 3'; echo '1, 81559, 5, 0'",
            ["GPU 0 has 3 memory errors that could not be corrected (ECC)"],
        ),
    ],
)
def test_gpus_are_counted_and_must_be_empty(tmp_path, monkeypatch, script, said):
    fake_nvidia_smi(tmp_path, monkeypatch, script)
    assert rendezvous.problems(rendezvous.Wanted(2, 0, tmp_path)) == said


def test_gpus_of_amd_are_counted_and_must_be_empty(tmp_path, monkeypatch):
    tool = tmp_path / "rocm-smi"
    header = "device,VRAM Total Memory (B),VRAM Total Used Memory (B)"
    tool.write_text(
        f"#!/bin/bash\nprintf '{header}\\ncard0,206141652992,297795584\\ncard1,206141652992,200000000000\\n\\n'"
    )
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert rendezvous.gpu_problems(3) == [
        "3 GPUs were asked for, and rocm-smi shows 2",
        "GPU 1 has 190734 of 196592 MiB in use before the job began",
    ]
    assert rendezvous.gpu_problems(2, used=True) == []


def test_no_nvidia_smi_is_said(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert rendezvous.problems(rendezvous.Wanted(8, 0, tmp_path)) == [
        "8 GPUs were asked for, and there is neither nvidia-smi nor rocm-smi"
    ]
    assert rendezvous.problems(rendezvous.Wanted(0, 0, tmp_path)) == []


def test_the_disk_must_have_room_and_be_there(tmp_path):
    (full,) = rendezvous.problems(rendezvous.Wanted(0, 1e9, tmp_path))
    assert "GiB free; free_disk_gib asks for 1e+09" in full
    (gone,) = rendezvous.problems(rendezvous.Wanted(0, 0, tmp_path / "gone"))
    assert "is gone" in gone and list(tmp_path.iterdir()) == []


def test_clocks_far_apart_are_a_problem():
    assert rendezvous.clock_problems(1.0) == [] and "-60 s off" in rendezvous.clock_problems(-60.0)[0]


def test_addresses_come_from_the_file_the_card_or_the_host():
    assert own_address("n1", {"n1": "10.0.0.9"}, "lo") == "10.0.0.9"
    assert own_address("n2", {"n1": "10.0.0.9"}, "lo") == "127.0.0.1"
    assert own_address("n2", {}, None)
    with pytest.raises(WorkerError, match=r"n2: network_interface 'ib7' has no IPv4 address here; cards: .*lo"):
        own_address("n2", {}, "ib7")


def test_nodes_report_join_and_are_missed(tmp_path):
    async def scene() -> tuple[list[str], list[str], str, Message | None]:
        greeter = Greeter(tmp_path, "127.0.0.1", 2)
        await greeter.start()
        assert stat.S_IMODE((tmp_path / HEAD_FILE).stat().st_mode) == 0o600
        lines = [await reach_head(tmp_path, f"n{i}", ["bad"] * i, 5) for i in (0, 1)]
        there = await greeter.gather(5)
        bad = greeter.members["n1"].problems
        await greeter.order("join", "somewhere:1")
        order = await lines[0].receive()
        for line in lines:
            await line.send(Message(event="joined"))
        await greeter.all_joined(5)
        lines[1]._writer.close()
        trouble = await asyncio.wait_for(greeter.trouble, 5)
        await greeter.close()
        return there, bad, trouble, order

    there, bad, trouble, order = asyncio.run(scene())
    assert there == ["n0", "n1"] and bad == ["bad"]
    assert order == {"order": "join", "address": "somewhere:1", "temporary": ""}
    assert trouble == "n1 was lost: its connection to the first node ended"


class Answers:
    """What the other nodes say when the first one asks for their GPUs; None: nothing."""

    def __init__(self, **problems: list[str] | None) -> None:
        self._problems = problems

    async def check(self, limit_s: float) -> dict[str, list[str] | None]:
        return self._problems


@pytest.mark.parametrize(
    ("others", "kind", "words", "nodes"),
    [
        ({"n1": [], "n2": ["GPU 3 is gone", "GPU 4 is hot"]}, "bad_nodes", "n2: GPU 3 is gone, GPU 4 is hot", "n2"),
        ({"n2": ["b"], "n1": ["a"]}, "bad_nodes", "n1: a; n2: b", "n1,n2"),
        ({"n1": None, "n2": ["b"]}, "node_lost", "n1 gave no answer within", "n1"),
        ({"n1": []}, None, "", ""),
    ],
)
def test_after_a_failed_training_silent_nodes_and_bad_gpus_are_named(others, kind, words, nodes):
    place, options = argparse.Namespace(node="n0"), argparse.Namespace(gpus=0)
    ending = asyncio.run(node._looked_at(Answers(**others), place, options))
    if kind is None:
        assert ending is None
    else:
        assert (ending.kind, ending.nodes) == (kind, nodes) and ending.cause.startswith(words)


def test_a_node_that_does_not_join_is_named(tmp_path):
    async def scene() -> None:
        greeter = Greeter(tmp_path, "127.0.0.1", 1)
        await greeter.start()
        await reach_head(tmp_path, "slow", [], 5)
        await greeter.gather(5)
        try:
            await greeter.all_joined(0.1)
        finally:
            await greeter.close()

    with pytest.raises(DeadlineError, match="slow did not join Ray"):
        asyncio.run(scene())


def meeting(tmp_path, other):
    """What comes of a first node and another one, which does `other`."""

    async def scene():
        greeter = Greeter(tmp_path, "127.0.0.1", 1)
        await greeter.start()
        line = await reach_head(tmp_path, "n1", [], 5)
        await greeter.gather(5)
        try:
            return await other(greeter, line)
        finally:
            await greeter.close()

    return asyncio.run(scene())


def test_a_node_that_is_frozen_counts_as_lost_and_one_that_is_busy_does_not(tmp_path, monkeypatch):
    monkeypatch.setattr(rendezvous, "BEAT_S", 0.1)
    monkeypatch.setattr(rendezvous, "FROZEN_S", 1.5)

    async def other(greeter, line):
        await asyncio.sleep(3)
        busy = greeter.trouble.done()
        line._beats.cancel()  # as if its processes were stopped: the connection stays
        return busy, await asyncio.wait_for(greeter.trouble, 20)

    assert meeting(tmp_path, other) == (False, "n1 was lost: no sign of life for 1.5 s")


@pytest.mark.parametrize("answers", [True, False])
def test_after_a_failure_every_node_looks_at_its_gpus(tmp_path, monkeypatch, answers):
    fake_nvidia_smi(tmp_path, monkeypatch, "echo '0, 81559, 5, 7'")
    options = argparse.Namespace(gpus=1)

    async def other(greeter, line):
        following = (
            asyncio.create_task(node._follow(line, options)) if answers else asyncio.create_task(asyncio.sleep(0))
        )
        found = await greeter.check(20 if answers else 0.5)
        following.cancel()
        return found

    sick = ["GPU 0 has 7 memory errors that could not be corrected (ECC)"]
    assert meeting(tmp_path, other) == {"n1": sick if answers else None}


def test_a_node_whose_ray_does_not_start_is_not_waited_for(tmp_path):
    async def other(greeter, line):
        await line.send(Message(event="unstarted", why="Ray did not start within 150 s"))
        with pytest.raises(WorkerError, match="n1: Ray did not start within 150 s"):
            await greeter.all_joined(60)

    meeting(tmp_path, other)


def test_a_stranger_is_not_listened_to(tmp_path):
    async def scene() -> list[str]:
        greeter = Greeter(tmp_path, "127.0.0.1", 1)
        await greeter.start()
        head = json.loads((tmp_path / HEAD_FILE).read_text())
        write_private(tmp_path / HEAD_FILE, json.dumps({**head, "secret": "wrong"}))
        line = await reach_head(tmp_path, "stranger", [], 5)
        assert await line.receive() is None
        there = await greeter.gather(0.2)
        await greeter.close()
        return there

    assert asyncio.run(scene()) == []


def test_a_directory_that_is_not_shared_is_named(tmp_path):
    with pytest.raises(DeadlineError, match=r"n1 saw no .*head.json within 0.3 s: the run directory is not shared"):
        asyncio.run(reach_head(tmp_path, "n1", [], 0.3))


def test_a_first_node_that_does_not_answer_is_named(tmp_path):
    (tmp_path / HEAD_FILE).write_text(json.dumps({"host": "127.0.0.1", "port": 9, "secret": "x"}))
    with pytest.raises(DeadlineError, match=r"n1 cannot reach the first node at 127.0.0.1:9 .*network_interface"):
        asyncio.run(reach_head(tmp_path, "n1", [], 1))


def test_a_port_that_a_program_took_meanwhile_is_not_the_end(tmp_path, monkeypatch, capfd):
    """Ray's control service finds its port taken, once; then it starts. Other failures are not tried again."""
    program = tmp_path / "python"
    program.write_text(
        f'#!/bin/bash\necho "$*" >>{tmp_path}/asked\n'
        f"[ -e {tmp_path}/broken ] && {{ echo no such library; exit 1; }}\n"
        f"[ $(wc -l <{tmp_path}/asked) = 1 ] && {{ echo 'Check failed: The specified port is 7'; exit 1; }}\n"
        "echo 'Ray runtime started.'; exec sleep 60\n"
    )
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    place, options = node.Place("node1", True, 1, "127.0.0.1"), argparse.Namespace(gpus=0, cores=3)

    async def ask() -> int:
        ray, port = await node._ray_head(place, options, tmp_path, {})
        ray.signal(signal.SIGKILL)
        await ray.wait()
        return port

    port = asyncio.run(ask())
    asked = (tmp_path / "asked").read_text().splitlines()
    assert len(asked) == 2 and f"--port={port} " in asked[1] and "--num-cpus=3 " in asked[1]
    assert "was taken meanwhile" in capfd.readouterr().out
    (tmp_path / "broken").touch()
    with pytest.raises(WorkerError, match="no such library"):
        asyncio.run(ask())
    assert len((tmp_path / "asked").read_text().splitlines()) == 3


def test_a_line_that_came_before_it_was_waited_for_counts():
    """What a process prints while it is started can be there before anybody asks."""

    async def ask() -> None:
        process = await training.Process.start(["/bin/sh", "-c", "echo 'Ray runtime started.'; exec sleep 60"], {})
        while not process.lines:
            await asyncio.sleep(0.01)
        await asyncio.wait_for(process.says(b"Ray runtime started"), 10)
        await process.kill()

    asyncio.run(ask())


def test_a_start_of_ray_that_takes_too_long_is_ended_and_tried_again(tmp_path, monkeypatch, capfd):
    """The first one leaves a child, as Ray's does; it must be gone before the second."""
    program = tmp_path / "python"
    program.write_text(
        f"#!/bin/bash\necho $$ >>{tmp_path}/asked\n"
        f"[ $(wc -l <{tmp_path}/asked) -gt 1 ] || {{ sleep 600 & echo $! >{tmp_path}/child; wait; }}\n"
        "echo 'Ray runtime started.'; exec sleep 60\n"
    )
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    monkeypatch.setattr(training.start_ray, "__kwdefaults__", {"joins": "", "limit_s": 3.0})
    place, options = node.Place("node1", True, 1, "127.0.0.1"), argparse.Namespace(gpus=0, cores=3)

    async def scene() -> None:
        ray, _ = await node._ray_head(place, options, tmp_path, {})
        await ray.kill()

    asyncio.run(scene())
    assert len((tmp_path / "asked").read_text().splitlines()) == 2
    assert "did not start within 3 s on 127.0.0.1" in capfd.readouterr().out
    child = int((tmp_path / "child").read_text())
    assert not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE


def test_a_ray_that_gives_up_its_start_by_itself_is_tried_again(tmp_path, monkeypatch, capfd):
    """Its own limit is a minute, shorter than ours: ray/_private/node.py raises these words."""
    program = tmp_path / "python"
    program.write_text(
        f"#!/bin/bash\necho $$ >>{tmp_path}/asked\n[ $(wc -l <{tmp_path}/asked) -gt 1 ] || "
        "{ echo 'Exception: The current node timed out during startup. This could happen because'; exit 1; }\n"
        "echo 'Ray runtime started.'; exec sleep 60\n"
    )
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    place, options = node.Place("node1", True, 1, "127.0.0.1"), argparse.Namespace(gpus=0, cores=3)

    async def scene() -> None:
        ray, _ = await node._ray_head(place, options, tmp_path, {})
        await ray.kill()

    asyncio.run(scene())
    assert len((tmp_path / "asked").read_text().splitlines()) == 2
    assert "timed out during startup" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("before", "kind"),
    [((), "unstarted"), (("unstarted",) * 2, "failed"), (("unstarted", "saved"), "unstarted")],
)
def test_attempts_that_do_not_start_are_counted(tmp_path, monkeypatch, before, kind):
    async def slow(*_):
        raise SlowStartError("Ray did not start within 150 s")

    monkeypatch.setattr(node, "_first", slow)
    monkeypatch.setattr(node, "kill_descendants", lambda: None)
    monkeypatch.setenv("SLURMD_NODENAME", "node7")
    monkeypatch.setenv("SLURM_JOB_ID", "987654321")
    monkeypatch.setattr(node.tempfile, "gettempdir", lambda: str(tmp_path))
    (tmp_path / "daro987654321_1").mkdir()  # of an attempt that was killed
    (tmp_path / "daro98_1").mkdir()
    for number, word in enumerate(before, 1):
        (tmp_path / f"attempt_{number:03d}").mkdir()
        (tmp_path / f"attempt_{number:03d}" / "result").write_text(f"{word}\ncause\n")
    own = tmp_path / f"attempt_{len(before) + 1:03d}"
    own.mkdir()
    given = ["--attempt-dir", own, "--attempt", len(before) + 1, "--run-dir", tmp_path, "--gpus", 0]
    given += ["--free-disk-gib", 0, "--check-minutes", 1, "--stall-minutes", 1, "--term-grace-s", 1]
    node.main([*map(str, given), "--address", "node7=127.0.0.1", "--", "run.yaml"])
    assert (own / "result").read_text().splitlines()[0] == kind
    assert not (tmp_path / "daro987654321_1").exists() and (tmp_path / "daro98_1").exists()


def test_a_broken_environment_ends_the_job_with_its_cause(tmp_path, monkeypatch, capfd):
    """Without a result the batch script would take it for a lost node, and requeue."""

    async def broken(*_):
        raise FileNotFoundError(2, "No such file or directory", "/env/bin/tool")

    monkeypatch.setattr(node, "_first", broken)
    monkeypatch.setattr(node, "kill_descendants", lambda: None)
    monkeypatch.setenv("SLURMD_NODENAME", "node7")
    given = ["--attempt-dir", tmp_path, "--attempt", 1, "--run-dir", tmp_path, "--gpus", 0, "--free-disk-gib", 0]
    given += ["--check-minutes", 1, "--stall-minutes", 1, "--term-grace-s", 1, "--address", "node7=127.0.0.1"]
    assert node.main([*map(str, given), "--", "run.yaml"]) == 1
    kind, cause = (tmp_path / "result").read_text().splitlines()[:2]
    assert kind == "failed"
    assert cause == "node7: FileNotFoundError: [Errno 2] No such file or directory: '/env/bin/tool'"
    assert "Traceback" in capfd.readouterr().err


def test_large_jobs_give_ray_more_time_and_a_users_settings_win(tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_health_check_period_ms", "5000")
    options = argparse.Namespace(attempt_dir=tmp_path)
    small, large = node._ray_environment(options, 2), node._ray_environment(options, node.LARGE_JOB_NODES)
    assert set(small) == {"RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH", "RAY_USAGE_STATS_ENABLED"}
    assert large["RAY_gcs_rpc_server_connect_timeout_s"] == "120" and large["RAY_health_check_period_ms"] == "5000"
    gcs = Path(ray.__file__).parent / "core/src/ray/gcs/gcs_server"
    known = gcs.read_bytes()
    assert all(name.encode() in known for name in node._LARGE_JOB), "this Ray knows no such setting"


def test_as_many_nodes_as_are_spare_may_be_lost_and_each_counts_once(tmp_path, capfd):
    async def scene():
        greeter = Greeter(tmp_path, "127.0.0.1", 3)
        await greeter.start()
        lines = [await reach_head(tmp_path, f"n{i}", [], 5) for i in (1, 2, 3)]
        await greeter.gather(5)
        greeter.may_lose = 1
        await lines[0].send(Message(event="failed", why="Ray ended with code 1"))
        first = await asyncio.wait_for(greeter.first_loss, 5)
        told = await lines[0].receive()  # as for a node that was frozen and wakes up: it is over
        lines[0]._writer.close()
        await asyncio.sleep(0.2)
        still = greeter.trouble.done(), sorted(greeter.members), greeter.may_lose
        checks = asyncio.ensure_future(greeter.check(1.0))
        lines[1]._writer.close()
        trouble = await asyncio.wait_for(greeter.trouble, 5)
        checked = await checks
        await greeter.close()
        return first, told, still, trouble, checked

    first, told, still, trouble, checked = asyncio.run(scene())
    assert first == "n1: Ray ended with code 1" and told is None
    assert still == (False, ["n2", "n3"], 0)
    assert trouble == "n2 was lost: its connection to the first node ended"
    assert set(checked) == {"n2", "n3"}
    assert "n1: Ray ended with code 1; the run goes on; nodes that may be lost yet: 0" in capfd.readouterr().out


def test_a_node_that_is_lost_before_training_begins_ends_the_attempt(tmp_path):
    async def other(greeter, line):
        line._writer.close()
        return await asyncio.wait_for(greeter.trouble, 5)

    assert "n1 was lost" in meeting(tmp_path, other)
