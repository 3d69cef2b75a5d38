"""Ctrl-C: once is a clean stop with a checkpoint, twice ends at once, and during start-up it ends promptly.

SIGTERM and SIGHUP are the same."""

import signal
import time

import pytest
from cli_runs import assert_same_run, checkpoint, last_step, metric_lines, signalled, started, trained

INTERRUPTED = 130


def test_ctrl_c_stops_with_a_checkpoint_and_resume_continues_bit_for_bit(tiny, reference, tmp_path):
    run_dir = tmp_path / "run"
    arguments = ["train", tiny.config, f"trainer.run_dir={run_dir}", "trainer.eval_every_steps=4"]
    with signalled(arguments, tmp_path / "log", name="SIGINT", place="train", after_step=2, run_dir=run_dir) as run:
        finished = run.finish()
        assert run.fired.read_text() == "train 2"
        assert run.left_behind() == []
    assert finished.code == INTERRUPTED, finished.stderr
    assert "SIGINT: stopping with a checkpoint" in finished.stdout
    assert "step 3" in finished.last_line and "--resume" in finished.last_line
    assert last_step(run_dir) == 3  # the step that was going on is finished
    assert checkpoint(run_dir, 3).is_dir()
    assert metric_lines(run_dir) == metric_lines(reference, range(4))
    trained([*arguments, "--resume"], tmp_path / "resumed")
    assert_same_run(run_dir, reference, range(1, 9))


def test_second_ctrl_c_ends_at_once_although_a_worker_hangs(tiny, tmp_path):
    run_dir = tmp_path / "run"
    overrides = [
        f"trainer.run_dir={run_dir}",
        "trainer.steps=100000",
        "algorithm.name=grpo",
        "trainer.save_every_steps=0",
    ]
    with started(["train", tiny.config, *overrides], tmp_path / "log") as run:
        run.wait_until(lambda: last_step(run_dir) >= 1, "first step")
        run.named("ray::TrainWorker")[0].suspend()
        run.interrupt()
        run.wait_until(lambda: "stopping with a checkpoint" in run.output(), "notice of the first Ctrl-C")
        with pytest.raises(AssertionError, match="still running"):
            run.finish(limit_s=1.0)  # it waits for the step, which cannot end
        run.interrupt()
        finished = run.finish(limit_s=30)
        assert run.left_behind() == []
    assert finished.code == INTERRUPTED, finished.stderr
    assert "without a checkpoint" in finished.last_line
    assert not list((run_dir / "checkpoints").glob("step_??????"))  # at most one that was never finished


@pytest.mark.parametrize(
    ("place", "number"),
    [
        ("raylet", signal.SIGINT),
        pytest.param("ray::TrainWorker", signal.SIGINT, marks=pytest.mark.heavy),
        pytest.param("raylet", signal.SIGTERM, marks=pytest.mark.heavy),
        pytest.param("ray::TrainWorker", signal.SIGHUP, marks=pytest.mark.heavy),
    ],
)
def test_a_signal_during_start_up_ends_promptly(tiny, tmp_path, place, number):
    run_dir = tmp_path / "run"
    with started(["train", tiny.config, f"trainer.run_dir={run_dir}", "trainer.steps=100000"], tmp_path / "log") as run:
        run.wait_until(lambda: any(place in " ".join(p.cmdline()) for p in run.processes()), place)
        run.interrupt() if number == signal.SIGINT else run.driver.send_signal(number)
        finished = run.finish(limit_s=30)
        assert run.left_behind() == []
    assert finished.code == INTERRUPTED, finished.stderr
    assert "interrupted" in finished.last_line or "stopped" in finished.last_line
    assert "Traceback" not in finished.stderr
    assert last_step(run_dir) < 1


@pytest.mark.heavy
def test_ctrl_c_before_the_first_step_does_not_wait_for_the_evaluation(tiny, tmp_path):
    run_dir = tmp_path / "run"
    arguments = ["train", tiny.config, f"trainer.run_dir={run_dir}", "trainer.eval_every_steps=4"]
    with signalled(arguments, tmp_path / "log", name="SIGINT", place="start", after_step=-1, run_dir=run_dir) as run:
        finished = run.finish()
        assert run.fired.exists() and run.left_behind() == []
    assert finished.code == INTERRUPTED, finished.stderr
    assert "stopped before step 1" in finished.last_line
    assert last_step(run_dir) == -1  # the first evaluation would have written step 0


@pytest.mark.heavy
@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP"])
def test_sigterm_and_a_closed_terminal_stop_with_a_checkpoint_too(tiny, tmp_path, name):
    run_dir = tmp_path / "run"
    arguments = ["train", tiny.config, f"trainer.run_dir={run_dir}"]
    with signalled(arguments, tmp_path / "log", name=name, place="train", after_step=1, run_dir=run_dir) as run:
        finished = run.finish()
        assert run.fired.exists() and run.left_behind() == []
    assert finished.code == INTERRUPTED and f"{name}: stopping with a checkpoint" in finished.stdout
    assert checkpoint(run_dir, 2).is_dir()


@pytest.mark.heavy
def test_many_quick_ctrl_c_end_without_a_traceback(tiny, tmp_path):
    run_dir = tmp_path / "run"
    arguments = ["train", tiny.config, f"trainer.run_dir={run_dir}", "trainer.steps=100000"]
    with started(arguments, tmp_path / "log") as run:
        run.wait_until(lambda: last_step(run_dir) >= 1, "first step")
        for _ in range(12):
            run.interrupt()
            time.sleep(0.05)
        finished = run.finish(limit_s=60)
        assert run.left_behind() == []
    assert finished.code == INTERRUPTED, finished.stderr
    assert "Traceback" not in finished.stderr and "interrupted" in finished.last_line
