"""The split over ranks and micro-batches: its laws, its balance, its refusals."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from published_configs import GPT_OSS_120B

from megatron_daro.config.model_shape import read_model_shape
from megatron_daro.data.schedule import CostModel, Schedule, interleaved_group, schedule
from megatron_daro.errors import DataError


def check_laws(plan: Schedule, lengths, ranks: int, budget: int, sequence_multiple=1, total_multiple=1):
    assert len(plan) == ranks
    assert len({len(rank) for rank in plan}) == 1
    used = sorted(i for rank in plan for part in rank for i in part)
    assert used == list(range(len(lengths)))
    step = math.lcm(sequence_multiple, total_multiple)
    assert any(all(rank) for rank in plan), "a micro-batch that is empty on every rank"
    for rank in plan:
        assert all(rank) or len(lengths) % ranks, "equal numbers of samples need no empty micro-batch"
        for part in rank:
            padded = sum(-(-int(lengths[i]) // sequence_multiple) * sequence_multiple for i in part)
            assert -(-padded // step) * step <= budget


def loads(plan: Schedule, costs) -> list:
    """Sums of the ranks. costs: of each sample."""
    return [sum(costs[i] for part in rank for i in part) for rank in plan]


def imbalance(loads) -> float:
    """How much the fullest rank exceeds the mean, as a fraction of it."""
    return max(loads) / np.mean(loads) - 1


@settings(deadline=None, max_examples=200)
@given(
    st.integers(1, 6),
    st.integers(1, 8),
    st.data(),
    st.sampled_from([None, CostModel(1.0, 0.01), CostModel(0.0, 1.0)]),
    st.integers(0, 50),
)
def test_laws_hold_for_any_lengths(ranks, per_rank, data, cost, slack):
    lengths = data.draw(st.lists(st.integers(1, 100), min_size=ranks * per_rank, max_size=ranks * per_rank))
    budget = max(lengths) + slack
    plan = schedule(lengths, ranks, budget, cost=cost)
    check_laws(plan, lengths, ranks, budget)
    assert plan == schedule(np.array(lengths), ranks, budget, cost=cost)
    assert len(plan[0]) >= math.ceil(sum(lengths) / ranks / budget)


@settings(deadline=None, max_examples=100)
@given(st.integers(1, 5), st.lists(st.integers(1, 60), min_size=1, max_size=40), st.integers(1, 8), st.integers(1, 8))
def test_any_number_of_samples_splits_and_padding_counts_against_the_budget(
    ranks, lengths, sequence_multiple, total_multiple
):
    step = math.lcm(sequence_multiple, total_multiple)
    budget = max(-(-max(lengths) // step) * step, 3 * step)
    kwargs = {"sequence_multiple": sequence_multiple, "total_multiple": total_multiple}
    check_laws(schedule(lengths, ranks, budget, **kwargs), lengths, ranks, budget, **kwargs)


def real_lengths(num: int, seed: int = 0) -> np.ndarray:
    return np.clip(np.random.default_rng(seed).lognormal(8.0, 1.0, num).astype(np.int64), 32, 20480)


@pytest.mark.parametrize("cost", [None, CostModel(1.0, 1 / 8000)])
def test_balance_on_lengths_like_real_answers(cost):
    lengths = real_lengths(16384)
    plan = schedule(lengths, 8, 20480, cost=cost)
    check_laws(plan, lengths, 8, 20480)
    assert imbalance(loads(plan, (cost or CostModel()).of(lengths))) <= 0.001
    assert imbalance(loads(plan, lengths)) <= 0.02
    assert len(plan[0]) <= math.ceil(lengths.sum() / 8 / 20480) + 1


def test_balance_with_few_samples():
    batches = [real_lengths(128, seed) for seed in range(10)]
    imbalances = [imbalance(loads(schedule(lengths, 8, 20480), lengths)) for lengths in batches]
    assert np.median(imbalances) <= 0.01


def test_exchange_repairs_what_longest_first_leaves():
    # Longest first alone ends at 125 and 114, and at 106 and 112.
    lengths = [29, 37, 35, 20, 37, 39, 38, 4]
    assert imbalance(loads(schedule(lengths, 2, 1000), lengths)) < 0.015
    lengths = [35, 34, 32, 34, 3, 32, 37, 11]
    assert loads(schedule(lengths, 2, 1000), lengths) == [109, 109]


def test_quadratic_cost_moves_the_balance():
    lengths = [100, 10, 10, 10, 10, 10, 10, 10, 10, 10]
    flops = schedule(lengths, 2, 200, cost=CostModel(0.0, 1.0))
    assert sorted(loads(flops, lengths)) == [90, 100]
    assert CostModel.transformer(num_parameters=10, num_layers=2, attention_width=3) == CostModel(60.0, 36.0)


def test_a_window_makes_attention_cost_the_same_for_each_token():
    shape = read_model_shape(GPT_OSS_120B)  # 18 layers of each kind, 64 heads of 64
    cost = CostModel.of_model(shape)
    assert cost.quadratic == 6 * 18 * 4096
    assert cost.linear == 6 * (shape.num_active_parameters - 201088 * 2880) + 12 * 18 * 128 * 4096


QWEN_05B = {
    "model_type": "qwen2",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_attention_heads": 14,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "rope_theta": 1000000.0,
    "vocab_size": 151936,
    "max_position_embeddings": 32768,
}


def test_the_cost_of_a_model_is_that_of_its_shape():
    """By hand: 6 operations a parameter that multiplies; 6 a layer, channel and pair of tokens of causal attention."""
    layer = 896 * (2 * 896 + 2 * 128) + (896 + 2 * 128) + 3 * 896 * 4864 + 2 * 896
    multiplied = 24 * layer + 896 + 151936 * 896
    for tie in (True, False):
        cost = CostModel.of_model(read_model_shape({**QWEN_05B, "tie_word_embeddings": tie}))
        assert cost == CostModel(6.0 * multiplied, 6.0 * 24 * 14 * 64), "an input embedding of its own costs nothing"


@pytest.mark.parametrize("num", [64, 128, 512])
def test_cost_of_a_model_is_balanced_within_the_token_budget(num):
    """Few samples a rank: equal tokens would leave the rank with the longest answers behind."""
    cost = CostModel.of_model(read_model_shape({**QWEN_05B, "tie_word_embeddings": True}))

    found = []
    for seed in range(5):
        lengths = real_lengths(num, seed)
        by_cost = schedule(lengths, 8, 20480, cost=cost)
        check_laws(by_cost, lengths, 8, 20480)
        plans = schedule(lengths, 8, 20480), by_cost
        found.append([imbalance(loads(plan, cost.of(lengths))) for plan in plans])
    before, after = np.median(found, axis=0)
    assert after < before / 2
    assert after < 0.02


@pytest.mark.parametrize("parts", [(0.0, 0.0), (-1.0, 2.0)])
def test_cost_must_be_positive(parts):
    with pytest.raises(DataError, match="CostModel"):
        CostModel(*parts)


def test_small_micro_batches_stand_at_both_ends():
    lengths = real_lengths(256)
    for rank in schedule(lengths, 2, 20480):
        sizes = [int(lengths[list(part)].sum()) for part in rank]
        middle = sizes.index(max(sizes))
        assert sizes[:middle] == sorted(sizes[:middle])
        assert sizes[middle:] == sorted(sizes[middle:], reverse=True)
        assert sorted([sizes[0], sizes[-1]]) == sorted(sizes)[:2]


def test_every_sample_its_own_micro_batch():
    plan = schedule([10] * 6, 3, 10)
    assert len(plan[0]) == 2
    check_laws(plan, [10] * 6, 3, 10)


def test_a_rank_with_less_to_do_has_empty_micro_batches():
    plan = schedule([60] * 5, 2, 100)  # each in a micro-batch of its own
    assert sorted(len(rank) - sum(map(bool, rank)) for rank in plan) == [0, 1]
    check_laws(plan, [60] * 5, 2, 100)
    fewer = schedule([10] * 3, 5, 100)
    assert fewer == (((0,),), ((1,),), ((2,),), ((),), ((),))


def test_ranks_with_few_long_and_many_short_samples():
    lengths = [100, 1, 1, 1, 1, 1, 1, 99, 98, 97, 2, 2]
    check_laws(schedule(lengths, 4, 100), lengths, 4, 100)


def test_attention_stops_at_each_context_of_a_sample():
    contexts = [(8192,), (8192,), (1024,) * 8, (1024,) * 8]
    plan = schedule([8192] * 4, 2, 16384, contexts_N=contexts, cost=CostModel(0.0, 1.0))
    assert sorted(sorted(row // 2 for micro in rank for row in micro) for rank in plan) == [[0, 1], [0, 1]]


def test_a_sample_that_is_over_the_budget_by_the_padding_of_its_contexts_is_alone():
    contexts = [(5,) * 8, (30,), (10,)]  # 64 tokens when each is padded to a multiple of 4
    plan = schedule([40, 30, 10], 1, 40, contexts_N=contexts, sequence_multiple=4)
    assert sorted(plan[0]) == [(0,), (1,), (2,)]


def test_sample_over_the_budget_is_named():
    with pytest.raises(DataError, match=r"sample 2 .*50 .*40"):
        schedule([10, 20, 50], 1, 40)
    with pytest.raises(DataError, match=r"sample 1 .*39 .*40"):
        schedule([10, 39], 1, 39, sequence_multiple=4)


def test_refusals():
    with pytest.raises(DataError, match="no samples"):
        schedule([], 1, 10)
    with pytest.raises(DataError, match=r"sample 1 .*0"):
        schedule([1, 0], 1, 10)
    with pytest.raises(DataError, match="data_parallel_size"):
        schedule([1], 0, 10)
    with pytest.raises(DataError, match="token_budget"):
        schedule([1], 1, 3, total_multiple=4)


@pytest.mark.parametrize(
    ("micro_batches", "stages", "given"),
    [
        (1, 4, (4, 4)),  # filled up to one for each stage
        (8, 4, (8, 4)),
        (5, 2, (5, 3)),  # groups of 3 and 2: the rest is as large as the pipeline
        (7, 4, (7, 7)),  # groups of 4, 5 or 6 leave less than a pipeline
        (11, 4, (11, 6)),
    ],
)
def test_interleaved_groups_leave_no_rest_that_is_smaller_than_the_pipeline(micro_batches, stages, given):
    count, size = interleaved_group(micro_batches, stages)
    assert (count, size) == given
    rests = {smaller: count % smaller for smaller in range(stages, size)}
    assert all(0 < rest < stages for rest in rests.values()), "a smaller group would have done"
