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

import pytest

from megatron_daro.errors import DeadlineError, WorkerError
from megatron_daro.slurm import health, node, training
from megatron_daro.slurm.processes import Process
from megatron_daro.slurm.rendezvous import HEAD_FILE, Greeter, Message, own_address, reach_head, write_private
from megatron_daro.slurm.training import Stops, train


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
    ],
)
def test_gpus_are_counted_and_must_be_empty(tmp_path, monkeypatch, script, said):
    fake_nvidia_smi(tmp_path, monkeypatch, script)
    assert health.problems(health.Wanted(2, 0, tmp_path)) == said


def test_no_nvidia_smi_is_said(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert health.problems(health.Wanted(8, 0, tmp_path)) == ["8 GPUs were asked for, and there is no nvidia-smi"]
    assert health.problems(health.Wanted(0, 0, tmp_path)) == []


def test_the_disk_must_have_room_and_be_there(tmp_path):
    (full,) = health.problems(health.Wanted(0, 1e9, tmp_path))
    assert "GiB free; free_disk_gib asks for 1e+09" in full
    (gone,) = health.problems(health.Wanted(0, 0, tmp_path / "gone"))
    assert "is gone" in gone and list(tmp_path.iterdir()) == []


def test_clocks_far_apart_are_a_problem():
    assert health.clock_problems(1.0) == [] and "-60 s off" in health.clock_problems(-60.0)[0]


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
    assert order == {"order": "join", "address": "somewhere:1"}
    assert trouble == "n1 was lost: its connection to the first node ended"


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


class Options:
    """What node.py's command line gives to `train`."""

    def __init__(self, run_dir: Path, stall_minutes: float = 10) -> None:
        self.run_dir, self.stall_minutes, self.term_grace_s, self.train = run_dir, stall_minutes, 5.0, ["run.yaml"]


def trained_with(
    code: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    save: bool = False,
    lost: str = "",
    end: bool = False,
    **options: float,
):
    """How a job ends whose training is this Python code."""

    async def scene():
        stops = Stops()
        real = Process.start

        async def start(command, environment):
            assert command[1:4] == ["-m", "megatron_daro", "train"]
            return await real([sys.executable, "-u", "-c", code], environment)

        monkeypatch.setattr(Process, "start", start)
        if save:
            asyncio.get_running_loop().call_later(1.0, stops.saving.set)
        trouble: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        if lost:
            asyncio.get_running_loop().call_later(1.0, trouble.set_result, lost)
        if end:
            asyncio.get_running_loop().call_later(1.5, stops.end)
        return await train(Options(tmp_path, **options), stops, {}, lost=[trouble])  # type: ignore[arg-type]

    return asyncio.run(scene())


def test_a_finished_training_ends_the_job_well(tmp_path, monkeypatch):
    ending = trained_with("print('run: runs/a, 6 steps')", tmp_path, monkeypatch)
    assert (ending.kind, ending.cause) == ("finished", "run: runs/a, 6 steps")


def test_an_error_is_the_cause(tmp_path, monkeypatch):
    ending = trained_with("print('step 1'); raise SystemExit('ModelError: torn')", tmp_path, monkeypatch)
    assert (ending.kind, ending.cause) == ("failed", "ModelError: torn")


def test_asked_to_save_the_training_gets_sigterm_and_the_job_goes_on_later(tmp_path, monkeypatch):
    code = (
        "import signal, sys, time\nsignal.signal(15, lambda *_: (print('saved step 3'), sys.exit(130)))\ntime.sleep(60)"
    )
    ending = trained_with(code, tmp_path, monkeypatch, save=True)
    assert (ending.kind, ending.cause) == ("saved", "saved step 3")


def test_no_new_step_for_too_long_ends_the_job_with_the_last_words(tmp_path, monkeypatch):
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "driver.log").write_text("waiting for sync\n")
    ending = trained_with("import time; time.sleep(60)", tmp_path, monkeypatch, stall_minutes=0.03)
    assert ending.kind == "failed"
    assert "no new step in" in ending.cause and "driver.log: waiting for sync" in ending.cause


def test_a_lost_node_is_the_cause(tmp_path, monkeypatch):
    monkeypatch.setattr(training, "_CANCELLED_S", 0.2)
    ending = trained_with("import time; time.sleep(60)", tmp_path, monkeypatch, lost="n1 was lost")
    assert (ending.kind, ending.cause) == ("node_lost", "n1 was lost")


def test_a_lost_node_is_named_also_where_slurm_then_ends_the_others(tmp_path, monkeypatch):
    code = "import signal, time; signal.signal(15, lambda *_: None); time.sleep(3)"
    ending = trained_with(code, tmp_path, monkeypatch, lost="n1 was lost", end=True)
    assert (ending.kind, ending.cause) == ("ended", "n1 was lost; ended by SIGTERM; nothing was saved")


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
