"""Attempts of a job, node by node: each is a process that runs the command line of a node, as srun starts it.

Python is a shell script in them: started with Ray's program it does what the test says of Ray, and with the training
what it says of that. tests/slurm has the real ones.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import stat
import sys
import time
from pathlib import Path

import pytest

from megatron_daro.workshop.slurm import node, ray_start, rendezvous, training

pytestmark = pytest.mark.slow

RUNS = "echo 'Ray runtime started.'; exec sleep 60"
TRAINS = "echo 'run: runs/a, 6 steps'"


class Attempt:
    """An attempt in a directory of its own, and the commands that its nodes start, one line each."""

    def __init__(self, place: Path, *, number: int = 1, ray: str = RUNS, train: str = TRAINS) -> None:
        self.place, self.number = place, number
        self.directory, self.run_dir = place / f"attempt_{number:03d}", place / "run"
        for folder in (self.directory, self.run_dir, place / "t"):
            folder.mkdir(exist_ok=True)
        self.program = place / "python"
        self.program.write_text(
            f'#!/bin/bash\ncd {place}\necho "$*" >>asked\nenv | grep ^RAY_ >environment_$$\n'
            f'case "$2" in ray.*) {ray} ;; *) {train} ;; esac\n'
        )
        self.program.chmod(0o755)
        self.nodes: list[multiprocessing.Process] = []

    def start(self, rank: int = 0, nodes: int = 1, **options: object) -> multiprocessing.Process:
        """Start a node, which is called n0, n1 and so on."""
        given = {"attempt_dir": self.directory, "attempt": self.number, "run_dir": self.run_dir, "gpus": 0, "cores": 2}
        given |= {"free_disk_gib": 0, "check_minutes": 1, "stall_minutes": 10, "term_grace_s": 5, **options}
        words = [f"--{name.replace('_', '-')}={value}" for name, value in given.items()]
        words += [f"--address=n{rank}=127.0.0.1", "--", "run.yaml", "a=b"]
        process = multiprocessing.get_context("fork").Process(target=self._run, args=(rank, nodes, words))
        process.start()
        self.nodes.append(process)
        return process

    def _run(self, rank: int, nodes: int, words: list[str]) -> None:
        os.environ |= {"SLURM_JOB_ID": "7", "SLURMD_NODENAME": f"n{rank}", "SLURM_PROCID": str(rank)}
        os.environ |= {"SLURM_NNODES": str(nodes), "TMPDIR": str(self.place / "t")}
        node.tempfile.tempdir, sys.executable = None, str(self.program)
        sys.exit(node.main(words))

    def ended(self) -> tuple[str, str, str]:
        """Wait for all nodes; how it ended, why, and which nodes that is about."""
        for process in self.nodes:
            process.join(60)
            assert process.exitcode is not None
        kind, cause, names = (self.directory / "result").read_text().split("\n")
        return kind, cause, names

    def wait(self, name: str) -> None:
        deadline = time.monotonic() + 60
        while not (self.place / name).exists():
            assert time.monotonic() < deadline, f"{name} did not come"
            time.sleep(0.01)

    @property
    def asked(self) -> list[str]:
        return (self.place / "asked").read_text().splitlines()


@pytest.fixture
def attempt(tmp_path, monkeypatch):
    """Make an attempt; its processes end with the test."""
    monkeypatch.setattr(training, "_NODE_LOSS_S", 0.1)  # of the wait for a lost node after each failure
    made = []

    def make(**options: object) -> Attempt:
        made.append(Attempt(tmp_path, **options))
        return made[-1]

    yield make
    for process in (process for one in made for process in one.nodes):
        process.kill()


@pytest.mark.parametrize(
    ("train", "kind", "cause", "status"),
    [
        (TRAINS, "finished", "run: runs/a, 6 steps", 0),
        ("echo 'ConfigError: x'; exit 2", "failed", "ConfigError: x", 1),
        ("echo 'WorkerError: y'; exit 1", "failed", "WorkerError: y", 1),
        ("kill -9 $$", "failed", "-9", 1),
        ("echo 'rank 3: uncorrectable ECC error'; exit 1", "gpu_fault", "uncorrectable ECC error", 0),
        ("echo 'ECC: NVLink'; exit 2", "failed", "NVLink", 1),  # of the configuration: machines are no cause
    ],
)
def test_the_end_of_the_training_is_that_of_the_attempt(attempt, tmp_path, train, kind, cause, status):
    one = attempt(train=train)
    first = one.start()
    found = one.ended()
    assert (found[0], first.exitcode) == (kind, status) and cause in found[1]
    assert "-m megatron_daro train run.yaml a=b" in one.asked and not list((tmp_path / "t").glob("daro*"))


def test_all_nodes_run_one_ray_that_nobody_else_can_use_and_end_with_the_training(attempt, tmp_path):
    one = attempt()
    one.start(nodes=2)
    other = one.start(rank=1, nodes=2)
    assert one.ended() == ("finished", "run: runs/a, 6 steps", "") and other.exitcode == 0
    head, joins, _ = one.asked
    port = head.partition("--port=")[2].partition(" ")[0]
    assert " --head " in head and f" --address=127.0.0.1:{port} " in joins
    assert all(" --node-ip-address=127.0.0.1 --num-cpus=2 --num-gpus=0" in line for line in (head, joins))
    tokens = {
        path.read_text().partition("RAY_AUTH_TOKEN_PATH=")[2].split()[0] for path in tmp_path.glob("environment_*")
    }
    assert tokens == {f"{one.directory}/ray_token"}
    for name in ("ray_token", "head.json", "attach"):
        assert stat.S_IMODE((one.directory / name).stat().st_mode) == 0o600
    assert f"export RAY_ADDRESS=127.0.0.1:{port}" in (one.directory / "attach").read_text().splitlines()


@pytest.mark.parametrize(
    ("files", "resumed"),
    [
        ({}, False),
        ({"metrics.jsonl": ""}, False),
        ({"metrics.jsonl": "{}\n"}, True),
        ({"checkpoints/step_3/x": ""}, True),
    ],
)
def test_a_run_that_has_begun_is_resumed(attempt, files, resumed):
    one = attempt()
    for name, text in files.items():
        (one.run_dir / name).parent.mkdir(parents=True, exist_ok=True)
        (one.run_dir / name).write_text(text)
    one.start()
    assert one.ended()[0] == "finished" and one.asked[-1].endswith("--resume") is resumed


def test_nodes_that_are_not_well_are_named(attempt):
    one = attempt()
    one.start(nodes=3)
    one.start(rank=1, nodes=3, free_disk_gib=1e9)
    one.start(rank=2, nodes=3)
    kind, cause, names = one.ended()
    assert (kind, names) == ("bad_nodes", "n1") and "n1: " in cause and "free_disk_gib" in cause
    alone = attempt(number=2)
    alone.start(nodes=3, free_disk_gib=1e9)
    assert alone.ended()[::2] == ("bad_nodes", "n0")


def test_nodes_that_do_not_report_are_counted_and_those_that_started_named(attempt):
    one = attempt()
    (one.directory / "started_n2").touch()
    one.start(nodes=4, check_minutes=0.01)
    kind, cause, _ = one.ended()
    assert kind == "failed" and "3 of 4 nodes" in cause and "n2" in cause and "n1" not in cause


def test_a_node_that_never_sees_the_first_one_says_so(attempt):
    one = attempt()
    other = one.start(rank=1, nodes=2, check_minutes=0.005)
    other.join(60)
    assert other.exitcode == 1 and "n1" in (one.directory / "failed_n1").read_text()


@pytest.mark.parametrize(
    ("words", "starts", "kind"),
    [
        ("Check failed: The specified port is 7", 2, "finished"),  # a program took it meanwhile
        ("Exception: The current node timed out during startup. This could happen because", 2, "finished"),
        ("no such library", 1, "failed"),
    ],
)
def test_ray_is_started_again_where_its_port_is_taken_or_it_was_slow(attempt, words, starts, kind):
    one = attempt(ray=f"[ $(wc -l <asked) -gt 1 ] || {{ echo '{words}'; exit 1; }}; {RUNS}")
    one.start()
    found = one.ended()
    assert found[0] == kind and (kind == "finished" or words in found[1])
    assert sum("ray.scripts" in line for line in one.asked) == starts


def test_a_start_of_ray_that_takes_too_long_is_ended_with_what_it_started(attempt, tmp_path, monkeypatch):
    monkeypatch.setattr(ray_start, "RAY_START_S", 2.0)
    one = attempt(ray=f"[ $(wc -l <asked) -gt 1 ] || {{ sleep 600 & echo $! >child; wait; }}; {RUNS}")
    one.start()
    assert one.ended()[0] == "finished"
    state = Path("/proc", (tmp_path / "child").read_text().strip(), "stat")
    assert not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z"


@pytest.mark.parametrize(
    ("before", "kind"), [((), "unstarted"), (("unstarted",) * 2, "failed"), (("unstarted", "saved"), "unstarted")]
)
def test_attempts_in_a_row_that_do_not_start_end_the_job(attempt, tmp_path, before, kind):
    for number, word in enumerate(before, 1):
        (tmp_path / f"attempt_{number:03d}").mkdir()
        (tmp_path / f"attempt_{number:03d}" / "result").write_text(f"{word}\ncause\n")
    one = attempt(number=len(before) + 1, ray="echo it timed out during startup; exit 1")
    for left in ("daro7_0", "daro77_0"):  # of an attempt that was killed on this node, and of another job
        (tmp_path / "t" / left).mkdir()
    one.start()
    assert one.ended()[0] == kind
    assert [path.name for path in (tmp_path / "t").glob("daro*")] == ["daro77_0"]


SAVES = "trap 'echo saved step 3; exit 130' TERM; touch trains; while true; do sleep 0.05; done"


@pytest.mark.parametrize(
    ("by", "kind"), [("a file", "saved"), ("USR1", "saved"), ("TERM", "ended")], ids=["file", "USR1", "TERM"]
)
def test_training_saves_where_the_job_asks_for_it_and_is_waited_for_at_its_end(attempt, by, kind):
    """Slurm signals every process of a job, the training too, where it ends it."""
    one = attempt(train=SAVES.replace("touch trains", "echo $$ >pid; touch trains"))
    first = one.start()
    one.wait("trains")
    if by == "a file":
        (one.directory / "save").touch()
    else:
        os.kill(first.pid, getattr(signal, f"SIG{by}"))
    if by == "TERM":
        os.kill(int((one.place / "pid").read_text()), signal.SIGTERM)
    found = one.ended()
    assert found[0] == kind and "saved step 3" in found[1]


def test_a_training_that_ends_unsaved_after_a_request_to_save_goes_on_later(attempt):
    """Ended in its imports it has no word."""
    one = attempt(train="touch trains; exec sleep 60")
    first = one.start()
    one.wait("trains")
    os.kill(first.pid, signal.SIGUSR1)
    assert one.ended()[0] == "stopped" and first.exitcode == 0


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_a_signal_is_heard_while_nodes_join(attempt, number):
    one = attempt(ray="touch joins; sleep 60")
    first = one.start()
    one.wait("joins")
    os.kill(first.pid, number)
    assert one.ended()[0] == ("stopped" if number == signal.SIGUSR1 else "ended")


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "frozen"])
def test_a_node_that_is_lost_is_the_cause(attempt, monkeypatch, how):
    monkeypatch.setattr(rendezvous, "BEAT_S", 0.2)
    monkeypatch.setattr(rendezvous, "FROZEN_S", 2.0)
    one = attempt(train="touch trains; sleep 60")
    one.start(nodes=2)
    other = one.start(rank=1, nodes=2)
    one.wait("trains")
    time.sleep(3 if how == signal.SIGSTOP else 0)  # one that is busy gives signs of life
    assert not (one.directory / "result").exists()
    os.kill(other.pid, how)
    one.nodes[0].join(60)
    other.kill()
    found = one.ended()
    assert found[0] == "node_lost" and "n1" in found[1]


@pytest.mark.parametrize(
    ("train", "kind"), [(TRAINS, "finished"), ("echo 'WorkerDiedError: engine 0 died'; exit 1", "node_lost")]
)
def test_a_run_goes_on_without_as_many_nodes_as_are_spare(attempt, train, kind):
    """What fails after the loss is taken for its consequence."""
    one = attempt(train=f"touch trains; while [ ! -e go ]; do sleep 0.05; done; {train}")
    one.start(nodes=2, may_lose=1)
    other = one.start(rank=1, nodes=2)
    one.wait("trains")
    other.kill()
    time.sleep(0.5)
    assert not (one.directory / "result").exists()
    (one.place / "go").touch()
    found = one.ended()
    assert found[0] == kind and (kind == "finished" or "n1" in found[1])


def test_a_ray_that_ends_on_another_node_ends_the_attempt(attempt):
    one = attempt(train="touch trains; sleep 60", ray=f'case "$*" in *--head*) {RUNS} ;; esac; echo $$ >ray; {RUNS}')
    one.start(nodes=2)
    other = one.start(rank=1, nodes=2)
    one.wait("trains")
    os.kill(int((one.place / "ray").read_text()), signal.SIGKILL)
    found = one.ended()
    assert found[0] == "node_lost" and "n1: Ray ended" in found[1] and other.exitcode == 1


def test_no_new_step_for_too_long_ends_the_job_with_the_last_words(attempt):
    one = attempt(train="for i in 1 2 3 4 5; do echo $i >>run/metrics.jsonl; sleep 0.5; done; exec sleep 60")
    (one.run_dir / "logs").mkdir()
    (one.run_dir / "logs" / "driver.log").write_text("waiting for sync\n")
    started = time.monotonic()
    one.start(stall_minutes=0.03)
    kind, cause, _ = one.ended()
    assert kind == "failed" and "driver.log: waiting for sync" in cause
    assert time.monotonic() - started > 2 + 60 * 0.03, "new steps put it off"


@pytest.mark.parametrize(("errors", "kind"), [(0, "failed"), (7, "bad_nodes")])
def test_after_a_failed_training_every_node_looks_at_its_gpus(attempt, monkeypatch, tmp_path, errors, kind):
    """Memory is in use then by right; errors of it are not."""
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "nvidia-smi").write_text(
        f"#!/bin/bash\nif [ -e {tmp_path}/trains ]; then echo '0, 1000, 900, {errors}'; else echo '0, 1000, 5, 0'; fi\n"
    )
    (tools / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tools), prepend=os.pathsep)
    one = attempt(train="touch trains; echo 'WorkerError: y'; exit 1")
    for rank in range(2):
        one.start(rank=rank, nodes=2, gpus=1)
    found = one.ended()
    assert found[0] == kind and found[2] == ("n0,n1" if errors else "")
