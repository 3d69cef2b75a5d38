"""kill -9 of a process of a conversion: nothing of it stays behind, and the same command goes on from what is there."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time

import psutil
import pytest
from hf_checkpoints import CARD_FILE, assert_equal, config_of, make_hf, tensors_of, to_hf, to_megatron

pytestmark = pytest.mark.slow

FILES = ("--max-shard-size", "1KB")  # some hundred files, so that there is something left to do


@pytest.mark.parametrize("victim", ["first", "worker", pytest.param("fork server", marks=pytest.mark.heavy)])
def test_a_killed_process_ends_the_others_and_what_is_complete_is_kept(tmp_path, victim):
    given = make_hf(tmp_path / "hf", config_of(num_hidden_layers=40), max_shard_bytes=10**6)
    to_megatron(tmp_path / "hf", tmp_path / "megatron")
    out, partial = tmp_path / "out", tmp_path / ".out.partial"
    command = ["-m", "megatron_daro", "convert", "--megatron", tmp_path / "megatron", *FILES]
    command = [sys.executable, *map(str, command), "--out", str(out), "--processes", "2"]
    first = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    end = time.monotonic() + 120
    while not list(partial.rglob("*.safetensors.json")) and time.monotonic() < end:
        time.sleep(0.005)
    family = psutil.Process(first.pid).children(recursive=True)
    (server,) = [one for one in family if one.children()]
    victims = {"first": psutil.Process(first.pid), "fork server": server, "worker": server.children()[0]}
    victims[victim].kill()
    _, errors = first.communicate(timeout=60)
    assert not psutil.wait_procs(family, timeout=30)[1]
    assert first.returncode == (-signal.SIGKILL if victim == "first" else 1)
    assert victim == "first" or "--processes" in errors
    assert not out.exists()
    to_hf(tmp_path / "megatron", out, *FILES)
    checks = {row["check"] for row in json.loads((out / CARD_FILE).read_text())["rows"]}
    assert checks == {"written", "read back and compared"}
    assert_equal(tensors_of(out), given)
