"""metrics.jsonl: what is written, what survives damage, and the views (TensorBoard, wandb) beside it."""

from __future__ import annotations

import itertools
import json
import math
import shutil
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
from synthetic_run import write_synthetic_run

from megatron_daro.errors import ConfigError, DataError
from megatron_daro.observe import MetricsLog, comparable, read_metrics


def _write(run_dir, steps, **options):
    with MetricsLog(run_dir, tensorboard=False, **options) as log:
        for step in steps:
            log.write(step, {"loss/policy": step / 7, "accuracy/mean": 0.5, "timing/step_s": 1.0})


def test_a_line_is_an_object_with_step_first_and_keys_in_path_order(tmp_path):
    with MetricsLog(tmp_path, tensorboard=False) as log:
        log.write(3, {"difficulty/loss/10": 1, "b": 2.5, "difficulty/loss/2": 3, "a/x": 4})
    ordered = '"a/x": 4, "b": 2.5, "difficulty/loss/2": 3, "difficulty/loss/10": 1, "observe/nonfinite_values": 0'
    assert (tmp_path / "metrics.jsonl").read_text() == f'{{"step": 3, {ordered}}}\n'


def test_non_finite_values_become_null_and_are_counted(tmp_path):
    with MetricsLog(tmp_path) as log:
        log.write(1, {"a": math.nan, "b": math.inf, "c": 1.0})
    line = (tmp_path / "metrics.jsonl").read_text()
    assert json.loads(line, parse_constant=pytest.fail) == {
        "step": 1,
        "a": None,
        "b": None,
        "c": 1.0,
        "observe/nonfinite_values": 2,
    }


@pytest.mark.parametrize("value", ["0.5", None, [1.0]])
def test_a_value_that_is_no_number_is_refused_and_named(tmp_path, value):
    with MetricsLog(tmp_path, tensorboard=False) as log:
        with pytest.raises(DataError, match="loss/policy"):
            log.write(1, {"loss/policy": value})
        assert (tmp_path / "metrics.jsonl").read_bytes() == b""


@pytest.mark.parametrize("key", ["step", "observe/nonfinite_values", 7])
def test_reserved_keys_are_refused(tmp_path, key):
    with MetricsLog(tmp_path, tensorboard=False) as log, pytest.raises(DataError, match=str(key)):
        log.write(1, {key: 1.0})


@pytest.mark.parametrize("step", [1, 2])
def test_steps_must_increase(tmp_path, step):
    _write(tmp_path, [1, 2])
    before = (tmp_path / "metrics.jsonl").read_bytes()
    with MetricsLog(tmp_path, tensorboard=False) as log, pytest.raises(DataError, match=r"metrics\.jsonl"):
        log.write(step, {"a": 1.0})
    assert (tmp_path / "metrics.jsonl").read_bytes() == before


def test_truncate_after_and_writing_again_gives_the_file_of_the_unbroken_run(tmp_path):
    _write(tmp_path / "unbroken", range(1, 9))
    _write(tmp_path / "broken", range(1, 7))
    with MetricsLog(tmp_path / "broken", tensorboard=False) as log:
        assert log.truncate_after(4) == 2
        assert log.last_step == 4
    _write(tmp_path / "broken", range(5, 9))
    assert (tmp_path / "broken/metrics.jsonl").read_bytes() == (tmp_path / "unbroken/metrics.jsonl").read_bytes()


def test_truncate_before_the_first_step_empties_the_file(tmp_path):
    _write(tmp_path, [1, 2])
    with MetricsLog(tmp_path, tensorboard=False) as log:
        assert log.truncate_after(0) == 2
        assert log.last_step is None
        log.write(1, {"a": 1.0})
    assert [r["step"] for r in read_metrics(tmp_path)] == [1]


def test_a_last_line_torn_at_any_byte_is_left_out_and_repaired(tmp_path):
    _write(tmp_path, [1, 2])
    path = tmp_path / "metrics.jsonl"
    whole = path.read_bytes()
    first = whole.index(b"\n") + 1
    for cut in range(first, len(whole)):
        path.write_bytes(whole[:cut])
        expected = [1, 2] if cut == len(whole) - 1 else [1]
        assert [r["step"] for r in read_metrics(tmp_path)] == expected, cut
        _write(tmp_path, [3])
        assert [r["step"] for r in read_metrics(tmp_path)] == [*expected, 3], cut


