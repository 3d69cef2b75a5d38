"""The adapter inside verl's real code: its estimator registry, its training worker with the FSDP engine, its loss.

Runs in an environment that has verl 0.9.1 (tests/host_environments.sh makes it); skipped elsewhere.
"""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import verl_batches as batches
from algo_reference import AdamWeight
from host_ranks import run_ranks, unlike

from megatron_daro.errors import AlgorithmError

pytest.importorskip("verl", reason="needs verl 0.9.1: bash tests/host_environments.sh verl")
K = batches.K


@pytest.fixture(scope="module")
def adapter():
    import megatron_daro.plugins.verl as adapter

    return adapter


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A random Qwen2 on disk and in memory."""
    from transformers import AutoModelForCausalLM, Qwen2Config

    config = Qwen2Config(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        intermediate_size=48,
        vocab_size=batches.VOCAB,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    made = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    directory = tmp_path_factory.mktemp("model")
    made.save_pretrained(directory)
    return directory, made


def installed(folder):
    """The package's metadata as an installation writes it, in a folder for PYTHONPATH."""
    folder.mkdir()
    command = [sys.executable, "setup.py", "-q", "egg_info", "--egg-base", str(folder)]
    subprocess.run(command, cwd=Path(__file__).parents[2], check=True, timeout=120)
    return str(folder)


@pytest.mark.parametrize(("size", "by"), [(1, "entry-point"), (2, "variable")])
def test_three_real_steps_of_verl_have_the_reference_gradient(model, tmp_path, monkeypatch, size, by):
    """Uneven micro-batches by verl's own token budget, sharded over gloo ranks; then weights, metrics and a resume."""
    directory, reference_model = model
    if by == "entry-point":
        monkeypatch.setenv("PYTHONPATH", installed(tmp_path / "metadata"), prepend=os.pathsep)
    ranks = run_ranks("verl_ranks.py", size, tmp_path, directory, by)
    weights, worst = [AdamWeight() for _ in range(K + 1)], 0.0
    named = dict(reference_model.named_parameters())
    for step in range(3):
        with torch.no_grad():
            for name, parameter in named.items():
                parameter.copy_(ranks[0]["parameters"][step][name])
        now, whole = [weight.w for weight in weights], batches.samples(step)
        loss, bin_losses = batches.reference(reference_model, whole, now)
        for found in ranks:
            assert set(found["gradients"][step]) == set(named)
            worst = max(worst, *(unlike(found["gradients"][step][n], p.grad) for n, p in named.items()))
            metrics = found["metrics"][step]
            assert metrics["loss/policy"] == pytest.approx(loss, rel=1e-5)
            assert {"actor/pg_clipfrac", "actor/ppo_kl", "actor/pg_clipfrac_lower"} <= set(metrics)
            for k in range(1, K):
                assert metrics[f"difficulty/loss/{k}"] == pytest.approx(bin_losses[k], rel=1e-4)
                assert metrics[f"difficulty/weight/{k}"] == pytest.approx(now[k], rel=1e-4)
                assert metrics[f"difficulty/groups/{k}"] >= 1
        for k in range(1, K):
            weights[k].update(abs(bin_losses[k]))
    assert worst < 1e-5, worst
    print(f"largest error of 3 steps: {worst:.1e}")
    for found in ranks:
        assert not any("difficulty" in name for name in found.get("plain", ["difficulty"] * (by == "entry-point")))
        assert found["state"] == ranks[0]["state"], "every rank holds the same weights"
        assert found["resumed"] == found["state"][-1]
        assert found["metrics"][-1]["difficulty/weight/2"] != 1
    assert (tmp_path / "checkpoint" / "daro.json").is_file()
    assert_the_report_reads_what_verl_logged(tmp_path / "logs" / "0", ranks[0]["metrics"])


def assert_the_report_reads_what_verl_logged(folder, metrics):
    """By verl's own logger, under the names that its trainer gives."""
    from megatron_daro.workshop.report.host_metrics import load_host_run

    run = load_host_run(folder, "verl")
    for key in ("difficulty/weight/2", "difficulty/loss/1", "loss/policy"):
        assert run.values(key) == pytest.approx([row[key] for row in metrics])
    assert len(run.values("loss/grad_norm")) == len(metrics)


