"""What one node of a job does from its command line to its result: as the first one, and as another."""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import stat
import sys
from pathlib import Path

import pytest

from megatron_daro.errors import DaroError, DeadlineError
from megatron_daro.workshop.slurm import node, rendezvous, training
from megatron_daro.workshop.slurm.rendezvous import Greeter, Message, reach_head
from megatron_daro.workshop.slurm.training import (
    EndedError,
    Ending,
    PortTakenError,
    SlowStartError,
    StoppedError,
    Stops,
)

NEEDED = {
    "--attempt-dir": "/a", "--attempt": "2", "--run-dir": "/r", "--gpus": "8", "--free-disk-gib": "1.5",
    "--check-minutes": "2.5", "--stall-minutes": "60.5", "--term-grace-s": "20.5",
}  # fmt: skip


def words(given: dict[str, object], *more: str) -> list[str]:
    return [str(word) for pair in given.items() for word in pair] + [*more, "--", "run.yaml", "a=b"]


def test_the_command_line_is_read_as_numbers_and_paths():
    more = ("--cores", "3", "--may-lose", "2", "--interface", "ib0", "--address", "n1=10.0.0.1", "--address", "n2=b=c")
    options = vars(node._parser().parse_args(words(NEEDED, *more)))
    assert options == {
        "attempt_dir": Path("/a"), "attempt": 2, "run_dir": Path("/r"), "gpus": 8, "cores": 3, "free_disk_gib": 1.5,
        "check_minutes": 2.5, "stall_minutes": 60.5, "term_grace_s": 20.5, "may_lose": 2, "interface": "ib0",
        "address": ["n1=10.0.0.1", "n2=b=c"], "train": ["run.yaml", "a=b"],
    }  # fmt: skip
    plain = node._parser().parse_args(words(NEEDED))
    assert (plain.cores, plain.may_lose, plain.interface, plain.address) == (None, 0, None, [])


@pytest.mark.parametrize("missing", [*NEEDED, "train"])
def test_what_a_node_cannot_do_without_is_asked_for(missing, capsys):
    given = words({name: value for name, value in NEEDED.items() if name != missing})
    with pytest.raises(SystemExit):
        node._parser().parse_args(given[:-3] if missing == "train" else given)
    assert f"the following arguments are required: {missing}" in capsys.readouterr().err


def test_the_command_line_explains_itself(capsys):
    with pytest.raises(SystemExit):
        node.main(["--help"])
    said = " ".join(capsys.readouterr().out.split())
    assert said.startswith("usage: megatron_daro.workshop.slurm.node [-h]") and "--address NODE=ADDRESS" in said
    assert "Run one node of a job: `python" in said and "Health check" not in said
    assert "of a node without GPUs; unset" in said and "after --: arguments of" in said


@pytest.fixture
def attempt(tmp_path, monkeypatch):
    """Run a node whose part, as the first one or another, is given; return its exit status."""
    monkeypatch.setattr(node, "kill_descendants", lambda: None)
    (tmp_path / "t").mkdir()
    monkeypatch.setattr(node.tempfile, "gettempdir", lambda: str(tmp_path / "t"))
    monkeypatch.setattr(training, "_LOOK_S", 0.01)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURMD_NODENAME", "n1")

    def run(part, *, rank: int = 0, nodes: str | None = None, kills: list[int] | None = None) -> int:
        monkeypatch.setattr(node, "_other" if rank else "_first", part)
        if kills is not None:
            monkeypatch.setattr(node, "kill_descendants", lambda: kills.append(1))
        monkeypatch.setenv("SLURM_PROCID", str(rank))
        monkeypatch.setenv("SLURM_NNODES", nodes) if nodes else monkeypatch.delenv("SLURM_NNODES", raising=False)
        given = NEEDED | {"--attempt-dir": tmp_path, "--run-dir": tmp_path, "--gpus": 0}
        return node.main(words(given, "--address", "n1=a=b"))

    return run


def raising(error: BaseException):
    async def part(*_):
        raise error

    return part


def ending(*fields: str):
    async def part(*_):
        return Ending(*fields)

    return part


