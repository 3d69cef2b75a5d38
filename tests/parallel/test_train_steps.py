"""Several optimizer steps: the same parameters and DARO weights in every layout, against torch's own AdamW."""

from __future__ import annotations

import itertools

import megatron_tasks
import numpy as np
import pytest
import torch
from heavy_cases import mostly_heavy
from small_models import ROLLOUTS, random_batch, save_model
from test_gradients_exact import layouts, reference_gradients

from megatron_daro.algo.difficulty_weights import DifficultyWeights

STEPS = 5
OPTIMIZER = {"learning_rate": 1e-2, "eps": 1e-3, "weight_decay": 0.01, "grad_clip": 0.5, "warmup_steps": 3}


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """Five steps of the unpacked model with torch's AdamW and the difficulty weights of algo."""
    directory = tmp_path_factory.mktemp("qwen2_steps")
    model = save_model("qwen2", directory)
    batches = [random_batch(seed=s) for s in range(STEPS)]
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": decayed, "weight_decay": 0.01}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.999), eps=1e-3)
    weights = DifficultyWeights(ROLLOUTS, learning_rate=0.1)
    for step, batch in enumerate(batches):
        counts = np.zeros(ROLLOUTS + 1)
        np.add.at(counts, batch.bins_N, batch.trained_tokens_N)
        coefficients = weights.coefficients(torch.tensor(counts))
        total = {n: torch.zeros_like(p) for n, p in model.named_parameters()}
        sums = torch.zeros(ROLLOUTS + 1, dtype=torch.float64)
        for k in range(1, ROLLOUTS):
            rows = np.flatnonzero(batch.bins_N == k)
            if len(rows) == 0:
                continue
            # Homogeneity: with one bin only, the "daro" reference is sum / N_k; scale it to w_k / N_k.
            _, loss_sums, gradients = reference_gradients(model, batch.select(rows), "daro")
            sums[k] = loss_sums[k]
            for name, gradient in gradients.items():
                total[name] += torch.from_numpy(gradient) * float(coefficients[k] * counts[k])
        for name, parameter in model.named_parameters():
            parameter.grad = total[name]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * min(1.0, (step + 1) / 3)
        optimizer.step()
        weights.update(sums, torch.tensor(counts))
    parameters = {n: p.detach().numpy() for n, p in model.named_parameters()}
    return directory, batches, parameters, weights.weights.numpy()


@pytest.mark.parametrize(
    ("layout", "distributed"),
    mostly_heavy(
        itertools.product(["single", "tp2", "dp2", "cp2", "tp2_pp2", "tp2_dp2"], [True, False]),
        ("single", False),
        ("cp2", True),
        ("tp2_pp2", False),
        ("tp2_dp2", True),
    ),
)
def test_five_steps_equal_the_reference(rank_pool, tmp_path, reference, layout, distributed):
    _, batches, want, want_weights = reference
    directory = tmp_path / "model"
    save_model("qwen2", directory)  # the reference changed its own copy
    results = train(rank_pool, layouts()[layout], directory, batches, num_micro_batches=3, distributed=distributed)
    assert_equal_to(want, want_weights, results)


@pytest.mark.parametrize("distributed", [True, False], ids=["distributed_optimizer", "plain_optimizer"])
@pytest.mark.parametrize(
    ("pipeline", "virtual", "context"),
    mostly_heavy([(1, 1, 1), (2, 1, 1), (2, 2, 1), (1, 1, 2)], (2, 2, 1), (1, 1, 2)),
    ids=["dp2", "pp2_dp2", "pp2_vpp2_dp2", "cp2_dp2"],
)
def test_gradients_reduced_while_they_are_computed(
    rank_pool, tmp_path, reference, pipeline, virtual, context, distributed
):
    """Several buckets, each sent within the last backward pass; the number of micro-batches differs in every step."""
    from megatron_daro.actor.parallel import Layout

    _, batches, want, want_weights = reference
    directory = tmp_path / "model"
    save_model("qwen2", directory)
    results = train(
        rank_pool,
        Layout(data=2, pipeline=pipeline, context=context, virtual_pipeline=virtual),
        directory,
        batches,
        num_micro_batches=[2, 4, 1, 3, 2],
        distributed=distributed,
        megatron={"overlap_grad_reduce": True, "bucket_size": 20_000},
    )
    assert_equal_to(want, want_weights, results)


def train(pool, layout, directory, batches, *, num_micro_batches, distributed, **options):
    return pool.run(
        megatron_tasks.train,
        layout,
        path=directory,
        batches=batches,
        num_micro_batches=num_micro_batches,
        algorithm={"name": "daro", "daro": {"learning_rate": 0.1}},
        optimizer={**OPTIMIZER, "distributed": distributed},
        **options,
    )


def assert_equal_to(want, want_weights, results):
    got = {}
    for result in results:
        got |= result["parameters"]
        np.testing.assert_allclose(result["weights"], want_weights, rtol=1e-5)
        assert result["metrics"] == results[0]["metrics"]
    assert set(got) == set(want)
    for name in want:
        # Adam divides by the gradient's own size: a rounding difference of a tiny gradient is amplified by 1/eps.
        np.testing.assert_allclose(got[name], want[name], rtol=0, atol=2e-5, err_msg=name)