@pytest.mark.parametrize("ranks", ["0,1", "0"])
def test_the_driver_hears_from_every_worker_on_a_real_ray(tmp_path, ranks):
    """A worker without the plug-in is met before it trains a batch of DARO as plain PPO."""
    here = Path(__file__).parent
    paths = os.pathsep.join([str(here), str(here.parents[1]), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-W", "ignore", str(here / "verl_ray_run.py"), ranks]
    # An installed megatron_daro would load itself in every process.
    environment = {**os.environ, "PYTHONPATH": paths, "VERL_USE_EXTERNAL_PLUGINS": "none"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    text = done.stdout + done.stderr
    if ranks == "0":
        assert "before: ['DaroTrainingWorker', 'TrainingWorker']" in text, text[-2000:]
        assert done.returncode and "worker 1 of verl's actor has verl's own loss" in text and "after: [" not in text
    else:
        assert done.returncode == 0 and "DARO is in force on all 2 workers" in text, text[-2000:]


def estimate(whole, rewards=None, config=None):
    from verl.trainer.ppo.core_algos import get_adv_estimator_fn

    estimator = get_adv_estimator_fn("daro")
    rewards = batches.token_rewards(whole) if rewards is None else rewards
    return estimator(
        token_level_rewards=rewards,
        response_mask=batches.response_mask(whole),
        index=batches.uids(whole),
        config=config or {},
    )


def test_the_registered_estimator_agrees_with_verls_grpo_but_for_the_divisor(adapter):
    from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage

    whole = batches.samples(0)
    advantages, returns = estimate(whole)
    theirs, _ = compute_grpo_outcome_advantage(
        batches.token_rewards(whole), batches.response_mask(whole), batches.uids(whole)
    )
    # verl divides by the sample standard deviation of the group, DARO by the population one.
    torch.testing.assert_close(theirs, advantages * ((K - 1) / K) ** 0.5, rtol=1e-4, atol=1e-5)
    rates = {s.uid: np.mean([o.correct for o in whole if o.uid == s.uid]) for s in whole}
    wanted = torch.tensor([rates[s.uid] for s in whole], dtype=torch.float32)
    torch.testing.assert_close(returns[:, 0] - adapter.MARK, wanted)


def test_the_estimator_runs_through_verls_own_dispatch(adapter):
    from verl import DataProto
    from verl.trainer.ppo.ray_trainer import compute_advantage

    whole = batches.samples(0)
    data = DataProto.from_dict(
        tensors={"token_level_rewards": batches.token_rewards(whole), "response_mask": batches.response_mask(whole)},
        non_tensors={"uid": batches.uids(whole)},
    )
    data = compute_advantage(data, adv_estimator="daro", config={})
    torch.testing.assert_close(data.batch["returns"], estimate(whole)[1])


def test_shaped_rewards_need_a_threshold(adapter, monkeypatch):
    whole = batches.samples(0)
    shaped = batches.token_rewards(whole)
    shaped[:, 1] = -0.25
    with pytest.raises(AlgorithmError, match="correct_above"):
        estimate(whole, shaped)
    monkeypatch.setenv("MEGATRON_DARO_OPTIONS", "correct_above=0.5")
    torch.testing.assert_close(estimate(whole, shaped)[1], estimate(whole)[1])


def test_an_incomplete_group_has_no_signal_and_many_are_refused(adapter):
    whole = batches.samples(0)
    short = [s for i, s in enumerate(whole) if i != whole.index(next(s for s in whole if s.uid == "prompt 2"))]
    advantages, returns = estimate(short)
    mine = torch.tensor([s.uid == "prompt 2" for s in short])
    assert int(mine.sum()) == K - 1
    assert not advantages[mine].any()
    assert bool((returns[mine] == adapter.MARK).all())
    with pytest.raises(AlgorithmError, match="5 of 6"):
        firsts = {s.uid: s for s in whole if s.uid != "prompt 0"}
        estimate([s for s in whole if s is not firsts.get(s.uid)])


def test_verls_padding_rows_are_no_group(adapter):
    """As verl 0.9.1's upsample_batch_to_divisible_size makes them: one uid, one masked token, more of them than K."""
    from verl import DataProto
    from verl.trainer.ppo.padding_utils import construct_minimal_padding_template
    from verl.trainer.ppo.ray_trainer import compute_advantage

    whole, extra = batches.samples(0), 6
    one = {"input_ids": torch.zeros(3, dtype=torch.int64), "response_mask": torch.ones(2, dtype=torch.int64)}
    row, tag = construct_minimal_padding_template(one, {}, eos_token_id=1)
    assert tag["is_padding"] and row["response_mask"].tolist() == [0]
    masked = torch.zeros(extra, batches.LONGEST, dtype=torch.int64)
    data = DataProto.from_dict(
        tensors={
            "token_level_rewards": torch.cat([batches.token_rewards(whole), masked.float()]),
            "response_mask": torch.cat([batches.response_mask(whole), masked]),
        },
        non_tensors={"uid": np.concatenate([batches.uids(whole), np.array(["pad0"] * extra, dtype=object)])},
    )
    data = compute_advantage(data, adv_estimator="daro", num_repeat=K, config={})
    torch.testing.assert_close(data.batch["returns"][: len(whole)], estimate(whole)[1])
    assert not data.batch["advantages"][len(whole) :].any()


def test_k_is_rollout_n_and_not_the_largest_group(adapter):
    from verl import DataProto
    from verl.trainer.ppo.ray_trainer import compute_advantage

    whole = batches.samples(0)
    tensors = {"token_level_rewards": batches.token_rewards(whole), "response_mask": batches.response_mask(whole)}
    for wrong in (K - 1, K + 1):
        data = DataProto.from_dict(tensors=tensors, non_tensors={"uid": batches.uids(whole)})
        with pytest.raises(AlgorithmError, match=f"{wrong} answers.*{K}"):
            compute_advantage(data, adv_estimator="daro", num_repeat=wrong, config={})


def actor_config(**options):
    from verl.workers.config import ActorConfig

    base = {"strategy": "fsdp2", "rollout_n": K, "ppo_micro_batch_size_per_gpu": 1, "clip_ratio_high": 0.28}
    return ActorConfig(**{**base, **options})


@pytest.mark.parametrize("scale", [1, 2])
def test_the_first_step_compares_with_verls_own_loss(adapter, monkeypatch, scale):
    """The probe is red where verl's own loss has another scale."""
    from verl.utils import tensordict_utils as tu

    own_loss = adapter.get_policy_loss_fn("vanilla")
    monkeypatch.setattr(adapter, "get_policy_loss_fn", lambda name: lambda **given: (scale * own_loss(**given)[0], {}))
    whole = batches.samples(0)
    advantages, returns = estimate(whole)
    data = batches.as_tensordict(whole, advantages, returns, part=range(len(whole)))
    tokens = sum(sum(s.mask) for s in whole)
    tu.assign_non_tensor(data, dp_size=1, batch_num_tokens=tokens, global_batch_size=len(whole))
    step = adapter.DifficultyStep(adapter.read_options("").algorithm(K))
    bins = torch.tensor([sum(other.correct for other in whole if other.uid == s.uid) for s in whole])
    step.begin(bins, torch.tensor([sum(s.mask) for s in whole]), adapter.over_group(None))
    log_probs = torch.full((sum(len(s.prompt) + len(s.response) for s in whole),), -3.9, requires_grad=True)
    loss = partial(adapter.daro_loss, config=actor_config(), step=step)
    if scale == 1:
        loss(model_output={"log_probs": log_probs}, data=data)[0].backward()
        assert log_probs.grad.any()
    else:
        with pytest.raises(AlgorithmError, match="loss of the first step"):
            loss(model_output={"log_probs": log_probs}, data=data)


def test_analyze_reads_what_verl_writes(tmp_path):
    from verl.trainer.ppo.ray_trainer import RayPPOTrainer

    from megatron_daro.workshop.analyze.columns import Wanted
    from megatron_daro.workshop.analyze.dump import infer_rollouts_per_prompt, read_dump
    from megatron_daro.workshop.analyze.files import files_of
    from megatron_daro.workshop.analyze.rows import open_file

    whole = batches.samples(0)
    scores = [float(s.correct) for s in whole]
    extra = {"acc": [bool(s.correct) for s in whole], "pred": ["?"] * len(whole)}
    texts = ["x" * len(s.response) for s in whole]
    RayPPOTrainer._write_generations([s.uid for s in whole], texts, ["1"] * len(whole), scores, extra, tmp_path, 7)
    files = files_of(tmp_path)
    columns, rows = open_file(files[0], Wanted())
    assert (columns.names, files[0].name) == (["input", "output", "acc"], "7.jsonl")
    assert infer_rollouts_per_prompt(rows) == K
    dump = read_dump([open_file(files[0], Wanted())[1]], K)
    assert float(dump.total.groups.sum()) == batches.GROUPS
    assert float(dump.total.right_tokens.sum()) == sum(len(s.response) for s in whole if s.correct)
