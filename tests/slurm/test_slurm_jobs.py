"""Jobs on a real Slurm of two nodes: trained over both, preempted, cancelled, hit by a lost node, refused."""

from __future__ import annotations

import os
import shutil
import signal
from contextlib import suppress

import cli_runs
import psutil
import pytest
from slurm_jobs import SlurmJob

from megatron_daro.observe.metrics import comparable, read_metrics

pytestmark = [pytest.mark.heavy, pytest.mark.slow, pytest.mark.timeout(900)]
STEPS = 40
# The quickstart's layout and engines, on a smaller model and smaller batches.
OPTIONS = [f"trainer.steps={STEPS}", "engine.replicas=2", "actor.sequence_parallel=true"]
LASTING = set[str]()
"""Jobs that outlive a test."""


@pytest.fixture(scope="module")
def unbroken_run(tiny, tmp_path_factory):
    """The same run, without Slurm and without a break."""
    run_dir = tmp_path_factory.mktemp("unbroken") / "run"
    cli_runs.trained(["train", tiny.config, *OPTIONS, f"trainer.run_dir={run_dir}"], run_dir.parent / "log")
    return run_dir


@pytest.fixture(scope="module")
def unbroken(unbroken_run):
    """Its metrics."""
    return [comparable(row) for row in read_metrics(unbroken_run)]


@pytest.fixture(scope="module")
def stalled(slurm, tiny, tmp_path_factory):
    """A job of which one rank stands still; other tests run until it ends itself."""
    job = submitted(slurm, tiny, tmp_path_factory.mktemp("stalled"), "trainer.steps=100000", stall_minutes=1.5)
    LASTING.add(job.number)
    job.wait("some steps", lambda: job.steps() >= 2)
    ranks = [p for p in job.processes() if any("TrainWorker" in part for part in p.cmdline())]
    assert ranks
    os.kill(ranks[0].pid, signal.SIGSTOP)
    yield job
    slurm.run("scancel", job.number, check=False)


@pytest.fixture(scope="module")
def frozen(slurm, tiny, tmp_path_factory):
    """A job whose second node stands still, as one that hangs or has no power; other tests run until it is missed."""
    job = submitted(slurm, tiny, tmp_path_factory.mktemp("frozen"))
    LASTING.add(job.number)
    job.wait("some steps", lambda: job.steps() >= 3)
    second = [p for p in job.processes() if p.environ().get("SLURMD_NODENAME") == "node2"]
    assert second, "nothing of the job runs on the second node"
    for process in second:
        with suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGSTOP)
    yield job
    slurm.run("scancel", job.number, check=False)


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
    for number in set(slurm.run("squeue", "-h", "-o", "%A").split()) - LASTING:
        slurm.run("scancel", number, check=False)


def submitted(slurm, tiny, tmp_path, *options, **cluster):
    return SlurmJob(slurm, tiny.config, tmp_path / "run", cluster, *OPTIONS, *options)


def test_a_preempted_job_is_requeued_and_ends_as_if_nothing_had_been(slurm, tiny, tmp_path, unbroken):
    job = submitted(slurm, tiny, tmp_path)
    job.wait("some steps", lambda: job.steps() >= 3)
    trains, serves = job.nodes_of("TrainWorker"), job.nodes_of("EngineWorker")
    assert len(trains) == len(serves) == 1 and trains | serves == {"node1", "node2"}
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
        with suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGKILL)
    job.start_again()
    assert "node2" in requeued(job)
    assert job.ended().startswith(f"job {job.number}: run: ")
    assert trained(job) == unbroken


def test_what_the_shell_that_submits_wants_of_srun_is_not_for_the_job(slurm, tiny, tmp_path, monkeypatch):
    left_behind = {
        "SLURM_CPU_BIND": "quiet,mask_cpu:0x1",  # as `srun -c1 --pty bash` does
        "SLURM_CPU_BIND_TYPE": "mask_cpu:",
        "SLURM_CPU_BIND_LIST": "0x1",
        "SLURM_MEM_PER_CPU": "100",
    }
    for name, value in left_behind.items():
        monkeypatch.setitem(slurm.environment, name, value)
    job = submitted(slurm, tiny, tmp_path, memory_gib=2)
    job.wait("some steps", lambda: job.steps() >= 1)
    ranks = [p for p in job.processes() if "ray::TrainWorker" in " ".join(p.cmdline())]
    assert ranks and all(set(p.cpu_affinity()) == os.sched_getaffinity(0) for p in ranks)
    slurm.run("scancel", job.number)


def test_a_wish_that_srun_refuses_is_the_cause(slurm, tiny, tmp_path):
    job = submitted(slurm, tiny, tmp_path, setup=["export SLURM_MEM_PER_CPU=100"], memory_gib=2)
    assert "SLURM_MEM_PER_CPU" in job.ended()


def test_cancelled_leaves_no_process(slurm, tiny, tmp_path):
    job = submitted(slurm, tiny, tmp_path, "trainer.steps=100000")
    job.wait("some steps", lambda: job.steps() >= 2)
    assert len(job.processes()) > 5
    slurm.run("scancel", job.number)
    job.wait("all processes gone", lambda: not job.processes(), limit_s=30)
    assert "requeued" not in job.log


def test_the_next_job_of_a_chain_goes_on_where_one_was_ended(slurm, tiny, tmp_path, unbroken):
    job = submitted(slurm, tiny, tmp_path, "--chain", "3")
    first, second, third = job.numbers
    job.wait("some steps", lambda: job.steps() >= 3)
    slurm.run("scancel", first)
    job.number = second
    assert job.ended().startswith(f"job {second}: run: ")
    assert trained(job) == unbroken and attempts(job) == {1, 2}
    job.number = third
    assert job.ended() == f"job {third}: the run is finished already"


