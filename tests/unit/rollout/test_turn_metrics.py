"""What a step says of conversations: turns, observed tokens, and the limits that ended them."""

from dataclasses import replace

from test_batch import make_rollout

from megatron_daro.rollout.summary import turn_metrics
from megatron_daro.types import Verdict


def test_turns_and_limits_by_hand():
    one = replace(make_rollout(0, 0, response=9), turns=((0, 3), (2, 3), (1, 0)))
    two = replace(make_rollout(0, 1, response=4), turns=((1, 3),))
    single = make_rollout(0, 2)
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
