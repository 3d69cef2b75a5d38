"""A run whose server is spread over two places: a process in each, with half of the model. Both are on this machine."""

from __future__ import annotations

import pytest
from books import assert_books_add_up
from cli_runs import last_step, servers, started
from sglang_pool import SERVER_ENVIRONMENT, cpu_servers

from megatron_daro.observe.metrics import read_metrics
from megatron_daro.rollout.recorder import read_step

pytestmark = [pytest.mark.slow, pytest.mark.heavy, pytest.mark.timeout(1200)]

START_LIMIT_S = 400
CORES = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}
"""One for each rank: else SGLang wants a NUMA node for each."""


def test_a_server_in_two_parts_has_the_policys_weights_and_dies_as_one(tiny, tmp_path, pool):
    pool.down()
    sglang = cpu_servers(env={**SERVER_ENVIRONMENT, **CORES}, sync="distributed", tensor_parallel=2, nodes=2)
    sglang["max_restarts"] = 0  # else the run would wait until it is back
    changes = {
        "engine": {"kind": "sglang", "replicas": 1, "sglang": sglang},
        "rollout": {"max_refill_rounds": 20},
        "trainer": {"steps": 100_000, "save_every_steps": 0},
    }
    path, run_dir = tiny.write_config(tmp_path / "parts.yaml", changes), tmp_path / "run"
    with started(["train", path, f"trainer.run_dir={run_dir}"], tmp_path / "log") as run:
        run.wait_until(lambda: last_step(run_dir) >= 3, "third step", START_LIMIT_S)
        parts = {words[words.index("--node-rank") + 1]: p for p in servers(run) for words in [p.cmdline()]}
        assert sorted(parts) == ["0", "1"] and len(run.named("ray::ServerWorker")) == 2
        parts["1"].kill()  # which answers nobody; the other part would wait for it for ever
        finished = run.finish()
        assert run.left_behind() == []
    assert finished.code == 1
    assert "EngineError: all 1 SGLang servers are gone" in finished.last_line
    for line in read_metrics(run_dir)[1:]:
        assert_books_add_up(line)
        assert line["mismatch/logprob_abs_mean"] < 1e-4, "both parts have the policy's weights"
        assert line["engine/servers"] == 1
    for step in range(1, 4):
        assert {r.weight_version for group, _ in read_step(run_dir, step) for r in group.rollouts} == {step - 1}
    assert "signal 9" in (finished.last_line + finished.stdout)
