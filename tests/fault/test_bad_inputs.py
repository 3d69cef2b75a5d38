"""Wrong files and values through the command line: a message, an exit code, no traceback, and no cluster is touched.

Most in this process, where a start of Ray is a failure. Of each kind one is a process of its own; there RAY_ADDRESS
names a port where nothing listens: a command that went on to Ray would fail in another way.
"""

import json
import os
import shutil

import pytest
from cli_runs import Finished, run_cli

ERROR, CONFIGURATION = 1, 2
NO_CLUSTER = {"RAY_ADDRESS": "127.0.0.1:1"}


@pytest.fixture
def fails(tiny, tmp_path, refused):
    """How `train` ends with these overrides; nothing is left in the run directory that a resume would take."""

    def run(*overrides, config=None, process=False) -> Finished:
        command = ["train", config or tiny.config, f"trainer.run_dir={tmp_path / 'run'}", *overrides]
        finished = run_cli(command, tmp_path / "log", environment=NO_CLUSTER) if process else refused(command)
        assert "Traceback" not in finished.stderr and finished.lines
        assert not (tmp_path / "run" / "checkpoints").exists()
        return finished

    return run


@pytest.fixture
def model(tiny, tmp_path):
    """A copy of the model to damage."""
    return shutil.copytree(tiny.model, tmp_path / "model")


def test_yaml_typos_name_the_nearest_keys(tiny, fails, tmp_path):
    config = tmp_path / "typo.yaml"
    config.write_text(
        tiny.config.read_text().replace("prompts_per_batch", "prompt_per_step").replace("steps:", "stpes:")
    )
    finished = fails(config=config, process=True)
    assert finished.code == CONFIGURATION
    assert "prompt_per_step" in finished.stderr and "prompts_per_batch" in finished.stderr
    assert "stpes" in finished.stderr and "steps" in finished.stderr


def test_text_that_is_no_yaml_names_the_line(tiny, fails, tmp_path):
    config = tmp_path / "broken.yaml"
    config.write_text(tiny.config.read_text() + "trainer: {steps: [1\n")
    finished = fails(config=config)
    assert finished.code == CONFIGURATION and "broken.yaml:36:1: got a YAML" in finished.stderr


def test_wrong_numbers_are_all_reported_at_once(fails):
    finished = fails("rollout.rollouts_per_prompt=1", "actor.micro_batch_tokens=0")
    assert finished.code == CONFIGURATION
    assert "rollout.rollouts_per_prompt (command line): got 1; allowed: an integer >= 2" in finished.stderr
    assert "actor.micro_batch_tokens" in finished.stderr


@pytest.mark.parametrize(
    ("overrides", "names"),
    [
        pytest.param(
            ["trainer.minibatches_per_batch=500"],
            ["trainer.minibatches_per_batch", "got 500", "prompts of a batch"],
            id="more-minibatches-than-prompts",
        ),
        pytest.param(
            ["actor.tensor_parallel=3"], ["actor.tensor_parallel", "got 3", "attention heads"], id="heads-not-divisible"
        ),
        pytest.param(["actor.pipeline_parallel=3"], ["actor.pipeline_parallel", "3"], id="layers-not-divisible"),
    ],
)
def test_layouts_that_cannot_be_are_refused(fails, overrides, names):
    finished = fails(*overrides)
    assert finished.code == CONFIGURATION
    assert all(name in finished.stderr for name in names), finished.stderr


def test_missing_model_file(fails, model):
    (model / "model.safetensors").unlink()
    finished = fails(f"model.path={model}")
    assert finished.code == CONFIGURATION and "no *.safetensors" in finished.stderr


def test_torn_model_file(fails, model):
    weights = model / "model.safetensors"
    os.truncate(weights, weights.stat().st_size - 100)
    finished = fails(f"model.path={model}", process=True)
    assert finished.code == CONFIGURATION and "model.safetensors" in finished.stderr


def test_tokenizer_without_a_stop_token(fails, model):
    for name in ("tokenizer_config.json", "special_tokens_map.json", "config.json", "generation_config.json"):
        path = model / name
        if path.exists():
            content = json.loads(path.read_text())
            removed = {k: v for k, v in content.items() if not k.startswith("eos_token")}
            path.write_text(json.dumps(removed))
    finished = fails(f"model.path={model}")
    assert finished.code == CONFIGURATION and "rollout.stop_token_ids" in finished.stderr


@pytest.mark.parametrize(
    ("content", "says"),
    [
        pytest.param("", "empty", id="empty-file"),
        pytest.param('{"problem": "1="}\n{"problem": "2=", "answer": ""}\n', "no answer", id="no-answers"),
        pytest.param('{"problem": "1=", "answer": {"a": 1}}\n', "answer is not text", id="answer-not-text"),
        pytest.param('{"problem": "1=", "answ', "line is not JSON (1 rows: prompts.jsonl:1)", id="torn"),
    ],
)
def test_unusable_prompt_files(fails, tmp_path, content, says):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(content)
    finished = fails(f"data.train=[{prompts}]")
    assert finished.code in (ERROR, CONFIGURATION)
    assert "prompts.jsonl" in finished.stderr and says in finished.stderr


def test_replay_of_a_run_without_rollouts(fails, tmp_path):
    (tmp_path / "other").mkdir()
    finished = fails("--replay", tmp_path / "other")
    assert finished.code == ERROR and "no recorded steps" in finished.last_line


def test_a_cluster_that_is_not_there(fails, tmp_path):
    finished = fails(process=True)
    assert finished.code == CONFIGURATION
    assert "RAY_ADDRESS: got '127.0.0.1:1', but nobody answers" in finished.last_line
    assert not (tmp_path / "run").exists()


def test_run_directory_that_holds_a_run_is_not_written_over(tiny, reference, refused):
    finished = refused(["train", tiny.config, f"trainer.run_dir={reference}"])
    assert finished.code == CONFIGURATION and str(reference) in finished.last_line
