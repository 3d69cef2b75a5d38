"""Batch assembly: bins from verdicts, advantages from shaped rewards, refusals."""

from dataclasses import replace

import numpy as np
import pytest
from lab_names import configured

from megatron_daro.algo.weighting import Algorithm, make_algorithm
from megatron_daro.config.algorithm import LengthRewardSection
from megatron_daro.data.batch import build_step_batch, with_columns_of
from megatron_daro.errors import AlgorithmError, DataError
from megatron_daro.routed_experts import Part, StoredExperts
from megatron_daro.types import Group, Prompt, Rollout, TurnReport, Verdict


def algorithm(k: int, name: str = "grpo", **options) -> Algorithm:
    return make_algorithm(name, rollouts_per_prompt=k, max_response_tokens=64, **options)


def make_rollout(group_id: int, index: int, response: int = 3, finish: str = "stop", prompt: int = 2) -> Rollout:
    tokens = np.arange(prompt + response, dtype=np.int32) + 100 * group_id + 10 * index
    return Rollout(
        prompt_id=f"p{group_id}",
        group_id=group_id,
        attempt=0,
        index=index,
        tokens=tokens,
        prompt_length=prompt,
        loss_mask=np.ones(response, dtype=np.uint8),
        logprobs=-np.arange(1, response + 1, dtype=np.float32),
        finish_reason=finish,
        weight_version=3,
    )


def make_group(
    group_id: int, correct: list[bool], responses: list[int] | None = None, finish=None, rewards=None
) -> Group:
    responses = responses or [3] * len(correct)
    finish = finish or ["stop"] * len(correct)
    rewards = rewards or [float(c) for c in correct]
    return Group(
        group_id=group_id,
        prompt=Prompt(id=f"p{group_id}", answer="1", source="test", text="?"),
        rollouts=tuple(make_rollout(group_id, i, r, f) for i, (r, f) in enumerate(zip(responses, finish, strict=True))),
        verdicts=tuple(Verdict(c, r, "match") for c, r in zip(correct, rewards, strict=True)),
    )


def test_columns_by_hand():
    batch = build_step_batch([make_group(5, [True, False], [1, 2]), make_group(2, [True, True], [2, 1])], algorithm(2))
    assert batch.lengths_N.tolist() == [3, 4, 4, 3] and batch.prompt_lengths_N.tolist() == [2] * 4
    assert batch.tokens_T.tolist() == [500, 501, 502, 510, 511, 512, 513, 200, 201, 202, 203, 210, 211, 212]
    assert batch.tokens_T.dtype == np.int32
    assert batch.rollout_logprobs_R.tolist() == [-1, -1, -2, -1, -2, -1]
    assert batch.bins_N.tolist() == [1, 1, 2, 2] and batch.bins_N.dtype == np.int64
    assert batch.group_ids_N.tolist() == [5, 5, 2, 2]
    np.testing.assert_allclose(batch.advantages_N, [1, -1, 0, 0], atol=1e-5)
    assert batch.advantages_N.dtype == np.float32
    assert batch.trained_tokens_N.tolist() == [1, 2, 2, 1]
    assert batch.old_logprobs_R is None and batch.group_lengths_NK is None


def test_experts_of_the_engine_go_along_and_are_unknown_where_it_did_not_tell():
    groups = [make_group(5, [True, False], [1, 2])]
    assert build_step_batch(groups, algorithm(2)).routed_experts_N is None
    first, second = groups[0].rollouts
    experts = StoredExperts((Part("somewhere", 0, 3),), (4, 3, 2))
    groups = [replace(groups[0], rollouts=(first, replace(second, routed_experts=experts)))]
    batch = build_step_batch(groups, algorithm(2))
    assert batch.routed_experts_N == (None, experts)
    assert batch.select([1, 0, 1]).routed_experts_N == (experts, None, experts)


def test_lengths_of_the_groups_go_along_where_the_algorithm_needs_them():
    groups = [make_group(5, [True, False], [1, 2], ["stop", "length"]), make_group(2, [True, True], [2, 1])]
    batch = build_step_batch(groups, algorithm(2, configured("lambda_grpo")), overlong="filter")
    assert batch.group_lengths_NK.tolist() == [[1, 0], [1, 0], [2, 1], [2, 1]]  # of what is trained
    part = batch.select([2, 1])
    assert part.group_lengths_NK.tolist() == [[2, 1], [1, 0]]


