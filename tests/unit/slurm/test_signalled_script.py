"""The batch script under signals: a real bash runs it, with stand-ins for the four commands of Slurm that it calls.

`srun` waits for a file and leaves the result that a node would; `squeue` says what slurmctld says of a job in that
state (as seen with Slurm 22.05: RUNNING None while it is preempted with a grace time, COMPLETING TimeLimit at the time
limit, COMPLETING None after scancel). tests/slurm does the same with the real ones.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_daro.workshop.slurm.cluster_file import ClusterFile
from megatron_daro.workshop.slurm.script import Job, script_of

USR1, TERM = signal.SIGUSR1, signal.SIGTERM
STAND_INS = {
    "srun": 'printf "%s\\n" "$@" >arguments\n'
    "touch srun; while [ ! -e go ]; do /bin/sleep 0.05; done; cp answer slurm/attempt_001/result; exit 1",
    "squeue": "cat state",
    "scontrol": 'echo "$*" >>scontrol\n'
    'case "$1 $2" in "show hostnames") echo "$3" | tr , "\\n" ;; "show job") cat job_line 2>/dev/null ;; esac',
    "sinfo": "cat partition_nodes 2>/dev/null",
    "sleep": "touch waits; exit 0",
    "find": "if [ -e slow_start ]; then touch first_lines; while [ ! -e go ]; do /bin/sleep 0.05; done; fi\n"
    '/usr/bin/find "$@"',
}


class Script:
    """A job's script as a process of its own, in its run directory."""

    def __init__(self, place: Path, setup: tuple[str, ...] = (), **fields: object) -> None:
        self.place = place
        programs = place / "programs"
        programs.mkdir()
        for name, body in STAND_INS.items():
            (programs / name).write_text(f"#!/bin/bash\ncd {place}\n{body}\n")
            (programs / name).chmod(0o755)
        site = ClusterFile.model_validate({"partition": "main", "gpus_per_node": 0, "setup": setup, **fields})
        self.text = script_of(Job("job", 1, place, place, ("run.yaml",), 1, 300, 0), site)
        self.path = f"{programs}:/usr/bin:/bin"
        (place / "state").write_text("RUNNING None\n")

    def start(self, **files: str) -> None:
        for name, text in files.items():
            (self.place / name).write_text(text)
        file = self.place / "script"
        file.write_text(self.text)
        environment = {"PATH": self.path, "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node1", "HOME": str(self.place)}
        environment |= {"SLURM_JOB_PARTITION": "main", "SLURM_JOB_NUM_NODES": "1"}
        self.process = subprocess.Popen(
            ["bash", str(file)], env=environment, stdout=(self.place / "log").open("w"), stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip

    def wait(self, file: str) -> None:
        deadline = time.monotonic() + 60
        while not (self.place / file).exists():
            assert time.monotonic() < deadline and self.process.poll() is None, f"{file} did not come"
            time.sleep(0.01)

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.process.pid, number)

    def go(self) -> None:
        (self.place / "go").touch()

    def end(self) -> tuple[str, bool]:
        """The last line, and whether Slurm was asked to requeue."""
        self.process.wait(timeout=60)
        output = (self.place / "log").read_text()  # what a setup has left behind may live on, until Slurm ends it
        asked = self.place / "scontrol"
        requeued = asked.exists() and "requeue 7" in asked.read_text().splitlines()
        assert requeued == output.splitlines()[-1].endswith("; requeued"), output
        return output.splitlines()[-1], requeued


Moment = Callable[[Path, signal.Signals], Script]


def in_the_first_lines(place: Path, number: signal.Signals) -> Script:
    script = Script(place)
    script.start(slow_start="")
    script.wait("first_lines")
    script.signal(number)
    time.sleep(0.1)
    script.go()
    return script


def in_the_setup(place: Path, number: signal.Signals) -> Script:
    script = Script(place, setup=(f"touch {place}/in_setup; /bin/sleep 30",))
    script.start()
    script.wait("in_setup")
    script.signal(number)  # it would go on for half a minute
    return script


def while_the_nodes_start(place: Path, number: signal.Signals) -> Script:
    script = Script(place)
    script.start()
    script.wait("srun")
    script.signal(number)
    script.wait("slurm/attempt_001/save")
    script.go()
    return script


def result(kind: str) -> Moment:
    def moment(place: Path, number: signal.Signals) -> Script:
        script = Script(place)
        script.start(answer=f"{kind}\nits cause\nnode1\n")
        script.wait("srun")
        script.signal(number)
        script.wait("slurm/attempt_001/save")
        script.go()
        return script

    return moment


