"""The checks for a GPU, run on the CPU so that they cannot rot; and what the tool says where there is no GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from test_gradients_exact import layouts

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tests" / "gpu"))

from gpu_checks import CHECKS  # noqa: E402  (found through the line above)


def run_check(layout, name, directory):
    """On a rank: (difference, tolerance, passed), or why the check cannot run here."""
    import torch
    from gpu_checks import CHECKS, NotHereError

    try:
        outcome = CHECKS[name](torch.device("cpu"), directory)
    except NotHereError as reason:
        return str(reason)
    return outcome.difference, outcome.tolerance, outcome.passed


@pytest.mark.parametrize("name", CHECKS)
def test_each_check_holds_on_the_cpu(rank_pool, tmp_path, name):
    (found,) = rank_pool.run(run_check, layouts()["single"], name=name, directory=tmp_path)
    if name == "policy steps, fp8":
        assert found == "Transformer Engine is not installed, or there is no GPU"
    else:
        assert found[2], found


def test_a_difference_that_is_no_number_does_not_pass():
    from gpu_checks import Outcome

    assert not Outcome(float("nan"), 1.0, "nats").passed
    assert not Outcome(2.0, 1.0, "nats").passed
    assert Outcome(1.0, 1.0, "nats").passed


def run_tool(*arguments):
    return subprocess.run(
        [sys.executable, str(ROOT / "tools" / "gpu_check.py"), *arguments],
        capture_output=True,
        text=True,
        timeout=280,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "COLUMNS": "200"},
        check=False,
    )


def test_without_a_gpu_it_says_so(tmp_path):
    report = tmp_path / "report.md"
    done = run_tool("--report", str(report))
    assert done.returncode == 2
    assert done.stderr.startswith("gpu_check: no GPU is visible to torch here, so nothing was checked.")
    assert not report.exists()


def test_the_rehearsal_shows_checks_and_speed_and_writes_nothing(tmp_path):
    report = tmp_path / "report.md"
    done = run_tool("--rehearse", "--only", "log-probs, fp32", "--report", str(report))
    assert done.returncode == 0, done.stderr
    assert "passed" in done.stdout
    assert "train step bf16" in done.stdout
    assert "ERROR" not in done.stdout
    assert not report.exists()


def test_the_report_names_what_failed():
    sys.path.append(str(ROOT / "tools"))
    import gpu_check

    rows = [
        gpu_check.Row("good", "passed", "1e-06", "1e-04 (nats)", 1.0, 0.5),
        gpu_check.Row("bad", "ERROR", "", "RuntimeError: a | b\nc", 1.0, None),
        gpu_check.Row("absent", "not here", "", "no fp8", 0.0, None),
    ]
    text = gpu_check.markdown(rows, [["train step", "10.0", "1,000", "2.00"]], {"GPU": "a GPU"})
    assert "1 of 3 checks passed, 1 failed, 1 could not be run here." in text
    assert "| bad | ERROR |  | RuntimeError: a \\| b c | 1.0 |  |" in text
    assert "| train step | 10.0 | 1,000 | 2.00 |" in text
