"""What a step says of its tokens, and of conversations: turns, observed tokens, and the limits that ended them."""

import numpy as np
import pytest
from loop_fakes import make_stack, run_stack

from megatron_daro.observe.metrics import read_metrics
from megatron_daro.rollout.recorder import read_step
from megatron_daro.rollout.summary import turn_metrics
from megatron_daro.types import Rollout, Verdict


def rollout(index, turns, length):
    tokens, ones = np.zeros(2 + length, np.int32), np.ones(length, np.uint8)
    return Rollout("p", 0, 0, index, tokens, 2, ones, np.zeros(length, np.float32), "stop", 1, turns=turns)


def test_turns_and_limits_by_hand():
    one, two = rollout(0, ((0, 3), (2, 3), (1, 0)), 9), rollout(1, ((1, 3),), 4)
    single = rollout(2, (), 3)
    reasons = ["max_turns", "context_overflow", "max_turns"]
    found = turn_metrics([one, two, single], [Verdict(False, 0.0, reason) for reason in reasons])
    assert found == {
        "environment/turns_mean": 1.5,
        "environment/turns_max": 2.0,
        "environment/observed_tokens_mean": 2.0,
        "environment/max_turns_fraction": 0.5,
        "environment/max_tokens_fraction": 0.0,
        "environment/context_overflow_fraction": 0.5,
    }
    assert turn_metrics([single], [Verdict(True, 1.0, "match")]) == {}


@pytest.mark.parametrize("minibatches", [1, 2])
def test_every_generated_token_is_counted_once(tmp_path, minibatches):
    trainer = {"steps": 6, "minibatches_per_batch": minibatches}
    run_stack(make_stack(tmp_path, rollout={"prompts_per_batch": 6}, trainer=trainer))
    lines = read_metrics(tmp_path)
    told = [line["rollout/generated_tokens"] for line in lines]
    groups = [group for line in lines for group, _ in read_step(tmp_path, line["step"])]
    assert sum(told) == sum(r.generated_length for group in groups for r in group.rollouts)
    assert [tokens > 0 for tokens in told] == [step % minibatches == 0 for step in range(6)]


def test_named_rewards_are_means_over_the_conversations_that_were_given_them():
    given = [(("form", 0.5), ("right", 1.0)), (("form", 1.0),)]
    verdicts = [Verdict(True, 2.0, "match", rewards) for rewards in given]
    found = turn_metrics([rollout(0, ((0, 3),), 3), rollout(1, ((0, 3),), 3)], verdicts)
    named = {key: value for key, value in found.items() if "reward" in key}
    assert named == {"environment/reward/form": 0.75, "environment/reward/right": 1.0}
