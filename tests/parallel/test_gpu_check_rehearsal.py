"""The checks for a GPU, run on the CPU so that they cannot rot; and what the tool says where there is no GPU."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from test_gradients_exact import layouts

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tests" / "gpu"))

from gpu_checks import CHECKS, NO_TRANSFORMER_ENGINE  # noqa: E402  (found through the line above)

NOT_ON_A_CPU = {
    "weight gradients fused, bf16": NO_TRANSFORMER_ENGINE,
    "layers and attention are Transformer Engine's": NO_TRANSFORMER_ENGINE,
    "policy steps, fp8": NO_TRANSFORMER_ENGINE,
    "policy steps, fp8 blockwise": NO_TRANSFORMER_ENGINE,
    "policy steps, fp8 mxfp8": NO_TRANSFORMER_ENGINE,
    "fp8 against bf16, 50 steps": NO_TRANSFORMER_ENGINE,
    "checkpoint, fp8": NO_TRANSFORMER_ENGINE,
    "checkpoint before the first step, fp8": NO_TRANSFORMER_ENGINE,
    "checkpoint, qwen3_moe fp8": NO_TRANSFORMER_ENGINE,
    "routing and permutation of experts fused, bf16": NO_TRANSFORMER_ENGINE,
    "ten steps, a server with fp8 blocks beside": "servers multiply fp8 blocks on a GPU; "
    "tests/sglang/test_sglang_fp8_blocks.py sends them to one",
    "memory released": "it counts the memory of a GPU, and there is none",
    "weights by handles to a second process": "handles are of a GPU's memory, and there is none",
}


LONG = pytest.mark.skipif("MEGATRON_DARO_LONG" not in os.environ, reason="minutes: MEGATRON_DARO_LONG=1 runs it")


def run_check(layout, name, directory):
    """On a rank: (difference, tolerance, passed), or why the check cannot run here."""
    import torch
    from gpu_checks import CHECKS
    from gpu_outcomes import NotHereError

    try:
        outcome = CHECKS[name](torch.device("cpu"), directory)
    except NotHereError as reason:
        return str(reason)
    return outcome.difference, outcome.tolerance, outcome.passed


def rehearsed():
    """Checks that start ranks or a run take half a minute or two: one of them, the others with the heavy tests. Of lost
    ranks tests/fault does the same."""
    slow = {name for name in CHECKS if name.startswith(("training, ", "ten steps, "))} - {"training, CP 2"}
    marks = {name: [pytest.mark.heavy] for name in slow}
    marks |= {name: [LONG] for name in CHECKS if name.startswith("a rank killed")}
    return [pytest.param(name, marks=marks.get(name, [])) for name in CHECKS]


@pytest.mark.parametrize("name", rehearsed())
def test_each_check_holds_on_the_cpu(rank_pool, tmp_path, name):
    (found,) = rank_pool.run(run_check, layouts()["single"], name=name, directory=tmp_path)
    if name in NOT_ON_A_CPU:
        assert found == NOT_ON_A_CPU[name]
    else:
        assert found[2], found


def test_a_difference_that_is_no_number_does_not_pass():
    from gpu_outcomes import Outcome

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


def test_without_a_gpu_every_item_is_listed_as_not_run(tmp_path):
    report = tmp_path / "report.html"
    done = run_tool("--report", str(report))
    assert done.returncode == 2
    assert done.stderr.startswith("gpu_check: no GPU is visible to torch here, so nothing was checked.")
    listed = [line for line in done.stdout.splitlines() if "not here" in line and "no GPU is visible to torch" in line]
    assert len(listed) == len(CHECKS) + len(gpu_check().SPEEDS)
    assert not report.exists()


def gpu_check():
    sys.path.append(str(ROOT / "tools"))
    import gpu_check

    return gpu_check


def test_the_rehearsal_shows_checks_and_speed_and_writes_nothing(tmp_path):
    report = tmp_path / "report.html"
    done = run_tool("--rehearse", "--only", "log-probs, fp32", "--report", str(report))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "passed" in done.stdout
    # On a machine that is so busy that eight layers take no longer than one, there is nothing to reckon with.
    assert re.search("train step 7B bf16: (2 layers from 1 and 8|train step)", done.stdout), done.stdout
    assert "ERROR" not in done.stdout
    assert not report.exists()


ROWS = (
    ("good", "passed", "1e-06", "1e-04 (nats)", 1.0, 0.5),
    ("bad", "ERROR", "", "RuntimeError: a < b\nc", 1.0, None),
    ("absent", "not here", "", "no fp8", 0.0, None),
)


def test_the_report_names_what_failed():
    tool = gpu_check()
    rows = [tool.Row(*row) for row in ROWS]
    speed = ["train step", "10.0", "1,000", "2.00", "20 %", "FAILED: 20% of the peak, at least 30%"]
    rows[1] = replace(rows[1], gpus=2)
    text = tool.page(rows, {"train step": [speed]}, {"GPU": "a GPU"})
    assert "1 of 3 checks passed, 1 failed, 1 could not be run here." in text
    assert '<tr class="ERROR"><td>bad</td><td>ERROR</td><td></td><td>RuntimeError: a &lt; b\nc</td>' in text
    assert '<tr class="FAILED"><td>train step</td><td>10.0</td>' in text
    assert text.index("<h2>1 GPU</h2>") < text.index("absent") < text.index("<h2>2 GPUs</h2>") < text.index("<td>bad")
    written = json.loads(tool.as_json(rows, {"train step": [speed]}, {"GPU": "a GPU"}))
    assert [row["result"] for row in written["checks"]] == ["passed", "ERROR", "not here"]
    assert written["speed"] == [{"item": "train step", **dict(zip(tool.SPEED_COLUMNS, speed, strict=True))}]
    assert written["facts"] == {"GPU": "a GPU"}


def test_the_page_says_what_each_check_compares():
    said = gpu_check().what_each_compares()
    assert said.keys() == CHECKS.keys() and all(said.values())
    assert "against transformers" in said["policy log-probs, qwen3 fp32"]


def test_what_passed_on_the_same_machine_is_not_run_again(tmp_path, monkeypatch):
    tool, report, known = gpu_check(), tmp_path / "report.html", {"date": "2026-01-01", "GPU": "a GPU", "torch": "2.13"}
    nothing = {}, {}
    assert tool.found_before(report, known) == nothing
    slow, missed, absent = (["", "1.0", "", "", "", goal] for goal in ("reached: 1", "FAILED: 2", ""))
    absent[1] = "not here"
    speeds = {"log-probs fp32": [slow, [*slow[:-1], ""]], "log-probs bf16": [slow, missed], tool.STEPS[0]: [absent]}
    tool.write(report, [tool.Row(*row) for row in ROWS], speeds, known)
    kept = {"good": tool.Row(*ROWS[0])}, {"log-probs fp32": speeds["log-probs fp32"]}
    assert tool.found_before(report, {**known, "date": "2026-01-02"}) == kept
    assert tool.found_before(report, {**known, "torch": "2.14"}) == nothing
    monkeypatch.setattr(tool, "speed_lines", lambda name, device, small: [["measured", name]])
    *_, lines = tool.run_speed(None, kept[1], small=False)
    assert lines["log-probs fp32"] == kept[1]["log-probs fp32"] and list(lines) == list(tool.SPEEDS)
    assert lines[tool.STEPS[0]] == [["measured", tool.STEPS[0]]]


def test_each_check_is_listed_under_the_gpus_that_it_needs():
    from gpu_checks import gpus_of

    needed = {name: gpus_of(check) for name, check in CHECKS.items()}
    assert sorted(set(needed.values())) == [1, 2, 3, 8]
    assert needed["ten steps, GPUs shared with a server"] == needed["checkpoint, bf16"] == 1
    assert needed["ten steps, a server beside"] == needed["training, EP 2 of experts"] == 2
    assert [name for name, gpus in needed.items() if gpus == 8] == [
        "training, TP 2 PP 2 DP 2",
        "training, bf16, TP 2 CP 2 PP 2",
        "ten steps, TP 2 PP 2 with four servers beside, weights from shards to shards",
        "ten steps, TP 2 PP 2 with four servers beside",
    ]


def test_a_speed_below_its_goal_fails():
    tool = gpu_check()
    ours, plain, bare, triton = (SimpleNamespace(seconds=s) for s in (2.0, 9.0, 1.0, 1.5))
    assert tool.logprob_goals([ours, plain, bare])[0].startswith("reached: 2.0 of at most 3")
    assert tool.logprob_goals([plain, ours, bare])[0].startswith("FAILED: 9.0 of at most 3")
    assert tool.logprob_goals([ours, plain, bare, triton])[3] == "1.5 bare products", "on a GPU"
    assert tool.GOALS.keys() <= set(tool.SPEEDS)


def test_the_mfu_of_a_model_is_that_of_its_parts(monkeypatch):
    """A step of 2 s and half a second a layer, whose operations are counted by hand."""
    import gpu_speed

    def measured(device, directory, build_policy, *, shape, **options):
        depth = shape["num_hidden_layers"]
        return gpu_speed.Speed("", 2.0 + 0.5 * depth, 7.0 + depth, 100, 1e12 * depth + 3e12)

    monkeypatch.setattr(gpu_speed, "train_step_speed", measured)
    speed = gpu_speed.bracketed(None, Path(), None, shape={"num_hidden_layers": 28}, depths=(2, 6))
    assert (speed.seconds, speed.operations, speed.peak_gib) == (16.0, 31e12, 13.0)
    assert speed.mfu(31.0) == pytest.approx(1 / 16)
    monkeypatch.setattr(gpu_speed, "train_step_speed", lambda *a, **k: gpu_speed.Speed("", 1.0, None, 1))
    with pytest.raises(RuntimeError, match="6 layers took 1 s, 2 took 1 s"):
        gpu_speed.bracketed(None, Path(), None, shape={"num_hidden_layers": 28})
    assert gpu_speed.bracketed(None, Path(), None, shape={"num_hidden_layers": 28}, rehearsed=True).seconds == 1


def test_the_output_layer_counts_for_trained_tokens_only():
    import gpu_speed

    config = SimpleNamespace(hidden_size=8, num_attention_heads=2, num_key_value_heads=1, intermediate_size=10)
    config.num_hidden_layers, config.vocab_size = 3, 100
    batch = gpu_speed.equal_samples(4, 16, 100)  # an eighth is prompt
    layer = 8 * 8 * 2 + 2 * 8 * 4 + 3 * 8 * 10  # query and output, key and value, gated MLP
    by_hand = 6 * 3 * layer * 64 + 6 * 8 * 100 * 56 + 6 * 3 * 8 * 4 * 16**2
    assert gpu_speed.train_operations(config, batch) == by_hand


def test_layers_that_are_not_transformer_engines_are_counted():
    from gpu_checks import own_layers, unfused

    fused = type("TELinear", (torch.nn.Linear,), {})(2, 2)
    layers = torch.nn.ModuleDict({"linear_qkv": torch.nn.Linear(2, 2), "linear_proj": fused})
    assert own_layers([torch.nn.ModuleDict({"layer": layers})]) == 1
    assert own_layers([torch.nn.Linear(2, 2)]) == 1, "a model without layers proves nothing"
    assert unfused({"use_fused_attention": False, "use_flash_attention": False})
    assert not unfused({"use_fused_attention": True, "use_flash_attention": False})


def test_ranks_take_the_gpus_that_they_were_given():
    from gpu_processes import gpu_of

    assert [gpu_of(rank, {"CUDA_VISIBLE_DEVICES": "5, GPU-ab"}) for rank in range(2)] == ["5", "GPU-ab"]
    assert [gpu_of(rank, {}) for rank in range(2)] == ["0", "1"]


def test_ranks_need_a_gpu_each(tmp_path, monkeypatch):
    from gpu_outcomes import NotHereError

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(NotHereError, match=r"8 .*2"):
        CHECKS["training, TP 2 PP 2 DP 2"](torch.device("cuda"), tmp_path)
