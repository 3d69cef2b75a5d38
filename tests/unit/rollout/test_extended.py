"""A rollout that was cut short and went on: one rollout, with each part's tokens, log-probs and version."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_daro.routed_experts import ExpertsFolder
from megatron_daro.types import Prompt, Rollout

PROMPT = Prompt("p", "4", "test", text="2 + 2", tokens=(5, 6, 7))


def part(prompt, count, version, *, spans=(), finish="abort", attempt=0, seed=0) -> Rollout:
    """A rollout of `count` response tokens after these prompt tokens."""
    generator = np.random.default_rng([seed, version, count])
    return Rollout(
        prompt_id="p",
        group_id=3,
        attempt=attempt,
        index=1,
        tokens=np.concatenate([np.asarray(prompt, np.int32), generator.integers(10, 99, count).astype(np.int32)]),
        prompt_length=len(prompt),
        loss_mask=generator.integers(0, 2, count).astype(np.uint8),
        logprobs=-generator.random(count, dtype=np.float32),
        finish_reason=finish,
        weight_version=version,
        text="old",
        version_spans=spans,
    )


def test_two_parts_by_hand():
    first = part(PROMPT.tokens, 2, 4)
    later = part(first.tokens, 3, 6, spans=((6, 1), (7, 2)), finish="stop", attempt=1)
    whole = first.extended(later, "all of it")
    assert whole.tokens.tolist() == [5, 6, 7, *first.tokens[3:], *later.tokens[5:]] and whole.tokens.dtype == np.int32
    assert whole.prompt_length == 3 and whole.response_length == 5
    assert whole.logprobs.tolist() == [*first.logprobs, *later.logprobs] and whole.logprobs.dtype == np.float32
    assert whole.loss_mask.tolist() == [*first.loss_mask, *later.loss_mask] and whole.loss_mask.dtype == np.uint8
    assert whole.version_spans == ((4, 2), (6, 1), (7, 2)) and whole.weight_version == 4
    assert (whole.finish_reason, whole.attempt, whole.text) == ("stop", 1, "all of it")
    assert whole.continues(first) and not first.continues(whole)


def test_a_token_keeps_the_experts_that_it_met_first(tmp_path):
    def routed(rollout, number):
        """The rollout with experts of this number; of its last token none."""
        experts = np.full((len(rollout.tokens) - 1, 1, 1), number)
        stored = ExpertsFolder(tmp_path).store((rollout.group_id, number, 0), experts, len(rollout.tokens))
        return replace(rollout, routed_experts=stored)

    first = part(PROMPT.tokens, 2, 4)
    later = routed(part(first.tokens, 3, 6), 2)
    whole = routed(first, 1).extended(later, "x")
    assert whole.routed_experts.read().ravel().tolist() == [1, 1, 1, 1, 2, 2, 2, -1]
    assert first.extended(later, "x").routed_experts.read().ravel().tolist() == [2] * 7 + [-1]
    again = routed(part(whole.tokens, 2, 7), 3)
    assert whole.extended(again, "x").routed_experts.read().ravel().tolist() == [1] * 4 + [2] * 3 + [3] * 2 + [-1]
    assert whole.routed_experts.cut(6).read().ravel().tolist() == [1, 1, 1, 1, 2, -1]
    assert whole.routed_experts.cut(4).read().ravel().tolist() == [1, 1, 1, -1]
    assert whole.routed_experts.longer(2).read().ravel().tolist() == [1] * 4 + [2] * 3 + [-1] * 3


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 4)), min_size=1, max_size=5))
def test_many_parts(parts):
    """Versions may even fall (a server that was behind): the oldest counts, and the spans cover every token."""
    whole = part(PROMPT.tokens, parts[0][1], parts[0][0])
    for version, count in parts[1:]:
        earlier, whole = whole, whole.extended(part(whole.tokens, count, version), "")
        assert whole.continues(earlier)
    total = sum(count for _, count in parts)
    assert whole.response_length == total == len(whole.logprobs) == len(whole.loss_mask)
    expected = [version for version, count in parts for _ in range(count)]
    assert [version for version, count in whole.version_spans for _ in range(count)] == expected
    if expected:
        assert whole.weight_version == min(expected)
    neighbours = [version for version, _ in whole.version_spans]
    assert all(one != other for one, other in pairwise(neighbours))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda r: replace(r, index=2), "rollout 2"),
        (lambda r: replace(r, group_id=4), "group 4"),
        (lambda r: replace(r, tokens=np.where(np.arange(len(r.tokens)) == 4, 1, r.tokens)), "5 tokens"),
    ],
)
def test_what_is_no_continuation_is_refused(change, named):
    first = part(PROMPT.tokens, 2, 4)
    with pytest.raises(ValueError, match=named):
        first.extended(change(part(first.tokens, 3, 6)), "")


def test_starting_over_is_no_continuation():
    first = part(PROMPT.tokens, 2, 4)
    assert not part(PROMPT.tokens, 4, 5).continues(first)
    same_tokens = replace(first, logprobs=first.logprobs - 1)
    assert not same_tokens.continues(first), "other weights may choose the same tokens"
