"""What the small commands hand on and print: check-layout, check-loss, plan, submit."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import yaml

from megatron_daro.actor.parallel import Layout
from megatron_daro.cli import main
from megatron_daro.commands import check_layout, plan, submit
from megatron_daro.config import resolve
from megatron_daro.config.check_training import FIRST_STAGE, LAST_STAGE
from megatron_daro.workshop.check_layout import RankShare, WorldReport
from megatron_daro.workshop.check_loss import pool, search
from megatron_daro.workshop.check_loss.records import Case
from megatron_daro.workshop.plan import history, scaling
from megatron_daro.workshop.plan import search as planning
from megatron_daro.workshop.slurm import submission

MODEL = {
    "model_type": "llama",
    "num_hidden_layers": 8,
    "hidden_size": 64,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "intermediate_size": 128,
    "vocab_size": 100,
    "eos_token_id": 1,
}


@pytest.fixture
def model(tmp_path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    return tmp_path / "config.json"


SHARES = (RankShare(0, 0, 5000, 2**30), RankShare(1, 0, 5000, 2**30), RankShare(2, 1, 7, 2**29))
WORLD = WorldReport(Layout(tensor=2), 3, 12345, SHARES)


@pytest.fixture
def actors(monkeypatch) -> list[Any]:
    """The worlds that are asked for, in place of ranks."""
    asked: list[Any] = []
    monkeypatch.setattr(check_layout, "_checked", lambda actor, file: asked.append((actor, file)) or WORLD)
    return asked


def test_every_size_of_a_layout_has_its_option(actors, model, capsys):
    sizes = "--world 32 --tp 2 --pp 4 --vpp 1 --cp 2 --ep 1 --first-layers 1 --last-layers 3"
    assert main(["check-layout", str(model), *sizes.split()]) == 0
    ((actor, file),) = actors
    assert file == model and (actor.world_size, actor.data_parallel, actor.context_parallel) == (32, 2, 2)
    assert (actor.tensor_parallel, actor.pipeline_parallel, actor.expert_tensor_parallel) == (2, 4, None)
    assert actor.megatron == {FIRST_STAGE: 1, LAST_STAGE: 3}
    assert main(["check-layout", str(model), "--world", "8", "--pp", "2", "--vpp", "4"]) == 0
    assert actors[1][0].virtual_pipeline_parallel == 4 and actors[1][0].megatron == {}
    assert main(["check-layout", str(model), "--world", "8", "--ep", "2", "--etp", "3"]) == 2
    assert "actor.expert_tensor_parallel: got 3" in capsys.readouterr().err


def test_a_world_that_replicas_do_not_fill_is_told_the_next(actors, model, capsys):
    assert main(["check-layout", str(model), "--world", "7", "--tp", "2", "--cp", "2"]) == 2
    assert "got 7; allowed: a multiple of TP 2 * PP 1 * CP 2 = 4; fix: use --world 8" in capsys.readouterr().err
    assert main(["check-layout", str(model), "--world", "6", "--tp", "4", "--pp", "3"]) == 2
    assert "= 12; fix: use --world 12" in capsys.readouterr().err and not actors


def test_ranks_that_hold_as_much_share_a_line(actors, model, capsys):
    assert main(["check-layout", str(model), "--world", "2"]) == 0
    out = capsys.readouterr().out
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in out.splitlines() if "GiB" in line]
    assert rows == [["0", "2", "5,000", "1.000 GiB"], ["1", "1", "7", "0.500 GiB"]]
    assert "3 tensors, 12,345 parameters: each is used exactly once by every replica" in out
    assert "all 3 ranks" in " ".join(out.split())
    assert main(["check-layout", str(model), "--world", "2", "--json"]) == 0
    out = capsys.readouterr().out
    assert json.loads(out)["ranks"][2] == {"rank": 2, "stage": 1, "parameters": 7, "size_bytes": 2**29}
    assert out.startswith('{\n  "layout": {\n    "tensor": 2')


@pytest.fixture
def searched(monkeypatch) -> list[dict[str, Any]]:
    """Searches for a case that differs, and the report that each gets."""
    calls: list[dict[str, Any]] = []
    found = search.Report("m:f", [search.Row("one", True, 0.0)], seconds=2.6)
    calls.append({"report": found})
    pools = SimpleNamespace(__enter__=lambda self: "pool", __exit__=lambda self, *_: None)
    monkeypatch.setattr(pool, "CasePool", type("Pool", (), vars(pools)))
    monkeypatch.setattr(pool, "find_function", lambda name: calls[0].update(function=name))

    def check(function, progress, **options):
        for row in (search.Row("one", True, 1e-7), search.Row("two", False, 0.1234)):
            progress(row)
        calls.append({"function": function, **options})
        return calls[0]["report"]

    monkeypatch.setattr(search, "check", check)
    return calls


def test_an_exact_loss_is_said_to_be_exact(searched, capsys):
    assert main(["check-loss", "m:f"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        f"  per-token on   {'one':<38} exact",
        f"  per-token off  {'two':<38} differs by 0.12",
        "exact: 1 cases in 3 s agree with one process to 1e-5",
    ]
    assert searched[0]["function"] == "m:f"
    assert searched[1] == {
        "function": "m:f",
        "pool": "pool",
        "flags": (True, False),
        "uses": ["advantages"],
        "whole": False,
        "seconds": 20.0,
        "seed": 0,
    }


def test_options_reach_the_search(searched):
    options = "--per-token off --uses rewards,,ref_logprobs --samples whole --seconds 1.5 --seed 3"
    assert main(["check-loss", "m:f", *options.split()]) == 0
    assert searched[1] == {
        "function": "m:f",
        "pool": "pool",
        "flags": (False,),
        "uses": ["rewards", "ref_logprobs"],
        "whole": True,
        "seconds": 1.5,
        "seed": 3,
    }
    assert main(["check-loss", "m:f", "--per-token", "on"]) == 0 and searched[2]["flags"] == (True,)


def test_the_smallest_case_of_a_wrong_loss_is_written(searched, tmp_path, capsys):
    case = Case(1, 1, 2, (((0, 1),),), (3, 3), (4, 4))
    script = tmp_path / "case.py"
    searched[0]["report"] = search.Report("m:f", [], case, 0.12345, "a sum", seconds=1.2)
    assert main(["check-loss", "m:f", "--script", str(script)]) == 1
    assert capsys.readouterr().out.splitlines()[2:] == [
        "NOT exact, found in 1 s",
        "likely cause: a sum",
        f"smallest case: {case.describe()}",
        "largest difference, relative to the gradient: 0.123",
        f"repeat it: torchrun --nproc-per-node 2 {script}",
    ]
    assert "m:f differs from one process" in script.read_text() and "Likely cause: a sum." in script.read_text()


def test_a_loss_that_raises_says_its_error_and_has_no_script(searched, tmp_path, capsys):
    searched[0]["report"] = search.Report("m:f", cause="it raised", error="ValueError: no\n\n")
    assert main(["check-loss", "m:f", "--script", str(tmp_path / "case.py")]) == 1
    assert capsys.readouterr().out.splitlines()[2:] == [
        "NOT exact, found in 0 s",
        "likely cause: it raised",
        "ValueError: no",
    ]
    assert not (tmp_path / "case.py").exists()


@pytest.fixture
def recipe(tmp_path, model) -> Path:
    """Of a small model on servers."""
    tree = {"model": {"path": str(tmp_path)}, "data": {"train": ["a"]}, "rollout": {"max_response_tokens": 512}}
    tree |= {"engine": {"kind": "sglang"}, "trainer": {"steps": 7, "updates_per_batch": 2, "save_every_steps": 5}}
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


def test_a_plan_costs_whole_batches_and_asks_for_what_is_given(recipe, capsys, monkeypatch):
    asked = []
    real = planning.search
    monkeypatch.setattr(
        planning, "search", lambda *given, **options: asked.append((given, options)) or real(*given, **options)
    )
    options = "--gpus 4 --mean-response 100 --mean-prompt 50 --best 2 --price 3 --json"
    assert main(["plan", str(recipe), *options.split()]) == 0
    record = json.loads(capsys.readouterr().out)
    (((workload, gpu, gpus), options),) = asked
    assert (workload.mean_response, workload.mean_prompt) == (pytest.approx(100, rel=0.01), 50) and gpus == 4
    assert gpu.name == "h100-80g" and options == {"constants": None, "best": 2}
    assert len(record["choices"]) == 2 and "shard_sync" not in record
    choice = record["choices"][0]
    assert choice["gpu_hours"] == pytest.approx(4 * choice["seconds"]["step"] * 4 / 3600), "4 batches of 2 of 7 steps"
    assert choice["cost"] == pytest.approx(3 * choice["gpu_hours"])


def test_a_plan_of_a_run_has_its_lengths_and_times(recipe, tmp_path, monkeypatch, capsys):
    run = history.History(resolve(recipe), np.array([10, 30]), 5.0, 6.0, 3.0, 1.0, 0.5, 12.0, 9)
    monkeypatch.setattr(history, "read_history", lambda path: run)
    shapes = []
    constants = history.Constants(generation_factor=2.0, training_factor=3.456)
    monkeypatch.setattr(history, "fitted", lambda of, shape, gpu: shapes.append((of, shape, gpu.name)) or constants)
    assert main(["plan", str(recipe), "--gpus", "4", "--from", "some/run", "--json"]) == 0
    printed = capsys.readouterr()
    assert printed.err == (
        "some/run: 9 steps, median 12.0 s (generation 6.0, training 4.0, sync 0.5), answers of 20 tokens; against the "
        "assumed constants generation took 2 times as long, training 3.46 times\n"
    )
    assert shapes[0][0] is run and shapes[0][1].layers == 8 and shapes[0][2] == "h100-80g"
    assert json.loads(printed.out)["choices"]


def test_a_simulation_says_every_size_and_where_it_ends(monkeypatch, tmp_path, capsys):
    sizes = [SimpleNamespace(gpus=n, tokens_per_s=n * 100.0, step=1.25, bound_by="generation") for n in (8, 16)]
    asked = []
    monkeypatch.setattr(scaling, "simulate", lambda *given, **options: asked.append((given, options)) or sizes)
    monkeypatch.setattr(scaling, "write_plot", lambda *given: asked.append(given))
    workload, gpu = SimpleNamespace(samples=64), SimpleNamespace(name="x", gpus_per_node=8)
    plan._simulate(workload, gpu, 16, 100.0, "constants", 0, tmp_path / "a.html")
    assert asked[0] == ((workload, gpu, [8, 16], scaling.Failures(100.0, save_every=1)), {"constants": "constants"})
    assert asked[1] == (sizes, tmp_path / "a.html", "64 answers a batch on x")
    assert capsys.readouterr().err.splitlines() == [
        "     8 GPUs:          800 tokens/s, step 1.2 s, generation",
        "    16 GPUs:         1600 tokens/s, step 1.2 s, generation",
        f"scales to 16 GPUs; plot: {tmp_path}/a.html",
    ]
    sizes[1].tokens_per_s = 801.0
    plan._simulate(workload, gpu, 16, 100.0, None, 3, tmp_path / "a.html")
    assert asked[2][0][3] == scaling.Failures(100.0, save_every=3)
    assert capsys.readouterr().err.splitlines()[-1].startswith("stops to scale at 8 GPUs: generation; plot: ")


def test_scaling_is_simulated_with_what_the_run_saves(recipe, monkeypatch, tmp_path):
    asked = []
    monkeypatch.setattr(plan, "_simulate", lambda *given: asked.append(given))
    assert main(["plan", str(recipe), "--gpus", "4", "--scaling", "p.html", "--mtbf-hours", "9"]) == 0
    ((workload, gpu, *rest),) = asked
    assert rest == [4, 9.0, None, 2, Path("p.html")] and gpu.name == "h100-80g" and workload.samples == 512


@pytest.fixture
def slurm(tmp_path, monkeypatch, recipe) -> Any:
    """Runs `submit` with commands of Slurm that write down what they are given."""
    log = tmp_path / "log"
    answers = {
        "sbatch": "echo 17; echo sbatch $* >> {log}",
        "squeue": "echo squeue >> {log}",
        "sinfo": "echo 'up|8|infinite'",
    }
    (tmp_path / "bin").mkdir()
    for name, body in answers.items():
        tool = tmp_path / "bin" / name
        tool.write_text(f"#!/bin/bash\n{body.format(log=log)}\n")
        tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    monkeypatch.setattr(submission, "check_cluster", lambda job, site: log.open("a").write("checked\n"))
    site = tmp_path / "cluster.yaml"
    site.write_text("{partition: gpu, gpus_per_node: 8, nodes: 2, gpu_option: none, time: '2:00:00'}")
    for name in ("model.safetensors", "tokenizer.json"):
        (tmp_path / name).write_text("{}")
    (tmp_path / "a.jsonl").write_text("{}")

    def run(*options: str) -> list[str]:
        log.write_text("")
        command = ["submit", str(recipe), f"data.train={tmp_path}/a.jsonl", f"trainer.run_dir={tmp_path}/run"]
        from megatron_daro.config import loading

        monkeypatch.setattr(loading, "check", lambda config, hardware: SimpleNamespace(problems=(), warnings=("mind",)))
        assert main([*command, "--cluster", str(site), *options]) == 0
        return [" ".join(line.split()[:2]) for line in log.read_text().splitlines()]

    return run


def test_a_job_is_tried_before_it_is_submitted(slurm, tmp_path, capsys):
    assert slurm() == ["checked", "squeue", "sbatch --test-only", "sbatch --parsable"]
    out = capsys.readouterr()
    assert out.err == "warning: mind\n"
    folder = submission.job_of(
        resolve(tmp_path / "recipe.yaml", [f"trainer.run_dir={tmp_path}/run"]), tmp_path, [], SITE
    ).folder
    assert out.out.splitlines() == [
        f"script: {folder / submission.SCRIPT_FILE}",
        f"logs: {folder}/job_17.log, and a directory for each attempt beside it",
        f"a shell beside the training, while it runs: bash {folder}/attach.sh",
        "submitted: 17 (2 nodes, gpu); look with: squeue -j 17",
    ]
    assert slurm("--no-test-only") == ["checked", "squeue", "sbatch --parsable"]


def test_a_job_can_be_tried_only_or_shown_only(slurm, capsys):
    assert slurm("--test-only") == ["checked", "sbatch --test-only"]
    assert capsys.readouterr().out == "17\n"
    assert slurm("--dry-run") == []
    assert capsys.readouterr().out.startswith("#!/bin/bash\n")


def test_jobs_of_a_chain_wait_for_each_other(slurm, capsys):
    assert slurm("--chain", "2", "--no-test-only")[2:] == ["sbatch --parsable"] * 2
    assert "submitted: 17, 17 (2 nodes, gpu)" in capsys.readouterr().out


SITE = submission.ClusterFile.model_validate({"partition": "gpu", "gpus_per_node": 8, "nodes": 2})


@pytest.mark.parametrize(
    "overrides",
    [["engine.kind=embedded"], ['engine.sglang.urls=["http://h:1"]']],
)
def test_without_servers_of_its_own_a_run_has_no_planned_signal(recipe, overrides):
    assert submit._signal_before_s(resolve(recipe, overrides), SITE, 2) == (0, [])
    assert submit._signal_before_s(resolve(recipe), SITE.model_copy(update={"gpus_per_node": 0}), 2) == (0, [])


def test_the_signal_leaves_time_for_two_steps_and_a_checkpoint(recipe, monkeypatch):
    from megatron_daro.workshop.plan import layout, times

    weights = []
    monkeypatch.setattr(layout, "checkpoint_bytes", lambda shape, weight: weights.append(weight) or 41 * 2**30)
    monkeypatch.setattr(times, "train_times", lambda *given: SimpleNamespace(total=100.0))
    monkeypatch.setattr(times, "generation_s", lambda *given: 150.0)
    config = resolve(recipe)
    assert submit._signal_before_s(config, SITE, 2) == (60 * 11, []), "2 * 250 + 41 GiB at 1 GiB/s + 60 = 601"
    assert submit._signal_before_s(config, SITE, 100) == (60 * 10, []), "at most 4 GiB/s"
    ahead = resolve(recipe, ["rollout.max_staleness=1", "actor.precision=fp32", "cluster.gpu=X9"])
    assert submit._signal_before_s(ahead, SITE, 2) == (60 * 7, []), "2 * 150 + 41 + 60"
    assert weights == [2, 2, 4]
    enough, short = (SITE.model_copy(update={"signal_before_s": seconds}) for seconds in (351, 350))
    assert submit._signal_before_s(config, enough, 2) == (660, [])
    assert submit._signal_before_s(config, short, 2) == (
        660,
        [
            "signal_before_s: got 350; a step is planned to take 250 s on h100-80g, and a checkpoint of 41 GiB about "
            "41 s, so training may not have saved when the time limit ends it, and what it did since its last "
            "checkpoint is lost; fix: leave signal_before_s unset, which takes 660"
        ],
    )


NUMBER_IN_COLOUR = "\x1b[1;36m"


def test_numbers_have_no_colour_of_their_own_on_a_terminal(actors, model, recipe, monkeypatch, capsys):
    from megatron_daro.workshop import doctor

    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setattr(doctor, "diagnose", lambda *_: [doctor.Finding("ok", "part 3", "found 4", "fix 5")])
    plan_of_recipe = ["plan", str(recipe), "--gpus", "4", "--best", "1"]
    for command in (["check-layout", str(model), "--world", "2"], ["doctor"], plan_of_recipe):
        assert main(command) == 0
        out = capsys.readouterr().out
        assert out and NUMBER_IN_COLOUR not in out, command


def test_a_plan_has_the_width_of_its_tables(recipe, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["plan", str(recipe), "--gpus", "4", "--best", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert 120 < max(map(len, lines)) <= 210 and "shards" not in " ".join(lines).lower()
