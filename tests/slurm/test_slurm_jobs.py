"""Jobs on a real Slurm of two nodes: trained over both, preempted, cancelled, hit by a lost node, refused."""

from __future__ import annotations

import os
import signal
import time

import cli_runs
import psutil
import pytest
from slurm_jobs import SlurmJob

from megatron_daro.observe.metrics import comparable, read_metrics

pytestmark = [pytest.mark.heavy, pytest.mark.slow, pytest.mark.timeout(900)]
STEPS = 40


@pytest.fixture(scope="module")
def unbroken(tiny, tmp_path_factory):
    """Metrics of the same run, without Slurm and without a break."""
    run_dir = tmp_path_factory.mktemp("unbroken") / "run"
    options = [f"trainer.run_dir={run_dir}", f"trainer.steps={STEPS}"]
    cli_runs.trained(["train", tiny.config, *options], run_dir.parent / "log")
    return [comparable(row) for row in read_metrics(run_dir)]


def trained(job: SlurmJob) -> list[dict[str, float]]:
    return [comparable(row) for row in read_metrics(job.run_dir)]


def attempts(job: SlurmJob) -> set[float]:
    return {row["timing/attempt"] for row in read_metrics(job.run_dir)}


def requeued(job: SlurmJob) -> str:
    """The line that says why the job was put back into the queue."""
    return next(line for line in job.log.splitlines() if line.endswith("; requeued"))


@pytest.fixture(autouse=True)
def nothing_left(slurm):
    """A failed test leaves no job to the next one."""
    yield
    for number in slurm.run("squeue", "-h", "-o", "%A").split():
        slurm.run("scancel", number, check=False)


def submitted(slurm, tiny, tmp_path, *options, **cluster):
    return SlurmJob(slurm, tiny.config, tmp_path / "run", cluster, f"trainer.steps={STEPS}", *options)


def test_a_preempted_job_is_requeued_and_ends_as_if_nothing_had_been(slurm, tiny, tmp_path, unbroken):
    job = submitted(slurm, tiny, tmp_path)
    job.wait("some steps", lambda: job.steps() >= 3)
    whole = ["-N2", "--exclusive", "-o", "/dev/null", "--wrap", "sleep 1"]
    urgent = slurm.run("sbatch", "--parsable", "-p", "high", *whole)
    job.start_again()
    assert "whose state is saved" in requeued(job)
    assert job.ended().startswith(f"job {job.number}: run: ")
    assert job.state == "COMPLETED"
    assert trained(job) == unbroken
    assert attempts(job) == {1, 2}
    slurm.run("scancel", urgent.strip(), check=False)


def test_a_lost_node_costs_an_attempt_and_nothing_else(slurm, tiny, tmp_path, unbroken):
    job = submitted(slurm, tiny, tmp_path)
    job.wait("some steps", lambda: job.steps() >= 3)
    second = [p for p in job.processes() if p.environ().get("SLURMD_NODENAME") == "node2"]
    assert second, "nothing of the job runs on the second node"
    for process in second:
        try:
            process.send_signal(signal.SIGKILL)
        except psutil.NoSuchProcess:
            continue
    job.start_again()
    assert "node2" in requeued(job)
    assert job.ended().startswith(f"job {job.number}: run: ")
    assert trained(job) == unbroken


def test_cancelled_leaves_no_process(slurm, tiny, tmp_path):
    job = submitted(slurm, tiny, tmp_path, "trainer.steps=100000")
    job.wait("some steps", lambda: job.steps() >= 2)
    assert len(job.processes()) > 5
    slurm.run("scancel", job.number)
    job.wait("all processes gone", lambda: not job.processes(), limit_s=30)
    assert "requeued" not in job.log


def test_a_job_without_progress_ends_and_says_what_it_did_last(slurm, tiny, tmp_path):
    job = submitted(slurm, tiny, tmp_path, "trainer.steps=100000", stall_minutes=1.5)
    job.wait("some steps", lambda: job.steps() >= 2)
    ranks = [p for p in job.processes() if any("TrainWorker" in part for part in p.cmdline())]
    assert ranks
    os.kill(ranks[0].pid, signal.SIGSTOP)
    last = job.ended()
    assert "no new step in" in last and "last words" in last and job.state == "FAILED"
    job.wait("all processes gone", lambda: not job.processes(), limit_s=30)


def test_a_node_that_lies_about_its_gpus_is_named(slurm, tiny, tmp_path):
    programs = tmp_path / "bin"
    programs.mkdir()
    tool = programs / "nvidia-smi"
    tool.write_text(
        '#!/bin/bash\nlast=7; [ "$SLURMD_NODENAME" = node2 ] && last=6\n'
        'for i in $(seq 0 $last); do echo "$i, 81559, 12"; done\n'
    )
    tool.chmod(0o755)
    job = submitted(slurm, tiny, tmp_path, gpus_per_node=8, setup=[f"export PATH={programs}:$PATH"])
    assert job.ended() == f"job {job.number}: node2: 8 GPUs were asked for, and nvidia-smi shows 7"
    assert job.state == "FAILED"


def test_a_full_disk_ends_the_job_with_its_cause_in_a_minute(slurm, tiny, tmp_path):
    job = submitted(slurm, tiny, tmp_path, free_disk_gib=10**7)
    began = time.monotonic()
    last = job.ended()
    assert "GiB free; free_disk_gib asks for" in last and time.monotonic() - began < 60


def test_an_error_of_the_training_is_the_last_line(slurm, tiny, tmp_path):
    job = submitted(slurm, tiny, tmp_path)
    job.ended()
    again = submitted(slurm, tiny, tmp_path, "rollout.rollouts_per_prompt=5")
    assert "CheckpointError" in again.ended() or "configuration error" in again.log.splitlines()[-1]
    assert again.state == "FAILED"


@pytest.mark.parametrize(
    ("cluster", "said"),
    [
        ({"partition": "mian"}, "partition: got 'mian', which this cluster does not have; allowed: closed, high, main"),
        ({"partition": "closed"}, "partition: got 'closed', which is down"),
        ({"sbatch": ["--constraint=h100"]}, "sbatch --parsable: refused: sbatch: error:"),
        ({"container": {"image": "/images/none.sqsh"}}, "container.image: got '/images/none.sqsh', which is not there"),
        ({"partiton": "main"}, "partiton: got an unknown key with value 'main'"),
    ],
)
def test_what_slurm_would_refuse_is_said_at_once(slurm, tiny, tmp_path, cluster, said):
    with pytest.raises(AssertionError, match="configuration error") as refused:
        submitted(slurm, tiny, tmp_path, **cluster)
    assert said in str(refused.value)


def test_test_only_takes_nothing_into_the_queue(slurm, tiny, tmp_path):
    job = submitted(slurm, tiny, tmp_path, "trainer.steps=100000")
    before = slurm.run("squeue", "-h")
    said = slurm.run(*job.command, "--test-only")
    assert "to start at" in said and slurm.run("squeue", "-h").count("\n") == before.count("\n")
    slurm.run("scancel", job.number)
