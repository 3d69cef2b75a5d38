"""What the end of a training, a request to save and a lost node mean for the job."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from megatron_daro.workshop.slurm import training
from megatron_daro.workshop.slurm.training import EndedError, Ending, Process, StoppedError, Stops, train

START = Process.start


class Options:
    """What node.py's command line gives to `train`."""

    def __init__(self, run_dir: Path, stall_minutes: float = 10) -> None:
        self.run_dir, self.stall_minutes, self.term_grace_s, self.train = run_dir, stall_minutes, 5.0, ["run.yaml"]


def trained_with(
    code: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    save: bool = False,
    lost: str = "",
    lost_before: str = "",
    end: bool = False,
    found: Ending | None = None,
    **options: float,
):
    """How a job ends whose training is this Python code. save: it is asked to once the code has made a file `ready`."""

    async def ask_to_save(stops: Stops) -> None:
        while not (tmp_path / "ready").exists():
            await asyncio.sleep(0.02)
        stops.saving.set()

    async def scene():
        stops = Stops()

        async def start(command, environment):
            assert command[1:4] == ["-m", "megatron_daro", "train"]
            return await START([sys.executable, "-u", "-c", code], environment)

        monkeypatch.setattr(Process, "start", start)
        asking = asyncio.ensure_future(ask_to_save(stops)) if save else None
        trouble: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        survived: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        if lost_before:
            survived.set_result(lost_before)
        if lost:
            asyncio.get_running_loop().call_later(1.0, trouble.set_result, lost)
        if end:
            asyncio.get_running_loop().call_later(1.5, stops.end)

        async def look() -> Ending | None:
            return found

        try:
            given = Options(tmp_path, **options)
            return await train(given, stops, {}, lost=[trouble], first_loss=survived, look=look)  # type: ignore[arg-type]
        finally:
            if asking:
                asking.cancel()

    return asyncio.run(scene())


def test_a_finished_training_ends_the_job_well(tmp_path, monkeypatch):
    ending = trained_with("print('run: runs/a, 6 steps')", tmp_path, monkeypatch)
    assert (ending.kind, ending.cause) == ("finished", "run: runs/a, 6 steps")


def test_what_fails_after_the_loss_of_a_node_is_taken_for_its_consequence(tmp_path, monkeypatch):
    code = "raise SystemExit('WorkerDiedError: engine 0 died')"
    ending = trained_with(code, tmp_path, monkeypatch, lost_before="n2 was lost")
    assert ending == Ending("node_lost", "n2 was lost (training: WorkerDiedError: engine 0 died)")
    ending = trained_with("print('run: runs/a, 6 steps')", tmp_path, monkeypatch, lost_before="n2 was lost")
    assert ending.kind == "finished"


def test_an_error_is_the_cause(tmp_path, monkeypatch):
    ending = trained_with("print('step 1'); raise SystemExit('ModelError: torn')", tmp_path, monkeypatch)
    assert (ending.kind, ending.cause) == ("failed", "ModelError: torn")


def test_asked_to_save_the_training_gets_sigterm_and_the_job_goes_on_later(tmp_path, monkeypatch):
    code = (
        "import signal, sys, time\nsignal.signal(15, lambda *_: (print('saved step 3'), sys.exit(130)))\n"
        f"open({str(tmp_path / 'ready')!r}, 'w').close()\ntime.sleep(60)"
    )
    ending = trained_with(code, tmp_path, monkeypatch, save=True)
    assert (ending.kind, ending.cause) == ("saved", "saved step 3")


@pytest.mark.parametrize("code", ["raise SystemExit('WorkerError: torn')", "import os; os.kill(os.getpid(), 15)"])
def test_any_end_after_a_request_to_save_goes_on_later(tmp_path, monkeypatch, code):
    """Ended in its imports it has no word, in `ray.init` an error of Ray's."""
    (tmp_path / "ready").touch()
    ending = trained_with(f"import time; time.sleep(3); {code}", tmp_path, monkeypatch, save=True)
    assert ending.kind == "stopped" and ending.cause


@pytest.mark.parametrize("asked", ["save", "end"])
def test_a_request_is_heard_in_every_phase_before_training(asked):
    async def scene():
        stops = Stops()
        phase = asyncio.ensure_future(stops.or_end(asyncio.sleep(60)))
        await asyncio.sleep(0.05)
        stops.saving.set() if asked == "save" else stops.end()
        await phase

    with pytest.raises(StoppedError if asked == "save" else EndedError):
        asyncio.run(scene())


def test_a_fault_of_a_gpu_is_told_from_an_error_of_the_program(tmp_path, monkeypatch):
    code = "print('step 1'); raise SystemExit('WorkerError: actor rank 3: {}')"
    found = Ending("bad_nodes", "n1: GPU 3 has 7 memory errors", "n1")
    words = "CUDA error: uncorrectable ECC error encountered"
    monkeypatch.setattr(training, "_NODE_LOSS_S", 0.1)
    sick = trained_with(code.format(words), tmp_path, monkeypatch, found=found)
    assert (sick.kind, sick.nodes) == ("bad_nodes", "n1") and words in sick.cause
    assert trained_with(code.format(words), tmp_path, monkeypatch).kind == "gpu_fault"
    assert trained_with(code.format("CUDA out of memory"), tmp_path, monkeypatch).kind == "failed"


def test_no_new_step_for_too_long_ends_the_job_with_the_last_words(tmp_path, monkeypatch):
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "driver.log").write_text("waiting for sync\n")
    ending = trained_with("import time; time.sleep(60)", tmp_path, monkeypatch, stall_minutes=0.03)
    assert ending.kind == "failed"
    assert "no new step in" in ending.cause and "driver.log: waiting for sync" in ending.cause


def test_a_lost_node_is_the_cause(tmp_path, monkeypatch):
    monkeypatch.setattr(training, "_CANCELLED_S", 0.2)
    ending = trained_with("import time; time.sleep(60)", tmp_path, monkeypatch, lost="n1 was lost")
    assert (ending.kind, ending.cause) == ("node_lost", "n1 was lost")


def test_a_lost_node_is_named_also_where_slurm_then_ends_the_others(tmp_path, monkeypatch):
    code = "import signal, time; signal.signal(15, lambda *_: None); time.sleep(3)"
    ending = trained_with(code, tmp_path, monkeypatch, lost="n1 was lost", end=True)
    assert (ending.kind, ending.cause) == ("ended", "n1 was lost; ended by SIGTERM; nothing was saved")
