"""`megatron-daro rehearse` of real recipes: the loop finishes, and a lost node ends it with its ranks named."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest
from weightless import SHARED, save_recipe_model

from megatron_daro.cli import main
from megatron_daro.workshop.rehearse import loop

ROOT = Path(__file__).resolve().parents[2]
SMALL = ("rollout.prompts_per_step=32", "rollout.max_response_tokens=512", "trainer.updates_per_batch=1")
SMALLER_PENALTY = "algorithm.overlong.cache_tokens=128"

pytestmark = pytest.mark.shared


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A directory with what recipes name: real configurations, a real tokenizer, weights of no size."""
    if not SHARED.is_dir():
        pytest.skip(f"needs the model configurations in {SHARED}")
    monkeypatch.chdir(tmp_path)
    rows = "".join(json.dumps({"problem": f"{i} + 1?", "answer": str(i + 1)}) + "\n" for i in range(200))
    (tmp_path / "data").mkdir()
    for name in ("dapo_math_17k", "aime24", "math500"):
        (tmp_path / "data" / f"{name}.jsonl").write_text(rows)
    return tmp_path


def recipe_of(name: str, place: Path) -> Path:
    recipe = ROOT / "examples" / "recipes" / f"{name}.yaml"
    save_recipe_model(recipe, place)
    return recipe


def rehearsed(recipe: Path, place: Path, *options: str) -> dict:
    """The record of a rehearsal in a process of its own."""
    command = [sys.executable, "-m", "megatron_daro", "rehearse", str(recipe), "--json", "--mean-response", "100"]
    ended = subprocess.run([*command, *options], cwd=place, capture_output=True, text=True, timeout=280)
    assert ended.returncode in (0, 1) and "{\n" in ended.stdout, ended.stderr[-2000:]
    found = json.loads(ended.stdout[ended.stdout.index("{\n") :])
    assert ended.returncode == (0 if found["holds"] else 1)
    # What a small machine needs for its work is no matter of these tests.
    assert all("own work" in fault or "CPU seconds" in fault for fault in found["faults"]), found["faults"]
    return found


@pytest.mark.heavy
def test_a_lost_node_ends_the_run_and_its_ranks_are_named(place):
    recipe = recipe_of("qwen2.5-32b", place)
    found = rehearsed(recipe, place, "--nodes", "16", "--lose-node", "3", *SMALL, SMALLER_PENALTY)
    loss = found["loss"]
    assert found["world"].startswith("64 ranks (TP 2, PP 2") and found["steps"] == [1]
    # TP 2 x PP 2: two replicas a node, and the second stage of one is 32 ranks on.
    assert loss["ranks"] == [12, 13, 14, 15, 44, 45, 46, 47] == loss["died"] and loss["waiting"] == 56
    assert found["status"] == "failed" and len(loss["named_by_the_driver"]) == 1
    assert found["error"].startswith("WorkerDiedError: actor rank ")
    assert found["driver"]["rank_calls"][0] >= 2 * 64 and found["driver"]["cpu_s"][0] > 0
    assert found["ports"] == {"chosen": 16, "clashes": 0}
    assert found["planned"]["checkpoint"]["files"] == 64 and len(found["planned"]["weight_buckets"]) == 2


def test_too_few_nodes_are_refused_as_a_dry_run_refuses_them(place, capsys):
    recipe = recipe_of("qwen2.5-32b", place)
    assert main(["rehearse", str(recipe), "--nodes", "15"]) == 2
    said = capsys.readouterr().err
    assert main(["train", str(recipe), "--dry-run", "cluster.nodes=15", "cluster.gpus_per_node=8"]) == 2
    assert said == capsys.readouterr().err and "no room for" in said
    assert main(["rehearse", str(recipe), "--nodes", "16", "--lose-node", "16"]) == 2
    assert "--lose-node: got 16; allowed" in capsys.readouterr().err


@pytest.mark.heavy
def test_servers_that_are_lost_do_not_end_the_run(place):
    recipe = recipe_of("qwen2.5-32b", place)
    found = rehearsed(recipe, place, "--nodes", "16", "--lose-node", "12", *SMALL, SMALLER_PENALTY)
    assert found["status"] == "finished" and found["steps"] == [1, 2, 3] and found["loss"]["servers"] == [4]
    assert any("server 4" in notice and "is given up" in notice for notice in found["notices"])


@pytest.mark.heavy
@pytest.mark.timeout(600)
def test_1024_ranks(place):
    recipe = recipe_of("llama-3.3-70b", place)
    layout = ["actor.tensor_parallel=2", "actor.pipeline_parallel=4", "actor.data_parallel=128"]
    options = [*layout, "rollout.prompts_per_step=64", *SMALL[1:]]
    found = rehearsed(recipe, place, "--nodes", "144", "--steps", "2", *options)
    assert found["world"].startswith("1024 ranks") and found["status"] == "finished"
    assert found["driver"]["rank_calls"][1] >= 1024 and found["planned"]["checkpoint"]["files"] == 1024


@pytest.mark.heavy
@pytest.mark.timeout(400)
def test_a_wait_without_an_end_is_found_and_named(place, monkeypatch, capsys):
    """An optimizer step that never ends: in a run its limit is four hours."""

    async def endless(self, batch, step):
        await asyncio.Event().wait()

    monkeypatch.setattr(loop.ThinPolicyGroup, "train", endless)
    recipe = recipe_of("qwen2.5-32b", place)
    options = ["--nodes", "16", "--steps", "1", "--mean-response", "100", *SMALL, SMALLER_PENALTY]
    assert main(["rehearse", str(recipe), *options]) == 1
    said = capsys.readouterr()
    assert "verdict: does not hold" in said.out and "deadline 'train' (" in " ".join(said.err.split())
