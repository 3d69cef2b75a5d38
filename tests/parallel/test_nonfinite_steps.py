"""A step that is not finite changes nothing on any rank, and the run goes on as if it had never been."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import policy_tasks
import pytest
from heavy_cases import mostly_heavy
from small_models import ROLLOUTS, random_batch, save_model
from test_gradients_exact import layouts

OPTIMIZER = {"learning_rate": 1e-2, "weight_decay": 0.01, "warmup_steps": 3}
DARO = {"name": "daro", "daro": {"learning_rate": 0.1}}
LAYOUTS = ["single", "tp2_pp2", "dp2"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    directory = tmp_path_factory.mktemp("qwen2_nonfinite")
    save_model("qwen2_tied", directory)
    return directory


def a_trained_sample(batch):
    """The last row whose tokens are trained and whose group has both verdicts; it is on the last data-parallel rank."""
    rows = np.flatnonzero((batch.trained_tokens_N > 0) & (batch.bins_N > 0) & (batch.bins_N < ROLLOUTS))
    return int(rows[-1])


def nan_advantage():
    batch = random_batch(seed=7)
    advantages = batch.advantages_N.copy()
    advantages[a_trained_sample(batch)] = np.nan
    return replace(batch, advantages_N=advantages)


def nan_rollout_logprob():
    batch = random_batch(seed=7)
    starts = np.cumsum(batch.response_lengths_N) - batch.response_lengths_N
    row = a_trained_sample(batch)
    first = starts[row] + np.flatnonzero(batch.loss_mask_R[starts[row] :])[0]
    column = batch.rollout_logprobs_R.copy()
    column[first] = np.nan
    return replace(batch, rollout_logprobs_R=column)


def huge_advantages():
    """A loss that is a number with a gradient whose norm is not: its square is beyond fp32."""
    batch = random_batch(seed=7)
    return replace(batch, advantages_N=np.full_like(batch.advantages_N, 1e30))


BAD = {
    "nan_advantage": (nan_advantage, "", DARO, "the loss"),
    "nan_rollout_logprob": (nan_rollout_logprob, "", {**DARO, "correction": {"kind": "tis"}}, "the loss"),
    "infinite_weight": (lambda: random_batch(seed=7), "weight", DARO, "the loss"),
    "infinite_gradient": (huge_advantages, "", DARO, "the gradient norm"),
}


def run(pool, layout, model, bad, poison, algorithm, **options):
    return pool.run(
        policy_tasks.skip_and_go_on,
        layouts()[layout],
        path=model,
        good=[random_batch(seed=1), random_batch(seed=2)],
        bad=bad,
        poison=poison,
        algorithm=algorithm,
        **options,
    )


def assert_skipped_without_a_trace(with_bad, without, reason):
    for here, clean in zip(with_bad, without, strict=True):
        outcome = here["outcome"]
        assert outcome["skipped"]
        assert outcome["reason"].startswith(reason) and "not finite" in outcome["reason"]
        assert outcome["changed"] == []
        assert {name.split()[0] for name in outcome["kept"]} == {"parameter", "optimizer", "scheduler", "difficulty"}
        assert set(here["end"]) == set(clean["end"])
        for name, value in clean["end"].items():
            np.testing.assert_array_equal(here["end"][name], value, err_msg=name)
        for mine, theirs in zip(here["metrics"], clean["metrics"], strict=True):
            assert timeless(mine) == timeless(theirs)


def timeless(metrics):
    return {name: value for name, value in metrics.items() if not name.startswith("timing/")}


@pytest.mark.parametrize("kind", BAD)
@pytest.mark.parametrize("layout", mostly_heavy([*LAYOUTS, "cp2"], "tp2_pp2"))
def test_a_bad_step_leaves_no_trace(rank_pool, model, layout, kind):
    make, poison, algorithm, reason = BAD[kind]
    options = {"optimizer": OPTIMIZER}
    without = run(rank_pool, layout, model, None, "", algorithm, **options)
    with_bad = run(rank_pool, layout, model, make(), poison, algorithm, **options)
    assert_skipped_without_a_trace(with_bad, without, reason)


@pytest.mark.parametrize("options", [{"precision": "bf16"}, {"distributed": False}], ids=["bf16", "plain_optimizer"])
@pytest.mark.parametrize("kind", mostly_heavy(["nan_advantage", "infinite_gradient"], "infinite_gradient"))
def test_other_optimizers_too(rank_pool, model, kind, options):
    make, poison, algorithm, reason = BAD[kind]
    optimizer = {**OPTIMIZER, "distributed": options.get("distributed", True)}
    settings = {"optimizer": optimizer, "precision": options.get("precision", "fp32")}
    without = run(rank_pool, "dp2", model, None, "", algorithm, **settings)
    with_bad = run(rank_pool, "dp2", model, make(), poison, algorithm, **settings)
    assert_skipped_without_a_trace(with_bad, without, reason)


def test_the_bad_sample_of_a_group_without_signal_is_refused_as_well(rank_pool, model):
    """Its coefficient is 0, but 0 times NaN is NaN: a broken value anywhere among the trained tokens is a refusal."""
    batch = random_batch(seed=7)
    row = int(np.flatnonzero((batch.bins_N == 0) & (batch.trained_tokens_N > 0))[0])
    advantages = batch.advantages_N.copy()
    advantages[row] = np.nan
    results = run(rank_pool, "dp2", model, replace(batch, advantages_N=advantages), "", DARO, optimizer=OPTIMIZER)
    assert all(r["outcome"]["skipped"] and r["outcome"]["changed"] == [] for r in results)


def test_a_masked_token_may_be_anything(rank_pool, model):
    """NaN where the loss mask is 0 reaches nothing: the step is applied, and equals one with a number there."""
    batch = random_batch(seed=7)
    masked = batch.loss_mask_R == 0
    assert masked.any()
    results = []
    for filler in (np.nan, 0.0):
        column = np.where(masked, filler, batch.rollout_logprobs_R).astype(np.float32)
        broken = replace(batch, rollout_logprobs_R=column, old_logprobs_R=column)
        results.append(
            run(rank_pool, "single", model, broken, "", {**DARO, "correction": {"kind": "tis"}}, optimizer=OPTIMIZER)
        )
    (with_nan,), (with_zero,) = results
    assert not with_nan["outcome"]["skipped"]
    assert with_nan["outcome"]["changed"]
    for name, value in with_zero["end"].items():
        np.testing.assert_array_equal(with_nan["end"][name], value, err_msg=name)
