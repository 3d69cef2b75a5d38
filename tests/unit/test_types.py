"""Records between processes: what they say of themselves, where they are cut, and what they are without being told."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from megatron_daro.routed_experts import Part, StoredExperts
from megatron_daro.types import (
    Group,
    GroupRequest,
    Prompt,
    Rollout,
    SamplingParams,
    StepBatch,
    Verdict,
)

PROMPT = Prompt("p", "4", "s", text="2+2?", tokens=(5, 6))


def rollout(length=4, version=3, **changes) -> Rollout:
    tokens = np.arange(2 + length, dtype=np.int32) + 5
    numbers = -np.arange(length, dtype=np.float32)
    ones = np.ones(length, np.uint8)
    return replace(Rollout("p", 1, 0, 0, tokens, 2, ones, numbers, "length", version, "old"), **changes)


def batch(lengths, *, first=0, **changes) -> StepBatch:
    """Samples with one prompt token each; values differ everywhere."""
    number, total = len(lengths), sum(lengths)
    per_sample = {
        name: np.arange(first, first + number)
        for name in ("rewards_N", "correct_N", "bins_N", "group_ids_N", "advantages_N", "truncated_N")
    }
    return StepBatch(
        tokens_T=np.arange(total + number) + 100 * first,
        lengths_N=np.array(lengths) + 1,
        prompt_lengths_N=np.ones(number, np.int64),
        loss_mask_R=np.arange(total, dtype=np.uint8) % 2,
        rollout_logprobs_R=np.arange(total, dtype=np.float32),
        rollouts_per_prompt=2,
        **per_sample,
        **changes,
    )


def test_a_prompt_says_its_golds_and_its_problem():
    assert replace(PROMPT, alternatives=("5", "6")).answers == ("4", "5", "6")
    assert PROMPT.statement == "2+2?" and replace(PROMPT, text=None).statement == ""
    chat = replace(PROMPT, text=None, messages=({"role": "system", "content": "s"}, {"role": "user", "content": "u"}))
    assert chat.statement == "u" and replace(chat, messages=({"role": "user"},)).statement == ""


def test_a_request_says_how_many_tokens_a_rollout_may_still_get():
    request = GroupRequest(
        1,
        0,
        PROMPT,
        (0, 1, 2),
        SamplingParams(max_new_tokens=10),
        partial={1: rollout(4), 2: rollout(3)},
        limits={2: 5},
    )
    assert [request.room(i) for i in range(3)] == [10, 6, 2]


def test_a_rollout_that_is_cut_is_an_answer_of_its_beginning():
    experts = StoredExperts((Part("x", 0, 5),), (6, 1, 1))
    whole = rollout(4, version_spans=((3, 1), (4, 3)), routed_experts=experts, teacher_logprobs=np.arange(4.0))
    cut = whole.cut(2, "new")
    assert cut.tokens.tolist() == [5, 6, 7, 8] and cut.prompt_length == 2
    assert cut.logprobs.tolist() == [0, -1] and cut.loss_mask.tolist() == [1, 1]
    assert cut.teacher_logprobs.tolist() == [0, 1] and cut.routed_experts.shape == (4, 1, 1)
    assert (cut.text, cut.finish_reason, cut.version_spans) == ("new", "stop", ((3, 1), (4, 1)))
    assert whole.cut(1, "").version_spans == ((3, 1),) and whole.cut(4, "").version_spans == ((3, 1), (4, 3))
    plain = rollout(4).cut(3, "new", "repetition")
    assert (plain.finish_reason, plain.version_spans) == ("repetition", ((3, 3),))
    assert plain.teacher_logprobs is None and plain.routed_experts is None
    assert rollout(4, version_spans=((4, 2), (3, 2))).cut(2, "").version_spans == ((4, 2),), "not of its oldest version"


def test_a_group_counts_what_is_right_and_is_as_old_as_its_oldest():
    verdicts = [Verdict(right, 0.0, "") for right in (True, False, True, False, False)]
    group = Group(1, PROMPT, tuple(rollout(version=v) for v in (5, 3, 4, 6, 7)), tuple(verdicts))
    assert (group.bin, group.pass_rate, group.weight_version) == (2, 0.4, 3)


def test_a_batch_knows_its_samples_and_their_trained_tokens():
    one = batch([3, 1, 2])
    assert len(one) == 3 and one.response_lengths_N.tolist() == [3, 1, 2]
    assert one.trained_tokens_N.tolist() == [1, 1, 1] and one.trained_tokens_N.dtype == np.int64
    long = replace(batch([300]), loss_mask_R=np.ones(300, np.uint8))
    assert long.trained_tokens_N.tolist() == [300], "no sum of bytes"


def test_chosen_samples_stand_in_the_given_order():
    routed = tuple(StoredExperts((Part(str(i), 0, 1),), (2, 1, 1)) for i in range(3))
    columns = {name: np.arange(6.0) for name in ("old_logprobs_R", "ref_logprobs_R", "values_R", "value_targets_R")}
    lengths_NK = np.arange(6).reshape(3, 2)
    one = batch([3, 1, 2], routed_experts_N=routed, group_lengths_NK=lengths_NK, opens_batch=False, **columns)
    chosen = one.select([2, 0])
    assert chosen.tokens_T.tolist() == [6, 7, 8, 0, 1, 2, 3]
    assert chosen.lengths_N.tolist() == [3, 4] and chosen.prompt_lengths_N.tolist() == [1, 1]
    for name in ("rewards_N", "correct_N", "bins_N", "group_ids_N", "advantages_N", "truncated_N"):
        assert getattr(chosen, name).tolist() == [2, 0]
    for name in ("rollout_logprobs_R", *columns):
        assert getattr(chosen, name).tolist() == [4, 5, 0, 1, 2]
    assert chosen.loss_mask_R.tolist() == [0, 1, 0, 1, 0]
    assert chosen.token_advantages_R is None and chosen.group_lengths_NK.tolist() == [[4, 5], [0, 1]]
    assert chosen.routed_experts_N == (routed[2], routed[0]) and chosen.opens_batch is False
    none = one.select([])
    assert len(none) == len(none.tokens_T) == 0 and none.tokens_T.dtype == one.tokens_T.dtype
    assert none.trained_tokens_N.tolist() == none.select([]).response_lengths_N.tolist() == []
    assert batch([1, 2]).select([1]).routed_experts_N is None
