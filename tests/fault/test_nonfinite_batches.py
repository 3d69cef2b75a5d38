"""NaN in a batch, on the real stack: recorded rollouts whose log-probs are NaN, and a model with a NaN weight."""

import math
import shutil

import numpy as np
import pytest
import safetensors.numpy
from cli_runs import checkpoint, different_files, last_step, run_cli, trained

from megatron_daro.observe.metrics import read_metrics
from megatron_daro.rollout.recorder import Recorder, read_groups, read_minibatch, read_step

BAD_STEP = 3
NONFINITE = 3


@pytest.fixture(scope="module")
def poisoned(reference, tmp_path_factory):
    """The reference's rollouts with one NaN log-probability in one rollout of step 3."""
    run_dir = tmp_path_factory.mktemp("poisoned")
    shutil.copytree(reference / "rollouts", run_dir / "rollouts")
    by_outcome = {"trained": [], "filtered": [], "dropped": []}
    for group, used in read_step(reference, BAD_STEP):
        by_outcome[used].append(group)
    victim = by_outcome["trained"][1].rollouts[2]
    victim.logprobs[0] = np.nan
    Recorder(run_dir).write_step(BAD_STEP, by_outcome, read_minibatch(reference, BAD_STEP))
    return run_dir


def arguments(tiny, tmp_path, *more):
    options = [f"trainer.run_dir={tmp_path / 'run'}", "trainer.save_every_steps=1", "trainer.keep_checkpoints=9"]
    return ["train", tiny.config, *options, *more]


def test_stop_takes_no_step_writes_the_batch_and_says_so_in_the_exit_code(tiny, poisoned, tmp_path):
    command = arguments(tiny, tmp_path, "algorithm.old_logprobs=rollout", "--replay", poisoned)
    finished = run_cli(command, tmp_path / "log")
    assert finished.code == NONFINITE, finished.stderr
    run_dir = tmp_path / "run"
    failed = run_dir / "failed" / "step_000003.parquet"
    assert f"step {BAD_STEP}" in finished.last_line and str(failed) in finished.last_line
    groups = [group for group, _ in read_groups(failed)]
    assert sum(math.isnan(value) for g in groups for r in g.rollouts for value in r.logprobs) == 1
    assert last_step(run_dir) == BAD_STEP - 1
    assert (run_dir / "checkpoints" / "latest").read_text().strip() == "step_000002"


@pytest.mark.heavy
def test_skip_counts_the_step_leaves_the_weights_and_goes_on(tiny, poisoned, tmp_path):
    options = ["algorithm.old_logprobs=rollout", "trainer.on_nonfinite=skip"]
    finished = trained(arguments(tiny, tmp_path, *options, "--replay", poisoned), tmp_path / "log")
    run_dir = tmp_path / "run"
    assert "no optimizer step" in finished.stdout
    lines = {line["step"]: line for line in read_metrics(run_dir)}
    assert [lines[step]["rollout/steps_skipped"] for step in range(1, 9)] == [0, 0, 1, 1, 1, 1, 1, 1]
    assert lines[BAD_STEP]["loss/policy"] is None and lines[BAD_STEP]["observe/nonfinite_values"] > 0
    changed = different_files(checkpoint(run_dir, BAD_STEP), checkpoint(run_dir, BAD_STEP - 1))
    assert changed == {"state.json", "manifest.json"}  # weights, optimizer and schedule are as they were
    assert "shard_00000.safetensors" in different_files(checkpoint(run_dir, 4), checkpoint(run_dir, BAD_STEP))
    assert (run_dir / "failed" / "step_000003.parquet").is_file()


@pytest.mark.heavy
def test_skip_ends_when_nothing_trains_any_more(tiny, reference, tmp_path):
    model = tmp_path / "model"
    shutil.copytree(tiny.model, model)
    tensors = safetensors.numpy.load_file(model / "model.safetensors")
    tensors["model.layers.0.mlp.down_proj.weight"][0, 0] = np.nan
    safetensors.numpy.save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    options = [f"model.path={model}", "trainer.on_nonfinite=skip", "--replay", reference]
    finished = run_cli(arguments(tiny, tmp_path, *options), tmp_path / "log")
    assert finished.code == 1
    assert "5 batches in a row trained nothing" in finished.last_line
    assert last_step(tmp_path / "run") == 4
    assert len(list((tmp_path / "run" / "failed").iterdir())) == 5
