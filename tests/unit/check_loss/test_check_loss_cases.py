"""Cases of the oracle: which are tried, what is simpler, their numbers, their words, and the parts of a rank."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from megatron_daro.workshop.check_loss.records import (
    Case,
    SampleColumns,
    as_json,
    from_json,
    local_positions,
    step_samples,
)
from megatron_daro.workshop.check_loss.search import AXES, axes, base, random_case, simpler

EVERY = Case(
    tensor=2,
    pipeline=3,
    context=4,
    schedule=(((0, 2), (3,)), ((1,), ())),
    prompts=(1, 2, 3, 4),
    responses=(5, 6, 7, 8),
    holes=((0, 1), (2, 3)),
    masked=(3,),
    poison=True,
    padding=7,
    whole=True,
    expert=2,
)


def test_a_case_counts_its_ranks_and_has_a_reference_on_one():
    assert (EVERY.data, EVERY.world_size, EVERY.num_micro_batches) == (2, 48, 2)
    plain = EVERY.reference()
    assert plain == replace(
        EVERY,
        schedule=(((0, 1, 2, 3),),),
        tensor=1,
        pipeline=1,
        context=1,
        poison=False,
        padding=0,
        whole=False,
        expert=1,
    )
    assert replace(EVERY, expert=0).reference().expert == 0


def test_a_case_is_described_in_one_line():
    assert EVERY.describe() == (
        "TP 2 PP 3 CP 4 DP 2 EP 2, per-token flag on, samples of each micro-batch: 0+2 3 | 1 nothing, masked samples "
        "[3], 2 holes in masks, NaN under the mask, 7 padded positions, whole samples on each rank, response lengths "
        "0: 5, 1: 6, 2: 7, 3: 8"
    )
    small = replace(EVERY.reference(), schedule=(((2,),),), holes=(), masked=(), per_token=False, whole=True)
    assert small.describe() == (
        "one process, per-token flag off, samples of each micro-batch: 2, response lengths 2: 7"
    )


def test_a_case_is_the_same_after_json():
    assert from_json(json.loads(json.dumps(as_json(EVERY)))) == EVERY
    assert set(as_json(EVERY)) >= {"tensor", "on_policy", "precise", "changed"}


@pytest.mark.parametrize(
    ("size", "wanted"), [(1, [[0, 1, 2, 3, 4]]), (2, [[4], [0, 1, 2, 3]]), (4, [[], [4], [0, 3], [1, 2]])]
)
def test_context_parallel_ranks_hold_two_chunks_of_the_whole_sample(size, wanted):
    # Three tokens of prompt and five of answer; the position of a token is that of the one before it: 2 .. 6 of 8.
    column = SampleColumns(*(torch.zeros(5),) * 5, prompt=3)
    assert [local_positions(column, rank, size).tolist() for rank in range(size)] == wanted


TOKENS = [8, 3, 5, 0, 7, 3, 7, 7]
OLD = [-2.833808937, -2.9594381581, -2.2386612609, -2.0647894668, -2.6877030314]
REF = [-2.46133741, -2.538654145, -2.227185406, -2.6426698373, -1.8597583316]
ADVANTAGES = [1.7320468, -0.4773489, -0.3773489, -0.2773489, 1.399998, 1.499998, -0.399998, -0.299998]


def test_numbers_of_a_sample_are_those_of_its_seed_and_place():
    one, other = step_samples(base(per_token=True)), step_samples(replace(base(per_token=True), seed=1))
    first, second = one.columns[0], one.columns[1]
    assert first.labels_R.tolist() == [TOKENS[i] for i in range(3, 8)] and first.inputs_R.tolist() == TOKENS[2:7]
    assert first.prompt == 3 and len(second.labels_R) == 2 and second.prompt == 2
    assert first.old_R.tolist() == pytest.approx(OLD, abs=1e-9) and first.ref_R.tolist() == pytest.approx(REF, abs=1e-9)
    assert other.columns[0].labels_R.tolist() != first.labels_R.tolist()
    assert all(bool(column.mask_R.all()) for column in one.columns)
    assert one.lengths_N.tolist() == [5, 2, 9, 3, 4, 7, 1, 6]


def test_rewards_bins_and_advantages_of_a_step():
    step = step_samples(base(per_token=True))
    assert step.rewards_N.tolist() == [1, 0, 0, 0, 1, 1, 0, 0] and step.bins_N.tolist() == [1] * 4 + [2] * 4
    assert step.advantages_N.tolist() == pytest.approx(ADVANTAGES, abs=1e-6)
    odd = step_samples(replace(base(per_token=True), group=3))
    assert odd.rewards_N.tolist() == [1, 0, 0, 1, 1, 0, 1, 1] and odd.bins_N.tolist() == [1] * 3 + [2] * 3 + [0] * 2


def test_holes_and_masked_samples_are_not_trained():
    case = replace(base(per_token=True), holes=((0, 1), (2, 0), (2, 8), (1, 2)), masked=(3,))
    step = step_samples(case)
    assert step.columns[0].mask_R.tolist() == [True, False, True, True, True]
    assert step.lengths_N.tolist() == [4, 2, 7, 0, 4, 7, 1, 6], "a hole beyond the answer is none"


def test_what_is_changed_differs_from_sample_to_sample_and_nothing_else_does():
    plain = step_samples(base(per_token=True))
    changed = {
        name: step_samples(replace(base(per_token=True), changed=name))
        for name in ("rewards", "advantages", "old_logprobs", "ref_logprobs")
    }
    third = torch.arange(8) % 3
    wanted = plain.rewards_N.roll(1) + 0.5 * third
    assert changed["rewards"].rewards_N.tolist() == wanted.tolist()
    factors = torch.tensor([2.0, -1.0, 0.5], dtype=torch.float64)[third]
    assert changed["advantages"].advantages_N.tolist() == (plain.advantages_N * factors).tolist()
    for name, step in changed.items():
        if name != "rewards":
            assert step.rewards_N.tolist() == plain.rewards_N.tolist()
        if name != "advantages":
            assert step.advantages_N.tolist() == plain.advantages_N.tolist()
        for i, (new, old) in enumerate(zip(step.columns, plain.columns, strict=True)):
            less = 0.05 * (1 + i % 3)
            assert (old.old_R - new.old_R).tolist() == pytest.approx([less * (name == "old_logprobs")] * len(old.old_R))
            assert (old.ref_R - new.ref_R).tolist() == pytest.approx([less * (name == "ref_logprobs")] * len(old.ref_R))


def test_a_random_case_is_that_of_its_seed():
    assert random_case(8, per_token=True) == Case(
        tensor=1,
        pipeline=1,
        context=1,
        schedule=(((2,), (1,)), ((5,), (0,)), ((4,), (3,)), ((7,), (6,))),
        prompts=(6, 3, 5, 4, 4, 4, 6, 1),
        responses=(8, 10, 4, 7, 2, 8, 4, 1),
        holes=((0, 1), (0, 5), (0, 6), (1, 0), (1, 7), (1, 9)),
        masked=(1,),
        group=4,
        seed=8,
        expert=2,
    )
    assert random_case(0, per_token=False) == Case(
        tensor=2,
        pipeline=2,
        context=1,
        schedule=(((0, 2, 4, 3, 5), (1, 6, 7)),),
        prompts=(5, 6, 5, 2, 3, 1, 6, 1),
        responses=(4, 9, 3, 5, 3, 2, 10, 5),
        holes=((0, 3), (2, 0), (3, 2), (6, 4), (6, 8)),
        group=4,
        per_token=False,
        poison=True,
        padding=1,
    )


def test_random_cases_have_every_size_and_no_more_than_four_ranks():
    cases = [random_case(seed, per_token=True) for seed in range(300)]
    assert {case.world_size for case in cases} == {1, 2, 3, 4} and {case.padding for case in cases} == {0, 1, 5}
    assert {(c.tensor, c.pipeline, c.context, c.data) for c in cases} == {
        (t, p, c, d) for t in (1, 2) for p in (1, 2) for c in (1, 2, 4) for d in (1, 2, 3, 4) if t * p * c * d <= 4
    }
    assert {case.num_micro_batches for case in cases} == {1, 2, 3}
    assert {len(case.responses) for case in cases} == {4, 6, 8, 9, 12}
    assert {n for case in cases for n in case.responses} == set(range(1, 13))
    assert {n for case in cases for n in case.prompts} == set(range(1, 7))
    split = [c for c in cases if c.expert]
    assert split and all(c.expert == 2 and c.tensor == 1 and c.context * c.data % 2 == 0 for c in split)


def test_the_named_cases_are_what_their_names_say():
    first, second = AXES["micro-batches"], AXES["data parallel"]
    assert first.schedule == (((0, 1, 2, 3), (4,), (5, 6, 7)),) and second.schedule == (
        ((0, 1, 2, 3, 4),),
        ((5, 6, 7),),
    )
    assert (first.prompts, first.responses, first.group) == ((3, 2, 4, 2, 5, 3, 2, 4), (5, 2, 9, 3, 4, 7, 1, 6), 4)
    masked = {name: case.masked for name, case in AXES.items() if case.masked}
    assert masked == {
        "a micro-batch without trained tokens": (4,),
        "a rank without trained tokens": (5, 6, 7),
        "tensor and data parallel": (5,),
    }
    assert {name: case.padding for name, case in AXES.items() if case.padding} == {
        "padding": 3,
        "pipeline and data parallel": 1,
    }
    assert [name for name, case in AXES.items() if case.poison] == ["NaN under the mask"]
    holes = ((0, 1), (2, 0), (2, 4), (5, 3), (5, 6), (7, 0))
    assert {case.holes for case in AXES.values()} == {(), holes}
    assert {name for name, case in AXES.items() if case.holes} == {
        "masks with holes, micro-batches",
        "masks with holes, context parallel",
        "NaN under the mask",
        "data parallel, micro-batches",
        "data and context parallel",
        "expert parallel",
    }
    assert AXES["order of samples"].schedule == (((3, 6, 0, 7, 1, 5, 2, 4),),)
    both = (((0, 1, 2), (3, 4)), ((5,), (6, 7)))
    assert [name for name, case in AXES.items() if case.schedule == both] == [
        "data parallel, micro-batches",
        "tensor and data parallel",
        "pipeline and data parallel",
        "expert parallel",
    ]
    largest = {max(c.tensor, c.pipeline, c.context, c.data, c.expert) for c in AXES.values()}
    assert largest == {1, 2} and base(per_token=False).schedule == (((0, 1, 2, 3, 4, 5, 6, 7),),)
    assert all(not c.per_token and not c.whole for _, c in axes(per_token=False))


SMALL = Case(
    tensor=1,
    pipeline=1,
    context=2,
    schedule=(((0, 1), (2,)), ((3,), (4,))),
    prompts=(1,) * 5,
    responses=(1, 2, 1, 1, 5),
    holes=((4, 0),),
    masked=(3,),
    poison=True,
    padding=2,
    expert=4,
)


def test_what_is_simpler_than_a_case_takes_one_thing_away_the_largest_first():
    found = [
        {name: value for name, value in as_json(smaller).items() if value != as_json(SMALL)[name]}
        for smaller in simpler(SMALL)
    ]
    assert found[:11] == [
        {"expert": 0},
        {"context": 1, "expert": 1},
        {"schedule": (((0, 1), (2,)),), "expert": 1},
        {"schedule": (((0, 1, 3), (2, 4)),), "expert": 1},
        {"schedule": (((0, 1, 2),), ((3, 4),))},
        {"schedule": (((0, 1),), ((3,),))},
        {"poison": False},
        {"padding": 0},
        {"holes": ()},
        {"masked": ()},
        {"schedule": (((1,), (2,)), ((3,), (4,)))},
    ]
    assert found[11] == {"schedule": (((0,), (2,)), ((3,), (4,)))}
    assert found[12] == {"responses": (1, 1, 1, 1, 5)}
    lengths = sorted(change["responses"][4] for change in found[13:])
    assert lengths == [1, 2, 4] and all(set(change) == {"responses"} for change in found[13:])
    deep = replace(
        SMALL, tensor=2, pipeline=2, context=1, expert=0, poison=False, schedule=(((0,),),), responses=(1,) * 5
    )
    assert [(c.tensor, c.pipeline) for c in simpler(replace(deep, padding=0, holes=(), masked=()))] == [(1, 2), (2, 1)]
    assert [c.expert for c in simpler(replace(deep, tensor=1, padding=0, holes=(), masked=(), expert=1))] == [0, 1]
