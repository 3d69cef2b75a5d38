"""PPO on ranks: values, the gradients of policy and critic in every layout, steps, checkpoints of both models."""

from __future__ import annotations

import shutil
from dataclasses import replace

import epoch_tasks
import numpy as np
import policy_tasks
import pytest
import torch
from heavy_cases import mostly_heavy
from safetensors.torch import load_file, save_file
from small_models import random_batch, save_model
from test_gradients_exact import LAYOUTS, layouts, merged, relative_difference
from test_token_advantages import label_logprobs, turns_batch
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification

from megatron_daro.convert.hf_files import copy_model_files
from megatron_daro.convert.mapping import critic_config

GAMMA, LAMBDA, ITS_LAMBDA, CLIP = 0.97, 0.9, 0.95, 0.2
OPTIONS = {"gamma": GAMMA, "gae_lambda": LAMBDA, "critic_lambda": ITS_LAMBDA}
USUAL = ("single", "tp2_pp2", "cp2_dp2", "pp2_vpp2")
USED = [name if name in USUAL else pytest.param(name, marks=pytest.mark.heavy) for name in LAYOUTS]


@pytest.fixture(scope="module", params=["qwen2", "qwen2_tied"])
def model(request, tmp_path_factory):
    """A policy, and a critic of other weights whose head is not 0."""
    return models(request.param, tmp_path_factory)


@pytest.fixture(scope="module")
def untied(tmp_path_factory):
    return models("qwen2", tmp_path_factory)


@pytest.fixture(scope="module")
def narrow(tmp_path_factory):
    return models("qwen2", tmp_path_factory, "qwen2_narrow")


def models(family, tmp_path_factory, its_family=None):
    policy, critic = tmp_path_factory.mktemp("policy"), tmp_path_factory.mktemp("critic")
    hf, its = save_model(family, policy), save_model(its_family or family, critic, seed=1)
    head = torch.randn(1, its.config.hidden_size, generator=torch.Generator().manual_seed(2)) * 0.3
    tensors = load_file(critic / "model.safetensors")
    save_file({**tensors, "score.weight": head}, critic / "model.safetensors", metadata={"format": "pt"})
    return policy, hf, critic, its, head


def section(critic=None, name="ppo", beta=0.0, **critic_options):
    path = {"path": str(critic)} if critic else {}
    kl = {"coefficient": beta, "estimator": "k1", "place": "token_reward"}
    return {"name": name, "options": OPTIONS, "kl": kl, "critic": {**path, **critic_options}}


def noisy_batch():
    batch = turns_batch()
    noise_R, moved_R = np.random.default_rng(4).normal(size=(2, len(batch.loss_mask_R))).astype(np.float32) * 0.4
    return replace(batch, values_R=noise_R, ref_logprobs_R=batch.old_logprobs_R + moved_R)


def values_of(its, head, sample):
    tokens, prompt = torch.tensor(sample.tokens_T, dtype=torch.long), int(sample.prompt_lengths_N[0])
    return (its.model(tokens[None]).last_hidden_state[0, prompt - 1 : -1] @ head.T)[:, 0]


def recursion(sample, values, lam, beta):
    """Advantages of the own tokens, last to first; a token's own reward is -beta (old - ref)."""
    mask, reward = sample.loss_mask_R, float(sample.rewards_N[0])
    kl = beta * (sample.old_logprobs_R.astype(float) - sample.ref_logprobs_R)
    found, following, later, first = {}, 0.0, 0.0, True
    for t in reversed(range(len(mask))):
        if mask[t]:
            following = (reward if first else 0.0) - kl[t] + GAMMA * later - values[t] + GAMMA * lam * following
            found[t], later, first = following, values[t], False
    return found


