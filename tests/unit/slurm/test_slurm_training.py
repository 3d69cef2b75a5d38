"""What the end of a training, a request to save and a lost node mean for the job."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_daro.errors import WorkerError
from megatron_daro.workshop.slurm import training
from megatron_daro.workshop.slurm.training import (
    EndedError,
    Ending,
    Process,
    SlowStartError,
    StoppedError,
    Stops,
    train,
)

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

    started: list[Process] = []

    async def scene():
        stops = Stops()

        async def start(command, environment):
            assert command[1:4] == ["-m", "megatron_daro", "train"]
            started.append(await START([sys.executable, "-u", "-c", code], environment))
            return started[0]

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
            await started[0].kill()

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


@pytest.mark.parametrize(
    ("files", "resumed"),
    [
        ({}, False),
        ({"metrics.jsonl": ""}, False),
        ({"metrics.jsonl": "{}\n"}, True),
        ({"checkpoints/step_3/x": ""}, True),
    ],
)
def test_a_run_that_has_begun_is_resumed(tmp_path, monkeypatch, files, resumed):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    seen: list[object] = []

    class EnoughSeenError(Exception):
        pass

    async def start(command, environment):
        seen.extend([command, environment])
        raise EnoughSeenError

    monkeypatch.setattr(Process, "start", start)
    with pytest.raises(EnoughSeenError):
        asyncio.run(train(Options(tmp_path), None, {"A": "b"}, lost=[], first_loss=None, look=None))  # type: ignore[arg-type]
    more = ["--resume"] if resumed else []
    assert seen == [[sys.executable, "-m", "megatron_daro", "train", "run.yaml", *more], {"A": "b"}]


def exited(code: int, words: str = "", *, saving: bool = False, found: Ending | None = None, lost: str = "") -> Ending:
    """What the exit code of a training with these words means."""

    async def scene():
        stops, process = Stops(), SimpleNamespace(lines=words.splitlines(), last_line=words.split("\n")[-1])
        if saving:
            stops.saving.set()
        future: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        if lost:
            future.set_result(lost)

        async def look():
            return found

        return await training._exited(code, process, stops, [future] if lost else [], look)

    return asyncio.run(scene())


BAD = Ending("bad_nodes", "n1: GPU 3", "n1")


@pytest.mark.parametrize(
    ("ending", "expected"),
    [
        (exited(0), Ending("finished", "finished")),
        (exited(0, "a\nb", saving=True), Ending("finished", "b")),
        (exited(130, "b", saving=True), Ending("saved", "b")),
        (exited(1, "b", saving=True), Ending("stopped", "b")),
        (exited(2, "ECC: NVLink", found=BAD), Ending("failed", "ECC: NVLink")),  # of the configuration
        (exited(1, "b", found=BAD), Ending("bad_nodes", "n1: GPU 3 (training: b)", "n1")),
        (exited(130, "b", found=BAD), Ending("bad_nodes", "n1: GPU 3 (training: b)", "n1")),
        (exited(-9, "b", found=BAD), Ending("bad_nodes", "n1: GPU 3 (training: b)", "n1")),
        (exited(-9), Ending("failed", "training ended with code -9 without a word")),
        (exited(1, "b", found=BAD, lost="n2 was lost"), Ending("node_lost", "n2 was lost (training: b)")),
        (exited(2, "b", lost="n2 was lost"), Ending("failed", "b")),
        (exited(1, " bus error \nx NVLink \nb"), Ending("gpu_fault", "x NVLink (training: b)")),
        (exited(1, "uncorrectable ecc"), Ending("gpu_fault", "uncorrectable ecc (training: uncorrectable ecc)")),
    ],
)
def test_the_exit_code_of_the_training_decides_what_the_job_does(ending, expected):
    assert ending == expected


def test_training_that_saves_at_the_end_of_the_job_is_waited_for(tmp_path, monkeypatch):
    code = "import signal, sys, time; signal.signal(15, lambda *_: None); time.sleep(2); print('saved'); sys.exit({})"
    ending = trained_with(code.format(130), tmp_path, monkeypatch, end=True)
    assert (ending.kind, ending.cause) == ("ended", "ended by SIGTERM; saved")
    ending = trained_with(code.format(1), tmp_path, monkeypatch, end=True)
    assert ending.cause == "ended by SIGTERM; nothing was saved"


def test_the_last_words_are_of_the_three_logs_that_were_written_last(tmp_path):
    (tmp_path / "logs").mkdir()
    assert training._last_words(tmp_path) == "last words: none in the logs"
    for second, (name, text) in enumerate(
        {"a.log": "old", "b.log": "x\n \n", "c.log": "  " + "y" * 300 + " \n\n", "d.log": "\n", "e.txt": "no"}.items()
    ):
        (tmp_path / "logs" / name).write_text(text)
        os.utime(tmp_path / "logs" / name, (second, second))
    assert training._last_words(tmp_path) == f"last words: c.log: {'y' * 200} | b.log: x"


def test_new_steps_put_the_end_of_a_stall_off(tmp_path, monkeypatch):
    monkeypatch.setattr(training, "_LOOK_S", 0.01)
    metrics = tmp_path / "metrics.jsonl"

    async def scene():
        stall = asyncio.ensure_future(training._stall(tmp_path, 0.3))
        for step in range(5):
            metrics.write_text("x" * step)
            await asyncio.sleep(0.1)
        still = stall.done()
        return still, await asyncio.wait_for(stall, 10)

    still, words = asyncio.run(scene())
    assert not still and words == f"no new step in {metrics} for 0.005 minutes; last words: none in the logs"


def test_work_before_training_gives_its_result_and_is_ended_by_a_request():
    async def scene():
        stops, ended = Stops(), []

        async def work():
            try:
                await asyncio.sleep(60)
            finally:
                ended.append(1)

        first = await stops.or_end(asyncio.sleep(0, "done"))
        phase = asyncio.ensure_future(stops.or_end(work()))
        await asyncio.sleep(0.01)
        stops.saving.set()
        stops.end()
        stops.end()  # a second signal changes nothing
        with pytest.raises(EndedError, match="ended by SIGTERM before training began"):
            await phase
        return first, ended

    assert asyncio.run(scene()) == ("done", [1])


def test_a_process_passes_its_words_on_and_keeps_the_last(capfd):
    async def scene():
        command = [
            "/bin/bash",
            "-c",
            'for i in {1..300}; do echo "$i $A"; done; read x || printf "end \\xff\\n \\n" >&2',
        ]
        process = await Process.start(command, {"A": "b"})
        code = await process.wait()
        process.signal(9)  # to nobody
        await process.kill()
        return code, process.lines, process.last_line

    code, lines, last = asyncio.run(scene())
    assert code == 0 and (len(lines), lines[0], last) == (201, "102 b", "end \ufffd")
    assert capfd.readouterr().out.splitlines()[0] == "1 b"


@pytest.mark.parametrize(
    ("words", "error"),
    [("Exception: The specified port is 7", training.PortTakenError), ("it timed out during startup", SlowStartError),
     ("no such library", WorkerError)],
)  # fmt: skip
def test_why_ray_did_not_start_is_read_from_its_words(tmp_path, monkeypatch, words, error):
    program = tmp_path / "python"
    program.write_text(f"#!/bin/bash\necho {words}; echo last; exit 3\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    start = training.start_ray(
        head=False, address="10.0.0.2", port=0, gpus=2, cpus=3, temporary=tmp_path, environment={}, joins="a:1"
    )
    with pytest.raises(WorkerError, match=r"^Ray ended with code 3 on 10\.0\.0\.2: last$") as caught:
        asyncio.run(start)
    assert type(caught.value) is error