def test_penalty_and_length_reward_are_for_what_the_model_said():
    long = replace(make_rollout(0, 0, response=12), turns=((0, 3), (6, 3)))
    short = make_rollout(0, 1, response=6)
    group = replace(make_group(0, [True, True]), rollouts=(long, short))
    shaped = build_step_batch([group], algorithm(2), overlong="penalty", max_tokens=8, cache_tokens=4)
    assert shaped.rewards_N.tolist() == [0.5, 0.5]  # 6 generated tokens each; with the observed ones the first had 0
    assert build_step_batch([group], algorithm(2), length_weight=1.0).rewards_N.tolist() == [1.0, 1.0]  # equally long


def test_an_answer_that_repeats_itself_loses_its_penalty_and_no_verdict():
    group = make_group(0, [True, False, False], [4, 4, 4], finish=["repetition", "repetition", "length"])
    batch = build_step_batch([group], algorithm(3), repetition_penalty=0.25)
    assert batch.rewards_N.tolist() == [0.75, -0.25, 0.0] and batch.rewards_N.dtype == np.float32
    assert batch.bins_N.tolist() == [1, 1, 1] and batch.truncated_N.tolist() == [0, 0, 1]


def test_penalty_changes_advantages_but_never_bins():
    group = make_group(0, [True, True, False, False], [1, 10, 1, 20])
    plain = build_step_batch([group], algorithm(4))
    shaped = build_step_batch([group], algorithm(4), overlong="penalty", max_tokens=12, cache_tokens=4)
    assert shaped.rewards_N.tolist() == [1.0, 0.5, 0.0, -1.0]
    assert shaped.bins_N.tolist() == plain.bins_N.tolist() == [2] * 4
    assert shaped.correct_N.tolist() == [1, 1, 0, 0]
    assert shaped.advantages_N[0] > shaped.advantages_N[1]


def test_bins_ignore_rewards_of_another_sign():
    group = make_group(0, [True, False, False], rewards=[-1.0, 1.0, 1.0])
    assert build_step_batch([group], algorithm(3)).bins_N.tolist() == [1, 1, 1]


def test_filter_masks_truncated_which_still_count():
    group = make_group(0, [True, False], [2, 4], finish=["stop", "length"])
    batch = build_step_batch([group], algorithm(2), overlong="filter")
    assert batch.loss_mask_R.tolist() == [1, 1, 0, 0, 0, 0]
    assert batch.truncated_N.tolist() == [0, 1]
    assert batch.bins_N.tolist() == [1, 1]
    assert batch.advantages_N[0] == pytest.approx(1, abs=1e-5)
    assert batch.trained_tokens_N.tolist() == [2, 0]
    untouched = build_step_batch([group], algorithm(2))
    assert untouched.loss_mask_R.tolist() == [1] * 6 and group.rollouts[1].loss_mask.tolist() == [1] * 4


def test_the_length_reward_is_added_from_its_first_step_on():
    group = make_group(0, [True, True, False, False], [10, 20, 15, 30])
    batch = build_step_batch([group], algorithm(4), length_weight=0.2)
    assert batch.rewards_N.tolist() == pytest.approx([1.1, 1.0, 0.0, -0.1])
    assert batch.rewards_N.dtype == np.float32 and batch.bins_N.tolist() == [2] * 4
    section = LengthRewardSection(weight=0.2, start_step=10)
    assert [section.weight_at(step) for step in (1, 10, 11, 1000)] == [0.0, 0.0, 0.2, 0.2]
    assert LengthRewardSection(weight=0.2).weight_at(1) == 0.2 and LengthRewardSection().weight_at(1) == 0.0


def test_filter_and_penalty_together_as_dapo_stacks_them():
    group = make_group(0, [True, True, False, False], [1, 10, 1, 20], ["stop", "stop", "stop", "length"])
    batch = build_step_batch([group], algorithm(4), overlong="both", max_tokens=12, cache_tokens=4)
    assert batch.rewards_N.tolist() == [1.0, 0.5, 0.0, -1.0]
    assert batch.trained_tokens_N.tolist() == [1, 10, 1, 0]
    penalized = build_step_batch([group], algorithm(4), overlong="penalty", max_tokens=12, cache_tokens=4)
    assert batch.advantages_N.tolist() == penalized.advantages_N.tolist(), "what is masked still counts in the mean"