def test_a_torn_last_line_is_said_and_a_whole_one_is_not(tmp_path):
    _write(tmp_path, [1, 2])
    with MetricsLog(tmp_path, tensorboard=False) as log:
        assert log.remark == ""
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(path.read_bytes()[:-5])
    torn = len(path.read_bytes().split(b"\n")[-1])
    with MetricsLog(tmp_path, tensorboard=False) as log:
        assert str(path) in log.remark and "step 1" in log.remark and str(torn) in log.remark


def test_a_removed_run_directory_is_named_and_not_taken_for_a_full_disk(tmp_path):
    with MetricsLog(tmp_path / "run", tensorboard=False) as log:
        log.write(1, {"a": 1.0})
        shutil.rmtree(tmp_path / "run")
        with pytest.raises(DataError, match="run is gone"):
            log.write(2, {"a": 1.0})


def test_damage_before_the_last_line_is_an_error_that_names_the_line(tmp_path):
    _write(tmp_path, [1, 2, 3])
    path = tmp_path / "metrics.jsonl"
    lines = path.read_bytes().split(b"\n")
    path.write_bytes(b"\n".join([lines[0], lines[1][:20], lines[2], b""]))
    with pytest.raises(DataError, match="line 2"):
        read_metrics(tmp_path)
    with pytest.raises(DataError, match="line 2"):
        MetricsLog(tmp_path, tensorboard=False)


def test_comparable_drops_what_depends_on_the_clock_and_nothing_else():
    metrics = {
        "step": 1,
        "loss/policy": 0.1,
        "timing/step_s": 2.0,
        "throughput/train_tokens_per_s": 3.0,
        "recovery/restarts": 1.0,
        "timings": 4.0,
    }
    assert comparable(metrics) == {"step": 1, "loss/policy": 0.1, "timings": 4.0}


_KILLED = """
import os, signal, sys
from megatron_daro.observe import MetricsLog
log = MetricsLog(sys.argv[1], tensorboard=False)
for step in (1, 2, 3):
    log.write(step, {"a": step})
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_was_written_survives_kill_9(tmp_path):
    done = subprocess.run([sys.executable, "-c", _KILLED, str(tmp_path)], check=False)
    assert done.returncode == -9
    assert [r["step"] for r in read_metrics(tmp_path)] == [1, 2, 3]


_DISK_FULL = """
import resource, sys
from pathlib import Path
from megatron_daro.errors import DataError
from megatron_daro.observe import MetricsLog
log = MetricsLog(sys.argv[1], tensorboard=False)
log.write(1, {"a": 1.0})
size = Path(sys.argv[1], "metrics.jsonl").stat().st_size
resource.setrlimit(resource.RLIMIT_FSIZE, (size + 10, resource.RLIM_INFINITY))
try:
    log.write(2, {"a": 1.0})
except DataError as error:
    print(error)
assert Path(sys.argv[1], "metrics.jsonl").stat().st_size == size, "half a line was left"
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
log.write(2, {"a": 2.0})
"""


def test_a_full_disk_is_an_error_and_leaves_whole_lines(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", _DISK_FULL, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "step 2" in done.stdout
    assert [r["a"] for r in read_metrics(tmp_path)] == [1.0, 2.0]


def _tensorboard_scalars(run_dir, key):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(run_dir / "tensorboard"))
    accumulator.Reload()
    return [(e.step, round(e.value, 5)) for e in accumulator.Scalars(key)]


def test_tensorboard_holds_the_same_and_forgets_truncated_steps(tmp_path):
    with MetricsLog(tmp_path) as log:
        for step in (1, 2, 3):
            log.write(step, {"loss/policy": float(step), "bad": math.nan})
        log.truncate_after(1)
        log.write(2, {"loss/policy": 20.0})
    assert _tensorboard_scalars(tmp_path, "loss/policy") == [(1, 1.0), (2, 20.0)]


def test_tensorboard_of_a_resumed_process_forgets_truncated_steps(tmp_path, monkeypatch):
    # TensorBoard orders files by the second of their beginning.
    seconds = itertools.count(1_800_000_000)
    monkeypatch.setattr(time, "time", lambda: next(seconds))
    with MetricsLog(tmp_path) as log:
        for step in (1, 2, 3):
            log.write(step, {"x": float(step)})
    with MetricsLog(tmp_path) as log:
        log.truncate_after(2)
        log.write(3, {"x": 30.0})
    assert _tensorboard_scalars(tmp_path, "x") == [(1, 1.0), (2, 2.0), (3, 30.0)]


def test_wandb_that_is_not_installed_is_a_clear_error(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match=r"megatron-daro\[wandb\]"):
        MetricsLog(tmp_path, tensorboard=False, wandb={"enabled": True, "project": "p"})
    MetricsLog(tmp_path, tensorboard=False, wandb={"enabled": False, "project": "p"}).close()


def test_wandb_offline_takes_steps_and_a_resumed_run_keeps_its_id(tmp_path, monkeypatch):
    pytest.importorskip("wandb", reason="the extra wandb is not installed")
    monkeypatch.setenv("WANDB_MODE", "offline")
    settings = {"enabled": True, "project": "p", "name": None}
    ids = []
    for step in (1, 2):
        with MetricsLog(tmp_path, tensorboard=False, wandb=settings) as log:
            log.write(step, {"loss/policy": 1.0})
        ids.append((tmp_path / "wandb_run_id").read_text())
    assert ids[0] == ids[1] and ids[0]


_IMPORTS = """
import sys
import time
from pathlib import Path
from megatron_daro.workshop.report.report import write_report
from megatron_daro.observe import MetricsLog, Phases, Progress
run = Path(sys.argv[1])
with MetricsLog(run) as log:
    log.write(4, {"a": 1.0})
