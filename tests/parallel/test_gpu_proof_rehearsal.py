"""The checks for a GPU, run on the CPU so that they cannot rot; and what the tool says where there is no GPU."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from test_gradients_exact import layouts

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tests" / "gpu"))

from gpu_checks import CHECKS  # noqa: E402  (found through the line above)
from gpu_outcomes import NO_TRANSFORMER_ENGINE  # noqa: E402

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
    **dict.fromkeys(
        ("memory released", "weights by handles to a second process", "memory paused under handles"),
        "it is about the memory of a GPU, and there is none",
    ),
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
    slow = {name for name in CHECKS if name.startswith(("training, ", "ten steps, ", "ranks on one GPU"))}
    slow -= {"training, CP 2", "ranks on one GPU, PP 2"}
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
        [sys.executable, str(ROOT / "tools" / "gpu_proof.py"), *arguments],
        capture_output=True,
        text=True,
        timeout=280,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        check=False,
    )


def gpu_proof():
    sys.path.append(str(ROOT / "tools"))
    import gpu_proof

    return gpu_proof


def items():
    return [name for some in gpu_proof().parts().values() for name in some]


def test_without_a_gpu_every_item_is_listed_as_not_run(tmp_path):
    done = run_tool("--out", str(tmp_path / "results.jsonl"))
    assert done.returncode == 2
    assert done.stderr.startswith("gpu_proof: no GPU is visible to torch here, so nothing was run.")
    assert [line.partition("  ")[2] for line in done.stdout.splitlines()] == items()
    assert not list(tmp_path.iterdir())


def test_what_pages_name_of_it_is_there():
    """Words of `--only` that fit nothing would run nothing."""
    named = [f"{title}: {name}" for title, some in gpu_proof().parts().items() for name in some]
    pages = "".join(path.read_text() for path in (ROOT / "docs").glob("*.md"))
    words = [
        word for line in re.findall(r"gpu_proof\.py --only (.+)", pages) for word in re.findall(r'"([^"]+)"', line)
    ]
    assert len(words) >= 5 and all(any(word in name for name in named) for word in words), words


def test_every_check_is_in_one_part():
    assert CHECKS.keys() <= set(items()) and len(set(items())) == len(items())


@pytest.mark.heavy
def test_the_rehearsal_measures_and_what_is_done_is_not_run_again(tmp_path):
    out = tmp_path / "results.jsonl"
    words = ["--rehearse", "--out", str(out), "--only", "packed attention, fp32", "Steps", "step of", "speed of"]
    words.append("Healing")
    done = run_tool(*words)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = {row["name"]: row for row in map(json.loads, out.read_text().splitlines())}
    assert {row["result"] for row in rows.values()} == {"passed", "measured", "not here"}, rows
    assert rows["packed attention, fp32"]["result"] == "passed" and rows["step of 7B, bf16"]["numbers"]["ms"] > 0
    assert list(tmp_path.iterdir()) == [out], "a rehearsal writes no report"
    left = [name for name, row in rows.items() if row["result"] == "not here"]
    assert run_tool("--resume", *words).stdout.startswith(f"not here  {left[0]}")
    assert run_tool("--budget", "1", *words).stdout.startswith("0 items")


def test_a_process_that_dies_costs_one_item(tmp_path):
    """The first process ends within the second item; the next one goes on with the third."""
    tool, out, started = gpu_proof(), tmp_path / "results.jsonl", []

    def process(until, after):
        started.append(after)
        for name, result in {"": (("a", "passed"), ("b", "begun")), "b": (("c", "passed"),)}[after]:
            tool.append(out, row_of(name, result))
        return 0 if after else -11

    tool.supervise(out, time.time() + 60, process)
    assert started == ["", "b"]
    found = {row["name"]: row["result"] for row in tool.read(out)}
    assert found == {"a": "passed", "b": "ERROR", "c": "passed"}
    assert tool.supervise(out, time.time() + 60, lambda until, after: 1) == 1, "it ended within no item"


def row_of(name, result, said="", gpu="a GPU"):
    return {"name": name, "date": "2026-01-01", "on": {"GPU": gpu, "torch": "2"}, "result": result, "said": said} | {
        "numbers": {}, "seconds": 1.0, "peak_gib": 0.5
    }  # fmt: skip


def test_the_report_names_what_failed_and_what_each_compares(tmp_path):
    tool, out = gpu_proof(), tmp_path / "results.jsonl"
    rows = [row_of("policy log-probs, qwen3 fp32", "passed"), row_of("bad", "ERROR", "a | b"), row_of("bad", "passed")]
    rows += [row_of("killed", "begun"), row_of("bad", "FAILED", gpu="another")]
    for row in rows:
        tool.append(out, row)
    (tmp_path / "verified.md").write_text("before\n" + "\n".join(tool.MARKS) + "\nafter\n")
    page, verified = (path.read_text() for path in tool.write_report(out))
    assert page.index("## a GPU") < page.index("against transformers") < page.index("| policy log-probs, qwen3 fp32")
    assert page.index("| bad | passed") < page.index("## another") < page.index("| bad | FAILED")
    assert verified.startswith("before") and verified.endswith("after\n")
    assert "* Formerly: 1 passed, 1 begun" in verified and "* Formerly: 1 FAILED" in verified
    assert "* Recomputation: step of 7B, recompute full" in verified, "on no GPU so far"


def test_the_report_in_docs_is_that_of_its_data(tmp_path):
    names = ("gpu_proof.jsonl", "gpu_proof.md", "verified.md")
    for name in names:
        shutil.copy(ROOT / "docs" / name, tmp_path)
    gpu_proof().write_report(tmp_path / names[0])
    for name in names:
        assert (tmp_path / name).read_text() == (ROOT / "docs" / name).read_text(), "python tools/gpu_proof.py --report"


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


def test_a_whole_model_is_reckoned_from_two_depths():
    """A step of 2 s and half a second a layer, 7 GiB and one a layer."""
    import gpu_measures

    two, six = (gpu_measures.Speed(2.0 + 0.5 * n, 7.0 + n, 8.0 + n, 3e12 + 1e12 * n) for n in (2, 6))
    assert two.deeper(six, (28 - 2) / 4) == gpu_measures.Speed(16.0, 35.0, 36.0, 31e12)


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
