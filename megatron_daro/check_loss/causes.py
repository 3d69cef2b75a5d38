"""The likely cause of a difference, from what is left of the case when it is as small as it gets.

Place in the data flow: the smallest failing Case and the ratio of its gradient to the reference -> a sentence. A layout
that fails alone, and whether the gradient is off by a constant factor, tell the usual mistakes apart.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from megatron_daro.check_loss.records import Case

_SAME = 1e-4


def constant_ratio(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> float | None:
    """Return the factor between two gradients; None where they differ by more than a factor."""
    got = torch.cat([found[name].flatten() for name in wanted])
    want = torch.cat([tensor.flatten() for tensor in wanted.values()])
    if not bool(torch.isfinite(got).all()) or not float(want.norm()):
        return None
    ratio = float(got @ want / (want @ want))
    return ratio if float((got - ratio * want).norm()) < _SAME * float(got.norm()) else None


def likely_cause(case: Case, ratio: float | None, *, finite: bool = True) -> str:
    """Return what most likely makes this case differ.

    Args:
        case: the smallest that still does.
        ratio: of its gradient to the reference, if constant.
        finite: whether its gradient is.
    """
    if case.poison or not finite:
        return (
            "what the mask leaves out reaches the loss: 0 * NaN is NaN; choose with torch.where before anything is "
            "multiplied"
        )
    if case.padding and case.context == 1 and case.world_size == 1:
        return "padded positions are counted in a denominator: count the mask, not the positions"
    sizes = {
        "micro-batches": case.num_micro_batches,
        "data": case.data,
        "context": case.context,
        "tensor": case.tensor,
        "pipeline": case.pipeline,
        "expert": case.expert,
    }
    active = {name: size for name, size in sizes.items() if size > 1}
    if not active:
        return "the order or the masks of the samples alone change it: something is taken by position, not by sample"
    name, size = next(iter(active.items()))
    if len(active) > 1:
        together = " and ".join(f"{n} {s}" for n, s in active.items())
        hint = "" if ratio is None else f", by the constant factor {ratio:.4g}"
        return f"only {together} together fail{hint}: a factor or a denominator of one stands in the place of the other"
    if ratio is None:
        return _UNEVEN[name]
    if abs(ratio - size) < _SAME * size:
        return _TIMES[name].format(size=size)
    if abs(ratio * size - 1) < _SAME:
        return _DIVIDED[name].format(size=size)
    if name == "micro-batches":
        return (
            f"a denominator per micro-batch in a part of the loss (factor {ratio:.4g} with {size} micro-batches): "
            "divide by the count of the whole step"
        )
    return f"the gradient is off by the constant factor {ratio:.4g} under {name} {size}: a count that is not the step's"


_UNEVEN = {
    "micro-batches": (
        "a mean of means: a denominator (tokens, samples, a subset of them) is taken from the micro-batch; take that "
        "of the whole step"
    ),
    "data": (
        "a missing all-reduce: a denominator or a statistic is of this data-parallel rank alone; sum it over the "
        "data-parallel group before the first micro-batch"
    ),
    "context": (
        "a context-parallel rank's part of a sample is taken for the whole: sum what is per sample (lengths, "
        "denominators, sequence ratios, statistics) over the context-parallel group"
    ),
    "tensor": "tensor-parallel ranks do not compute the same loss: something differs or is summed between them",
    "pipeline": "the loss depends on the pipeline stage: state is shared between stages, or a stage is skipped",
}
_TIMES = {
    "micro-batches": (
        "a denominator per micro-batch: the term is inflated by exactly the number of micro-batches ({size}); divide "
        "by the count of the whole step"
    ),
    "data": (
        "gradients of data-parallel ranks are summed where they should be averaged, factor {size}: with "
        "calculate_per_token_loss Megatron sums and divides by the returned token counts; return those, and no mean"
    ),
    "context": (
        "a context-parallel factor of {size} too much: Megatron multiplies 2-tuples by it already, or token counts of "
        "whole samples are returned by each context-parallel rank"
    ),
    "tensor": "a factor of the tensor-parallel size ({size}): the loss is summed over ranks that all hold the same",
    "pipeline": "a factor of the pipeline size ({size})",
}
_DIVIDED = {
    "micro-batches": (
        "divided by the number of micro-batches ({size}) although every denominator is of the whole step: Megatron's "
        "schedule divides by it too when calculate_per_token_loss is off; multiply by it"
    ),
    "data": (
        "divided by the data-parallel size ({size}): the denominator is global and Megatron averages over ranks as "
        "well when calculate_per_token_loss is off; multiply by the size"
    ),
    "context": (
        "a context-parallel factor is missing (1/{size}): Megatron averages gradients over DP x CP, or divides by "
        "token counts that each context-parallel rank returned whole; multiply the loss by the size, or return "
        "local counts"
    ),
    "tensor": "divided by the tensor-parallel size ({size})",
    "pipeline": "divided by the pipeline size ({size})",
}
