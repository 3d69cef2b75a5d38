"""A whole run of a mixture of experts trains with the experts that its SGLang server chose, and so does its replay."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
import tiny_task
from books import assert_books_add_up
from cli_runs import trained
from sglang_pool import SERVER_ENVIRONMENT, cpu_servers

from megatron_daro.observe.metrics import read_metrics
from megatron_daro.rollout.recorder import read_step

pytestmark = [pytest.mark.slow, pytest.mark.heavy, pytest.mark.timeout(1200)]

STEPS, EXPERTS, CHOSEN = 3, 4, 2


@pytest.fixture
def config(tiny, tmp_path):
    """The tiny task with a Qwen3-MoE on two ranks, each with half of the experts, and one server."""
    sglang = cpu_servers(env=SERVER_ENVIRONMENT, sync="distributed")
    model = tmp_path / "base"
    tiny_task.save_tokenizer(model, tiny_task.SYMBOLS)
    own = {"num_experts": EXPERTS, "num_experts_per_tok": CHOSEN, "moe_intermediate_size": 32, "norm_topk_prob": True}
    tiny_task.pretrain(model, family="Qwen3MoeConfig", head_dim=8, **own)
    changes = {
        "model": {"path": str(model)},
        "actor": {"expert_parallel": 2, "routing_replay": True},
        "engine": {"kind": "sglang", "replicas": 1, "sglang": sglang},
        "rollout": {"max_refill_rounds": 20},
        "trainer": {"steps": STEPS, "save_every_steps": 0},
    }
    return tiny.write_config(tmp_path / "experts.yaml", changes)


def test_a_run_trains_with_the_experts_of_its_rollouts(config, tmp_path, record_property):
    run_dir = tmp_path / "run"
    trained(["train", config, f"trainer.run_dir={run_dir}"], tmp_path / "log")
    lines = [line for line in read_metrics(run_dir) if line["step"]]
    assert len(lines) == STEPS
    for line in lines:
        assert_books_add_up(line)
        assert line["mismatch/logprob_abs_mean"] < 1e-4 and abs(line["ratio/mean"] - 1) < 1e-4
        assert np.isfinite(line["loss/policy"]) and line["loss/grad_norm"] > 0
    record_property("log-probs of server and trainer apart", max(line["mismatch/logprob_abs_max"] for line in lines))
    groups = [pair for step in range(1, STEPS + 1) for pair in read_step(run_dir, step)]
    told = [r.routed_experts.read() for group, used in groups if used == "trained" for r in group.rollouts]
    assert {experts.shape[1:] for experts in told} == {(2, CHOSEN)}
    kept = {part.path for g, used in groups if used == "trained" for r in g.rollouts for part in r.routed_experts.parts}
    settled = {str(group.group_id) for group, _ in groups}
    there = {str(file) for file in (run_dir / "experts").rglob("*.npy") if file.parent.name in settled}
    assert there == kept, "experts of groups that did not train, or of earlier attempts, are gone"
    assert {int(number) for experts in told for number in np.unique(experts[:-1])} == set(range(EXPERTS))

    same, other = (replayed(config, run_dir, tmp_path / name, change) for name, change in CHANGES.items())
    assert same["mismatch/logprob_abs_mean"] < 1e-4
    assert same["loss/grad_norm"] == pytest.approx(lines[0]["loss/grad_norm"], rel=1e-4)
    record_property("the same with other experts than the server chose", other["mismatch/logprob_abs_max"])
    assert other["mismatch/logprob_abs_mean"] > 0.01, "the experts of the record must be those that are met"


CHANGES = {
    "same": lambda experts: experts,
    "other": lambda experts: EXPERTS - 1 - experts,
}


def replayed(config, run_dir, copy, change):
    """The metrics of the first step when it is trained again from the record with these experts."""
    for folder in ("rollouts", "experts"):
        shutil.copytree(run_dir / folder, copy / "recorded" / folder)
    for file in (copy / "recorded" / "experts").rglob("*.npy"):
        np.save(file, change(np.load(file)))
    options = [f"trainer.run_dir={copy / 'run'}", "trainer.steps=1"]
    trained(["train", config, "--replay", copy / "recorded", *options], copy / "log")
    return next(line for line in read_metrics(copy / "run") if line["step"] == 1)
