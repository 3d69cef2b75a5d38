"""kill -9 of the embedded engine's processes: each is started again, and the run is that of an unbroken one."""

from __future__ import annotations

import re
import signal

import pytest
from cli_runs import assert_same_run, last_step, started

from megatron_daro.observe.metrics import read_metrics


def kill(run, signal_number=signal.SIGKILL, but=()):
    """End the newest engine that is none of these; returns its process id."""
    run.wait_until(lambda: [p for p in run.named("ray::EngineWorker") if p.pid not in but], "an engine")
    victim = [process for process in run.named("ray::EngineWorker") if process.pid not in but][-1]
    victim.send_signal(signal_number)
    return victim.pid


def test_a_killed_engine_is_started_again_and_nothing_else_shows(tiny, reference, tmp_path):
    run_dir = tmp_path / "run"
    options = [f"trainer.run_dir={run_dir}", "trainer.eval_every_steps=4"]
    with started(["train", tiny.config, *options], tmp_path / "log") as run:
        killed = []
        for step in (1, 3, 5):
            run.wait_until(lambda step=step: last_step(run_dir) >= step, f"step {step}")
            killed.append(kill(run, but=killed))
        finished = run.finish()
        assert run.left_behind() == []
    assert finished.code == 0, finished.stderr[-4000:]
    assert_same_run(run_dir, reference, range(1, 9))
    said = re.sub(r"\s+", " ", finished.stdout + finished.stderr)
    assert all(f"engine 0 died: process {pid}: " in said for pid in killed)
    assert said.count("It is started again, and asked again") == 3
    assert read_metrics(run_dir)[-1]["recovery/engine_restarts"] == 3


@pytest.mark.heavy
def test_a_frozen_engine_is_killed_and_started_again(tiny, reference, tmp_path):
    run_dir = tmp_path / "run"
    options = [f"trainer.run_dir={run_dir}", "trainer.eval_every_steps=4", "trainer.hung_rank_s=20"]
    with started(["train", tiny.config, *options], tmp_path / "log") as run:
        run.wait_until(lambda: last_step(run_dir) >= 3, "step 3")
        kill(run, signal.SIGSTOP)
        finished = run.finish()
        assert run.left_behind() == []
    assert finished.code == 0, finished.stderr[-4000:]
    assert_same_run(run_dir, reference, range(1, 9))
    assert "engine 0 has not answered for 20 s: it is frozen, and is killed" in finished.stdout + finished.stderr
    assert read_metrics(run_dir)[-1]["recovery/engine_restarts"] == 1
