"""What a step says in numbers, each by hand, and what people are told of answers without signal."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from loop_fakes import GRPO, K, make_rollout

from megatron_daro.data.batch import build_step_batch
from megatron_daro.errors import DataError
from megatron_daro.rollout.minibatches import MiniBatch
from megatron_daro.rollout.sampled_batch import SampledBatch, Snapshot
from megatron_daro.rollout.summary import (
    batch_metrics,
    environment_metrics,
    group_bins,
    length_metrics,
    mean_staleness,
    pass_at_k,
    step_metrics,
)
from megatron_daro.types import Group, Prompt, Verdict

PROMPT = Prompt("p", "42", "unit", text="6 * 7?", tokens=(1, 2))


def group(group_id, lengths, right=(), *, version=3, **changes) -> Group:
    rollouts = [
        replace(make_rollout(group_id, 0, i, PROMPT, version, length=n), **changes) for i, n in enumerate(lengths)
    ]
    verdicts = [Verdict(i in right, 1.0 if i in right else -0.5, "match") for i in range(len(lengths))]
    return Group(group_id, PROMPT, tuple(rollouts), tuple(verdicts))


def sampled(*groups, **others) -> SampledBatch:
    return SampledBatch(groups, Snapshot({}, {}), **others)


def test_every_complete_group_of_a_batch_counts():
    filtered = group(2, [2] * K, range(K))
    dropped = group(3, [3] * K, finish_reason="repetition"), group(4, [7] * 3, range(3))
    batch = sampled(
        group(1, [2, 4, 6, 8], (0,)), filtered=(filtered,), dropped=dropped, rounds=3, rollout_s=2.0,
        generated_tokens=60, counters={"rollout/x": 5},
    )  # fmt: skip
    assert batch_metrics(batch, K, {}) == {
        "accuracy/mean": 5 / 12,
        "reward/mean": pytest.approx((5 - 3.5) / 12),
        "response/length_mean": pytest.approx(40 / 12),
        "response/length_max": 8.0,
        "response/truncated_fraction": 1 / 12,
        "response/repetition_fraction": 4 / 12,
        "rollout/rounds": 3.0,
        "throughput/rollout_tokens_per_s": 30.0,
        "rollout/x": 5.0,
    }


def test_environments_are_measured_each_by_itself():
    long = replace(group(2, [6] * K), prompt=replace(PROMPT, source="code"))
    names = {"unit": "math", "code": "tools", "none": "idle"}
    found = environment_metrics([group(1, [2, 4, 6, 8], (0,)), long], names)
    assert found == {
        "environments/math/groups": 1.0,
        "environments/math/accuracy": 0.25,
        "environments/math/reward": pytest.approx((1 - 1.5) / 4),
        "environments/math/length_mean": 5.0,
        "environments/math/truncated_fraction": 0.25,
        "environments/tools/groups": 1.0,
        "environments/tools/accuracy": 0.0,
        "environments/tools/reward": -0.5,
        "environments/tools/length_mean": 6.0,
        "environments/tools/truncated_fraction": 0.0,
        "environments/idle/groups": 0.0,
    }
    assert environment_metrics([long], {}) == {}


def test_groups_are_counted_by_their_right_answers():
    groups = [group(1, [2] * K, (0,)), group(2, [2] * K), group(3, [2] * K, range(K))]
    bins = {f"difficulty/groups/{k}": float(k in (0, 1, K)) for k in range(K + 1)}
    assert group_bins(groups, K) == bins


def test_lengths_of_right_and_wrong_answers_predict_the_loss():
    columns = build_step_batch([group(1, [2, 6, 6, 6], (0,)), group(2, [1, 2, 3, 9], (0, 1, 2))], GRPO)
    found = length_metrics(columns)
    assert found == {
        "difficulty/length_right/1": 2.0,
        "difficulty/length_wrong/1": 6.0,
        "difficulty/predicted_loss/1": pytest.approx(0.1875**0.5 * 4 / 5),
        "difficulty/length_right/3": 2.0,
        "difficulty/length_wrong/3": 9.0,
        "difficulty/predicted_loss/3": pytest.approx(0.1875**0.5 * 7 / 3.75),
    }


def test_staleness_is_a_mean_in_batches():
    groups = [group(1, [2] * K, version=3), group(2, [2] * K, version=6)]
    assert mean_staleness(groups, 7, 2) == 1.25 and mean_staleness([], 7, 2) == 0.0


@pytest.mark.parametrize(("first", "tokens"), [(True, 60.0), (False, 0.0)])
def test_an_update_says_all_of_it(first, tokens):
    turns = ((0, 1), (1, 1))
    groups = (group(1, [3] * K, (0,), turns=turns), group(2, [3] * K, (1,), turns=turns))
    filtered = (group(3, [3] * K),)
    batch = sampled(*groups, filtered=filtered, generated_tokens=60)
    minibatch = MiniBatch(8, groups, 8, first=first, epoch=2, filtered=filtered, generated_tokens=tokens)
    metrics = batch_metrics(batch, K, {}) | step_metrics(minibatch, build_step_batch(groups, GRPO), 2)
    assert metrics["rollout/epoch"] == 2.0 and metrics["rollout/generated_tokens"] == tokens
    assert metrics["rollout/staleness_mean"] == 2.0 and metrics["accuracy/mean"] == 2 / 12
    assert metrics["difficulty/groups/1"] == 2.0 and metrics["difficulty/groups/0"] == 1.0
    assert metrics["difficulty/length_right/1"] == 3.0 and metrics["environment/turns_mean"] == 2.0
    assert metrics["response/length_mean"] == (8 * 2 + 4 * 3) / 12, "what was shown is not counted"
    assert "distill/reverse_kl" not in metrics


def test_the_divergence_from_a_teacher_is_that_of_the_models_own_tokens():
    mask, logprobs = np.array([1, 0, 1], np.uint8), np.array([-1, -9, -2], np.float32)
    taught = group(
        1, [3] * K, (0,), loss_mask=mask, logprobs=logprobs, teacher_logprobs=np.array([-1.5, 0, -3.5], np.float32)
    )
    plain = group(2, [3] * K, (0,))
    metrics = step_metrics(MiniBatch(1, (taught, plain), 1), build_step_batch([taught, plain], GRPO), 1)
    assert metrics["distill/reverse_kl"] == 1.0


@pytest.mark.parametrize("arguments", [(4, 1, 0), (4, 1, 5), (4, 5, 2)])
def test_a_pass_rate_of_what_cannot_be_is_refused(arguments):
    with pytest.raises(DataError, match=f"pass@{arguments[2]}"):
        pass_at_k(*arguments)


def test_pass_rates_at_their_limits():
    assert [pass_at_k(4, c, 1) for c in (0, 1, 4)] == [0.0, 0.25, 1.0]
    assert [pass_at_k(4, c, 4) for c in (0, 1, 4)] == [0.0, 1.0, 1.0] and pass_at_k(4, 1, 2) == 0.5
