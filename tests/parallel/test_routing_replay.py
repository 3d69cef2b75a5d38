"""Routing replay: log-probs and gradients with given experts equal those of transformers' model with these experts.

Every token has random experts of its own in every layer, so that a token, a layer or a sample beside the right one
gives other numbers by far; the last test shows it.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import policy_tasks
import pytest
import torch
import torch.nn.functional as F
from small_models import as_in_checkpoint, random_batch, save_model
from stored_experts import stored
from test_experts import layouts
from test_gradients_exact import reference_gradients, relative_difference
from test_logprobs_models import TOLERANCE, plain_logprobs

from megatron_daro.errors import DataError
from megatron_daro.routed_experts import StoredExperts

LAYERS, EXPERTS, CHOSEN = 4, 4, 2
FAMILIES = ["qwen3_moe", "qwen3_moe_mixed", "glm4_moe", "gpt_oss"]
CASES = [
    *[("qwen3_moe", layout, {}) for layout in ("single", "tp2_ep2", "cp2_ep2", "pp2_vpp2_ep2", "tp4_ep2")],
    *[("qwen3_moe_mixed", layout, {}) for layout in ("single", "tp2", "pp2_ep2")],
    *[("glm4_moe", layout, {}) for layout in ("single", "tp2_ep2")],
    ("gpt_oss", "tp2_ep2", {}),
    # The second forward pass of a layer comes in the backward pass, when other micro-batches were told since.
    *[("qwen3_moe", layout, {"recompute": "full"}) for layout in ("single", "pp2_ep2", "pp2_vpp2_ep2")],
    ("qwen3_moe_mixed", "single", {"megatron": {"recompute_granularity": "selective", "recompute_modules": ["moe"]}}),
]


def experts_of_batch(batch):
    """int16 [T, layers, experts of a token], others in every row; of some tokens none are known, nor of the last of a
    sample."""
    rng = np.random.default_rng(1)
    number = len(batch.tokens_T)
    experts_TLE = np.argsort(rng.random((number, LAYERS, EXPERTS)), axis=-1)
    experts_TLK = experts_TLE[:, :, :CHOSEN].astype(np.int16)
    experts_TLK[rng.random(number) < 0.1] = -1
    experts_TLK[np.cumsum(batch.lengths_N) - 1] = -1
    return experts_TLK


@contextmanager
def given_experts(model, batch, experts_TLK):
    """The transformers model, each of whose routers weighs these experts of a sample."""
    ends_N = np.cumsum(batch.lengths_N)[:-1]
    samples = zip(np.split(batch.tokens_T, ends_N), np.split(experts_TLK, ends_N), strict=True)
    table = {tuple(tokens.tolist()): experts for tokens, experts in samples}
    assert len(table) == len(batch)
    current = {}

    def remember(module, arguments):
        current["experts"] = torch.from_numpy(table[tuple(arguments[0][0].tolist())].astype(np.int64))

    def routed(gate, layer):
        def forward(hidden):
            logits = F.linear(hidden.view(-1, hidden.shape[-1]), gate.weight, getattr(gate, "bias", None))
            sigmoid = hasattr(gate, "e_score_correction_bias")
            probabilities = logits.sigmoid() if sigmoid else logits.softmax(-1)
            own = type(gate).forward(gate, hidden)[2]
            wanted = current["experts"][:, layer]
            chosen = torch.where(wanted[:, :1] < 0, own, wanted)
            weights = probabilities.gather(1, chosen)
            weights = weights / weights.sum(-1, keepdim=True) if getattr(gate, "norm_topk_prob", True) else weights
            return logits, weights * getattr(gate, "routed_scaling_factor", 1.0), chosen

        return forward

    hook = model.register_forward_pre_hook(remember)
    routers = [getattr(layer.mlp, "gate", None) or getattr(layer.mlp, "router", None) for layer in model.model.layers]
    gates = [(i, router) for i, router in enumerate(routers) if router is not None]
    for layer, gate in gates:
        gate.forward = routed(gate, layer)
    yield
    hook.remove()
    for _, gate in gates:
        del gate.forward


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Family -> (directory, log-probs, loss, gradients) of one process."""
    found, batch = {}, random_batch()
    experts_TLK = experts_of_batch(batch)
    for family in FAMILIES:
        directory = tmp_path_factory.mktemp(family)
        model = save_model(family, directory)
        with given_experts(model, batch, experts_TLK):
            loss, _, gradients = reference_gradients(model, batch, "daro")
            logprobs = plain_logprobs(model, batch)
        assert np.abs(logprobs - plain_logprobs(model, batch)).max() > 100 * TOLERANCE, "its own experts"
        tensors = {name: torch.from_numpy(gradient) for name, gradient in gradients.items()}
        named = as_in_checkpoint(model, tensors, tmp_path_factory.mktemp("gradients"))
        found[family] = directory, logprobs, loss, named
    return found


