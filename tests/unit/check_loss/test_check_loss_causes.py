"""What the oracle says of a loss, from traces that are made up: each cause, and what tells it from others."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from megatron_daro.workshop.check_loss.causes import (
    Share,
    constant_ratio,
    likely_cause,
    lost_tokens_cause,
    shares,
    single_process_cause,
)
from megatron_daro.workshop.check_loss.records import Case, Outcome, Trace

BASE = Case(tensor=1, pipeline=1, context=1, schedule=(((0, 1),),), prompts=(2, 2), responses=(4, 4), per_token=False)
MASK, SHIFTED = "what the mask leaves out reaches the loss", "something is shifted by one position: "


def trace(rows, *, unit=(0, 0, 0), tensor=0, returned=None):
    """rows: sample, place, coefficient, old log-prob, advantage, whether it is trained."""
    samples, places, coefficients, old, advantages, mask = zip(*rows, strict=True)
    columns = [torch.tensor(column, dtype=torch.float64) for column in (old, advantages, coefficients)]
    return Trace(
        data=unit[0],
        context=unit[2],
        tensor=tensor,
        micro_batch=unit[1],
        samples_T=torch.tensor(samples),
        positions_T=torch.tensor(places),
        mask_T=torch.tensor(mask),
        old_T=columns[0],
        advantages_T=columns[1],
        coefficients_T=columns[2],
        returned=returned,
    )


def outcome(*traces, gradient=(1.0, 2.0)):
    return Outcome({"w": torch.tensor(gradient, dtype=torch.float64)}, traces)


def sample(number, coefficients, trained=None, *, advantage=1.0, start=0):
    mask = trained or [True] * len(coefficients)
    return [(number, start + i, value, -0.1 * i * i, advantage, mask[i]) for i, value in enumerate(coefficients)]


def test_a_factor_between_gradients_is_found_where_they_differ_by_nothing_else():
    want = {"a": torch.tensor([[1.0, 2.0]]), "b": torch.tensor([3.0])}
    assert constant_ratio({"b": want["b"] * 2, "a": want["a"] * 2}, want) == pytest.approx(2)
    assert constant_ratio({"a": want["a"], "b": want["b"] * -1}, want) is None
    assert constant_ratio({"a": want["a"] * math.inf, "b": want["b"]}, want) is None
    assert constant_ratio(want, {name: tensor * 0 for name, tensor in want.items()}) is None
    assert constant_ratio({"a": want["a"], "b": want["b"] + 3e-4}, want) == pytest.approx(1, abs=1e-3)
    assert constant_ratio({"a": want["a"], "b": want["b"] + 3e-3}, want) is None


def test_a_share_is_what_a_position_adds_under_the_scaling_of_the_schedule():
    rows = [(1, 0, 8.0, -1.0, 0.5, True), (1, 1, 4.0, -2.0, 0.5, False), (-1, -1, 2.0, 0.0, 0.0, False)]
    both = outcome(
        trace(rows, unit=(1, 2, 0), returned=3.0),
        trace(sample(0, [6.0]), unit=(0, 0, 0), returned=5.0),
        trace(sample(0, [600.0]), tensor=1, returned=100.0),
    )
    found = shares(replace(BASE, schedule=(((0,),), ((1,),)), context=2), both)
    assert found == {
        (1, 0): Share(2.0, -1.0, 0.5, True, (1, 2, 0), border=True),
        (1, 1): Share(1.0, -2.0, 0.5, False, (1, 2, 0), border=True),
        (-1, 2): Share(0.5, 0.0, 0.0, False, (1, 2, 0), border=True),
        (0, 0): Share(1.5, 0.0, 1.0, True, (0, 0, 0), border=True),
    }
    per_token = shares(replace(BASE, per_token=True), both)
    assert [share.coefficient for share in per_token.values()] == [1.0, 0.5, 0.25, 0.75]
    none = shares(replace(BASE, per_token=True), outcome(trace(sample(0, [6.0]), returned=None)))
    assert none[0, 0].coefficient == 6


@pytest.mark.parametrize(
    ("places", "wanted"),
    [
        ([(0, 0), (0, 1), (0, 2)], [True, False, True]),
        ([(0, 0), (0, 1), (1, 2), (1, 3)], [True, True, True, True]),
        ([(0, 0), (0, 1), (0, 2), (0, 5), (0, 6), (0, 7)], [True, False, True, True, False, True]),
    ],
)
def test_a_border_is_beside_another_sample_or_another_part_of_its_own(places, wanted):
    rows = [(sample, place, 1.0, 0.0, 1.0, True) for sample, place in places]
    assert [share.border for share in shares(BASE, outcome(trace(rows))).values()] == wanted


def one_process(coefficients, trained, *more):
    rows = sample(0, coefficients, trained)
    return single_process_cause(outcome(trace([*rows, *more])), BASE)


def test_on_one_process_positions_outside_the_mask_must_have_no_gradient():
    trained = [True, True, False, True, True]
    assert one_process([1.0, -1.0, 0.0, 1.0, 1.0], trained) == ""
    assert one_process([1.0, -1.0, 1e-4, 1.0, 1.0], trained) == "", "rounding is none"
    assert one_process([1.0, -1.0, -2e-4, 1.0, 1.0], trained) == f"{MASK} (1 such positions have a gradient)"
    assert one_process([1.0] * 5, [False, True, False, True, True]) == f"{MASK} (2 such positions have a gradient)"
    assert single_process_cause(Outcome({}, [trace([(-1, -1, 0.0, 0.0, 0.0, False)])]), BASE) == ""


def test_on_one_process_gradients_beside_the_borders_of_the_mask_are_a_shift():
    trained = [True, True, False, True, True]
    words = f"{SHIFTED}positions beside the mask's borders are trained, and trained ones are not; align "
    assert one_process([1.0, 1.0, 1.0, 0.0, 1.0], trained).startswith(words)
    assert one_process([1.0, 1e-4, -1.0, 1.0, 1.0], trained).startswith(words)
    assert one_process([0.0, 1.0, 1.0, 1.0, 1.0], trained).startswith(MASK), "not beside it"
    lonely = (1, 0, 1.0, 0.0, 1.0, False)
    assert one_process([1.0, 1.0, 1.0, 0.0, 1.0], trained, lonely).startswith(f"{MASK} (2 such")


@pytest.mark.parametrize(
    ("first", "second", "which"),
    [
        ([0.0, 1.0, 2.0], [1e-4, 1.0], "first"),
        ([1.0, -2.0, 0.0], [1.0, 0.0], "last"),
        ([0.0, 1.0, 0.0], [0.0, 1.0], ""),
        ([0.0, 1.0, 2.0], [1.0, 1.0], ""),
        ([1.0, 1.0, 2.0], [1.0, 1.0], ""),
        ([0.0], [0.0], ""),
    ],
)
def test_a_token_of_every_sample_without_a_gradient_at_ratios_of_1_is_a_shift(first, second, which):
    rows = [*sample(0, first), *sample(1, second), *sample(2, [0.0]), *sample(3, [0.0, 0.0], [False, False])]
    found = lost_tokens_cause(outcome(trace(rows)), BASE)
    words = f"the {which} trained token of every sample has no gradient, all others have"
    assert found.startswith(f"{SHIFTED}{words}") if which else found == ""


RIGHT = [1.0, 2.0, 3.0, 4.0]
SPLIT = replace(BASE, schedule=(((0,), (1,)),))


def cause(coefficients, *, case=SPLIT, gradient=(1.0, 2.0), right=RIGHT, advantages=(1.0, 1.0), **options):
    """What is said where two samples of four tokens, a micro-batch each, have these coefficients instead of RIGHT."""
    got, want = (
        outcome(
            *(trace(sample(i, values[i], advantage=advantages[i]), unit=(0, i, 0)) for i in range(2)),
            gradient=made,
        )
        for values, made in ((coefficients, gradient), ((right, right), (1.0, 2.0)))
    )
    return likely_cause(case, got, want, **options)


def test_what_is_nan_or_poisoned_is_laid_to_the_mask():
    words = f"{MASK}: 0 * NaN is NaN; choose with torch.where"
    assert cause((RIGHT, RIGHT), gradient=(math.nan, 1.0)).startswith(words)
    assert cause((RIGHT, RIGHT), case=replace(SPLIT, poison=True)).startswith(words)


def test_padding_that_is_trained_and_padding_that_is_counted_are_told_apart():
    padded = replace(BASE, padding=1)

    def found(coefficient, case):
        rows = [*sample(0, RIGHT), (-1, -1, coefficient, 0.0, 0.0, False)]
        return likely_cause(case, outcome(trace(rows)), outcome(trace(sample(0, RIGHT))))

    assert found(0.1, padded) == f"{MASK}: padded positions are trained"
    assert found(0.1, BASE) == MASK
    assert found(0.0, padded).startswith("padded positions are counted in a denominator: count the mask")
    assert found(0.0, replace(padded, context=2)).startswith("a context-parallel factor is missing") is False
    assert found(0.0, BASE).startswith("the order or the masks of the samples alone change it")


def test_positions_at_the_border_that_differ_alone_are_a_shift():
    words = f"{SHIFTED}only positions at the border of a part differ, all others are right"
    assert cause(([1.1, 2.0, 3.0, 4.0], [1.0, 2.0, 3.0, 4.2])).startswith(words)
    assert not cause(([1.1, 2.1, 3.0, 4.0], [1.0, 2.0, 3.0, 4.2])).startswith(words)
    short = [outcome(trace(sample(0, values))) for values in ([1.0, 2.5], [1.0, 2.0])]
    assert not likely_cause(SPLIT, *short).startswith(words), "nothing is inside"


@pytest.mark.parametrize("gap", [-1, 1])
def test_ratios_to_the_old_log_prob_beside_are_a_shift(gap):
    old = [-0.1 * i * i for i in range(4)]
    moved = [RIGHT[i] * math.exp(old[i] - old[i + gap]) if 0 <= i + gap < 4 else RIGHT[i] * 1.5 for i in range(4)]
    words = f"{SHIFTED}ratios are to the old log-prob of the position beside"
    assert cause((moved, moved)).startswith(words)
    assert not cause((moved, RIGHT)).startswith(words), "three positions are too few"
    assert not cause((moved, [-value for value in moved])).startswith(words)
    assert not cause(([value * 1.01 for value in moved],) * 2).startswith(words)


def test_a_micro_batch_without_a_gradient_is_one_that_is_dropped():
    words = "micro-batch 2 of data-parallel rank 0 is not trained: its loss is dropped"
    assert cause((RIGHT, [0.0] * 4)) == words
    assert cause(([0.0] * 4, [0.0] * 4)) != words
    assert cause(([2.0, 4.0, 6.0, 8.0], [0.0] * 4)) != words, "the other one differs, too"
    ranks = replace(BASE, schedule=(((0,),), ((1,),)))
    got, want = (
        outcome(trace(sample(0, first), unit=(0, 0, 0)), trace(sample(1, second), unit=(1, 0, 0)))
        for first, second in (([2 * value for value in RIGHT], [0.0] * 4), (RIGHT, RIGHT))
    )
    assert likely_cause(ranks, got, want) == "micro-batch 1 of data-parallel rank 1 is not trained: its loss is dropped"


def test_advantages_of_other_samples_are_recognized():
    words = "advantages are taken by position and not by sample"
    swapped = ([value * 3 for value in RIGHT], [value / 3 for value in RIGHT])
    assert cause(swapped, advantages=(1.0, 3.0)).startswith(words)
    assert not cause(swapped, advantages=(1.0, 2.0)).startswith(words)
    few = ([value * 3 for value in RIGHT[:3]] + [4.0], RIGHT)
    assert not cause(few, advantages=(1.0, 3.0)).startswith(words), "three positions are too few"
    some = ([value * 3 for value in RIGHT], [value * 1.5 for value in RIGHT[:2]] + [1.0, 4.0])
    assert cause(some, advantages=(1.0, 3.0)).startswith(words), "four of seven"
    half = ([value * 3 for value in RIGHT], [value * 1.5 for value in RIGHT])
    assert not cause(half, advantages=(1.0, 3.0)).startswith(words)


RANKS = replace(BASE, schedule=(((0,),), ((1,),)))
AXES = {
    "micro-batches": SPLIT,
    "data": RANKS,
    "context": replace(BASE, context=2),
    "tensor": replace(BASE, tensor=2),
    "pipeline": replace(BASE, pipeline=2),
}
WORDS = {
    (
        "micro-batches",
        2.0,
    ): "a denominator per micro-batch: the term is inflated by exactly the number of micro-batches (2)",
    (
        "micro-batches",
        0.5,
    ): "divided by the number of micro-batches (2) although every denominator is of the whole step",
    ("micro-batches", 1.3): "a denominator per micro-batch in a part of the loss (factor 1.3 in the smallest case)",
    ("micro-batches", None): "a mean of means: a denominator (tokens, samples, a subset of them)",
    ("data", 2.0): "gradients of data-parallel ranks are summed where they should be averaged, factor 2",
    ("data", 0.5): "divided by the data-parallel size (2): the denominator is global",
    ("data", 1.3): "the gradient is off by the constant factor 1.3 under data 2: a count that is not the step's",
    ("data", None): "a missing all-reduce: a denominator or a statistic is of this data-parallel rank alone",
    ("context", 2.0): "a context-parallel factor of 2 too much: Megatron multiplies 2-tuples by it already",
    ("context", 0.5): "a context-parallel factor is missing (1/2): Megatron averages gradients over DP x CP",
    ("context", 1.3): "the gradient is off by the constant factor 1.3 under context 2",
    ("context", None): "a context-parallel rank's part of a sample is taken for the whole",
    ("tensor", 2.0): "a factor of the tensor-parallel size (2): the loss is summed over ranks",
    ("tensor", 0.5): "divided by the tensor-parallel size (2)",
    ("tensor", None): "tensor-parallel ranks do not compute the same loss",
    ("pipeline", 2.0): "a factor of the pipeline size (2)",
    ("pipeline", 0.5): "divided by the pipeline size (2)",
    ("pipeline", None): "the loss depends on the pipeline stage",
}


def scaled(factor):
    return (1.0, 3.0) if factor is None else (factor, 2 * factor)


@pytest.mark.parametrize(("axis", "factor"), WORDS)
def test_one_axis_and_a_factor_name_the_count_that_is_wrong(axis, factor):
    # After the schedule's scaling positions are those of the reference, so that the layout decides.
    scale = AXES[axis].data * AXES[axis].context
    made = ([value * scale for value in RIGHT],) * 2
    assert cause(made, case=AXES[axis], gradient=scaled(factor)).startswith(WORDS[axis, factor])


def test_a_part_s_factor_and_several_axes_have_words_of_their_own():
    part = cause((RIGHT, RIGHT), gradient=scaled(None), part=1.25)
    assert part.startswith("a denominator per micro-batch in a part of the loss (factor 1.25 in the smallest case)")
    tensor = cause((RIGHT, RIGHT), case=AXES["tensor"], gradient=scaled(None), part=1.25)
    assert tensor.startswith("tensor-parallel ranks do not compute")
    both = replace(SPLIT, tensor=2)
    end = "a factor or a denominator of one stands in the place of the other"
    assert (
        cause((RIGHT, RIGHT), case=both, gradient=scaled(None))
        == f"only micro-batches 2 and tensor 2 together fail: {end}"
    )
    words = f"only micro-batches 2 and tensor 2 together fail, by the constant factor 1.5: {end}"
    assert cause((RIGHT, RIGHT), case=both, gradient=scaled(1.5)) == words
    assert cause((RIGHT, RIGHT), case=replace(BASE, expert=2, tensor=2)).startswith(
        "only tensor 2 and expert 2 together"
    )


def test_a_constant_in_place_of_the_number_of_tokens_is_named():
    def plain(returned):
        rows = sample(0, RIGHT, [True, True, True, False])
        return [trace(rows, returned=None), trace(rows, returned=3.0), trace(rows, returned=returned)]

    case, words = replace(SPLIT, per_token=True), "the number of tokens that is returned is 7 in each micro-batch"
    assert cause((RIGHT, RIGHT), case=case, plain=plain(7.0)).startswith(words)
    assert not cause((RIGHT, RIGHT), case=case, plain=plain(3.0)).startswith(words)
    assert not cause((RIGHT, RIGHT), case=SPLIT, plain=plain(7.0)).startswith(words)
    assert not cause((RIGHT, RIGHT), case=case, plain=plain(7.0), gradient=scaled(None)).startswith(words)