def reference(hf, its, head, batch, coefficients, beta=0.0):
    """Losses and gradients of both models by autograd through transformers' models, token by token; a policy's token
    counts with the coefficient of its sample."""
    samples = [batch.select([i]) for i in range(len(batch))]
    head = head.clone().requires_grad_()
    hf.zero_grad(), its.zero_grad()
    old = [(values_of(its, head, s).detach().double() + torch.tensor(s.values_R)).tolist() for s in samples]
    raw = [recursion(s, v, LAMBDA, beta) for v, s in zip(old, samples, strict=True)]
    its_own = [recursion(s, v, ITS_LAMBDA, beta) for v, s in zip(old, samples, strict=True)]
    flat = np.array([a for sample in raw for a in sample.values()])
    mean, deviation = flat.mean(), np.sqrt(flat.var(ddof=1) + 1e-8)
    policy, critic = (torch.zeros((), dtype=torch.float64) for _ in range(2))
    for s, before, advantages, errors, coefficient in zip(samples, old, raw, its_own, coefficients, strict=True):
        logp, values = label_logprobs(hf, s), values_of(its, head, s)
        for t, advantage in advantages.items():
            rho, a = torch.exp(logp[t] - float(s.old_logprobs_R[t])), (advantage - mean) / deviation
            policy = policy - torch.min(rho * a, rho.clamp(0.8, 1.28) * a).double() * coefficient
            target, near = errors[t] + before[t], values[t].clamp(before[t] - CLIP, before[t] + CLIP)
            worse = torch.max((values[t] - target) ** 2, (near - target) ** 2)
            critic = critic + 0.5 * worse.double() / len(flat)
    policy.backward(), critic.backward()
    gradients = {name: p.grad.clone().numpy() for name, p in hf.named_parameters()}
    its_gradients = {f"critic {n}": p.grad.clone().numpy() for n, p in its.model.named_parameters(prefix="model")}
    its_gradients["critic score.weight"] = head.grad.numpy()
    return float(policy.detach()), float(critic.detach()), gradients, its_gradients


@pytest.mark.parametrize("layout", USED)
def test_values_and_gradients_of_both_models_equal_one_process(rank_pool, model, layout):
    check_gradients(rank_pool, model, layouts()[layout])


@pytest.mark.heavy
def test_without_sequence_parallelism(rank_pool, untied):
    check_gradients(rank_pool, untied, layouts()["tp2_pp2"], sequence_parallel=False)


@pytest.mark.parametrize("layout", mostly_heavy(("single", "cp2_dp2", "tp2_pp2", "pp2_vpp2"), "tp2_pp2"))
def test_a_critic_of_half_the_width_and_twice_the_depth(rank_pool, narrow, layout):
    check_gradients(rank_pool, narrow, layouts()[layout])


@pytest.mark.parametrize("layout", ["cp2_dp2", pytest.param("tp2_pp2", marks=pytest.mark.heavy)])
def test_daros_weights_on_ppos_losses(rank_pool, untied, layout):
    """Their weights are 1 at first: each bin's mean of token losses counts once."""
    check_gradients(rank_pool, untied, layouts()[layout], name="daro_ppo")


def coefficients_of(batch, name):
    own_N = np.array([batch.select([i]).loss_mask_R.sum() for i in range(len(batch))])
    if name == "ppo":
        return np.full(len(batch), 1 / own_N.sum())
    bins_N, top = batch.bins_N, 4
    tokens = {k: own_N[bins_N == k].sum() for k in range(1, top)}
    assert sum(count > 0 for count in tokens.values()) > 1, "more than one bin"
    return np.array([1 / tokens[k] if 0 < k < top else 0.0 for k in bins_N.tolist()])


@pytest.mark.parametrize("layout", mostly_heavy(("single", "cp2_dp2", "tp2_pp2"), "cp2_dp2"))
def test_kl_in_the_reward_of_each_token(rank_pool, untied, layout):
    check_gradients(rank_pool, untied, layouts()[layout], beta=0.4)


