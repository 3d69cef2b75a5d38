"""Each recipe passes `train --dry-run` for its cluster on this machine, fits its GPUs, and so do its baselines."""

from __future__ import annotations

import json
import re
import runpy
import shutil
from pathlib import Path

import pytest
from weightless import SHARED, save_recipe_model

from megatron_daro.cli import main
from megatron_daro.config import resolve
from megatron_daro.config.model_shape import read_model_shape
from megatron_daro.config.placement import demand_of
from megatron_daro.workshop.plan.gpus import find_gpu
from megatron_daro.workshop.plan.layout import ModelLayout
from megatron_daro.workshop.plan.memory import HEADROOM, trainer_memory
from megatron_daro.workshop.plan.times import micro_batches_of
from megatron_daro.workshop.plan.workload import workload_of

ROOT = Path(__file__).resolve().parents[3]
RECIPES = [*sorted((ROOT / "examples" / "recipes").glob("*.yaml")), ROOT / "examples" / "lab" / "at-1.5b.yaml"]
PREPARE = ROOT / "examples" / "recipes" / "prepare_data.py"
NAMES = [path.stem for path in RECIPES]
BASELINES, LADDER = (
    re.findall(r"^\| [^|]+ \| `(algorithm\.name=[^`]+)` \|$", part, re.M)
    for part in (ROOT / "examples/recipes/README.md").read_text().split("### DAPO's ladder")
)
WRAPPED = (
    "Solve the following math problem step by step. The last line ...\n\n{}\n\n"
    'Remember to put your answer on its own line after "Answer:".'
)

pytestmark = [pytest.mark.shared, pytest.mark.slow]


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A directory with the files that recipes name: real configurations, tokenizers and evaluation sets; weights of no
    size, and two rows to train on."""
    if not SHARED.is_dir():
        pytest.skip(f"needs the model configurations in {SHARED}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    row = json.dumps({"problem": "1 + 1?", "answer": "2"}) + "\n"
    (tmp_path / "data").mkdir()
    for name in ("dapo_math_17k", "gsm8k_train", "math_train"):
        (tmp_path / "data" / f"{name}.jsonl").write_text(row * 2)
    prepare = runpy.run_path(str(PREPARE))
    for name in ("aime24", "aime25", "amc23", "math500", "minerva_math", "olympiadbench", "gsm8k_test"):
        (source,) = (SHARED / "eval").glob(f"{name}[._]*.jsonl")
        monkeypatch.setattr("sys.argv", ["prepare_data.py", "--out", "data", "--name", name, str(source)])
        prepare["main"]()
    return tmp_path


@pytest.mark.parametrize("recipe", RECIPES, ids=NAMES)
def test_a_recipe_passes_its_dry_run_and_fits_its_gpus(recipe, place, capsys):
    model = save_recipe_model(recipe, place)
    assert main(["train", str(recipe), "--dry-run"]) == 0, capsys.readouterr().err
    config = resolve(recipe)
    shape, actor, gpu = read_model_shape(model), config.actor, find_gpu("h100-80g")
    assert demand_of(config).gpus <= config.cluster.nodes * (config.cluster.gpus_per_node or 0)
    layout = ModelLayout.of(actor)
    workload = workload_of(config, shape)
    data = actor.data_parallel
    memory = trainer_memory(
        workload, layout, shards=data * layout.context, micro_batches=micro_batches_of(workload, layout, data)
    )
    assert memory.total <= HEADROOM * gpu.memory_bytes


@pytest.mark.parametrize("recipe", RECIPES[:-1], ids=NAMES[:-1])
def test_the_layout_of_a_recipe_is_the_planners_first_choice(recipe, place):
    """Of the GPUs and lengths that its header names; else run the header's command with --write."""
    save_recipe_model(recipe, place)
    (command,) = re.findall(r"`megatron-daro plan (--gpus \d+ --gpu \S+)`", recipe.read_text())
    copy = place / recipe.name
    shutil.copy(recipe, copy)
    assert main(["plan", str(copy), *command.split(), "--write"]) == 0
    assert resolve(copy) == resolve(recipe)
    assert int(command.split()[1]) == resolve(recipe).cluster.nodes * 8


