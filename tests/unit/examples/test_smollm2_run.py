"""`examples/smollm2/run.sh`: its stages and options, and a run that was killed."""

from __future__ import annotations

from pathlib import Path

import pytest
from script_copy import ROOT, Copy, executable

from megatron_daro.config import resolve

CONFIG = "examples/smollm2/config.yaml"


@pytest.fixture(params=[True, False], ids=["avx512_bf16", "without"])
def bf16(request):
    """Whether the machine's CPU computes in bf16."""
    return request.param


@pytest.fixture
def copy(tmp_path, bf16):
    made = Copy(tmp_path / "a project", "smollm2")
    executable(
        made.root / "first/grep", f'#!/bin/bash\n[ "$*" = "-qs avx512_bf16 /proc/cpuinfo" ] && exit {int(not bf16)}\n'
    )
    return made


def trained(copy: Copy, *arguments: str) -> list[str]:
    """The options that reach `megatron-daro train`, after the configuration file."""
    done = copy.run(*arguments)
    assert done.returncode == 0, done.stderr
    dry_run, command, _ = copy.calls("megatron-daro")[-3:]
    assert command[:2] == ["train", CONFIG] and dry_run[-1] == "--dry-run"
    return command[2:]


def test_model_problems_training_table(copy, bf16):
    options = trained(copy, "trainer.steps=5")
    assert options == [*([] if bf16 else ["actor.precision=fp32"]), "trainer.steps=5"]
    programs = [call[:2] for call in copy.calls("python") if call[:1] != ["-c"]]
    made = [["examples/smollm2/from_gguf.py", "runs/smollm2-base/model"]]
    made += [["examples/smollm2/short_problems.py", "runs/smollm2-base"]]
    assert programs[-3:] == [*made, ["examples/quickstart/summary.py", "runs/smollm2"]]
    assert copy.calls("megatron-daro")[-1] == ["report", "runs/smollm2"]
    assert resolve(ROOT / CONFIG, options).actor.precision == ("bf16" if bf16 else "fp32")


def test_what_the_user_says_wins(copy):
    config = resolve(ROOT / CONFIG, trained(copy, "actor.precision=fp32", "trainer.run_dir=runs/mine"))
    assert config.actor.precision == "fp32" and config.trainer.run_dir == Path("runs/mine")


def test_servers_compute_as_the_trainer_does(copy, bf16):
    config = resolve(ROOT / CONFIG, trained(copy, "--engine", "sglang"))
    assert (config.engine.kind, config.engine.replicas) == ("sglang", 2)
    assert config.trainer.run_dir == Path("runs/smollm2-sglang")
    assert config.engine.sglang.arguments["dtype"] == ("bfloat16" if bf16 else "float32")
    assert config.engine.sglang.arguments["device"] == "cpu"
    assert copy.calls("sglang_cpu_env") == [[]]


def test_a_killed_run_goes_on_and_a_finished_one_is_moved_aside(copy):
    run = copy.root / "runs/smollm2"
    (run / "checkpoints").mkdir(parents=True)
    (run / "checkpoints/latest").write_text("step_000020")
    assert trained(copy)[-1] == "--resume"
    assert run.exists()
    (run / "hf").mkdir()
    assert "--resume" not in trained(copy)
    assert [path.name[:8] for path in run.parent.iterdir()] == ["smollm2-"]


def test_a_run_killed_before_its_first_checkpoint_starts_again(copy):
    (copy.root / "runs/smollm2").mkdir(parents=True)
    assert "--resume" not in trained(copy)
