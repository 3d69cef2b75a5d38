"""Gradients of every layout and algorithm against one process, unpacked, transformers' model and a slow loop."""

from __future__ import annotations

from dataclasses import replace

import megatron_tasks
import numpy as np
import pytest
import torch
from heavy_cases import mostly_heavy
from lab_names import configured
from small_models import ROLLOUTS, random_batch, save_model


def layouts():
    from megatron_daro.actor.parallel import Layout

    return {
        "single": Layout(),
        "tp2": Layout(tensor=2),
        "pp2": Layout(pipeline=2),
        "dp2": Layout(data=2),
        "cp2": Layout(context=2),
        "tp2_pp2": Layout(tensor=2, pipeline=2),
        "tp2_dp2": Layout(tensor=2, data=2),
        "cp2_dp2": Layout(context=2, data=2),
        "tp2_cp2": Layout(tensor=2, context=2),
        "pp2_vpp2": Layout(pipeline=2, virtual_pipeline=2),
    }


def layout_for(directory, name):
    """The layout of a name, in which experts with biases are not cut: Megatron-core cannot."""
    from megatron_daro.config.model_shape import read_model_shape

    return replace(layouts()[name], expert_tensor=1) if read_model_shape(directory).biases else layouts()[name]


LAYOUTS = list(layouts())
ALGORITHMS = ["grpo", "grpo_sequence", "dapo", "lite_ppo", "dr_grpo", "daro"]
RIVALS = ["maxrl", "f_grpo", "mgpo", "dgpo", "ha_dw", "fade"]
ANCHOR, POWER, SCALE = 0.3, 2.5, 0.6
EDGES = [8, 16]
WEIGHTS = [1.0, *np.geomspace(4.0, 0.25, ROLLOUTS - 1), 1.0]
"""Of DARO, learnt before the step that is compared."""
LEARNT = {
    "rollouts_per_prompt": ROLLOUTS,
    "parameter": "log",
    "values": np.log(WEIGHTS).tolist(),
    **dict.fromkeys(("first_moments", "second_moments", "steps"), [0] * (ROLLOUTS + 1)),
}
OF_ENVIRONMENTS = np.stack([WEIGHTS, WEIGHTS[::-1]], axis=1)
LEARNT_OF_ENVIRONMENTS = {
    **LEARNT,
    "environments": ["a", "b"],
    "values": np.log(OF_ENVIRONMENTS).reshape(-1).tolist(),
    **dict.fromkeys(("first_moments", "second_moments", "steps"), [0] * 2 * (ROLLOUTS + 1)),
}
STATES = {
    "ha_dw": {"anchor": ANCHOR, "anchors": [ANCHOR], "early": []},
    "fade": {"solved": 3 / 8, "entropy": 0.5, "target_entropy": 0.9},  # alpha 2.5, delta 0.6
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    directory = tmp_path_factory.mktemp("qwen2")
    return directory, save_model("qwen2", directory)


def rival_factor(algorithm, samples, i):
    """What multiplies 1 / N, or for dgpo 1 / (N of the mixed groups), written out for sample i."""
    mu = int(samples[i].bins_N[0]) / ROLLOUTS
    sign = float(np.sign(samples[i].advantages_N[0]))
    if algorithm == "dgpo":
        rates = {int(s.group_ids_N[0]): int(s.bins_N[0]) / ROLLOUTS for s in samples}
        mixed = [np.exp(-rate / 2) for rate in rates.values() if 0 < rate < 1]
        return np.exp(-mu / 2) * len(mixed) / sum(mixed) / (2 * mu * (1 - mu)) if 0 < mu < 1 else 0.0
    return {
        "maxrl": 1 / mu if mu else 0.0,
        "f_grpo": 1 - mu,
        "mgpo": np.exp(-sum(p * np.log(2 * p) for p in (mu, 1 - mu) if p)),
        "ha_dw": 1.3 * np.exp(-sign * (mu - ANCHOR)),
        "fade": (1 - mu) ** (POWER - 1) / (SCALE if sign < 0 else 1),
    }[algorithm]


def reference_gradients(model, batch, algorithm):
    """The loss of docs/algorithms.md written out sample by sample, token by token; autograd does the rest."""
    samples = [batch.select([i]) for i in range(len(batch))]
    tokens_per_bin = np.zeros(ROLLOUTS + 1)
    for s in samples:
        tokens_per_bin[s.bins_N[0]] += s.loss_mask_R.sum()
    tokens_per_cell = np.zeros((ROLLOUTS + 1, len(EDGES) + 1))
    tokens_of_environments = np.zeros((ROLLOUTS + 1, 2))
    for s in samples:
        tokens_of_environments[s.bins_N[0], environment_of(s)] += s.loss_mask_R.sum()
        length = int(s.loss_mask_R.sum())
        tokens_per_cell[s.bins_N[0], np.searchsorted(EDGES, length, "right")] += length
    total, kept = tokens_per_bin.sum(), tokens_per_bin[1:-1].sum()
    own_tokens = {int(g): batch.trained_tokens_N[batch.group_ids_N == g].sum() for g in batch.group_ids_N}
    mixed_prompts = len({int(s.group_ids_N[0]) for s in samples if 0 < s.bins_N[0] < ROLLOUTS})
    model.zero_grad()
    loss, loss_sums = torch.zeros((), dtype=torch.float64), np.zeros(ROLLOUTS + 1)
    for i, s in enumerate(samples):
        tokens = torch.tensor(s.tokens_T, dtype=torch.long)
        prompt, k, length = int(s.prompt_lengths_N[0]), int(s.bins_N[0]), int(s.loss_mask_R.sum())
        logp = torch.log_softmax(model(tokens[None]).logits[0], -1)[prompt - 1 : -1]
        logp = logp.gather(1, tokens[prompt:, None])[:, 0]
        advantage, sample_loss = float(s.advantages_N[0]), torch.zeros((), dtype=torch.float64)
        for t in range(len(logp)):
            if s.loss_mask_R[t]:
                rho = torch.exp(logp[t] - float(s.old_logprobs_R[t]))
                sample_loss = sample_loss - torch.min(rho * advantage, rho.clamp(0.8, 1.28) * advantage).double()
        loss_sums[k] += float(sample_loss.detach())
        if length == 0:
            continue
        rival = rival_factor(algorithm, samples, i) if algorithm in RIVALS else 0.0
        factor = {
            **dict.fromkeys(RIVALS, rival / (kept if algorithm == "dgpo" else total)),
            "grpo": 1 / total,
            "lite_ppo": 1 / total,
            "grpo_sequence": 1 / (length * len(samples)),
            "dapo": (0 < k < ROLLOUTS) / kept,
            "dapo_prompt": (0 < k < ROLLOUTS) / (own_tokens[int(s.group_ids_N[0])] * mixed_prompts),
            "dr_grpo": 1 / (len(samples) * 32),
            "daro": (0 < k < ROLLOUTS) / tokens_per_bin[k],
            "daro_shared": (0 < k < ROLLOUTS) * WEIGHTS[k] / kept,
            "daro_by_environment": (0 < k < ROLLOUTS)
            * OF_ENVIRONMENTS[k, environment_of(s)]
            / tokens_of_environments[k, environment_of(s)],
            "daro_by_length": (0 < k < ROLLOUTS) / tokens_per_cell[k, np.searchsorted(EDGES, length, "right")],
        }[algorithm]
        loss = loss + factor * sample_loss
    loss.backward()
    gradients = {name: p.grad.clone().numpy() for name, p in model.named_parameters()}
    return float(loss.detach()), loss_sums, gradients


def environment_of(sample):
    """The environment of a sample's group."""
    return int(sample.group_ids_N[0]) % 2


def relative_difference(got, want):
    """Largest difference of any parameter, relative to that parameter's largest gradient; an expert that no token met
    has none."""
    assert set(got) == set(want)
    return max(float(np.abs(got[n] - want[n]).max() / (np.abs(want[n]).max() or 1.0)) for n in want)


def merged(results):
    found = {}
    for result in results:
        found |= result["gradients"]
    return found


@pytest.mark.parametrize(
    ("family", "layout"),
    mostly_heavy(
        [
            # Each rank computes a part of the one key and value head, and all of them use it.
            ("llama_one_group", "tp2"),
            ("llama_one_group", "tp2_cp2"),
            ("olmo3_one_group", "tp2"),
            *(("olmo3", layout) for layout in LAYOUTS),
            *(("qwen3_5", layout) for layout in LAYOUTS if "cp2" not in layout),
        ],
        ("llama_one_group", "tp2"),
        ("llama_one_group", "tp2_cp2"),
        ("olmo3_one_group", "tp2"),
        ("olmo3", "tp2_cp2"),
        ("olmo3", "pp2"),
        ("qwen3_5", "tp2_pp2"),
    ),
)
def test_gradients_of_other_families(rank_pool, tmp_path, family, layout):
    hf, batch = save_model(family, tmp_path), random_batch()
    _, _, want = reference_gradients(hf, batch, "daro")
    results = rank_pool.run(
        megatron_tasks.gradients,
        layouts()[layout],
        path=tmp_path,
        batch=batch,
        num_micro_batches=4,
        algorithm={"name": "daro"},
    )
    assert relative_difference(merged(results), want) < 1e-5


CASES = mostly_heavy(
    [(layout, algorithm) for layout in LAYOUTS for algorithm in ALGORITHMS],
    *((layout, algorithm) for layout in ("tp2_pp2", "cp2_dp2") for algorithm in ALGORITHMS),
    *((layout, "daro") for layout in LAYOUTS if layout not in ("tp2_pp2", "cp2_dp2")),
)
# A rival differs by a number per sample, which no layout touches but through the split of samples and the totals.
CASES += [
    (layout, name) if layout == "cp2_dp2" else pytest.param(layout, name, marks=pytest.mark.heavy)
    for layout in LAYOUTS
    for name in RIVALS
]


@pytest.mark.parametrize(("layout", "algorithm"), CASES)
def test_gradients_equal_the_unpacked_reference(rank_pool, model, layout, algorithm):
    directory, hf = model
    batch = random_batch()
    loss, loss_sums, want = reference_gradients(hf, batch, algorithm)
    results = rank_pool.run(
        megatron_tasks.gradients,
        layouts()[layout],
        path=directory,
        batch=batch,
        num_micro_batches=4,
        algorithm={"name": configured(algorithm)},
        state=STATES.get(algorithm),
    )
    assert relative_difference(merged(results), want) < 1e-5
    for result in results:
        np.testing.assert_allclose(result["loss_sums"], loss_sums, rtol=1e-5, atol=1e-6)
        assert result["policy_loss"] == pytest.approx(loss, rel=1e-5, abs=1e-7)


FORMS = {
    "daro_by_environment": (
        {"name": "daro", "daro": {"weights_by": "environment_pass_rate"}},
        {"difficulty": LEARNT_OF_ENVIRONMENTS},
    ),
    "daro_by_length": ({"name": configured("daro_cells"), "options": {"length_edges": EDGES}}, None),
    "daro_shared": ({"name": "daro", "daro": {"normalizer": "shared"}}, {"difficulty": LEARNT}),
    "dapo_prompt": ({"name": "dapo", "options": {"denominator": "prompt"}}, None),
}


@pytest.mark.parametrize("layout", ["single", "cp2_dp2"])
@pytest.mark.parametrize("form", FORMS)
def test_gradients_of_other_forms(rank_pool, model, form, layout):
    directory, hf = model
    batch, (algorithm, state) = random_batch(), FORMS[form]
    batch = replace(batch, environments_N=batch.group_ids_N % 2)
    loss, _, want = reference_gradients(hf, batch, form)
    results = rank_pool.run(
        megatron_tasks.gradients,
        layouts()[layout],
        path=directory,
        batch=batch,
        num_micro_batches=4,
        algorithm=algorithm,
        state=state,
    )
    assert relative_difference(merged(results), want) < 1e-5
    assert all(result["policy_loss"] == pytest.approx(loss, rel=1e-5, abs=1e-7) for result in results)


def batch_of_conversations():
    """random_batch with an observation in the middle of each response that has room for one: three tokens that are not
    trained and have no log-prob, as megatron_daro.environments.environment makes them."""
    batch = random_batch()
    mask, old = np.ones_like(batch.loss_mask_R), batch.old_logprobs_R.copy()
    ends = np.cumsum(batch.response_lengths_N)
    for end, length in zip(ends, batch.response_lengths_N, strict=True):
        if length >= 5:
            observed = slice(end - length + length // 2 - 1, end - length + length // 2 + 2)
            mask[observed], old[observed] = 0, 0.0
    assert 0.7 < mask.mean() < 0.9
    return replace(batch, loss_mask_R=mask, old_logprobs_R=old, rollout_logprobs_R=old * mask)


TURN_CASES = [
    *(("tp2_pp2", "daro"), ("cp2_dp2", "daro"), ("tp2_cp2", "grpo")),
    *(
        pytest.param(layout, "daro", marks=pytest.mark.heavy)
        for layout in LAYOUTS
        if layout not in ("tp2_pp2", "cp2_dp2")
    ),
]


@pytest.mark.parametrize(("layout", "algorithm"), TURN_CASES)
def test_gradients_with_observations_between_turns_are_exact(rank_pool, model, layout, algorithm):
    directory, hf = model
    batch = batch_of_conversations()
    _, _, want = reference_gradients(hf, batch, algorithm)
    results = rank_pool.run(
        megatron_tasks.gradients,
        layouts()[layout],
        path=directory,
        batch=batch,
        num_micro_batches=4,
        algorithm={"name": configured(algorithm)},
    )
    assert relative_difference(merged(results), want) < 1e-5
