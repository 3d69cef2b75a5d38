"""What a metrics file, a log and the watch of the engine's log-probs say at their bounds."""

from __future__ import annotations

import logging
import os
from types import SimpleNamespace

import pytest

from megatron_daro.errors import ConfigError, DaroError, DataError
from megatron_daro.observe import logs, metrics
from megatron_daro.observe.logs import driver_log, failures_logged, file_name, safe_text, script_json
from megatron_daro.observe.metrics import DriftWatch, MetricsLog, Phases, read_metrics


def test_characters_that_act_become_codes_of_their_size():
    assert safe_text("\x1b\r\n\t\x7f\u202e\U000e0001\u200d ~\x80") == (
        "\\x1b\\r\n\t\\x7f\\u202e\\U000e0001\u200d ~\\x80"
    )
    assert safe_text("a\nb\tc", one_line=True) == "a\\nb\\tc" and safe_text(5) == "5"
    assert safe_text("abc", 3) == "abc" and safe_text("abcd", 3) == "abc… (+1 characters)"
    assert safe_text("\x1b\x1b", 5) == "\\x1b\\… (+3 characters)"
    assert script_json("<!--&>é") == '"\\u003c!--\\u0026\\u003e\\u00e9"'


def test_a_process_logs_into_a_file_of_its_name():
    assert file_name("actor rank 0") == "actor_rank_0.log"


def test_only_what_nobody_foresaw_is_logged_where_it_happens(caplog):
    class Worker:
        @failures_logged
        def work(self, error: Exception | None, *, more: int = 0) -> int:
            """Its words."""
            if error:
                raise error
            return 7 + more

    assert Worker().work(None, more=1) == 8 and Worker.work.__doc__ == "Its words."
    for error in (DaroError("said"), ValueError("unforeseen")):
        with pytest.raises(type(error)):
            Worker().work(error)
    (record,) = caplog.records
    assert record.getMessage() == "work failed" and record.exc_info and record.exc_info[0] is ValueError


@pytest.mark.parametrize("terminal", [True, False])
def test_the_drivers_log_is_closed_and_leaves_the_logger_as_it_was(tmp_path, capsys, terminal):
    logger = logging.getLogger("megatron_daro")
    before = logger.level, list(logger.handlers)
    with driver_log(tmp_path / "a" / "logs", terminal=terminal):
        assert logger.level == logging.INFO and len(logger.handlers) == len(before[1]) + 2 - terminal
        logger.info("told")
        logger.warning("warned")
        logger.debug("not told")
    assert (logger.level, logger.handlers) == before
    text = (tmp_path / "a" / "logs" / "driver.log").read_text()
    assert f" INFO driver ({os.getpid()}): told\n" in text and " WARNING driver" in text and "not told" not in text
    assert capsys.readouterr().err == ("" if terminal else "warned\n")
    with driver_log(tmp_path / "empty", terminal=True):
        pass
    assert not list((tmp_path / "empty").iterdir())
    with pytest.raises(KeyboardInterrupt), driver_log(tmp_path / "b", terminal=True):
        raise KeyboardInterrupt
    text = (tmp_path / "b" / "driver.log").read_text()
    assert " ERROR driver " in text and "the run ended with\nTraceback" in text and "KeyboardInterrupt" in text
    assert (logger.level, logger.handlers) == before


def test_without_a_folder_a_worker_keeps_its_streams():
    logs.take_over(None, "actor rank 0")


def test_a_step_that_was_written_only_in_part_is_taken_back(tmp_path):
    with MetricsLog(tmp_path, tensorboard=False) as log:
        log.write(1, {"a": 1})
        whole = log._file

        class Short:
            def fileno(self):
                return whole.fileno()

            def write(self, line):
                return whole.write(line[:5])

        log._file = Short()
        with pytest.raises(DataError, match=r"step 2 could not be written, .*only 5 of \d+ bytes fitted"):
            log.write(2, {"a": 2})
        log._file = whole
        assert log.last_step == 1
        log.write(2, {"a": 3})
    assert [line["a"] for line in read_metrics(tmp_path)] == [1, 3] and log.remark == ""


