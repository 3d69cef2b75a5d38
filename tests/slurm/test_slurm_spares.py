"""A node of a job is lost or frozen on a real Slurm while another is spare: the run goes on, in the same attempt."""

from __future__ import annotations

import os
import re
import signal
from contextlib import suppress

import cli_runs
import psutil
import pytest
from slurm_jobs import SlurmJob

from megatron_daro.observe.metrics import comparable, read_metrics

pytestmark = [pytest.mark.heavy, pytest.mark.slow, pytest.mark.timeout(900)]
# Two tensor-parallel groups, each a node's cores; the engine is on a third node, and the fourth has nothing to do.
OPTIONS = ["trainer.steps=60", "actor.data_parallel=2", "trainer.save_every_steps=20"]
SITE = {"nodes": 3, "spare_nodes": 1, "cpus_per_node": 2}


LONG = pytest.mark.skipif("MEGATRON_DARO_LONG" not in os.environ, reason="minutes: MEGATRON_DARO_LONG=1 runs it")


@pytest.mark.parametrize("how", ["lost", pytest.param("frozen", marks=LONG)])
def test_the_ranks_of_a_node_are_replaced_on_a_spare_one(slurm_with_spares, tiny, tmp_path, how):
    slurm, healing = slurm_with_spares, ["trainer.replace_lost_ranks=true", "trainer.hung_rank_s=20"]
    job = SlurmJob(slurm, tiny.config, tmp_path / "run", SITE, *OPTIONS, *healing)
    job.wait("some steps", lambda: job.steps() >= 3)
    # The first node has the training itself, and the embedded engine cannot be replaced.
    victim = max(job.nodes_of("TrainWorker") - job.nodes_of("EngineWorker") - {"node1"})
    assert len(job.nodes_of("TrainWorker")) == 2
    if how == "lost":
        slurm.lose(victim)
    for process in job.processes():
        with suppress(psutil.NoSuchProcess):
            if process.environ().get("SLURMD_NODENAME") == victim:
                process.send_signal(signal.SIGKILL if how == "lost" else signal.SIGSTOP)
    assert job.ended(400).startswith(f"job {job.number}: run: ")
    assert job.state == "COMPLETED"
    assert "; requeued" not in job.log and len(list((job.run_dir / "slurm").glob("attempt_*"))) == 1
    (log,) = job.folder_of_attempt().glob("node_0_*.log")
    said = log.read_text()
    assert re.search(rf"{victim}(:| was lost:) .*; the run goes on; nodes that may be lost yet: 0\n", said), said[
        -4000:
    ]
    assert "died and was replaced in" in " ".join(said.split())
    alone = tmp_path / "alone" / "run"
    cli_runs.trained(["train", tiny.config, *OPTIONS, f"trainer.run_dir={alone}"], alone.parent / "log")
    unbroken, healed = ([comparable(row) for row in read_metrics(path)] for path in (alone, job.run_dir))
    assert healed == unbroken
    job.wait("all processes gone", lambda: not job.processes(), limit_s=60)


@LONG
def test_the_loss_of_the_first_node_requeues_the_job(slurm_with_spares, tiny, tmp_path):
    """With it go the batch script, srun and the training: Slurm itself puts the job back, in spite of --no-kill."""
    slurm = slurm_with_spares
    job = SlurmJob(slurm, tiny.config, tmp_path / "run", SITE, *OPTIONS, "trainer.replace_lost_ranks=true")
    job.wait("some steps", lambda: job.steps() >= 3)
    slurm.lose("node1")
    for process in job.processes():
        with suppress(psutil.NoSuchProcess):
            if process.environ().get("SLURMD_NODENAME") == "node1":
                process.kill()
    job.wait("put back", lambda: job.state == "PENDING", limit_s=300)
    job.wait("all processes gone", lambda: not job.processes(), limit_s=120)