write_report(run)
print(*sorted(m for m in sys.modules if m.split(".")[0] in ("torch", "ray", "megatron", "tensorflow", "megatron_daro")))
"""


def test_observe_needs_no_torch_and_imports_only_downwards(tmp_path):
    write_synthetic_run(tmp_path, steps=3)
    arguments = [sys.executable, "-c", _IMPORTS, str(tmp_path)]
    done = subprocess.run(arguments, capture_output=True, text=True, check=True)
    loaded = done.stdout.split()
    assert "megatron_daro.workshop.report.report" in loaded
    allowed = tuple(f"megatron_daro.{unit}" for unit in ("observe", "types", "errors", "durable", "workshop.report"))
    packages = ("megatron_daro", "megatron_daro.workshop")
    assert [m for m in loaded if m not in packages and not m.startswith(allowed)] == []


@pytest.mark.parametrize("text", ['{"step": "1"}\n{"step": 2}\n', '[1]\n{"step": 2}\n', "{}\n{}\n"])
def test_a_line_that_is_no_step_is_named(tmp_path, text):
    (tmp_path / "metrics.jsonl").write_text(text)
    with pytest.raises(DataError, match="line 1"):
        read_metrics(tmp_path)


def test_a_step_that_stands_there_twice_is_named(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 2}\n{"step": 2}\n')
    with pytest.raises(DataError, match="line 2"):
        read_metrics(tmp_path)


def test_a_torn_first_line_is_removed(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1')
    _write(tmp_path, [1])
    assert [r["step"] for r in read_metrics(tmp_path)] == [1]


def test_a_wandb_that_cannot_start_is_named_with_its_settings(tmp_path, monkeypatch):
    def init(**arguments):
        raise RuntimeError("no login")

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    with pytest.raises(ConfigError, match=r"observe\.wandb: .*project.*no login.*WANDB_MODE"):
        MetricsLog(tmp_path, tensorboard=False, wandb={"project": "p", "enabled": True})


def test_wandb_gets_each_step_as_a_metric_of_its_own_and_goes_on_with_the_directorys_run(tmp_path, monkeypatch):
    started, logged, steps = [], [], []
    run = SimpleNamespace(
        id="abc",
        define_metric=lambda name, step_metric: steps.append((name, step_metric)),
        log=logged.append,
        finish=lambda: logged.append("finished"),
    )
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=lambda **given: started.append(given) or run))
    for step in (3, 4):
        with MetricsLog(tmp_path, tensorboard=False, wandb={"project": "p", "entity": None}) as log:
            log.write(step, {"a": 1.5, "b": float("nan")})
    line = {"a": 1.5, "observe/nonfinite_values": 1}
    assert logged == [{"step": 3, **line}, "finished", {"step": 4, **line}, "finished"]
    assert steps == [("*", "step")] * 2
    first = {"dir": str(tmp_path), "name": tmp_path.name, "project": "p"}
    assert started == [first, first | {"id": "abc", "resume": "allow"}]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_disk_that_is_too_full_for_tensorboard_is_said_in_the_same_words(tmp_path):
    words = r"step 2 not written, the disk is full: .*; free disk space and --resume"
    with pytest.raises(DataError, match=words), MetricsLog(tmp_path) as log:
        log.write(1, {"x": 1.0})
        (events,) = (tmp_path / "tensorboard").iterdir()
        events.unlink()
        events.symlink_to("/dev/full")
        log.write(2, {"x": 2.0})