MOMENTS: dict[str, Moment] = {
    "the script's first lines": in_the_first_lines,
    "`setup`": in_the_setup,
    "the nodes' programs start": while_the_nodes_start,
    **{f"the node says {kind}": result(kind) for kind in ("saved", "failed", "bad_nodes")},
}


@pytest.mark.parametrize("number", [USR1, TERM], ids=["USR1", "TERM"])
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_signal_in_any_moment_requeues(tmp_path, moment, number):
    line, requeued = MOMENTS[moment](tmp_path, number).end()
    assert requeued, line


def test_at_the_time_limit_the_job_is_requeued_though_nothing_was_saved(tmp_path):
    script = Script(tmp_path)
    script.start(state="COMPLETING TimeLimit\n")
    script.wait("srun")
    script.signal(TERM)
    script.go()
    assert script.end()[1]


def test_cancelled_is_cancelled_also_after_a_request_to_save(tmp_path):
    script = Script(tmp_path)
    script.start(state="COMPLETING None\n", answer="stopped\nits cause\n")
    script.wait("srun")
    script.signal(USR1)
    script.wait("slurm/attempt_001/save")
    script.signal(TERM)
    script.go()
    line, requeued = script.end()
    assert not requeued, line


@pytest.mark.parametrize(
    ("kind", "requeued"),
    [("finished", False), ("failed", False), ("bad_nodes", False), ("node_lost", True), ("unstarted", True),
     ("gpu_fault", True), ("ended", True)],
)  # fmt: skip
def test_without_a_signal_the_node_decides(tmp_path, kind, requeued):
    script = Script(tmp_path)
    script.start(answer=f"{kind}\nits cause\nnode1\n", go="")
    line, put_back = script.end()
    assert line.startswith("job 7: its cause") and put_back == requeued
    assert (tmp_path / "slurm" / "finished").exists() == (kind == "finished")


@pytest.mark.parametrize(
    ("left_out", "nodes", "enough"),
    [("(null)", ("node1", "node2"), True), ("node2", ("node1", "node2"), False),
     ("node2", ("node1", "node2", "node10"), True), ("(null)", (), True)],
)  # fmt: skip
def test_bad_nodes_are_left_out_unless_the_job_would_wait_for_ever(tmp_path, left_out, nodes, enough):
    """The job needs one node; a Slurm that does not name any is no reason to end."""
    script = Script(tmp_path, exclude_bad_nodes=True)
    files = {
        "job_line": f"JobId=7 ExcNodeList={left_out} Nice=0\n",
        "partition_nodes": "".join(f"{n}\n" for n in nodes),
    }
    script.start(answer="bad_nodes\nits cause\nnode1\n", go="", **files)
    line, requeued = script.end()
    if enough:
        assert requeued and "its cause" in line and "node1" in line
        every = "node1" if left_out == "(null)" else f"{left_out},node1"
        assert f"update JobId=7 ExcNodeList={every}" in (tmp_path / "scontrol").read_text().splitlines()
    else:
        assert not requeued and "its cause" in line and "node1" in line


def test_a_setup_that_ends_the_script_ends_the_job_with_its_code(tmp_path):
    script = Script(tmp_path, setup=("echo module not found; exit 3",))
    script.start()
    line, requeued = script.end()
    assert not requeued and "code 3" in line


def test_a_directory_of_an_earlier_attempt_is_not_used_again(tmp_path):
    """Where attempt_001 was removed, a count would give attempt_002 again, with its stale `save` in it."""
    stale = tmp_path / "slurm" / "attempt_002"
    stale.mkdir(parents=True)
    (stale / "save").touch()
    script = Script(tmp_path)
    script.start(go="")
    script.end()
    assert (tmp_path / "slurm" / "attempt_003").is_dir()


def test_attach_runs_a_command_beside_the_training_of_the_newest_attempt(tmp_path):
    """Before Ray runs there is nothing to attach to; then it is the first node of the job that wrote it."""
    script = Script(tmp_path, container={"image": "docker://x", "runtime": "apptainer"})
    script.start(go="")
    script.end()
    attach = ["bash", str(tmp_path / "slurm" / "attach.sh"), "ray", "status of all"]
    early = subprocess.run(attach, env={"PATH": script.path}, capture_output=True, text=True, check=False)
    assert early.returncode == 1 and early.stderr
    (tmp_path / "slurm" / "attempt_001" / "attach").write_text("first_node=node1\n")
    subprocess.run(attach, env={"PATH": script.path}, check=False)
    given = (tmp_path / "arguments").read_text().splitlines()
    assert given[:5] == ["--jobid=7", "--overlap", "--nodes=1", "--ntasks=1", "--nodelist=node1"]
    assert given[5] == "apptainer" and given[-2:] == ["ray", "status of all"]
