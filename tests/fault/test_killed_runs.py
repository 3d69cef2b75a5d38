"""kill -9 of the driver at every phase of a step, then --resume; and kill -9 of workers.

The kills form a chain on one run directory: killed, resumed, killed at the next place, and so on to the end. The result
must be bit for bit the unbroken run; each link says which place it was killed at, and nothing may outlive it.
"""

import signal

import psutil
import pytest
from cli_runs import (
    assert_same_run,
    checkpoint,
    different_files,
    last_step,
    metric_lines,
    signalled,
    started,
    trained,
)

# (place, after the metrics of this step). With a checkpoint every second step: the second to fourth go back to step 2.
PLACES = [
    pytest.param("rollout", 0, marks=pytest.mark.heavy),
    pytest.param("reward", 2, marks=pytest.mark.heavy),
    pytest.param("build", 2, marks=pytest.mark.heavy),
    pytest.param("train", 3, marks=pytest.mark.heavy),
    pytest.param("train:left", 4, marks=pytest.mark.heavy),
    pytest.param("sync", 5, marks=pytest.mark.heavy),
    pytest.param("write", 5, marks=pytest.mark.heavy),
    pytest.param("write:left", 7, marks=pytest.mark.heavy),
    ("seal", 8),
]


@pytest.fixture(scope="module")
def options(tmp_path_factory):
    directory = tmp_path_factory.mktemp("killed")
    return directory / "run", [f"trainer.run_dir={directory / 'run'}", "trainer.eval_every_steps=4"]


@pytest.mark.parametrize(("place", "after_step"), PLACES)
def test_killed_driver_leaves_no_process_and_what_it_wrote_is_whole(
    tiny, reference, options, tmp_path, place, after_step
):
    run_dir, overrides = options
    arguments = ["train", tiny.config, *overrides, *(["--resume"] if run_dir.exists() else [])]
    with signalled(
        arguments, tmp_path / "log", name="SIGKILL", place=place, after_step=after_step, run_dir=run_dir
    ) as run:
        run.wait_until(lambda: len(run.processes()) > 5, "workers")
        finished = run.finish()
        assert run.left_behind() == []
    assert finished.code == -signal.SIGKILL, finished.stderr
    fired_at, step = run.fired.read_text().split()
    assert fired_at == place and int(step) >= after_step
    if place == "seal":
        torn = checkpoint(run_dir, 8).with_name("step_000008.tmp")
        assert any(path.name.startswith("shard_") for path in torn.iterdir()) and not (torn / "manifest.json").exists()
    written = range(last_step(run_dir) + 1)
    assert metric_lines(run_dir) == metric_lines(reference, written)


def test_resume_after_all_kills_is_bit_for_bit_the_unbroken_run(tiny, reference, options, tmp_path):
    run_dir, overrides = options
    finished = trained(["train", tiny.config, *overrides, "--resume"], tmp_path / "log")
    assert "step_000006" in finished.stdout
    assert_same_run(run_dir, reference, range(1, 9))
    for step in (2, 4, 6):
        assert different_files(checkpoint(run_dir, step), checkpoint(reference, step)) == set()
    assert not list((run_dir / "checkpoints").glob("*.tmp"))


@pytest.mark.parametrize(
    ("title", "who", "how"),
    [
        ("ray::TrainWorker", "actor rank", signal.SIGSEGV),
        pytest.param("ray::EngineWorker", "engine 0", signal.SIGKILL, marks=pytest.mark.heavy),
    ],
)
def test_killed_worker_ends_the_job_with_the_cause_on_the_last_line(tiny, tmp_path, title, who, how):
    run_dir = tmp_path / "run"
    overrides = [f"trainer.run_dir={run_dir}", "trainer.steps=100000", "algorithm.name=grpo"]
    overrides.append("engine.embedded.max_restarts=0")
    with started(["train", tiny.config, *overrides], tmp_path / "log") as run:
        run.wait_until(lambda: last_step(run_dir) >= 2, "second step")
        victim = run.named(title)[-1]
        assert psutil.pid_exists(victim.pid)
        victim.send_signal(how)
        finished = run.finish(limit_s=30)
        assert run.left_behind() == []
    assert finished.code == 1
    assert (
        finished.last_line.startswith("WorkerDiedError: ")
        and who in finished.last_line
        and "died: process " in finished.last_line
        and "--resume" in finished.last_line
        and len(finished.last_line) < 400
    )
    assert last_step(run_dir) < 100000
    logs = {path.name: path.read_text() for path in (run_dir / "logs").iterdir()}
    assert set(logs) == {"driver.log", "actor_rank_0.log", "actor_rank_1.log", "engine_0.log"}
    assert f"what each process wrote is in {run_dir / 'logs'}" in finished.stdout
    assert " INFO driver (" in logs["driver.log"] and " ERROR driver (" in logs["driver.log"]
    assert logs["driver.log"].splitlines()[-1].endswith(finished.last_line.removeprefix("WorkerDiedError: "))
    crashed = [name for name, text in logs.items() if "Segmentation fault" in text and "most recent call first" in text]
    assert len(crashed) == (how == signal.SIGSEGV) and all(name.startswith("actor_rank_") for name in crashed)


@pytest.mark.heavy
def test_killed_raylet_is_the_cause_on_the_last_line(tiny, tmp_path):
    run_dir = tmp_path / "run"
    overrides = [f"trainer.run_dir={run_dir}", "trainer.steps=100000", "algorithm.name=grpo"]
    with started(["train", tiny.config, *overrides], tmp_path / "log") as run:
        run.wait_until(lambda: last_step(run_dir) >= 1, "first step")
        (raylet,) = [process for process in run.processes() if process.name() == "raylet"]
        raylet.kill()
        run.finish(limit_s=60)
        assert run.left_behind() == []
        finished = run.finish()
    assert finished.code != 0
    # Whether Ray's C++ part ends the driver, or the driver hears of its workers first, is a race.
    assert f"the raylet of this run (Ray's process {raylet.pid}) died" in finished.last_line or (
        finished.last_line.startswith("WorkerDiedError: ") and "died: " in finished.last_line
    )
    assert "--resume" in finished.last_line and len(finished.last_line) < 700