def test_the_advantages_are_those_of_the_algorithm():
    groups = [make_group(0, [True, False, False, False]), make_group(1, [True, True, False, True])]
    none = build_step_batch(groups, algorithm(4, std="none"))
    np.testing.assert_allclose(none.advantages_N[:4], [0.75, -0.25, -0.25, -0.25])
    left_out = build_step_batch(groups, algorithm(4, name="rloo"))
    np.testing.assert_allclose(left_out.advantages_N[:4], [1, -1 / 3, -1 / 3, -1 / 3], rtol=1e-6)


def test_incomplete_group_is_refused_by_name():
    with pytest.raises(DataError, match=r"group 7 \(prompt p7\) .*3 .*4"):
        build_step_batch([make_group(7, [True] * 3)], algorithm(4))


def test_missing_verdict_is_refused():
    group = make_group(1, [True, False])
    short = Group(group.group_id, group.prompt, group.rollouts, group.verdicts[:1])
    with pytest.raises(DataError, match="1 verdict"):
        build_step_batch([short], algorithm(2))


def test_aborted_rollout_is_refused():
    with pytest.raises(DataError, match="rollout 1"):
        build_step_batch([make_group(1, [True, False], finish=["stop", "abort"])], algorithm(2))


def test_other_refusals():
    group = make_group(1, [True, False])
    with pytest.raises(DataError, match="group 1"):
        build_step_batch([group, group], algorithm(2))
    with pytest.raises(DataError):
        build_step_batch([], algorithm(2))
    swapped = Group(1, group.prompt, group.rollouts[::-1], group.verdicts)
    with pytest.raises(DataError, match=r"\[1, 0\]"):
        build_step_batch([swapped], algorithm(2))
    with pytest.raises(DataError, match="penalti"):
        build_step_batch([group], algorithm(2), overlong="penalti")
    nan = Group(1, group.prompt, group.rollouts, (Verdict(True, float("nan"), "match"), group.verdicts[1]))
    with pytest.raises(AlgorithmError):
        build_step_batch([nan], algorithm(2))


def test_columns_that_do_not_fit_are_refused():
    group = make_group(1, [True, False])
    broken = make_rollout(1, 0)
    object.__setattr__(broken, "logprobs", broken.logprobs[:1])
    with pytest.raises(DataError, match=r"3 .*logprobs has 1"):
        build_step_batch([Group(1, group.prompt, (broken, group.rollouts[1]), group.verdicts)], algorithm(2))
    half_read = replace(make_rollout(1, 0), teacher_logprobs=np.zeros(1, np.float32))
    with pytest.raises(DataError, match=r"3 .*teacher_logprobs has 1"):
        build_step_batch([Group(1, group.prompt, (half_read, group.rollouts[1]), group.verdicts)], algorithm(2))
    headless = make_rollout(1, 0, prompt=0)
    with pytest.raises(DataError, match="prompt"):
        build_step_batch([Group(1, group.prompt, (headless, group.rollouts[1]), group.verdicts)], algorithm(2))


def test_empty_response_is_kept():
    batch = build_step_batch([make_group(1, [True, False], [3, 0])], algorithm(2))
    assert batch.trained_tokens_N.tolist() == [3, 0]


def test_chosen_samples_stand_end_to_end():
    batch = build_step_batch(
        [make_group(0, [True, False, True], [1, 4, 2]), make_group(1, [False] * 3, [2, 0, 3])], algorithm(3)
    )
    parts = [batch.select([i]) for i in range(6)]
    turned = batch.select([5, 1, 3])
    assert turned.tokens_T.tolist() == [t for i in (5, 1, 3) for t in parts[i].tokens_T.tolist()]
    assert turned.rollout_logprobs_R.tolist() == [t for i in (5, 1, 3) for t in parts[i].rollout_logprobs_R.tolist()]
    assert turned.group_ids_N.tolist() == [1, 0, 1]
    for name in ("tokens_T", "lengths_N", "loss_mask_R", "rollout_logprobs_R", "bins_N", "advantages_N", "truncated_N"):
        whole = batch.select(range(6))
        np.testing.assert_array_equal(getattr(whole, name), getattr(batch, name))
        assert getattr(whole, name).dtype == getattr(batch, name).dtype
    assert turned.old_logprobs_R is None
    assert len(batch.select([])) == 0


