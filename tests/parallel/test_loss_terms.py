"""Every term of the loss, in every layout, against the loss written out with transformers' model.

Shards and micro-batches are uneven; one micro-batch holds a sample without trained tokens.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import policy_tasks
import pytest
from heavy_cases import mostly_heavy
from loss_reference import reference
from small_models import random_batch, save_model
from test_gradients_exact import layouts, merged, relative_difference

TOLERANCE = 1e-5
LAYOUTS = ["single", "tp2", "pp2", "cp2", "dp2", "cp2_dp2"]


def correction(kind, level="token"):
    # Old and rollout log-probs of the batch differ by 0.1, the mean over a sequence by 0.03: both sides must be hit.
    bounds = {"token": {"cap": 1.1, "low": 0.95, "high": 1.06}, "sequence": {"cap": 1.02, "low": 0.98, "high": 1.02}}
    return {"correction": {"kind": kind, "level": level, **bounds[level]}}


KL = {estimator: {"kl": {"coefficient": 0.4, "estimator": estimator}} for estimator in ("k1", "k2", "k3")}
TERMS = {
    "entropy": {"entropy_coefficient": 0.3},
    "kl_k1": KL["k1"],
    "kl_k2": KL["k2"],
    "kl_k3": KL["k3"],
    "kl_rollouts": {"kl": {"coefficient": 0.4, "estimator": "k3", "mean": "rollouts"}},
    "tis_token": correction("tis"),
    "tis_sequence": correction("tis", "sequence"),
    "mis_token": correction("mis"),
    "mis_sequence": correction("mis", "sequence"),
    "gspo": {"trust_region": "gspo"},
    "cispo": {"trust_region": "cispo"},
    "sapo": {"trust_region": "sapo"},
    "reinforce": {"trust_region": "reinforce"},
    "kimi": {"name": "kimi", "options": {"tau": 0.3}},
    "dual_clip": {"dual_clip": 1.5},
    "all": {"name": "daro", "entropy_coefficient": 0.3, "dual_clip": 1.5, **KL["k3"], **correction("tis")},
    "all_gspo": {"name": "daro", "entropy_coefficient": 0.3, **KL["k2"], "trust_region": "gspo"},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    directory = tmp_path_factory.mktemp("qwen2_terms")
    return directory, save_model("qwen2", directory)


def batch_with_reference():
    """random_batch with old log-probs near the model's (so the clip range matters), reference log-probs beside them,
    and the sample without trained tokens first: the first micro-batch of several is that sample alone."""
    batch = random_batch()
    rng = np.random.default_rng(5)
    empty = np.flatnonzero(batch.trained_tokens_N == 0)
    assert len(empty) >= 1
    order = [*empty, *(i for i in range(len(batch)) if i not in set(empty))]
    batch = batch.select(order)
    near = (-3.9 + 0.3 * rng.standard_normal(len(batch.loss_mask_R))).astype(np.float32)

    def noisy(size):
        return (near + size * rng.standard_normal(len(near))).astype(np.float32)

    return replace(batch, old_logprobs_R=near, rollout_logprobs_R=noisy(0.1), ref_logprobs_R=noisy(0.5))


@pytest.fixture(scope="module")
def batch():
    return batch_with_reference()


@pytest.fixture(scope="module")
def references(model, batch):
    """Term -> its reference, computed once."""
    found = {}

    def of(term):
        if term not in found:
            found[term] = reference(model[1], batch, algorithm_of(term))
        return found[term]

    return of


def algorithm_of(term):
    return {"name": "grpo", **TERMS[term]}


def run(pool, layout, directory, batch, num_micro_batches, algorithm, **extra):
    return pool.run(
        policy_tasks.loss_terms,
        layouts()[layout],
        path=directory,
        batch=batch,
        num_micro_batches=num_micro_batches,
        algorithm=algorithm,
        **extra,
    )


def without_times(result):
    return {name: value for name, value in result["metrics"].items() if not name.startswith("timing/")}


def assert_equal_to(want, results):
    assert relative_difference(merged(results), want.gradients) < TOLERANCE
    for result in results:
        assert without_times(result) == without_times(results[0]), "ranks report different metrics"
        assert result["policy_loss"] == pytest.approx(want.policy_loss, rel=TOLERANCE, abs=1e-7)
        assert result["regularizer"] == pytest.approx(want.regularizer, rel=TOLERANCE, abs=1e-7)
        np.testing.assert_allclose(result["loss_sums"], want.loss_sums, rtol=TOLERANCE, atol=1e-6)
        np.testing.assert_allclose(result["abs_loss_sums"], want.abs_loss_sums, rtol=TOLERANCE, atol=1e-6)
    for name, value in want.metrics.items():
        assert results[0]["metrics"][name] == pytest.approx(value, rel=TOLERANCE, abs=1e-6), name
    assert results[0]["metrics"]["loss/policy"] == pytest.approx(want.policy_loss, rel=TOLERANCE, abs=1e-7)
    norm = np.sqrt(sum((g.astype(np.float64) ** 2).sum() for g in want.gradients.values()))
    assert results[0]["metrics"]["loss/grad_norm"] == pytest.approx(norm, rel=TOLERANCE)


def test_every_branch_is_taken(references):
    """The inputs reach what the terms do: otherwise a wrong term could not show."""
    assert 0.05 < references("tis_token").metrics["mismatch/corrected_fraction"] < 0.95
    assert 0.05 < references("tis_sequence").metrics["mismatch/corrected_fraction"] < 0.95
    assert 0.05 < references("mis_token").metrics["mismatch/corrected_fraction"] < 0.95
    assert 0.05 < references("mis_sequence").metrics["mismatch/corrected_fraction"] < 0.95
    assert references("dual_clip").metrics["ratio/dual_clip_fraction"] > 0.05
    assert references("dual_clip").metrics["ratio/clip_fraction_low"] > 0.05
    assert references("dual_clip").metrics["ratio/clip_fraction_high"] > 0.05
    plain = references("dual_clip").gradients
    for term in TERMS:
        if term != "dual_clip":
            assert relative_difference(references(term).gradients, plain) > 1e-2, term


TOGETHER = {"all", "all_gspo"}
COVERED = {"single", "tp2", "cp2", "dp2", "pp2"}
"""Terms of their own are heavy in these: a term sees log-probs, which are of all tensor ranks and of the last stage;
cp2_dp2 has both of the others."""


@pytest.mark.parametrize(
    ("layout", "term"),
    [
        pytest.param(layout, term, marks=[pytest.mark.heavy] if layout in COVERED and term not in TOGETHER else [])
        for layout in LAYOUTS
        for term in TERMS
    ],
)
def test_terms_equal_the_reference(rank_pool, model, batch, references, layout, term):
    results = run(rank_pool, layout, model[0], batch, 4, algorithm_of(term))
    assert_equal_to(references(term), results)


@pytest.mark.parametrize("num_micro_batches", [1, 2, 5])
@pytest.mark.parametrize("layout", mostly_heavy(LAYOUTS, "pp2", "cp2_dp2"))
def test_any_number_of_micro_batches(rank_pool, model, batch, references, layout, num_micro_batches):
    results = run(rank_pool, layout, model[0], batch, num_micro_batches, algorithm_of("all"))
    assert results[0]["num_micro_batches"] == num_micro_batches
    assert_equal_to(references("all"), results)


@pytest.mark.parametrize("layout", ["single", "pp2", "tp2_pp2", "dp2"])
def test_tied_embeddings(rank_pool, tmp_path, batch, layout):
    hf = save_model("qwen2_tied", tmp_path)
    want = reference(hf, batch, algorithm_of("all"))
    assert "lm_head.weight" not in want.gradients
    assert_equal_to(want, run(rank_pool, layout, tmp_path, batch, 3, algorithm_of("all")))


@pytest.mark.parametrize("layout", ["single", "pp2", "cp2_dp2"])
def test_the_order_of_samples_does_not_matter(rank_pool, model, batch, references, layout):
    shuffled = batch.select(np.random.default_rng(3).permutation(len(batch)))
    assert_equal_to(references("all"), run(rank_pool, layout, model[0], shuffled, 3, algorithm_of("all")))


@pytest.mark.parametrize(
    ("layout", "padding"), [("single", (1, 64)), ("single", (8, 8)), ("cp2", (12, 96)), ("tp2", (1, 128))]
)
def test_padding_does_not_matter(rank_pool, model, batch, references, layout, padding):
    results = run(rank_pool, layout, model[0], batch, 3, algorithm_of("all"), padding=padding)
    assert_equal_to(references("all"), results)


@pytest.mark.parametrize(("layout", "sequence_parallel"), [("single", False), ("tp2", True), ("cp2", False)])
def test_fp8_packs_hold_whole_blocks_of_tokens(rank_pool, batch, layout, sequence_parallel):
    """Every matrix product of a layer sees whole blocks of tokens; without fp8 nothing is padded for it."""
    parts = layouts()[layout].tensor if sequence_parallel else 1

    def lengths(recipe):
        options = {"batch": batch, "sequence_parallel": sequence_parallel, "fp8_recipe": recipe}
        return [n for rank in rank_pool.run(policy_tasks.pack_lengths, layouts()[layout], **options) for n in rank]

    assert all(length % (32 * parts) == 0 for length in lengths("mxfp8"))
    assert all(length % (128 * parts) == 0 for length in lengths("blockwise"))
    assert any(length % 32 for length in lengths(None))


@pytest.mark.parametrize("layout", ["single", "tp2", "pp2"])
def test_recomputation_does_not_matter(rank_pool, model, batch, references, layout):
    results = run(rank_pool, layout, model[0], batch, 3, algorithm_of("all"), recompute="full")
    assert_equal_to(references("all"), results)


@pytest.mark.parametrize("term", ["tis_token", "gspo", "all"])
@pytest.mark.parametrize("layout", ["single", "tp2", "cp2_dp2"])
def test_without_old_logprobs_the_ratio_is_exactly_one(rank_pool, model, batch, layout, term):
    on_policy = replace(batch, old_logprobs_R=None)
    results = run(rank_pool, layout, model[0], on_policy, 3, algorithm_of(term))
    for result in results:
        assert result["metrics"]["ratio/mean"] == 1.0
        assert result["metrics"]["ratio/clip_fraction_low"] == result["metrics"]["ratio/clip_fraction_high"] == 0.0
    assert_equal_to(reference(model[1], on_policy, algorithm_of(term)), results)


@pytest.mark.parametrize("name", ["grpo", "daro"])
@pytest.mark.parametrize("layout", ["single", "dp2"])
def test_a_denominator_taken_per_micro_batch_would_show(rank_pool, model, batch, layout, name):
    """The natural bug, brought in on purpose: the comparison above must go red for it."""
    algorithm = {"name": name}
    want = reference(model[1], batch, algorithm)
    assert_equal_to(want, run(rank_pool, layout, model[0], batch, 5, algorithm))
    arguments = {"path": model[0], "batch": batch, "num_micro_batches": 5, "algorithm": algorithm}
    wrong = rank_pool.run(policy_tasks.gradients_of_micro_batches, layouts()[layout], **arguments)
    assert relative_difference(merged(wrong), want.gradients) > 0.5


@pytest.mark.parametrize("layout", ["tp2_pp2", "cp2"])
def test_reference_logprobs_are_those_of_the_start_weights(rank_pool, model, batch, layout):
    results = rank_pool.run(policy_tasks.reference_after_training, layouts()[layout], path=model[0], batch=batch)
    last = [r for r in results if r["before"] is not None]
    assert last
    for result in last:
        np.testing.assert_array_equal(result["reference"], result["before"])
        assert np.abs(result["moved"] - result["before"]).max() > 1e-3, "the step did not move the weights"
        np.testing.assert_array_equal(result["moved_again"], result["moved"])
