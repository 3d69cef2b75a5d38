"""Log files of a run's processes: what gets there, in which form, and what does not."""

from __future__ import annotations

import logging
import re
import subprocess
import sys

import pytest

from megatron_daro.errors import DataError, ModelError
from megatron_daro.observe import logs
from megatron_daro.observe.progress import Progress

LINE = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} %s %s \(\d+\): %s"

WORKER = """
import logging, os, subprocess, sys
from pathlib import Path
from megatron_daro.errors import ModelError
from megatron_daro.observe import logs
logs.take_over(Path(sys.argv[1]), "actor rank 3")
print("from Python", flush=True)
subprocess.run(["sh", "-c", "echo from a child >&2"])
logging.getLogger("megatron_daro").info("built")
logging.getLogger("other").info("chatter")
logging.getLogger("other").warning("of a library")
@logs.failures_logged
def train(error):
    try:
        raise KeyError("layer 7")
    except KeyError as cause:
        raise error from cause
for error in (ModelError("said in a sentence"), ValueError("nobody foresaw")):
    try:
        train(error)
    except type(error):
        pass
if sys.argv[2:]:
    import ctypes
    ctypes.string_at(0)
"""


def worker(folder, *options):
    command = [sys.executable, "-c", WORKER, str(folder), *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_all_that_a_worker_writes_is_in_its_file(tmp_path):
    done = worker(tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    text = (tmp_path / "actor_rank_3.log").read_text()
    assert text.startswith("from Python\nfrom a child\n")
    assert re.search(LINE % ("INFO", "actor rank 3", "built"), text)
    assert re.search(LINE % ("WARNING", "actor rank 3", "of a library"), text)
    assert "chatter" not in text and "said in a sentence" not in text
    failure = text[re.search(LINE % ("ERROR", "actor rank 3", "train failed"), text).start() :]
    assert failure.index("KeyError: 'layer 7'") < failure.index("direct cause") < failure.index("ValueError: nobody")


def test_the_stack_of_a_crash_is_in_its_file_behind_what_an_earlier_start_wrote(tmp_path):
    (tmp_path / "actor_rank_3.log").write_text("an earlier start\n")
    assert worker(tmp_path, "crash").returncode < 0
    text = (tmp_path / "actor_rank_3.log").read_text()
    assert text.startswith("an earlier start\n") and "Segmentation fault" in text and "ctypes" in text


def test_a_node_without_the_run_directory_says_so_where_it_is_read(tmp_path):
    done = worker(tmp_path / "elsewhere")
    assert done.returncode == 0 and "from Python" in done.stdout
    assert f"{tmp_path / 'elsewhere'} cannot be written from this node" in done.stderr
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize("mode", ["plain", "off"])
def test_the_driver_logs_what_it_tells_and_what_ends_it(tmp_path, capsys, mode):
    with pytest.raises(ModelError), logs.driver_log(tmp_path / "logs", terminal=mode != "off"):
        progress = Progress(total_steps=2, rollouts_per_prompt=2, mode=mode)
        progress.notice("resumed")
        progress.warn("a server is slow")
        progress.step(1, {"loss/policy": 0.5})
        try:
            raise OSError("disk gone")
        except OSError as cause:
            raise ModelError("cannot be read") from cause
    text = (tmp_path / "logs" / "driver.log").read_text()
    assert re.search(LINE % ("INFO", "driver", "resumed"), text)
    assert re.search(LINE % ("WARNING", "driver", "a server is slow"), text)
    assert re.search(LINE % ("INFO", "driver", ".*1/2"), text)
    assert text.index("OSError: disk gone") < text.index("direct cause") < text.index("ModelError: cannot be read")
    said = capsys.readouterr()
    assert "a server is slow" in (said.out if mode == "plain" else said.err)
    assert ("resumed" in said.out) == (mode == "plain") and "resumed" not in said.err
    assert logging.getLogger("megatron_daro").handlers == []


@pytest.mark.parametrize("where", ["/dev/full", "/nowhere/driver.log"])
def test_a_log_that_cannot_be_written_is_told_once_and_the_cause_stays_last(tmp_path, capfd, where):
    """As on a full disk, which refuses the log as well as what the run writes."""
    (tmp_path / "driver.log").symlink_to(where)
    with pytest.raises(DataError, match="the disk is full"), logs.driver_log(tmp_path, terminal=True):
        for _ in range(3):
            logging.getLogger("megatron_daro").warning("still here")
        raise DataError("the disk is full")
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith(f"{tmp_path}/driver.log cannot be written any more: ")
