"""Whether a receiver kept its weights is seen in both precisions, and nobody is accused whose weights are right.

The policy and the receiver are one small model computed in two ways (the receiver rounds its weights to their dtype,
and nothing after that), so that they differ as two implementations do; the weights take the steps of an optimizer.
"""

from __future__ import annotations

import copy
import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from megatron_daro.engine.sglang.probe import probe_text
from megatron_daro.sync.check import ProbeAnswer, UpdateCheck
from megatron_daro.sync.plan import Digest
from megatron_daro.types import Rollout

VOCAB, SYNCS = 512, 25
TEXT = np.asarray(probe_text(VOCAB, longest=1000), dtype=np.int32)
DTYPES = {"float32": (torch.float32, torch.float64), "bfloat16": (torch.bfloat16, torch.float32)}
"""Of weights and of the policy's computation, of the receiver's computation."""
CONFIG = Qwen2Config(
    vocab_size=VOCAB,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    tie_word_embeddings=True,
    initializer_range=0.1,
)


def logprobs_of(model):
    """float32 [R] of the text after its first token."""
    ids = torch.tensor(TEXT, dtype=torch.int64)
    with torch.no_grad():
        logits = model(ids[None]).logits[0, :-1].to(torch.float64)
    return torch.log_softmax(logits, -1).gather(1, ids[1:, None])[:, 0].to(torch.float32).numpy()


def rollout(logprobs_R):
    ones = np.ones(len(logprobs_R), dtype=np.uint8)
    return Rollout("probe", -1, 0, 0, TEXT, 1, ones, logprobs_R, "length", 0)


@pytest.fixture(scope="module", params=sorted(DTYPES))
def steps(request):
    """(dtype, [(policy's log-probs, receiver's)] after 0, 1, ... optimizer steps of 1e-5)."""
    torch.manual_seed(0)
    master = AutoModelForCausalLM.from_config(CONFIG)
    optimizer = torch.optim.AdamW(master.parameters(), lr=1e-5)
    ours, theirs = (AutoModelForCausalLM.from_config(CONFIG).to(dtype) for dtype in DTYPES[request.param])
    found = []
    for _ in range(SYNCS):
        ours.load_state_dict(master.state_dict())
        theirs.load_state_dict(ours.state_dict())
        found.append((logprobs_of(ours), logprobs_of(theirs)))
        batch = torch.randint(0, VOCAB, (2, 32))
        optimizer.zero_grad()
        master(batch, labels=batch).loss.backward()
        optimizer.step()
    return request.param, found


def judged(check, dtype, policy_R, receiver_R, version, name="server 0", **of_receiver):
    answer = ProbeAnswer(rollout(receiver_R), rollout(receiver_R), 1.0, dtype, **of_receiver)
    digests = {"norm.weight": Digest(dtype, str(version), str(version))}
    return check.judge({name: answer}, {name: (policy_R, receiver_R)}, digests)


def test_the_sides_differ_by_more_than_the_steps_in_bf16(steps):
    """Or the test of closeness alone would do."""
    dtype, found = steps
    between_sides = np.mean([np.abs(p - r).mean() for p, r in found])
    of_steps = np.mean([np.abs(b[0] - a[0]).mean() for a, b in itertools.pairwise(found)])
    assert of_steps < 0.1 and (between_sides > of_steps / 3) == (dtype == "bfloat16")


def test_a_receiver_that_follows_is_never_accused_and_one_that_skips_a_step_always_is(steps):
    dtype, found = steps
    check, verified = UpdateCheck(), 0
    for version, (policy_R, receiver_R) in enumerate(found):
        if version:
            kept_R = found[version - 1][1]
            outcome = judged(copy.deepcopy(check), dtype, policy_R, kept_R, version)
            assert "server 0" in outcome.rejected, version
        outcome = judged(check, dtype, policy_R, receiver_R, version)
        assert not outcome.rejected, (version, outcome)
        verified += len(outcome.verified)
    if dtype == "float32":
        assert verified == SYNCS - 1, "each but the first shows that it follows"


@pytest.mark.parametrize("noise", [0.0, 1e-4])
def test_a_step_that_changed_nothing_tells_nothing(steps, noise):
    """A learning rate of 0, a skipped step: the digests are those of before, whatever the log-probs do."""
    dtype, found = steps
    check, random = UpdateCheck(), np.random.default_rng(0)
    policy_R, receiver_R = found[0]
    for _ in range(4):
        shown_R = (policy_R + noise * random.normal(size=len(policy_R))).astype(np.float32)
        outcome = judged(check, dtype, shown_R, receiver_R, version=0)
        assert not outcome.rejected and not outcome.verified