@pytest.mark.parametrize(
    ("part", "result", "status"),
    [
        (ending("finished", "6 steps"), "finished\n6 steps\n", 0),
        (ending("bad_nodes", "n2: a\n\n  b \n", "n2,n3"), "bad_nodes\nn2: a; b\nn2,n3", 0),
        (ending("ended", "SIGTERM"), "ended\nSIGTERM\n", 1),
        (ending("failed", "x"), "failed\nx\n", 1),
        (raising(EndedError("SIGTERM came")), "ended\nSIGTERM came\n", 1),
        (raising(StoppedError("asked to end")), "stopped\nasked to end\n", 0),
        (raising(SlowStartError("too slow")), "unstarted\nn1: too slow\nn1", 0),
        (raising(DaroError("no such model")), "failed\nno such model\n", 1),
        (raising(ImportError("no torch")), "failed\nn1: ImportError: no torch\n", 1),
        (raising(PermissionError("no")), "failed\nn1: PermissionError: no\n", 1),
    ],
)
def test_the_first_node_writes_how_the_attempt_ended(attempt, tmp_path, capfd, part, result, status):
    assert attempt(part) == status
    assert (tmp_path / "result").read_text() == result and not list(tmp_path.glob("failed_*"))
    assert "n1: " in capfd.readouterr().out


@pytest.mark.parametrize("kind", ["failed", "finished"])
def test_another_node_only_says_that_it_failed(attempt, tmp_path, kind):
    assert attempt(ending(kind, "a\nb"), rank=1) == (kind == "failed")
    assert not (tmp_path / "result").exists()
    assert [path.read_text() for path in tmp_path.glob("failed_n1")] == ["a; b\n"] * (kind == "failed")


def test_a_node_knows_its_place_and_leaves_nothing(attempt, tmp_path):
    seen: list[object] = []
    kills: list[int] = []
    (tmp_path / "t" / "daro7_0").symlink_to(tmp_path)  # what cannot be removed is left
    (tmp_path / "t" / "daro7_1").mkdir(parents=True)  # of an attempt that was killed on this node

    async def part(place, options, stops):
        seen.extend([place, (tmp_path / "t" / "daro7_1").exists(), len(kills)])
        node._temporary(options).mkdir(parents=True)
        return Ending("finished", "")

    attempt(part, rank=2, nodes="3", kills=kills)
    attempt(part, kills=kills)
    assert seen == [node.Place("n1", False, 3, "a=b"), False, 0, node.Place("n1", True, 1, "a=b"), False, 1]
    assert kills == [1, 1] and [left.name for left in (tmp_path / "t").iterdir()] == ["daro7_0"]


@pytest.mark.parametrize("by", ["a file", "USR1", "TERM"])
def test_a_node_is_asked_to_save_by_a_file_or_a_signal_and_to_end_by_another(attempt, tmp_path, by):
    async def part(place, options, stops):
        if by == "a file":
            (tmp_path / "save").touch()
        else:
            os.kill(os.getpid(), signal.SIGUSR1 if by == "USR1" else signal.SIGTERM)
        await asyncio.wait({stops.ended} if by == "TERM" else {asyncio.ensure_future(stops.saving.wait())}, timeout=10)
        return Ending("ended" if stops.ended.done() else "saved" if stops.saving.is_set() else "failed", "")

    attempt(part)
    assert (tmp_path / "result").read_text().split()[0] == ("ended" if by == "TERM" else "saved")


@pytest.mark.parametrize(("before", "kind"), [(1, "gpu_fault"), (2, "failed")])
def test_the_third_fault_of_a_gpu_in_a_row_is_the_last(attempt, tmp_path, monkeypatch, before, kind):
    for number in range(1, before + 1):
        (tmp_path / f"attempt_{number:03d}").mkdir()
        (tmp_path / f"attempt_{number:03d}" / "result").write_text("gpu_fault\nx\n")
    monkeypatch.setitem(NEEDED, "--attempt", before + 1)
    own = tmp_path / f"attempt_{before + 1:03d}"
    own.mkdir()
    monkeypatch.setattr(node, "write_private", lambda file, text: (own / file.name).write_text(text))
    read = node._in_a_row
    monkeypatch.setattr(
        node,
        "_in_a_row",
        lambda kind, options: read(kind, argparse.Namespace(attempt_dir=own, attempt=options.attempt)),
    )
    attempt(ending("gpu_fault", "ECC"))
    assert (own / "result").read_text().split("\n")[:2] == [
        kind, "ECC; so ended 3 attempts in a row" if kind == "failed" else "ECC"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("gpus", "cores", "machine", "places"), [(8, None, 4, 48), (8, 3, 200, 200), (0, 3, 200, 3), (0, None, None, 32)]
)
def test_ray_has_a_place_for_every_process_of_a_node(monkeypatch, gpus, cores, machine, places):
    monkeypatch.setattr(os, "cpu_count", lambda: machine)
    assert node._places(argparse.Namespace(gpus=gpus, cores=cores)) == places