@pytest.mark.parametrize("options", BASELINES)
def test_the_baselines_pass_their_dry_run(options, place, capsys):
    recipe = RECIPES[NAMES.index("qwen2.5-math-7b")]
    save_recipe_model(recipe, place)
    assert main(["train", str(recipe), "--dry-run", *options.split()]) == 0, capsys.readouterr().err


def test_four_worked_problems_stand_before_each(place, capsys):
    recipe = RECIPES[NAMES.index("llama-3.1-8b")]
    save_recipe_model(recipe, place)
    options = [(recipe.parent / "four_shot.txt").read_text().strip(), 'rollout.stop=["Problem:"]']
    options += ["data.max_prompt_tokens=1280", "rollout.max_response_tokens=3840"]
    assert main(["train", str(recipe), "--dry-run", *options]) == 0, capsys.readouterr().err
    template = resolve(recipe, options).data.template
    assert template.count("\nSolution: ") == template.count("\\boxed{") == 4
    assert template.endswith("\n\nProblem: {prompt}\nSolution:")


def test_there_are_recipes_and_baselines():
    assert len(RECIPES) == 13 and len(BASELINES) == 8 and len(LADDER) == 6


TECHNIQUES = [
    ("algorithm.overlong", "filter"),
    ("algorithm.clip_high", 0.28),
    ("algorithm.overlong", "penalty"),
    ("algorithm.mean", "tokens"),
    ("algorithm.filter", "pass_rate"),
]
"""What each rung of DAPO's ladder adds to the one before it, in the order of the paper's table 1."""


def technique_values(config):
    """Where a run stands in each of DAPO's techniques."""
    algorithm = config.algorithm
    kind = {"none": set(), "both": {"filter", "penalty"}}.get(algorithm.overlong.kind, {algorithm.overlong.kind})
    return {
        *(("algorithm.overlong", name) for name in kind),
        ("algorithm.clip_high", algorithm.clip_high),
        ("algorithm.mean", "rollouts" if algorithm.name == "grpo_sequence" else "tokens"),
        ("algorithm.filter", "pass_rate" if algorithm.name == "dapo" else "none"),
    }


@pytest.mark.parametrize("rung", range(6))
def test_each_rung_of_dapos_ladder_passes_its_dry_run_without_a_remark(rung, place, capsys):
    recipe = RECIPES[NAMES.index("qwen2.5-32b")]
    save_recipe_model(recipe, place)
    options = LADDER[rung].split()
    assert main(["train", str(recipe), "--dry-run", *options]) == 0, capsys.readouterr().err
    printed = capsys.readouterr()
    assert "oversampling: got" not in printed.out + printed.err and "incorrect_reward: got" not in printed.out
    config = resolve(recipe, options)
    assert [t in technique_values(config) for t in TECHNIQUES] == [True] * rung + [False] * (5 - rung)
    assert (config.reward.correct_reward, config.reward.incorrect_reward) == (1.0, -1.0)


def test_the_data_script_writes_each_problem_once(place, monkeypatch, capsys):
    prepare = runpy.run_path(str(PREPARE))
    file = place / "raw.jsonl"
    with file.open("w") as out:
        for problem, answer in [("a", "1"), ("a", "1"), ("b", "2"), ("c", "3"), ("c", "4")]:
            chat = [{"role": "user", "content": WRAPPED.format(problem)}]
            out.write(json.dumps({"prompt": chat, "reward_model": {"ground_truth": answer}}) + "\n")
    found, left_out = prepare["prepared"]([file])
    assert found == {"a": "1", "b": "2"} and left_out == {"repeated": 2, "two answers": 1}
    real, _ = prepare["prepared"]([SHARED / "train" / "dapo_math_17k.svs.parquet"])
    assert len(real) > 17000
