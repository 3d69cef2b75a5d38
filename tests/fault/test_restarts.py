"""What a restart changed is said, and takes effect or is refused; a refused one leaves the run directory as it was."""

import shutil
import tempfile
from pathlib import Path

import pytest
from cli_runs import digests, run_cli

from megatron_daro.observe.metrics import read_metrics
from megatron_daro.runtime.run_directory import owned

NO_CLUSTER = {"RAY_ADDRESS": "127.0.0.1:1"}


@pytest.fixture
def run_dir(reference, tmp_path):
    """A copy of the finished run of 8 steps."""
    return shutil.copytree(reference, tmp_path / "run")


def resume(tiny, run_dir, *overrides):
    return ["train", tiny.config, f"trainer.run_dir={run_dir}", "trainer.eval_every_steps=4", "--resume", *overrides]


def test_refused_changes_are_all_named_and_nothing_but_audit_and_log_is_written(tiny, run_dir, tmp_path):
    before = digests(run_dir)
    changed = ["rollout.rollouts_per_prompt=8", "actor.precision=bf16", "rollout.temperature=0.5"]
    finished = run_cli(resume(tiny, run_dir, *changed), tmp_path / "log", environment=NO_CLUSTER)
    assert finished.code == 1 and "belongs to another run" in finished.last_line
    assert "rollout.rollouts_per_prompt was 4, is 8" in finished.last_line
    assert "actor.precision was 'fp32', is 'bf16'" in finished.last_line
    after = digests(run_dir)
    audit = (run_dir / "restarts.txt").read_text()
    assert set(after) - set(before) == {"restarts.txt"}
    assert {name for name in before if after[name] != before[name]} == {"logs/driver.log"}
    assert finished.last_line.partition(": ")[2] in (run_dir / "logs" / "driver.log").read_text()
    row = next(line for line in audit.splitlines() if "rollout.temperature" in line)
    assert " ".join(row.split()) == "rollout.temperature 1.0 0.5 in effect: trains differently from here"
    assert row in finished.stdout


def test_a_finished_run_says_so_and_a_directory_in_use_who_has_it(tiny, run_dir, refused):
    before = digests(run_dir)
    finished = refused(resume(tiny, run_dir))
    assert finished.code == 0 and "has all of its 8 steps" in finished.stdout
    assert "values kept, 2 changed and in effect, 0 refused" in finished.stdout  # trainer.run_dir, tensorboard
    with owned(run_dir, resume=True):
        finished = refused(resume(tiny, run_dir))
    assert finished.code == 1 and "is in use by process" in finished.last_line
    changed = {name for name, digest in digests(run_dir).items() if before.get(name) != digest}
    assert changed == {"restarts.txt", "config.yaml", "logs/driver.log"}  # the configuration names the directory


@pytest.mark.heavy
def test_a_changed_learning_rate_is_used_and_the_audit_says_so(tiny, run_dir, tmp_path):
    changed = ["actor.optimizer.learning_rate=1e-9", "trainer.steps=9"]
    with tempfile.TemporaryDirectory(dir="/tmp") as temporary:  # a short path, so that Ray's session lies there
        finished = run_cli(resume(tiny, run_dir, *changed), tmp_path / "log", environment={"TMPDIR": temporary})
        assert finished.code == 0, finished.stderr
        left = [path.name for path in Path(temporary).iterdir()]
        assert [name for name in left if not name.startswith("torchinductor_")] == [], "but for torch's own cache"
    assert "actor.optimizer.learning_rate" in finished.stdout and "1e-09" in finished.stdout
    rates = [line["optimizer/learning_rate"] for line in read_metrics(run_dir)[-2:]]
    assert rates == pytest.approx([1e-3, 1e-9], rel=1e-6)