def test_ray_is_told_of_a_large_job_from_sixteen_nodes_on(tmp_path, monkeypatch):
    for name in node._LARGE_JOB:
        monkeypatch.delenv(f"RAY_{name}", raising=False)
    given = [node._ray_environment(argparse.Namespace(attempt_dir=tmp_path), nodes) for nodes in (15, 16)]
    own = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": f"{tmp_path}/ray_token", "RAY_USAGE_STATS_ENABLED": "0"}
    assert given[0] == own
    assert {name: given[1][name] for name in given[1].keys() - own.keys()} == {
        "RAY_worker_register_timeout_seconds": "180",
        "RAY_gcs_rpc_server_connect_timeout_s": "120",
        "RAY_gcs_rpc_server_reconnect_timeout_s": "120",
        "RAY_gcs_server_request_timeout_seconds": "120",
        "RAY_raylet_report_resources_period_milliseconds": "1000",
        "RAY_task_events_report_interval_ms": "10000",
        "RAY_health_check_period_ms": "10000",
    }


@pytest.mark.parametrize(("error", "tries"), [(SlowStartError, 3), (PortTakenError, 5)])
def test_a_start_of_ray_is_tried_again_so_many_times(monkeypatch, capfd, error, tries):
    ports: list[int] = []

    async def start_ray(**options):
        ports.append(options["port"])
        raise error("no")

    monkeypatch.setattr(node, "start_ray", start_ray)
    place, options = node.Place("n1", True, 1, "127.0.0.1"), argparse.Namespace(gpus=0, cores=1)
    with pytest.raises(error, match="no"):
        asyncio.run(node._ray_head(place, options, Path("t"), {}))
    said = capfd.readouterr().out
    assert len(ports) == tries and said.count("n1: ") == tries - 1
    assert ("n1: no; trying again" in said) is (error is SlowStartError)


@pytest.fixture
def ray_program(tmp_path, monkeypatch):
    """What was started in the place of Python with Ray: it says that it runs, and lives until it is told to end."""
    program = tmp_path / "python"
    program.write_text(
        f'#!/bin/bash\necho "$*" >>{tmp_path}/asked\nenv | grep ^RAY_ >{tmp_path}/environment\n'
        "echo 'Ray runtime started.'; exec sleep 60\n"
    )
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    monkeypatch.setattr(node, "kill_descendants", training.kill_descendants)
    real, started = training.Process.start, []

    async def start(command, environment):
        started.append(await real(command, environment))
        return started[-1]

    monkeypatch.setattr(training.Process, "start", start)
    return started


def options_in(place: Path, **fields: object) -> argparse.Namespace:
    (place / "run").mkdir(exist_ok=True)
    given = {"gpus": 0, "cores": 2, "free_disk_gib": 0, "run_dir": place / "run", "attempt_dir": place, "attempt": 4}
    return argparse.Namespace(**given | {"check_minutes": 10, "may_lose": 1, **fields})


def first_of(place: Path, other=None, *, nodes: int = 1, rays=(), **fields: object) -> Ending:
    """How an attempt ends whose first node meets `other`, a coroutine function."""

    async def scene() -> Ending:
        stops = Stops()
        beside = asyncio.ensure_future(other(stops)) if other else None
        try:
            return await node._first(node.Place("n0", True, nodes, "127.0.0.1"), options_in(place, **fields), stops)
        finally:
            if beside:
                await beside
            for ray in rays:
                await ray.kill()

    return asyncio.run(scene())