def conversation(index, turns, rewards, total, **changes):
    """A rollout of these (observed, generated) turns with a reward each, and its verdict."""
    mask = np.concatenate([np.repeat([0, 1], turn) for turn in turns]).astype(np.uint8)
    tokens = np.arange(3, 4 + len(mask), dtype=np.int32)
    columns = tokens, 1, mask, np.zeros(len(mask), np.float32), "stop", 1, "x"
    reports = tuple(TurnReport(reward) for reward in rewards)
    return Rollout("p", 0, 0, index, *columns, turns=turns, reports=reports, **changes), Verdict(total > 0, total, "x")


def test_advantages_by_turn_are_those_of_process_supervision_by_hand():
    (one, first), (two, second) = (
        conversation(0, ((0, 2), (1, 1)), (1.0, 3.0), 4.0),
        conversation(1, ((0, 1), (1, 0)), (2.0,), 0.0),  # 2 less a penalty of 2, in its only turn
    )
    group = Group(0, Prompt("p", "1", "s", tokens=(3,)), (one, two), (first, second))
    batch = build_step_batch([group], algorithm(2), by_turn=True)
    rewards = np.array([1.0, 3.0, 0.0])
    a, b, c = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
    np.testing.assert_allclose(batch.token_advantages_R, [a + b, a + b, 0, b, c, 0], rtol=1e-6)
    assert build_step_batch([group], algorithm(2)).token_advantages_R is None
    taught = [replace(r, teacher_logprobs=np.full(r.response_length, 0.5, np.float32)) for r in (one, two)]
    both = build_step_batch([replace(group, rollouts=tuple(taught))], algorithm(2), by_turn=True, teacher=(1.0, 2.0))
    expected = np.where(both.loss_mask_R == 1, 0.5 + 2 * batch.token_advantages_R, 0)
    np.testing.assert_allclose(both.token_advantages_R, expected, rtol=1e-6)


def test_answers_of_one_turn_have_the_advantage_of_their_reward():
    group = make_group(0, [True, False, False, True], responses=[2, 3, 1, 2])
    batch = build_step_batch([group], algorithm(4), by_turn=True)
    np.testing.assert_allclose(batch.token_advantages_R, np.repeat(batch.advantages_N, [2, 3, 1, 2]), rtol=1e-6)


def test_columns_of_earlier_passes_follow_their_groups():
    groups = [make_group(i, [True, False], [1 + i, 2]) for i in range(4)]
    batch = build_step_batch(groups, algorithm(2))
    values_R = np.arange(len(batch.loss_mask_R), dtype=np.float32)
    whole = replace(batch, old_logprobs_R=-values_R, values_R=values_R)
    earlier = [whole.select(range(6, 8)), whole.select(range(6))]
    got = with_columns_of(build_step_batch([groups[i] for i in (2, 3, 0)], algorithm(2)), earlier)
    wanted = whole.select([4, 5, 6, 7, 0, 1])
    np.testing.assert_array_equal(got.old_logprobs_R, wanted.old_logprobs_R)
    np.testing.assert_array_equal(got.values_R, wanted.values_R)
    assert got.ref_logprobs_R is None and got.tokens_T.tolist() == wanted.tokens_T.tolist()


def test_a_teacher_is_added_to_the_advantage_of_the_answer():
    group = make_group(0, [True, False], [2, 0])
    taught = replace(group.rollouts[0], teacher_logprobs=np.array([-0.5, -0.25], np.float32))
    group = replace(group, rollouts=(taught, group.rollouts[1]))  # of an empty answer the teacher says nothing
    batch = build_step_batch([group], algorithm(2), teacher=(2.0, 3.0))
    expected = 2.0 * np.array([0.5, 1.75]) + 3.0 * batch.advantages_N[0]
    np.testing.assert_allclose(batch.token_advantages_R, expected, rtol=1e-6)
    assert batch.token_advantages_R.dtype == np.float32


def test_an_answer_that_no_teacher_read_is_refused_by_name():
    with pytest.raises(DataError, match=r"group 7 rollout 0 .*teacher"):
        build_step_batch([make_group(7, [True, False])], algorithm(2), teacher=(1.0, 1.0))


def test_experts_of_fewer_tokens_are_refused():
    group = make_group(5, [True, False])
    short = replace(group.rollouts[1], routed_experts=StoredExperts((Part("somewhere", 0, 4),), (4, 3, 2)))
    with pytest.raises(DataError, match=r"rollout 1 .*5 .*4"):
        build_step_batch([replace(group, rollouts=(group.rollouts[0], short))], algorithm(2))
