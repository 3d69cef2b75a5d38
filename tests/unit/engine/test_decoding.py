"""The state of one batch: when a call ends, which rows go on, who is aborted, and where answers stop."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megatron_daro.engine import decoding as decoding_module
from megatron_daro.engine.decoding import AbortSignal, Decoding, EndOfCall, Row, TokenChooser
from megatron_daro.types import GroupRequest, Prompt, SamplingParams

VOCAB, STOP = 8, 7


def rows_of(count, *, group_of=lambda n: n, limits=None, **sampling):
    options = {"temperature": 0.0, "max_new_tokens": 5, "stop_token_ids": (STOP,), **sampling}
    prompt = Prompt(id="p", answer="", source="", tokens=(1, 2))
    requests = [GroupRequest(group_of(n), 0, prompt, (0,), SamplingParams(**options)) for n in range(count)]
    return [Row(request, 0) for request in requests]


def batch(rows, **options):
    reported = []
    abort = options.pop("abort", None) or AbortSignal()
    return Decoding(rows, 0, VOCAB, abort, reported.append, **options), reported


def choose(decoding, *tokens):
    """One step in which each row that is present is most likely to get this token."""
    logits = torch.zeros(len(tokens), VOCAB)
    logits[torch.arange(len(tokens)), torch.tensor(tokens)] = 5.0
    return decoding.choose(logits).tolist()


@pytest.mark.parametrize(("rows", "stopped", "ends"), [(16, 3, False), (16, 4, True), (15, 14, False), (2, 2, True)])
def test_a_call_ends_when_a_quarter_of_many_rows_or_all_have_finished(rows, stopped, ends):
    decoding, reported = batch(rows_of(rows))
    tokens = [STOP] * stopped + [3] * (rows - stopped)
    assert choose(decoding, *tokens) == tokens
    assert decoding.should_end(rows) is ends and reported == list(range(stopped))
    told = EndOfCall(decoding)(torch.zeros(rows, 3), None)
    assert told.dtype == torch.bool and told.tolist() == [ends] * rows
    assert reported == list(range(stopped)), "each is reported once"
    assert decoding.done is (stopped == rows)


def test_rows_that_go_on_keep_their_places_and_their_limits():
    decoding, reported = batch(rows_of(3, max_new_tokens=3))
    assert decoding.steps_left == 3
    choose(decoding, 1, STOP, 2)
    assert decoding.steps_left == 2 and decoding.compact().tolist() == [0, 2]
    choose(decoding, STOP, 3)
    assert decoding.compact().tolist() == [1] and not decoding.done
    choose(decoding, 4)
    assert decoding.done and decoding.steps_left == 0 and decoding.compact().tolist() == []
    decoding.settle()
    results = [decoding.result(n) for n in range(3)]
    assert [(tokens.tolist(), reason) for tokens, _, reason in results] == [
        ([1, STOP], "stop"),
        ([STOP], "stop"),
        ([2, 3, 4], "length"),
    ]
    assert all(tokens.dtype == np.int32 and logprobs.dtype == np.float32 for tokens, logprobs, _ in results)
    expected = torch.log_softmax(torch.tensor([5.0, *[0.0] * (VOCAB - 1)]), 0)[0]
    assert np.concatenate([logprobs for _, logprobs, _ in results]) == pytest.approx(float(expected), abs=1e-6)
    assert reported == [0, 1, 2]


def test_a_stop_token_is_that_of_its_request_and_ends_also_at_the_limit():
    rows = rows_of(1, max_new_tokens=1) + rows_of(1, stop_token_ids=(1, 2)) + rows_of(1, stop_token_ids=())
    decoding, _ = batch(rows)
    choose(decoding, STOP, 2, STOP)
    assert [decoding.result(n)[2] for n in (0, 1)] == ["stop", "stop"] and decoding.steps_left == 4


def test_a_result_does_not_change_with_what_follows():
    decoding, _ = batch(rows_of(1, stop_token_ids=()))
    choose(decoding, 4)
    decoding._finish_N[0] = decoding_module._LENGTH
    tokens, logprobs, _ = decoding.result(0)
    before = logprobs.copy()
    decoding._tokens_NM[0, 0] = 1
    decoding._logprobs_NM[0, 0] = -9.0
    assert tokens.tolist() == [4] and np.array_equal(logprobs, before)


def test_an_abort_is_of_the_groups_that_it_names_and_stays():
    signal = AbortSignal()
    assert not signal.hits(1) and signal.changes == 0
    signal.abort({1, 2})
    assert [signal.hits(group) for group in (0, 1, 2)] == [False, True, True]
    signal.abort(())
    signal.abort([5])
    assert [signal.hits(group) for group in (0, 1, 5)] == [False, True, True] and signal.changes == 3
    signal.abort()
    signal.abort({3})
    assert signal.hits(0) and signal.changes == 5


def test_aborted_rows_end_with_what_they_have_and_finished_ones_stay_as_they_are():
    signal = AbortSignal()
    decoding, reported = batch(rows_of(3), abort=signal)
    choose(decoding, STOP, 1, 1)
    signal.abort({0, 1})
    decoding.settle()
    assert sorted(reported) == [0, 1]
    assert [decoding.result(n)[2] for n in (0, 1)] == ["stop", "abort"]
    assert not decoding.done and decoding.compact().tolist() == [2]
    choose(decoding, 2)
    assert decoding.result(1)[0].tolist() == [1]


def test_the_last_tokens_are_looked_at_for_a_stop_text():
    """A window of as many tokens as may hold it, also over those of earlier steps."""
    looked = []

    def decode(ids):
        looked.append(list(ids))
        return "".join("abcdefgh"[i] for i in ids)

    rows = rows_of(1, stop=("bcd",), max_new_tokens=60) + rows_of(1)
    decoding, _ = batch(rows, decode=decode)
    window = decoding_module.window_of(("bcd",))
    for token in [0] * (window + 3) + [1, 2]:
        choose(decoding, token, 3)
    assert not decoding.done and max(map(len, looked)) == window
    decoding._finish_N[1] = decoding_module._LENGTH
    choose(decoding, 3, 3)
    assert decoding.result(0)[2] == "stop" and decoding.done
    assert looked[0] == [0] and looked[-1][-3:] == [1, 2, 3]


def test_repetition_is_looked_for_every_so_many_steps_and_only_where_it_is_wanted():
    rows = rows_of(1, repetition=(8, 2), max_new_tokens=100) + rows_of(1, max_new_tokens=100)
    decoding, _ = batch(rows)
    for step in range(32):
        assert not decoding.done, step
        choose(decoding, 1, 1)
    assert [int(reason) for reason in decoding._finish_N] == [decoding_module._STOP, decoding_module._RUNNING]


def test_an_answer_that_is_shorter_than_the_span_does_not_repeat_itself():
    decoding, _ = batch(rows_of(1, repetition=(33, 2), max_new_tokens=100))
    for _ in range(63):
        choose(decoding, 1)
    assert not decoding.done
    choose(decoding, 1)
    assert decoding.done


def test_what_is_left_to_pick_is_the_token_that_was_chosen():
    decoding, _ = batch(rows_of(2))
    scores = torch.zeros(2, VOCAB)
    scores[0, 3], scores[1, 5] = 1.0, 1.0
    left = TokenChooser(decoding)(torch.zeros(2, 1), scores)
    assert left.argmax(dim=1).tolist() == [3, 5]
    assert (left == -torch.inf).sum() == 2 * (VOCAB - 1) and left.max() == 0