def test_the_first_node_trains_once_ray_runs_on_all(tmp_path, monkeypatch, ray_program):
    seen: dict[str, object] = {}

    async def train(options, stops, environment, *, lost, first_loss, look):
        head = rendezvous.json.loads((tmp_path / "head.json").read_text())
        seen.update(environment=environment, looked=await look(), head=head, loss=first_loss.done())
        training.kill_descendants()
        seen["ended"] = await asyncio.wait_for(lost[1], 10)
        return Ending("finished", "done")

    async def other(stops):
        line = await reach_head(tmp_path, "n1", [], 10)
        seen["order"] = await line.receive()
        await line.send(Message(event="joined"))
        assert await line.receive() == {"order": "check", "address": "", "temporary": ""}
        await line.send(Message(event="checked", problems=[]))
        seen["last"], seen["closed"] = await line.receive(), await line.receive()

    monkeypatch.setattr(node, "train", train)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setattr(node.tempfile, "gettempdir", lambda: str(tmp_path))
    assert first_of(tmp_path, other, nodes=2, rays=ray_program) == Ending("finished", "done")
    token = (tmp_path / "ray_token").read_text()
    assert len(token) == 64 and len(seen["head"]["secret"]) == 32
    assert stat.S_IMODE((tmp_path / "ray_token").stat().st_mode) == 0o600
    address = seen["environment"]["RAY_ADDRESS"]
    asked = (tmp_path / "asked").read_text()
    assert asked.startswith("-m ray.scripts.scripts start --head --port=" + address.removeprefix("127.0.0.1:"))
    for option in (f"--temp-dir={tmp_path}/daro7_4", "--include-dashboard=false", "--block", "--disable-usage-stats"):
        assert f" {option} " in asked
    assert asked.endswith(" --node-ip-address=127.0.0.1 --num-cpus=2 --num-gpus=0\n")
    assert seen["order"] == {"order": "join", "address": address, "temporary": f"{tmp_path}/daro7_4"}
    assert seen["environment"]["MEGATRON_DARO_ATTEMPT"] == "4" and seen["environment"]["RAY_AUTH_MODE"] == "token"
    assert "RAY_AUTH_MODE=token" in (tmp_path / "environment").read_text()
    lines = (tmp_path / "attach").read_text().splitlines()
    assert lines[0] == "first_node=n0" and f"export RAY_ADDRESS={address}" in lines
    assert (seen["looked"], seen["loss"]) == (None, False)
    assert seen["ended"] == "n0: Ray ended with code -9: Ray runtime started."
    assert seen["last"] == {"order": "end", "address": "", "temporary": ""} and seen["closed"] is None


def test_nodes_may_be_lost_only_once_training_begins(tmp_path, monkeypatch, ray_program, capfd):
    async def train(options, stops, environment, *, lost, first_loss, look):
        return Ending("saved", await asyncio.wait_for(first_loss, 10) + f" {lost[0].done()}")

    async def other(stops):
        line = await reach_head(tmp_path, "n1", [], 10)
        await line.receive()
        await line.send(Message(event="joined"))
        await asyncio.sleep(0.1)
        line._writer.close()

    monkeypatch.setattr(node, "train", train)
    assert (
        first_of(tmp_path, other, nodes=2, rays=ray_program).cause
        == "n1 was lost: its connection to the first node ended False"
    )


@pytest.mark.parametrize(
    ("answer", "kind", "cause"),
    [
        ({"event": "unstarted", "why": "too slow"}, "unstarted", "n1: too slow"),
        ({"event": "bye"}, "unstarted", "n1: end"),
    ],
)
def test_a_node_that_cannot_join_ends_the_attempt(tmp_path, ray_program, answer, kind, cause):
    async def other(stops):
        line = await reach_head(tmp_path, "n1", [], 10)
        await line.receive()
        await line.send(answer)
        await line.receive()

    found = first_of(tmp_path, other, nodes=2, rays=ray_program)
    assert found.kind == kind and found.cause.startswith(cause)


def test_sigterm_is_heard_while_nodes_join(tmp_path, ray_program):
    async def other(stops):
        line = await reach_head(tmp_path, "n1", [], 10)
        await line.receive()
        stops.end()
        await line.receive()

    with pytest.raises(EndedError):
        first_of(tmp_path, other, nodes=2, rays=ray_program)


def test_a_first_node_that_is_not_well_asks_nobody(tmp_path):
    found = first_of(tmp_path, free_disk_gib=1e9)
    assert (found.kind, found.nodes) == ("bad_nodes", "n0") and found.cause.startswith(f"n0: {tmp_path}/run has ")
    assert list(tmp_path.rglob("*")) == [tmp_path / "run"]


def test_nodes_that_are_not_well_are_named_and_left_out(tmp_path):
    async def other(stops):
        lines = [await reach_head(tmp_path, *one, 10) for one in (("n2", ["b"]), ("n1", ["a", "c"]), ("n3", []))]
        for line in lines:
            await line.receive()

    assert first_of(tmp_path, other, nodes=4) == Ending("bad_nodes", "n1: a, c; n2: b", "n1,n2")


def test_nodes_that_do_not_report_are_counted_and_those_that_started_named(tmp_path):
    for name in ("n3", "n2", "n1"):
        (tmp_path / f"started_{name}").touch()

    async def other(stops):
        await reach_head(tmp_path, "n1", [], 10)

    found = first_of(tmp_path, other, nodes=5, check_minutes=0.005)
    assert (found.kind, found.nodes) == ("failed", "")
    assert found.cause.startswith(
        "3 of 5 nodes did not report to n0 within 0.3 s (n2, n3 started, and did not reach 127.0.0.1): is "
    )
    assert found.cause.endswith("reported: n1")
    for file in tmp_path.glob("started_*"):
        file.unlink()
    assert "within 0.3 s: is" in first_of(tmp_path, nodes=2, check_minutes=0.005).cause