def check_gradients(pool, model, layout, name="ppo", beta=0.0, **options):
    policy, hf, critic, its, head = model
    batch = noisy_batch()
    loss, value_loss, want, its_want = reference(hf, its, head, batch, coefficients_of(batch, name), beta)
    results = pool.run(
        policy_tasks.critic_gradients,
        layout,
        path=policy,
        batch=batch,
        num_micro_batches=4,
        algorithm=section(critic, name, beta, value_clip=CLIP),
        **options,
    )
    assert relative_difference(merged(results), want) < 1e-5
    its_got = {}
    for result in results:
        its_got |= result["critic"]
    assert relative_difference(its_got, its_want) < 1e-5
    parts = expected_metrics(its, head, batch, beta)
    norm = np.sqrt(sum(float((g.astype(np.float64) ** 2).sum()) for g in its_want.values()))
    for result in results:
        own = [batch.select([row]) for row in result["rows"]]
        values = np.concatenate([values_of(its, head, s).detach().numpy() for s in own])
        np.testing.assert_allclose(result["values"], values, rtol=0, atol=1e-5)
        assert result["policy_loss"] == pytest.approx(loss, rel=1e-5)
        assert result["metrics"]["critic/loss"] == pytest.approx(value_loss, rel=1e-5)
        assert result["metrics"]["critic/grad_norm"] == pytest.approx(norm, rel=1e-5)
        assert 0.1 < result["metrics"]["critic/clip_fraction"] < 0.9
        of_parts = {n: v for n, v in result["metrics"].items() if n.count("/") == 2}
        assert of_parts == pytest.approx(parts, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("layout", [name for name in USED if name != "single"])
def test_a_second_epoch_over_other_mini_batches_equals_one_process(rank_pool, untied, layout):
    """Groups of both mini-batches are mixed; every ratio, value and advantage is of before the first step."""
    policy, _, critic, *_ = untied
    batch = random_batch(groups=6, with_old=False)
    batch = batch.select(np.argsort(batch.group_ids_N, kind="stable"))
    algorithm = {**section(critic, value_clip=0.02, learning_rate=1e-3), "old_logprobs": "recompute", "clip_high": 0.02}
    found = [
        rank_pool.run(
            epoch_tasks.ppo_epochs,
            layouts()[name],
            path=policy,
            batch=batch,
            algorithm=algorithm,
            optimizer={"learning_rate": 1e-3, "eps": 1e-3, "distributed": False},
        )
        for name in ("single", layout)
    ]
    (one,), several = found
    assert one["clipped"] > 0.05, "nothing moved far enough for a clip"
    assert relative_difference(merged(several), one["gradients"]) < 1e-5
    assert all(result["policy_loss"] == pytest.approx(one["policy_loss"], rel=1e-5) for result in several)


def expected_metrics(its, head, batch, beta):
    """Means by pass rate and by tenth of the answer, token by token in plain Python."""
    found, raw = {}, []
    for i in range(len(batch)):
        s = batch.select([i])
        values = (values_of(its, head, s).detach().double() + torch.tensor(s.values_R)).tolist()
        own = [t for t, m in enumerate(s.loss_mask_R) if m]
        advantages, errors = recursion(s, values, LAMBDA, beta), recursion(s, values, ITS_LAMBDA, beta)
        side, k = "right" if s.correct_N[0] else "wrong", int(s.bins_N[0])
        for j, t in enumerate(own):
            tenth = int(10 * j / len(own))
            raw.append((k, advantages[t]))
            found.setdefault(f"critic/value_{side}/{tenth}", []).append(values[t])
            found.setdefault(f"critic/value/{k}", []).append(values[t])
            found.setdefault(f"critic/target/{k}", []).append(errors[t] + values[t])
    flat = np.array([a for _, a in raw])
    for k, a in raw:
        white = (a - flat.mean()) / np.sqrt(flat.var(ddof=1) + 1e-8)
        found.setdefault(f"critic/advantage/{k}", []).append(white)
        found.setdefault(f"critic/advantage_abs/{k}", []).append(abs(white))
    return {name: sum(values) / len(values) for name, values in found.items()}


@pytest.mark.parametrize("layout", mostly_heavy(("single", "tp2_pp2"), "tp2_pp2"))
def test_an_exported_critic_says_the_same_in_transformers_and_here(rank_pool, tmp_path, model, layout):
    """As a sequence classifier, whose `score` reads each token (TRL's convention), as a token classifier (verl's), and
    as `critic.path` of another run. A tied policy's critic has no output layer to be tied."""
    policy, _, critic, _, head = model
    batch = noisy_batch()
    results = rank_pool.run(
        policy_tasks.exported_critic, layouts()[layout], path=policy, batch=batch, algorithm=section(critic)
    )
    tensors = {name: tensor for result in results for name, tensor in result["tensors"].items()}
    copy_model_files(critic, tmp_path, "float32", always=True, changes=critic_config("qwen2"))
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert torch.equal(tensors["score.weight"], head) and "lm_head.weight" not in tensors
    sequence, report = AutoModelForSequenceClassification.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values()) and sequence.num_labels == 1
    token = AutoModelForTokenClassification.from_pretrained(tmp_path)
    for result in results:
        start = 0
        for row in result["rows"]:
            sample = batch.select([row])
            tokens, prompt = torch.tensor(sample.tokens_T, dtype=torch.long)[None], int(sample.prompt_lengths_N[0])
            own = result["values"][start : start + len(sample.loss_mask_R)]
            start += len(own)
            of_sequence = sequence.score(sequence.model(tokens).last_hidden_state)
            for values in (of_sequence, token(tokens).logits):
                np.testing.assert_allclose(values[0, prompt - 1 : -1, 0].detach(), own, rtol=0, atol=1e-5)
    again = rank_pool.run(
        policy_tasks.exported_critic, layouts()[layout], path=policy, batch=batch, algorithm=section(tmp_path)
    )
    for one, other in zip(results, again, strict=True):
        np.testing.assert_array_equal(one["values"], other["values"])


def steps(pool, layout, model, seeds, algorithm, **options):
    return pool.run(
        policy_tasks.ppo_steps,
        layouts()[layout],
        path=model[0],
        batches=[random_batch(seed=seed) for seed in seeds],
        algorithm=algorithm,
        **options,
    )