def test_what_is_wrong_with_a_step_is_said_before_it_is_written(tmp_path):
    with MetricsLog(tmp_path, tensorboard=False) as log:
        log.write(0, {"b/10": 1, "b/9": float("inf"), "a": True, "b/x": 2})
        with pytest.raises(DataError, match="step 0 after step 0; steps must increase"):
            log.write(0, {})
        for value in ("1", b"1", None, [1]):
            with pytest.raises(DataError, match=f"metric 'x' is {type(value).__name__}; allowed: one number"):
                log.write(1, {"x": value})
        assert log.truncate_after(0) == 0 and log.last_step == 0 and log.truncate_after(-1) == 1
        assert log.last_step is None
        log.write(0, {"b/10": 1, "b/9": float("inf"), "a": True, "b/x": 2})
    text = '{"step": 0, "a": 1, "b/9": null, "b/10": 1, "b/x": 2, "observe/nonfinite_values": 1}\n'
    assert log.path.read_text() == text and next(iter(read_metrics(tmp_path)[0])) == "step"
    log.close()


def test_a_torn_first_line_is_removed_and_said(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1')
    log = MetricsLog(tmp_path, tensorboard=False)
    assert log.remark.endswith("the last line, after the beginning, was torn (10 bytes); it was removed")
    log.close()
    for text in ('{"step": "1"}\n{"step": 2}\n', '[1]\n{"step": 2}\n', "{}\n{}\n"):
        (tmp_path / "metrics.jsonl").write_text(text)
        with pytest.raises(DataError, match="line 1 is not a JSON object with an integer 'step'"):
            read_metrics(tmp_path)
    (tmp_path / "metrics.jsonl").write_text('{"step": 2}\n{"step": 2}\n')
    with pytest.raises(DataError, match="line 2 has step 2 after 2"):
        read_metrics(tmp_path)


def test_the_arguments_of_wandb_go_on_with_the_directorys_run(tmp_path):
    run = tmp_path / "my-run"
    run.mkdir()
    assert metrics._wandb_arguments(run, {"project": "p", "entity": None}) == {
        "dir": str(run), "name": "my-run", "project": "p",
    }  # fmt: skip
    (run / "wandb_run_id").write_text("abc\n")
    found = metrics._wandb_arguments(run, {"name": "x"})
    assert (found["name"], found["id"], found["resume"]) == ("x", "abc", "allow")
    assert metrics._wandb_arguments(run, {"id": "own"}) == {"dir": str(run), "name": "my-run", "id": "own"}


def test_a_wandb_that_cannot_start_is_named_with_its_settings(tmp_path, monkeypatch):
    def init(**arguments):
        raise RuntimeError("no login")

    monkeypatch.setitem(__import__("sys").modules, "wandb", SimpleNamespace(init=init))
    with pytest.raises(ConfigError, match=r"wandb\.init\(mode, project\) failed: no login; check the settings"):
        MetricsLog(tmp_path, tensorboard=False, wandb={"project": "p", "mode": "online", "enabled": True})
    MetricsLog(tmp_path, tensorboard=False, wandb={"enabled": False, "project": "p"}).close()


def test_wandb_gets_each_step_as_a_metric_of_its_own(tmp_path, monkeypatch):
    said: list[object] = []
    run = SimpleNamespace(
        id="abc",
        define_metric=lambda *names, **options: said.append((names, options)),
        log=said.append,
        finish=lambda: said.append("finished"),
    )
    monkeypatch.setitem(__import__("sys").modules, "wandb", SimpleNamespace(init=lambda **arguments: run))
    with MetricsLog(tmp_path, tensorboard=False, wandb={"project": "p"}) as log:
        log.write(3, {"a": 1.5, "b": float("nan")})
        log.truncate_after(2)
    assert said == [
        (("*",), {"step_metric": "step"}), {"step": 3, "a": 1.5, "observe/nonfinite_values": 1}, "finished",
    ]  # fmt: skip
    assert (tmp_path / "wandb_run_id").read_text() == "abc"


def test_the_number_of_the_start_goes_into_the_times(monkeypatch):
    times = iter([0.0, 5.0, 6.0])
    phases = Phases(clock=lambda: next(times))
    monkeypatch.setenv("MEGATRON_DARO_ATTEMPT", "3")
    assert phases.collect() == {"timing/other_s": 5.0, "timing/step_s": 5.0, "timing/attempt": 3.0}
    monkeypatch.delenv("MEGATRON_DARO_ATTEMPT")
    assert phases.collect() == {"timing/other_s": 1.0, "timing/step_s": 1.0}


def warned(values: list[float], key: str = "mismatch/kl", **more: float) -> list[int]:
    """Steps, from 1, at which the watch warns."""
    watch = DriftWatch()
    return [step for step, value in enumerate(values, 1) if watch.observe(step, {key: value, **more})]


def test_the_watch_warns_at_its_limits_only():
    assert warned([0.1] * 9) == [] and warned([0.11] * 9) == [3]
    assert warned([0.3] * 9, "mismatch/logprob_abs_mean") == [] and warned([0.31] * 3, "mismatch/logprob_abs_mean") == [
        3
    ]
    assert warned([0.2] * 9, "mismatch/corrected_fraction") == [] and warned(
        [0.21] * 3, "mismatch/corrected_fraction"
    ) == [3]
    # The baseline is the median of eight: three times as much is allowed, and no less than the floor.
    assert warned([0.02] * 8 + [0.06] * 5) == [] and warned([0.02] * 8 + [0.0601] * 5) == [11]
    assert warned([0.02] * 7 + [0.07] * 5) == [11] and warned([0.02] * 6 + [0.07] * 5) == [11]
    assert warned([0.001] * 8 + [0.01] * 5) == [] and warned([0.001] * 8 + [0.0101] * 5) == [11]
    assert warned([0.05] * 8 + [0.101] * 5) == [11]
    # A drift is over after three steps below.
    assert warned([0.2] * 3 + [0.0] * 2 + [0.2] * 4) == [3] and warned([0.2] * 3 + [0.0] * 3 + [0.2] * 4) == [3, 9]
    assert warned([0.2, 0.2, 0.0, 0.2, 0.2]) == [] and warned([float("nan")] * 3) == [1]


def test_a_warning_has_its_numbers():
    watch = DriftWatch("tis")
    said = [watch.observe(step, {"mismatch/kl": 0.25, "rollout/staleness_mean": 1.5}) for step in (5, 6, 7)]
    assert said[:2] == [None, None] and said[2].startswith(
        "step 7: engine and trainer disagree about the same tokens for 3 steps: mismatch/kl 0.25 (limit 0.1). Likely "
        "the age of the rollouts (1.5 batches), which the correction tis cannot make good"
    )
    watch = DriftWatch()
    said = [watch.observe(1, {"mismatch/kl": float("inf"), "mismatch/logprob_abs_mean": float("nan")})]
    assert said[0].startswith("step 1: mismatch/kl and mismatch/logprob_abs_mean not finite. A log-prob of")


def test_only_what_the_clock_decides_is_left_out_of_a_comparison():
    line = {"timing/a": 1, "throughput/b": 2, "recovery/c": 3, "loss/timing/": 4, "step": 5}
    assert metrics.comparable(line) == {"loss/timing/": 4, "step": 5}


def test_a_phase_that_is_entered_twice_counts_once():
    times = iter([0.0, 1.0, 3.0, 6.0, 10.0, 15.0])
    phases = Phases(clock=lambda: next(times))
    with phases.measure("a"):
        with phases.measure("a"):
            assert phases.active() == ("a",)
        assert phases.active() == ("a",)
    assert phases.active() == ()
    assert phases.collect() == {"timing/a_s": 9.0, "timing/other_s": 6.0, "timing/step_s": 15.0}


def test_tensorboard_gets_each_step_and_forgets_the_later(tmp_path):
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    with MetricsLog(tmp_path) as log:
        log.write(4, {"a": 1.5, "b": float("nan")})
        log.truncate_after(2)
    (file,) = (tmp_path / "tensorboard").iterdir()
    events = [
        event
        for event in EventFileLoader(str(file)).Load()
        if event.HasField("summary") or event.HasField("session_log")
    ]
    assert [(event.step, event.session_log.status) for event in events] == [(4, 0), (3, 1)]
    assert [value.tag for value in events[0].summary.value] == ["a", "observe/nonfinite_values"]
    assert all(event.wall_time > 1e9 for event in events)
