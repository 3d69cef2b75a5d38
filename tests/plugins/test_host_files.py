"""Files that hosts' own code writes: their metrics as a report reads them, their dumps as `analyze` does.

Each needs a checkout of its host, named by MEGATRON_DARO_NEMO_RL, MEGATRON_DARO_SLIME or MEGATRON_DARO_ROLL, or skips.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
from host_logs import GROUPS, STEPS, K

from megatron_daro.errors import DataError
from megatron_daro.workshop.analyze.columns import Wanted
from megatron_daro.workshop.analyze.dump import infer_rollouts_per_prompt, read_dump
from megatron_daro.workshop.analyze.files import files_of
from megatron_daro.workshop.analyze.rows import open_file
from megatron_daro.workshop.report.host_metrics import load_host_run

HERE = Path(__file__).parent


def write(kind: str, out: Path, **environment: str) -> None:
    """Run the host's code in a process of its own."""
    checkout = f"MEGATRON_DARO_{'SLIME' if 'slime' in kind else kind.upper()}"
    if not os.environ.get(checkout):
        pytest.skip(f"needs a checkout named by {checkout}")
    paths = os.pathsep.join([str(HERE), str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-W", "ignore", str(HERE / "host_logs.py"), kind, str(out)]
    changed = {**os.environ, "PYTHONPATH": paths, **environment}
    done = subprocess.run(command, env=changed, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def check_weights(run):
    assert [row["step"] for row in run.rows] == list(range(1, STEPS + 1))
    assert run.values("difficulty/weight/2") == pytest.approx([1 + 0.2 * step for step in range(STEPS)])
    assert run.values("loss/policy") == pytest.approx([-0.1 * step for step in range(STEPS)])


def check_dump(folder):
    files = files_of(folder)
    assert len(files) == STEPS
    k = infer_rollouts_per_prompt(open_file(files[0], Wanted())[1])
    dump = read_dump([open_file(file, Wanted())[1] for file in files], k)
    assert k == K and dump.rollouts == STEPS * K * len(GROUPS) and not dump.incomplete
    for right in range(K + 1):
        there = [answers for _, answers in GROUPS if sum(ok for _, ok in answers) == right]
        assert float(dump.total.groups[right]) == STEPS * len(there)
        tokens = sum(n for answers in there for n, ok in answers if ok), sum(n for a in there for n, ok in a if not ok)
        assert (float(dump.total.right_tokens[right]), float(dump.total.wrong_tokens[right])) == tuple(
            STEPS * n for n in tokens
        )
    return open_file(files[0], Wanted())[0]


def test_nemo_rls_logger_and_dump(tmp_path):
    """It writes hyperparameters as a run in a folder of its own, and validation beside the dump."""
    write("nemo_rl", tmp_path)
    assert len({path.parent for path in tmp_path.rglob("*.tfevents.*")}) == 2
    run = load_host_run(tmp_path, "nemo-rl")
    check_weights(run)
    assert run.values("reward/mean") == pytest.approx([0.1 * step for step in range(STEPS)])
    assert run.values("eval/validation/accuracy") == [0.5] * STEPS
    assert run.values("response/length_mean") == [3.0] * STEPS
    assert check_dump(tmp_path).unit == "tokens"


@pytest.mark.parametrize("experiment", ["", "one"], ids=["folder-of-each-process", "one-folder"])
def test_slimes_logger_in_two_processes(tmp_path, experiment):
    """Metrics of a rollout stand at the last of its two optimizer steps."""
    for kind in ("slime_train", "slime_rollout"):
        write(kind, tmp_path, EXPERIMENT=experiment)
    assert len({path.parent for path in tmp_path.rglob("*.tfevents.*")}) == (1 if experiment else 2)
    run = load_host_run(tmp_path, "slime")
    check_weights(run)
    assert [row.get("reward/mean") for row in run.rows] == pytest.approx([None, 0.0, None, 0.1, None, 0.2])
    assert [row.get("response/length_mean") for row in run.rows] == pytest.approx([None, 10, None, 11, None, 12])
    if not experiment:
        write("slime_train", tmp_path, EXPERIMENT="again")
        with pytest.raises(DataError, match="3 runs"):
            load_host_run(tmp_path, "slime")


def test_rolls_dump(tmp_path):
    if importlib.util.find_spec("tensordict") is None:
        pytest.skip("needs tensordict and codetiming")
    write("roll", tmp_path)
    assert check_dump(tmp_path).unit == "characters"
