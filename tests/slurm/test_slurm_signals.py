"""One job, signalled in one moment of each of its attempts: it is requeued every time, and its run is that of an
unbroken one. The script's own first lines, and results that a node writes, are in tests/unit/slurm."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import cli_runs
import psutil
import pytest
from slurm_jobs import SlurmJob

from megatron_daro.observe.metrics import comparable, read_metrics

pytestmark = [pytest.mark.heavy, pytest.mark.slow, pytest.mark.timeout(3300)]
LONG = "MEGATRON_DARO_LONG" in os.environ
"""All moments and the time limit: 14 minutes on a busy machine. Else those of FEW, in a shorter run."""
STEPS = 30 if LONG else 16
OPTIONS = [f"trainer.steps={STEPS}", "engine.replicas=1", "trainer.save_every_steps=1"]
HOLD_NODES = '#!/bin/bash\nwhile [ -e {place}/hold_$SLURMD_NODENAME ]; do sleep 0.1; done\nexec {python} "$@"\n'


class Scene:
    """A job whose setup and nodes wait while there are files `hold_setup`, `hold_node1` and `hold_node2`."""

    def __init__(self, slurm, tiny, place: Path) -> None:
        self.place, python = place, place / "python"
        python.write_text(HOLD_NODES.format(place=place, python=sys.executable))
        python.chmod(0o755)
        self.hold("setup")
        setup = [f"touch {place}/in_setup", f"while [ -e {place}/hold_setup ]; do sleep 0.1; done"]
        site = {"setup": setup, "python": str(python), "time": "00:50:00"}
        self.job = SlurmJob(slurm, tiny.config, place / "run", site, *OPTIONS)

    def hold(self, *names: str) -> None:
        """Let these wait in the next attempt, and no others."""
        for file in self.place.glob("hold_*"):
            file.unlink()
        for name in names:
            (self.place / f"hold_{name}").touch()

    def runs(self, *words: str) -> bool:
        """Whether a process of the job has all these words in its command."""
        for process in self.job.processes():
            try:
                command = " ".join(process.cmdline())
            except psutil.Error:
                continue
            if all(word in command for word in words):
                return True
        return False

    def is_owned(self) -> bool:
        """Whether a training has taken the run directory, which it does just before it connects to Ray."""
        lock = self.place / "run" / "run.lock"
        owner = re.search(r'"pid": (\d+)', lock.read_text() if lock.exists() else "")
        return owner is not None and int(owner[1]) in {process.pid for process in self.job.processes()}

    def is_saving(self) -> bool:
        """Whether a checkpoint is being written."""
        return any((self.place / "run" / "checkpoints").glob("step_*.tmp"))

    def has_head(self) -> bool:
        """Whether the first node of this attempt waits for the others: the attempt before may have come as far while it
        was ended, and its file is there still when the next one is pending, where a signal finds nobody."""
        folder = self.job.folder_of_attempt()
        return folder.name == f"attempt_{requeues(self.job) + 1:03d}" and (folder / "head.json").exists()

    def steps_since(self, before: int) -> bool:
        return self.job.steps() > before


Seen = Callable[[Scene], bool]
MOMENTS: list[tuple[str, tuple[str, ...], Seen, str]] = [
    ("`setup`", ("setup",), lambda s: (s.place / "in_setup").exists(), "USR1"),
    ("the first node's program has not begun", ("node1",), lambda s: s.runs("python", "slurm.node"), "USR1"),
    ("the first node waits for the others", ("node2",), lambda s: s.has_head(), "USR1"),
    ("Ray starts on the first node", (), lambda s: s.runs("ray.scripts", "--head"), "USR1"),
    ("Ray starts there, ended by TERM", (), lambda s: s.runs("ray.scripts", "--head"), "TERM"),
    ("Ray joins on the others", (), lambda s: s.runs("ray.scripts", "--address="), "USR1"),
    ("the training imports its modules", (), lambda s: s.runs("megatron_daro train"), "USR1"),
    ("the training is in `ray.init`", (), lambda s: s.is_owned(), "USR1"),
    ("ranks and engines start", (), lambda s: s.runs("TrainWorker"), "USR1"),
    ("a step is trained", (), lambda s: s.steps_since(2), "USR1"),
    ("a checkpoint is written", (), lambda s: s.steps_since(3) and s.is_saving(), "USR1"),
    ("a step is trained, ended by TERM", (), lambda s: s.steps_since(8), "TERM"),
]  # fmt: skip
FEW = (0, 1, 2, 3, 5, 7, 8, 10)
"""One of each phase; a step that is interrupted is in test_slurm_jobs.py."""


def requeues(job: SlurmJob) -> int:
    return job.log.count("; requeued\n")


def test_a_job_survives_a_signal_in_each_of_its_phases(slurm, tiny, tmp_path):
    cli_runs.trained(["train", tiny.config, *OPTIONS, f"trainer.run_dir={tmp_path}/unbroken"], tmp_path / "log")
    scene, moments = Scene(slurm, tiny, tmp_path), MOMENTS if LONG else [MOMENTS[number] for number in FEW]
    job = scene.job
    for number, (name, held, is_so, sent) in enumerate(moments):
        job.wait(f"moment {number}: {name}", lambda is_so=is_so: is_so(scene))
        slurm.run("scancel", f"--signal={sent}", "--full" if sent == "TERM" else "--batch", job.number)
        scene.hold(*(name for name in held if name == "setup"))  # a setup is not waited for, a program is
        job.wait(f"requeued: {name}", lambda number=number: requeues(job) == number + 1, 120)
        scene.hold(*(moments[number + 1][1] if number + 1 < len(moments) else ()))
        job.start_again()
    if LONG:
        at_the_time_limit(scene, len(moments))
    assert job.ended().startswith(f"job {job.number}: run: ") and job.state == "COMPLETED"
    runs = [[comparable(row) for row in read_metrics(tmp_path / name)] for name in ("run", "unbroken")]
    assert runs[0] == runs[1] and len(runs[0]) == STEPS


def at_the_time_limit(scene: Scene, requeued: int) -> None:
    """A step without an end: the request to save finds nobody."""
    job, before = scene.job, scene.job.steps()
    job.wait("a step after all of them", lambda: scene.steps_since(before) and before < STEPS)
    (driver,) = [p for p in job.processes() if p.cmdline()[1:4] == ["-m", "megatron_daro", "train"]]
    driver.send_signal(signal.SIGSTOP)
    scene.job.slurm.run("scontrol", "update", f"jobid={job.number}", "TimeLimit=1")
    job.wait("requeued at the time limit", lambda: requeues(job) == requeued + 1, 180)
    scene.job.slurm.run("scontrol", "update", f"jobid={job.number}", "TimeLimit=50")
    job.start_again()


def test_a_hostile_run_directory_is_one_directory(slurm, tiny, tmp_path):
    """Up to the check of the node, which fails for want of disk; the log is there, and nothing was executed."""
    run_dir = tmp_path / "a b%j\\n #'\" --wrap=x $(touch HACKED)`touch HACKED`"
    job = SlurmJob(slurm, tiny.config, run_dir, {"free_disk_gib": 1e7, "sbatch": ["--comment=a \"b' #c --wrap=x"]})
    assert "GiB free; free_disk_gib asks for" in job.ended()
    assert "GiB free" in (run_dir / "slurm/attempt_001/node_0_node1.log").read_text()
    assert "Comment=a \"b' #c --wrap=x" in slurm.run("scontrol", "show", "job", job.number)
    assert not list(tmp_path.rglob("HACKED"))


def test_a_run_directory_belongs_to_one_job(slurm, tiny, tmp_path):
    job = SlurmJob(slurm, tiny.config, tmp_path / "run", {}, "trainer.steps=100000")
    with pytest.raises(AssertionError, match=rf"which job {job.number} has"):
        slurm.run(*job.command)
    job.wait("Ray", lambda: (job.folder_of_attempt() / "attach").exists())
    said = slurm.run(
        "bash", tmp_path / "run/slurm/attach.sh", "bash", "-c", "echo in $SLURMD_NODENAME; echo $RAY_ADDRESS"
    )
    assert "in node1" in said and "127.0.0.11:" in said
    second = [p for p in job.processes() if p.environ().get("SLURMD_NODENAME") == "node2"]
    assert second
    slurm.run("scancel", job.number)
    job.wait("all processes gone", lambda: not job.processes(), limit_s=40)
    assert not list(Path("/tmp").glob(f"daro{job.number}_*")), "Ray's session was left behind"


@pytest.mark.parametrize(
    ("cluster", "said"),
    [
        ({"time": "2:00:00"}, "time: got 0-02:00:00, beyond what partition 'main' allows; allowed: at most 1:00:00"),
        ({"nodes": 100000}, "nodes: got 100000, and partition 'main' has 2"),
        ({"sbatch": ["--constraint=h100"]}, "refused"),
        ({"memory_gib": 100000}, "--no-test-only"),
    ],
)
def test_what_would_wait_for_ever_is_refused(slurm, tiny, tmp_path, cluster, said):
    with pytest.raises(AssertionError, match="configuration error") as refused:
        SlurmJob(slurm, tiny.config, tmp_path / "run", cluster)
    assert said in str(refused.value) and not slurm.run("squeue", "-h")
