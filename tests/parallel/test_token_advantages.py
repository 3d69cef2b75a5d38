"""Advantages per token: columns by passes of the ranks, gradients of every layout against one process."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import policy_tasks
import pytest
import torch
from small_models import random_batch, save_model
from test_gradients_exact import LAYOUTS, layouts, merged, relative_difference

SCALE, DISCOUNT = 0.3, 0.8
OPTIONS = {"scale": SCALE, "discount": DISCOUNT}
ALGORITHM = {"name": "toy_algorithm:Fluent", "options": OPTIONS}
USUAL = ("single", "tp2_pp2", "cp2_dp2", "pp2_vpp2")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    directory = tmp_path_factory.mktemp("qwen2")
    return directory, save_model("qwen2", directory)


def turns_batch():
    """Ragged samples; one of them with two turns of an environment in its middle, one with a response of one token."""
    batch = random_batch(with_old=True)
    lengths_N = batch.response_lengths_N
    longest, mask_R = int(lengths_N.argmax()), batch.loss_mask_R.copy()
    start = int(lengths_N[:longest].sum())
    mask_R[start : start + int(lengths_N[longest])] = 1
    for first, last in ((3, 7), (11, 16)):
        mask_R[start + first : start + last] = 0
    batch = replace(batch, loss_mask_R=mask_R)
    assert lengths_N[longest] > 18 and 1 in lengths_N
    return batch


def label_logprobs(model, sample):
    tokens, prompt = torch.tensor(sample.tokens_T, dtype=torch.long), int(sample.prompt_lengths_N[0])
    logp = torch.log_softmax(model(tokens[None]).logits[0], -1)[prompt - 1 : -1]
    return logp.gather(1, tokens[prompt:, None])[:, 0]


def raw_advantages(sample, ref):
    """Token by token, each sum written out from that token to the end; None where nothing is trained."""
    mask, raw = sample.loss_mask_R, []
    for t in range(len(mask)):
        later = [s for s in range(t, len(mask)) if mask[s]]
        total = sum(DISCOUNT**n * float(ref[s]) for n, s in enumerate(later))
        raw.append(float(sample.advantages_N[0]) + SCALE * total if mask[t] else None)
    return raw


def reference_gradients(model, batch):
    samples = [batch.select([i]) for i in range(len(batch))]
    with torch.no_grad():
        raw = [raw_advantages(s, label_logprobs(model, s).double()) for s in samples]
    trained = np.array([a for sample in raw for a in sample if a is not None])
    mean, deviation = trained.mean(), trained.std()
    model.zero_grad()
    loss = torch.zeros((), dtype=torch.float64)
    for s, advantages in zip(samples, raw, strict=True):
        logp = label_logprobs(model, s)
        for t, advantage in enumerate(advantages):
            if advantage is not None:
                rho, a = torch.exp(logp[t] - float(s.old_logprobs_R[t])), (advantage - mean) / deviation
                loss = loss - torch.min(rho * a, rho.clamp(0.8, 1.28) * a).double() / len(trained)
    loss.backward()
    return float(loss.detach()), {name: p.grad.clone().numpy() for name, p in model.named_parameters()}


@pytest.mark.parametrize(
    "layout", [name if name in USUAL else pytest.param(name, marks=pytest.mark.heavy) for name in LAYOUTS]
)
def test_gradients_equal_the_unpacked_reference(rank_pool, model, layout):
    check_gradients(rank_pool, model, layouts()[layout])


@pytest.mark.heavy
def test_gradients_of_all_four_kinds_of_parallelism_at_once(model):
    from ranks import RankPool

    from megatron_daro.actor.parallel import Layout

    pool = RankPool(16)
    try:
        check_gradients(pool, model, Layout(tensor=2, pipeline=2, context=2, data=2))
    finally:
        pool.close()


def check_gradients(pool, model, layout):
    directory, hf = model
    batch = turns_batch()
    loss, want = reference_gradients(hf, batch)
    results = pool.run(
        policy_tasks.token_gradients, layout, path=directory, batch=batch, num_micro_batches=4, algorithm=ALGORITHM
    )
    assert relative_difference(merged(results), want) < 1e-5
    assert all(result["policy_loss"] == pytest.approx(loss, rel=1e-5) for result in results)


def test_a_second_epoch_has_the_advantages_of_the_first(rank_pool, model):
    """The columns are those of the weights that the batch began with; only the ratio moves."""
    directory, _ = model
    found = {
        name: rank_pool.run(
            policy_tasks.token_epochs,
            layouts()[name],
            path=directory,
            batch=turns_batch(),
            splits=(2, 4, 1),
            algorithm=ALGORITHM,
        )[-1]
        for name in ("single", "cp2_dp2")
    }
    one, several = found["single"], found["cp2_dp2"]
    assert [line["ratio/mean"] for line in one] == pytest.approx([m["ratio/mean"] for m in several], rel=1e-5)
    assert [line["loss/policy"] for line in one] == pytest.approx([m["loss/policy"] for m in several], rel=1e-4)
    assert one[0]["loss/policy"] != pytest.approx(one[1]["loss/policy"], rel=1e-3)


def test_numbers_that_are_not_finite_skip_the_step_on_every_rank(rank_pool, model):
    """Also on the data-parallel rank whose samples are all right; where nothing is trained they do not matter."""
    batch = turns_batch()
    last = len(batch) - 1
    batch = replace(batch, rewards_N=np.where(np.arange(len(batch)) == last, 7, batch.rewards_N).astype(np.float32))
    trained = int(batch.trained_tokens_N[last])
    for layout in ("dp2", "tp2_pp2", "cp2_dp2"):
        results = rank_pool.run(
            policy_tasks.token_skip, layouts()[layout], path=model[0], batch=batch, algorithm=faulty("nan")
        )
        for result in results:
            assert result["skipped"] and not result["changed"]
            what = f"algorithm faulty, token_advantages: {trained} of the step's trained tokens have an advantage that"
            assert result["reason"].startswith(what)
    (result,) = rank_pool.run(
        policy_tasks.token_skip,
        layouts()["single"],
        path=model[0],
        batch=batch,
        algorithm=faulty("nan where nothing is trained"),
    )
    assert not result["skipped"] and result["changed"]


def faulty(fault):
    return {"name": "toy_algorithm:Faulty", "options": {"fault": fault}}