def other_of(place: Path, first, *, rays=(), **fields: object) -> tuple[Ending, object]:
    """How another node ends that meets `first`, a coroutine function; and what that returns."""

    async def scene():
        greeter, stops = Greeter(place, "127.0.0.1", 1), Stops()
        await greeter.start()
        given = node.Place("n1", False, 2, "127.0.0.2"), options_in(place, **fields), stops
        own = asyncio.ensure_future(node._other(*given))
        try:
            await greeter.gather(10)
            return await first(greeter, stops), await own
        finally:
            await greeter.close()
            await asyncio.wait({own}, timeout=10)
            for ray in rays:
                await ray.kill()

    said, found = asyncio.run(scene())
    return found, said


def test_a_node_that_is_told_to_end_ends_well(tmp_path):
    async def first(greeter, stops):
        await greeter.order("end")
        return greeter.members["n1"].problems

    assert other_of(tmp_path, first) == (Ending("finished", "told to end"), [])
    assert (tmp_path / "started_n1").read_text() == ""


def test_a_node_that_is_not_well_reports_it(tmp_path):
    async def first(greeter, stops):
        await greeter.order("end")
        return greeter.members["n1"].problems

    _, (problem,) = other_of(tmp_path, first, free_disk_gib=1e9)
    assert problem.startswith(f"{tmp_path}/run has ") and not list(tmp_path.glob("started_*"))


@pytest.mark.parametrize("end", ["order", "SIGTERM", "Ray"])
def test_another_node_joins_ray_and_stays_until_it_is_over(tmp_path, ray_program, end):
    session = tmp_path / "session"
    session.mkdir()

    async def first(greeter, stops):
        await greeter.order("join", "10.0.0.1:6379", str(session))
        await greeter.all_joined(10)
        if end == "Ray":
            training.kill_descendants()
            return await asyncio.wait_for(greeter.trouble, 10)
        await greeter.order("end") if end == "order" else stops.end()
        return None

    found, said = other_of(tmp_path, first, rays=ray_program)
    asked = (tmp_path / "asked").read_text()
    assert asked.startswith("-m ray.scripts.scripts start --address=10.0.0.1:6379 --block --disable-usage-stats")
    assert asked.endswith(" --node-ip-address=127.0.0.2 --num-cpus=2 --num-gpus=0\n") and not session.exists()
    assert "RAY_AUTH_MODE=token" in (tmp_path / "environment").read_text()
    ended = "n1: Ray ended with code -9: Ray runtime started."
    expected = {
        "order": (Ending("finished", "told to end"), None),
        "SIGTERM": (Ending("finished", "ended by SIGTERM"), None),
        "Ray": (Ending("failed", ended), f"n1: {ended}"),
    }
    assert (found, said) == expected[end]


def test_a_node_whose_ray_is_too_slow_tells_the_first_one(tmp_path, monkeypatch):
    async def slow(**_):
        raise SlowStartError("did not start")

    async def first(greeter, stops):
        await greeter.order("join", "10.0.0.1:6379", str(tmp_path / "session"))
        return await asyncio.wait_for(greeter.trouble, 10)

    monkeypatch.setattr(node, "start_ray", slow)
    said: list[str] = []

    async def hear(greeter, stops):
        said.append(await first(greeter, stops))

    with pytest.raises(SlowStartError):
        other_of(tmp_path, hear)
    assert said == ["n1: did not start"]


def test_a_first_node_that_never_comes_is_said(tmp_path):
    place, options = node.Place("n1", False, 2, "127.0.0.1"), options_in(tmp_path, check_minutes=0.002)

    async def scene():
        return await node._other(place, options, Stops())

    with pytest.raises(DeadlineError, match=r"within 0.12 s: the run directory is not shared"):
        asyncio.run(scene())


@pytest.mark.parametrize("own", ["used", "sick"])
def test_after_a_failure_the_first_node_looks_at_its_own_gpus_too(tmp_path, monkeypatch, own):
    """Memory is in use then by right; errors of it are not."""

    class Well:
        async def check(self, limit_s):
            assert limit_s == 45
            return {"n1": []}

    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/bash\necho '0, 100, 90, {int(own == 'sick')}'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    found = asyncio.run(node._looked_at(Well(), node.Place("n0", True, 2, "a"), options_in(tmp_path, gpus=1)))
    words = "n0: GPU 0 has 1 memory errors that could not be corrected (ECC)"
    assert found == (Ending("bad_nodes", words, "n0") if own == "sick" else None)