@pytest.mark.parametrize(
    "layout", ["dp2", *(pytest.param(n, marks=pytest.mark.heavy) for n in ("tp2_pp2", "pp2_vpp2"))]
)
def test_a_restarted_run_is_the_unbroken_one_bit_for_bit(rank_pool, tmp_path, untied, layout):
    algorithm = section(untied[2], learning_rate=1e-3, warmup_steps=3, pretrain_steps=1)
    whole = steps(rank_pool, layout, untied, range(4), algorithm)
    saved = tmp_path / "checkpoint"
    saved.mkdir()
    steps(rank_pool, layout, untied, range(2), algorithm, save_to=saved)
    resumed = steps(rank_pool, layout, untied, range(2, 4), algorithm, load_from=saved, first=3)
    for one, other in zip(whole, resumed, strict=True):
        assert other["metrics"] == one["metrics"][2:]
        assert any(name.startswith("critic optimizer") for name in one["end"])
        for name, value in one["end"].items():
            np.testing.assert_array_equal(other["end"][name], value, err_msg=name)


@pytest.mark.heavy
def test_another_layout_continues_with_the_same_numbers(rank_pool, tmp_path, untied):
    algorithm = section(untied[2], learning_rate=1e-3)
    optimizer = {"optimizer": {"learning_rate": 1e-3, "eps": 1e-3}}
    whole = steps(rank_pool, "tp2_pp2", untied, range(4), algorithm, **optimizer)
    saved = tmp_path / "checkpoint"
    saved.mkdir()
    steps(rank_pool, "tp2_pp2", untied, range(2), algorithm, save_to=saved, **optimizer)
    resumed = steps(rank_pool, "cp2_dp2", untied, range(2, 4), algorithm, load_from=saved, first=3, **optimizer)
    keys = ("critic/loss", "critic/value_mean", "critic/explained_variance", "loss/policy")
    for one, other in zip(whole[0]["metrics"][2:], resumed[0]["metrics"], strict=True):
        assert [other[k] for k in keys] == pytest.approx([one[k] for k in keys], rel=1e-3, abs=1e-5)


@pytest.mark.parametrize(
    ("layout", "options"),
    [
        ("dp2", {}),
        pytest.param("tp2_pp2", {"precision": "bf16"}, marks=pytest.mark.heavy),
        pytest.param("tp2_dp2", {"precision": "bf16", "optimizer": {"distributed": False}}, marks=pytest.mark.heavy),
    ],
    ids=["dp2", "tp2_pp2_bf16", "tp2_dp2_plain_bf16"],
)
def test_models_that_take_turns_on_the_device_train_as_two_that_stay(rank_pool, tmp_path, untied, layout, options):
    """Through saves and loads too; one of the two has no memory at any time."""
    its = {"learning_rate": 1e-3, "warmup_steps": 3, "pretrain_steps": 1}
    stay, turns = (section(untied[2], **its, offload=offload) for offload in (False, True))
    saved, whole = _made(tmp_path / "checkpoint"), steps(rank_pool, layout, untied, range(4), stay, **options)
    begun = steps(rank_pool, layout, untied, range(2), turns, save_to=saved, leaves=True, **options)
    ended = steps(rank_pool, layout, untied, range(2, 4), turns, load_from=saved, first=3, **options)
    for stayed, first, last in zip(whole, begun, ended, strict=True):
        assert first["metrics"] + last["metrics"] == stayed["metrics"]
        assert all(left["policy"] > 0 < left["critic"] for left in stayed["left"])
        for name, value in stayed["end"].items():
            np.testing.assert_array_equal(last["end"][name], value, err_msg=name)
        for after_step, later in (first["left"], last["left"]):
            assert after_step["critic"] > 0 == after_step["policy"], "the critic is updated last"
            assert later["policy"] > 0 == later["critic"]


def test_neither_is_updated_from_what_is_not_finite(rank_pool, untied):
    """An infinite head makes targets that are no numbers: nothing at all changes."""
    tensors = load_file(untied[2] / "model.safetensors")
    broken = untied[2].parent / "broken"
    if not broken.exists():
        shutil.copytree(untied[2], broken)
        save_file(tensors | {"score.weight": tensors["score.weight"] * float("inf")}, broken / "model.safetensors")
    (result,) = steps(rank_pool, "single", untied, [0], section(broken))
    assert result["metrics"] == [{"skipped": 1.0}]
    assert not [name for name in result["changed"] if "parameter" in name]


def _made(directory):
    directory.mkdir()
    return directory