def run(pool, directory, layout, experts_TLK, folder, **options):
    """Log-probs of the last stage, the losses of all ranks, and gradients, with these experts in files."""
    batch = random_batch()
    batch = replace(batch, routed_experts_N=stored(experts_TLK, batch.lengths_N, folder))
    results = pool.run(
        policy_tasks.experts,
        layouts()[layout],
        path=directory,
        batch=batch,
        num_micro_batches=3,
        algorithm={"name": "daro"},
        routing_replay=True,
        **options,
    )
    logprobs = [result["logprobs"] for result in results if result["logprobs"] is not None]
    gradients = {name: value for result in results for name, value in result["gradients"].items()}
    return logprobs, {result["policy_loss"] for result in results}, gradients


@pytest.mark.parametrize(("family", "layout", "options"), CASES)
def test_the_given_experts_are_met(rank_pool, models, family, layout, options, tmp_path):
    directory, logprobs, loss, want = models[family]
    got, losses, gradients = run(rank_pool, directory, layout, experts_of_batch(random_batch()), tmp_path, **options)
    for column in got:
        np.testing.assert_allclose(column, logprobs, rtol=0, atol=TOLERANCE)
    assert all(found == pytest.approx(loss, rel=1e-5, abs=1e-7) for found in losses)
    assert relative_difference(gradients, want) < 1e-5


@pytest.mark.parametrize("scrambled", ["a token later", "a layer later", "another sample"])
def test_a_scrambled_alignment_is_seen(rank_pool, models, scrambled, tmp_path):
    """The same shapes and the same experts, at the wrong place: what peers shipped for months."""
    experts_TLK = experts_of_batch(random_batch())
    if scrambled == "another sample":
        samples = np.split(experts_TLK, np.cumsum(random_batch().lengths_N)[:-1])
        experts_TLK = np.concatenate(samples[::-1])
    else:
        experts_TLK = np.roll(experts_TLK, 1, axis=0 if scrambled == "a token later" else 1)
    directory, logprobs, _, want = models["qwen3_moe"]
    got, _, gradients = run(rank_pool, directory, "single", experts_TLK, tmp_path)
    assert np.abs(got[0] - logprobs).max() > 100 * TOLERANCE
    assert relative_difference(gradients, want) > 0.1


@pytest.mark.parametrize(
    "shape", [(-1, 0, 0), (0, -1, 0), (0, 0, -1)], ids=["of other tokens", "of other layers", "of another number"]
)
def test_experts_of_another_model_are_refused(models, shape):
    from megatron_daro.actor.routing_replay import check_routed_experts
    from megatron_daro.config.model_shape import read_model_shape

    batch, model = random_batch(), read_model_shape(models["qwen3_moe"][0])

    def told(change=(0, 0, 0)):
        sizes = [(length + change[0], LAYERS + change[1], CHOSEN + change[2]) for length in batch.lengths_N.tolist()]
        return replace(batch, routed_experts_N=(None, *(StoredExperts((), size) for size in sizes[1:])))

    check_routed_experts(told(), model)
    with pytest.raises(DataError):
        check_routed_experts(told(shape), model)
    with pytest.raises(DataError):
        check_routed_experts(told(), replace(model, experts=None))


@pytest.mark.parametrize(("added", "words"), [(3, "2 to 6"), (-1, "-2 to 2")])
def test_experts_that_the_model_has_not_are_refused(added, words, tmp_path):
    from megatron_daro.actor.routing_replay import check_numbers
    from megatron_daro.data.packing import pack

    batch = random_batch()
    experts_TLK = experts_of_batch(batch)
    for shift in (0, added):
        packed = pack(
            replace(batch, routed_experts_N=stored(experts_TLK + shift, batch.lengths_N, tmp_path)), range(len(batch))
        )
        if not shift:
            check_numbers(packed, EXPERTS)
            continue
        with pytest.raises(DataError, match=words):
            check_numbers(packed, EXPERTS)