def test_one_node_stands_still(frozen):
    """What follows of it is below."""
    assert frozen.state == "RUNNING"


def test_one_rank_stands_still(stalled):
    """What follows of it is below: the tests between need no more than a minute, in which it waits."""
    assert stalled.state == "RUNNING"


def lying_tool(directory, gpus=8):
    """A line for `setup`: the first node that is asked shows a GPU too few, and always will."""
    programs = directory / "bin"
    programs.mkdir()
    tool = programs / "nvidia-smi"
    tool.write_text(
        f'#!/bin/bash\nliar={directory}/liar\n(set -C; echo "$SLURMD_NODENAME" >"$liar") 2>/dev/null\n'
        f'last={gpus - 1}; [ "$SLURMD_NODENAME" = "$(cat "$liar")" ] && last=$((last - 1))\n'
        'for i in $(seq 0 $last); do echo "$i, 81559, 12"; done\n'
    )
    tool.chmod(0o755)
    return f"export PATH={programs}:$PATH"


def test_a_node_that_lies_about_its_gpus_is_named(slurm, tiny, tmp_path):
    job = submitted(slurm, tiny, tmp_path, gpus_per_node=8, setup=[lying_tool(tmp_path)])
    last, liar = job.ended(), (tmp_path / "liar").read_text().strip()
    assert last == f"job {job.number}: {liar}: 8 GPUs were asked for, and nvidia-smi shows 7"
    assert job.state == "FAILED"


def test_a_bad_node_is_left_out_where_the_cluster_file_says_so(slurm, tiny, tmp_path):
    """With one node: the next attempt is on the other one, and passes the check there."""
    site = {"nodes": 1, "gpus_per_node": 8, "exclude_bad_nodes": True, "setup": [lying_tool(tmp_path)]}
    job = submitted(slurm, tiny, tmp_path, **site)
    job.start_again()
    liar = (tmp_path / "liar").read_text().strip()
    assert requeued(job).endswith(f"left out from now on: {liar}; requeued")
    job.wait("a node that is fit", lambda: (job.run_dir / "slurm" / "attempt_002" / "ray_token").exists())
    other = {"node1": "node2", "node2": "node1"}[liar]
    assert f"attempt 2 on {other}," in job.log


def wrapper(directory):
    """Stands in for apptainer: says what it was asked for, and runs the command where it is."""
    programs = directory / "bin"
    programs.mkdir()
    tool = programs / "apptainer"
    tool.write_text(
        '#!/bin/bash\n[ "$1 $2 $3 $4" = "exec --nv --bind=/a:/b --pwd" ] || exit 9\n'
        'cd "$5" || exit 9\necho "inside $6"\nshift 6\nexec "$@"\n'
    )
    tool.chmod(0o755)
    return f"export PATH={programs}:$PATH"


@pytest.mark.parametrize(
    ("runtime", "said"),
    [("pyxis", "unrecognized option '--container-image=docker:"), ("apptainer", "apptainer")],
    ids=["pyxis", "apptainer"],
)
def test_a_runtime_that_is_not_there_ends_the_job_with_its_cause(slurm, tiny, tmp_path, runtime, said):
    job = submitted(slurm, tiny, tmp_path, container={"image": "docker://none", "runtime": runtime})
    last = job.ended()
    assert "the nodes did not start (srun: " in last and said in last
    assert job.state == "FAILED"


def test_the_nodes_run_inside_the_container(slurm, tiny, tmp_path):
    """Up to the check of the node, which fails for want of disk."""
    site = {"container": {"image": "docker://some", "runtime": "apptainer", "mounts": ["/a:/b"]}, "free_disk_gib": 1e7}
    job = submitted(slurm, tiny, tmp_path, setup=[wrapper(tmp_path)], **site)
    assert "GiB free; free_disk_gib asks for" in job.ended()
    assert "inside docker://some" in job.everything()


def test_a_full_disk_ends_the_job_with_its_cause(slurm, tiny, tmp_path):
    job = submitted(slurm, tiny, tmp_path, free_disk_gib=10**7)
    assert "GiB free; free_disk_gib asks for" in job.ended()


def test_a_job_without_progress_ends_and_says_what_it_did_last(stalled):
    last = stalled.ended()
    assert "no new step in" in last and "last words" in last and stalled.state == "FAILED"
    stalled.wait("all processes gone", lambda: not stalled.processes(), limit_s=30)


def test_a_frozen_node_costs_an_attempt_and_nothing_else(frozen, unbroken):
    """No connection ends and no process. Ray may miss it first; then it gives no answer when its GPUs are asked for."""
    frozen.start_again(attempt=2)
    missed = ("node2 was lost: no sign of life for 90 s", "node2 gave no answer within 45 s")
    assert any(words in requeued(frozen) for words in missed), requeued(frozen)
    assert frozen.ended().startswith(f"job {frozen.number}: run: ")
    assert trained(frozen) == unbroken and attempts(frozen) == {1, 2}


def test_an_error_of_the_training_is_the_last_line(slurm, tiny, tmp_path, unbroken_run):
    shutil.copytree(unbroken_run, tmp_path / "run")
    job = submitted(slurm, tiny, tmp_path, "rollout.rollouts_per_prompt=5")
    assert "CheckpointError" in job.ended() or "configuration error" in job.log.splitlines()[-1]
    assert job.state == "FAILED"


@pytest.mark.parametrize(
    ("cluster", "said"),
    [
        ({"partition": "mian"}, "partition: got 'mian', which this cluster does not have; allowed: closed, high, main"),
        ({"partition": "closed"}, "partition: got 'closed', which is down"),
        ({"sbatch": ["--constraint=h100"]}, "sbatch --test-only: refused"),
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