def test_steps_too_small_to_be_told_add_up(steps):
    """The server's answers vary by more than a step, as on a GPU where its batches differ; a stuck one is seen late."""
    _, found = steps
    move_R = found[-1][0] - found[0][0]
    check, random = UpdateCheck(), np.random.default_rng(0)
    seen = 0
    for version in range(200):
        policy_R = found[0][0] + (version / 200 * move_R).astype(np.float32)
        noise_R = 0.2 * np.std(move_R) * random.normal(size=len(move_R)).astype(np.float32)
        outcome = judged(check, "bfloat16", policy_R, found[0][1] + noise_R, version)
        if outcome.rejected:
            seen = version
            break
    assert 10 < seen < 150


def test_a_step_in_which_rounding_alone_moves_the_policy_far_accuses_nobody():
    """As with SmolLM2 in bf16, where it ended a run at its 41st sync: rounding moves both sides, as a rule by 0.1, each
    elsewhere to, and then the policy by 0.4."""
    check, random = UpdateCheck(), np.random.default_rng(0)

    def answers(version, of_policy):
        noise = random.normal(size=(2, 7)) * [[of_policy], [0.07]]
        return (version / 100 + noise).astype(np.float32)

    for version in range(40):
        policy_R, receiver_R = answers(version, 0.07)
        assert not judged(check, "bfloat16", policy_R, receiver_R, version).rejected, version
    policy_R, following_R = answers(40, 0.43)
    assert judged(copy.deepcopy(check), "bfloat16", policy_R, receiver_R, 40).rejected, "it answers as before"
    assert not judged(check, "bfloat16", policy_R, following_R, 40).rejected


def test_after_a_restart_it_is_compared_with_the_weights_it_had_at_first(steps):
    dtype, found = steps
    check = UpdateCheck()
    for version, (policy_R, receiver_R) in enumerate(found[:-1]):
        judged(check, dtype, policy_R, receiver_R, version)
    assert judged(copy.deepcopy(check), dtype, found[-1][0], found[0][1], SYNCS, fresh=True).rejected
    assert not judged(check, dtype, found[-1][0], found[-1][1], SYNCS, fresh=True).rejected


@pytest.mark.parametrize(("dtype", "by", "accused"), [("float32", 2e-3, True), ("float32", 5e-4, False)])
def test_a_sampled_answer_of_another_model_is_refused_at_the_first_sync(steps, dtype, by, accused):
    _, found = steps
    policy_R, _ = found[0]
    answer = ProbeAnswer(rollout(policy_R), rollout(policy_R + np.float32(by)), 1.0, dtype)
    outcome = UpdateCheck().judge({"a": answer}, {"a": (policy_R, policy_R)}, {})
    assert bool(outcome.rejected) == accused
    assert UpdateCheck().judge({"a": replace(answer, verified=True)}, {"a": (policy_R, policy_R)}, {}).verified == (
        frozenset() if accused else {"a"}
    )


@pytest.mark.parametrize(
    ("dtype", "apart", "accused"),
    [
        ("bfloat16", [2.8] + [0.1] * 15, False),
        ("bfloat16", [0.51] * 16, True),
        ("bfloat16", [0.5] * 16, False),
        ("float32", [2e-3] + [0.0] * 15, True),
        ("", [0.4] * 16, False),
        ("bfloat16", [float("nan")] + [0.0] * 15, True),
    ],
)
def test_in_bf16_one_token_may_be_far_off_and_not_all_of_them(dtype, apart, accused):
    zeros, apart_R = np.zeros(16, np.float32), np.asarray(apart, np.float32)
    answer = ProbeAnswer(rollout(zeros), rollout(apart_R), 1.0, dtype)
    rejected = UpdateCheck().judge({"a": answer}, {"a": (zeros, zeros)}, {}).rejected
    assert bool(rejected) is accused


def test_a_sync_that_changes_nothing_still_shows_a_receiver_that_went_back_to_its_first_weights(steps):
    dtype, found = steps
    check = UpdateCheck()
    for version, (policy_R, receiver_R) in enumerate(found):
        judged(check, dtype, policy_R, receiver_R, version)
    last = len(found) - 1
    assert not judged(copy.deepcopy(check), dtype, *found[last], last).rejected
    outcome = judged(check, dtype, found[last][0], found[0][1], last)
    assert "server 0" in outcome.rejected


@pytest.mark.parametrize("trained", [1, SYNCS - 1])
def test_a_receiver_that_computes_without_its_adapters_is_seen_in_its_first_sync(steps, trained):
    """As one that has them is not, nor anyone before they were trained."""
    dtype, found = steps
    base_R, receiver_base_R = found[0]
    policy_R, receiver_R = found[trained]

    def rejected(said_R, wanted_R):
        answer = ProbeAnswer(rollout(said_R), rollout(said_R), 1.0, dtype, base_R=receiver_base_R)
        return UpdateCheck().judge({"server 0": answer}, {"server 0": (wanted_R, said_R)}, {}, base_R).rejected

    assert rejected(receiver_base_R, policy_R)
    assert not rejected(receiver_R, policy_R) and not rejected(receiver_base_R, base_R)
