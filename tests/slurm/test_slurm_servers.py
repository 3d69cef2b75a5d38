"""A job whose rollouts come from SGLang servers on the second node: preempted, requeued, finished."""

from __future__ import annotations

import pytest
from books import check_books
from sglang_pool import cpu_servers
from slurm_jobs import SlurmJob

from megatron_daro.observe.metrics import read_metrics
from megatron_daro.rollout.recorder import read_step

pytestmark = [pytest.mark.heavy, pytest.mark.slow, pytest.mark.timeout(1800)]
STEPS, LIMIT_S = 30, 600


def test_a_preempted_job_with_servers_on_the_other_node_loses_no_step(slurm, tiny, tmp_path):
    changes = {
        "engine": {"kind": "sglang", "replicas": 2, "sglang": cpu_servers(sync="distributed")},
        # What servers sample is not the same twice: with few rounds the filter can leave a batch smaller than asked.
        "rollout": {"max_refill_rounds": 20},
        "trainer": {"steps": STEPS, "save_every_steps": 5},
    }
    recipe = tiny.write_config(tmp_path / "sglang.yaml", changes)
    job = SlurmJob(slurm, recipe, tmp_path / "run", {})
    job.wait("some steps", lambda: job.steps() >= 3, LIMIT_S)
    trains, serves = job.nodes_of("TrainWorker"), job.nodes_of("ServerWorker")
    assert len(trains) == len(serves) == 1 and trains | serves == {"node1", "node2"}
    slurm.run("sbatch", "-p", "high", "-N2", "--exclusive", "-o", "/dev/null", "--wrap", "sleep 1")
    job.start_again()
    assert "whose state is saved" in job.log
    assert job.ended(LIMIT_S).startswith(f"job {job.number}: run: ")
    assert job.state == "COMPLETED"
    rows = read_metrics(job.run_dir)
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1)), "a step is missing, or was made twice"
    assert {row["timing/attempt"] for row in rows} == {1, 2}
    for row in rows:
        assert row["engine/servers"] == 2 and row["rollout/staleness_mean"] == 0
        assert row["mismatch/logprob_abs_mean"] < 1e-4, "the servers had other weights than the policy"
    check_books(job.run_dir)
    trained = [sum(used == "trained" for _, used in read_step(job.run_dir, step)) for step in range(1, STEPS + 1)]
    assert trained == [4] * STEPS
