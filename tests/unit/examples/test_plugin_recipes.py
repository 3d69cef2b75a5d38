"""The recipes of examples/plugins: shell syntax, commands, and options that are those which the adapters ask for."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from megatron_daro.plugins import roll_driver, slime
from megatron_daro.plugins.options import read_options

RECIPES = Path(__file__).parents[3] / "examples" / "plugins"
SCRIPTS = sorted(path for path in RECIPES.rglob("*") if path.suffix in (".sh", ".slurm"))


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_the_shell_reads_it(path):
    done = subprocess.run(["bash", "-n", path], capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert "set -euo pipefail" in path.read_text()


def command_of(recipe, *arguments, **environment):
    """The words that a recipe would run."""
    paths = os.pathsep.join(filter(None, [str(RECIPES.parents[1]), os.environ.get("PYTHONPATH")]))
    base = {**os.environ, "DRY_RUN": "1", "PYTHONPATH": paths}
    base["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{base['PATH']}"
    base.pop("RAY_ADDRESS", None)
    command = ["bash", str(RECIPES / recipe), *map(str, arguments)]
    done = subprocess.run(
        command, env={**base, **environment}, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_slimes_recipe_has_the_flags_that_the_adapter_prints(tmp_path):
    models = tmp_path / "scripts" / "models"
    models.mkdir(parents=True)
    (models / "qwen2.5-7B.sh").write_text("MODEL_ARGS=(\n   --num-layers 28\n)")
    words = command_of(
        "slime/qwen2.5_math_7b.sh", tmp_path, "HF", "START", "TRAIN", "SAVE", "--num-rollout", "2", MEGATRON_LM="MLM"
    )
    printed = [word for line in slime.flags() for word in line.split()]
    start = words.index(printed[0])
    assert words[start : start + len(printed)] == printed
    assert words[-2:] == ["--num-rollout", "2"]
    options = dict(zip(printed[::2], printed[1::2], strict=True))
    given = SimpleNamespace(**{name[2:].replace("-", "_"): value for name, value in options.items()})
    slime.check_flags(given, slime.HOST, slime.MODULE, {}, read_options(""))
    assert "--num-layers" in words


def test_rolls_recipe_has_what_the_driver_asks_for():
    words = command_of("roll/qwen2.5_math_7b.sh", "ROLL")
    folder, name = words[words.index("--config_path") + 1], words[words.index("--config_name") + 1]
    tree = yaml.safe_load((Path(folder) / f"{name}.yaml").read_text())
    roll_has_them = {"gamma", "whiten_rewards", "use_opd", "is_pure_opd"}
    assert set(tree) >= set(roll_driver.FIXED) - roll_has_them

    def as_options(value):
        return SimpleNamespace(**{k: as_options(v) for k, v in value.items()}) if isinstance(value, dict) else value

    roll_driver.check_options(as_options(tree))
    assert words[:3] == ["python", "-m", roll_driver.MODULE]


def test_megatrons_recipe_has_what_the_launcher_asks_for(tmp_path):
    configs = tmp_path / "examples" / "rl" / "model_configs"
    configs.mkdir(parents=True)
    (configs / "qwen_2p5_math_7b.sh").write_text(
        'MODEL_OPTIONS="--calculate-per-token-loss --load-from $CHECKPOINT"\nCOMMON_OPTIONS="--bf16"\n'
        'ENV_DEPENDENT="--micro-batch-size $MICRO_BATCH_SIZE --grpo-group-size $GRPO_GROUP_SIZE"\n'
    )
    words = command_of("megatron_lm/qwen2.5_math_7b.sh", tmp_path, "START", "RUN")
    assert words[words.index("-m") + 1 :][:2] == ["megatron_daro.plugins.megatron_rl", f"{tmp_path}/train_rl.py"]
    assert {"--perform-rl-step", "--rl-use-sequence-packing", "--calculate-per-token-loss"} <= set(words)
    assert words[words.index("--micro-batch-size") + 1] == "1"
    assert words[words.index("--load-from") + 1] == "START"


def test_nemo_rls_recipe_has_one_step_a_batch():
    words = command_of("nemo_rl/qwen2.5_math_7b.sh", "NEMO", "MODEL")
    given = dict(word.split("=", 1) for word in words if "=" in word)
    prompts, each = int(given["grpo.num_prompts_per_batch"]), int(given["grpo.num_generations_per_prompt"])
    assert int(given["policy.train_global_batch_size"]) == prompts * each
    assert given["data_plane.enabled"] == "false"
    assert Path(words[3]).is_file()
