"""Answers that repeat themselves: where they are cut, against a slow search, and which reward they lose."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from megatron_daro.data.stops import repeated_at, until_repeated
from megatron_daro.types import Rollout


def slow(tokens, span, period):
    """The first end at which the last `span` tokens are one block of at most `period` again and again."""
    for end in range(span, len(tokens) + 1):
        tail = tokens[end - span : end]
        if any(all(tail[i] == tail[i - p] for i in range(p, span)) for p in range(1, period + 1)):
            return end
    return None


@given(st.lists(st.integers(0, 2), max_size=40), st.integers(4, 12), st.data())
def test_the_end_is_that_of_a_slow_search(tokens, span, data):
    period = data.draw(st.integers(1, span // 2))
    assert repeated_at(np.array(tokens, np.int32), span, period) == slow(tokens, span, period)


def test_a_block_is_found_where_it_has_come_often_enough():
    tokens = np.array([9, 8, *[1, 2, 3] * 5, 7], np.int32)
    assert repeated_at(tokens, 12, 3) == 2 + 12 and repeated_at(tokens, 12, 2) is None
    assert repeated_at(tokens, 16, 3) is None, "five blocks are 15 tokens"


def rollout(response, **changes):
    values = {"prompt_id": "p", "group_id": 1, "attempt": 0, "index": 0, "finish_reason": "length"} | changes
    tokens = np.array([50, 51, *response], np.int32)
    ones = np.ones(len(response), np.float32)
    columns = {"loss_mask": ones.astype(np.uint8), "logprobs": -ones, "prompt_length": 2, "weight_version": 3}
    return Rollout(tokens=tokens, **columns, **values)


def test_a_repeating_answer_ends_there_with_its_own_reason_and_spans():
    whole = rollout([4, *[6, 7] * 8], version_spans=((3, 4), (4, 13)))
    cut = until_repeated(whole, (8, 2), lambda tokens: " ".join(map(str, tokens)))
    assert (cut.finish_reason, cut.response_length, cut.text) == ("repetition", 9, "4 6 7 6 7 6 7 6 7")
    assert cut.version_spans == ((3, 4), (4, 5)) and len(cut.logprobs) == len(cut.loss_mask) == 9
    for repetition in (None, (18, 2), (8, 1)):
        assert until_repeated(whole, repetition, str) is whole
