"""Names what most likely makes a loss differ, from what it does to each position in the layout that fails.

Case, traces of that layout and of one process -> a sentence. The usual mistakes are told apart by which positions
differ (at the border of a part, under the mask, of one micro-batch), and whether they differ by a constant factor.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from megatron_daro.workshop.check_loss.cases import Case
from megatron_daro.workshop.check_loss.outcomes import Outcome, Trace, constant_ratio

_SAME, _EXACTLY = 1e-4, 1e-5
_COUNTED = ("tokens", "positions", "samples", "trained samples")
Position = tuple[int, int]
"""Sample and place in its response."""
Unit = tuple[int, int, int]
"""Data-parallel rank, micro-batch, context-parallel rank."""


@dataclass(frozen=True, slots=True)
class Share:
    """One position's share of the step. coefficient: derivative of the step's loss by the position's log-prob. border:
    whether it is the first or last position of a part of a sample that the rank holds."""

    coefficient: float
    old: float
    advantage: float
    trained: bool
    unit: Unit
    border: bool


def shares(case: Case, outcome: Outcome) -> dict[Position, Share]:
    """Return the share of each position; the keys of padded positions are (-1, number)."""
    ranks = [trace for trace in outcome.traces if trace.tensor == 0]
    scale = 1 / (case.data * case.context)
    if case.per_token:
        tokens = sum(trace.returned or 0.0 for trace in ranks)
        scale = 1 / tokens if tokens > 0 else 1.0
    out: dict[Position, Share] = {}
    for trace in ranks:
        unit = (trace.data, trace.micro_batch, trace.context)
        samples, places = trace.samples_T.tolist(), trace.positions_T.tolist()
        columns = (trace.coefficients_T, trace.old_T, trace.advantages_T, trace.mask_T)
        for i, (coefficient, old, advantage, trained) in enumerate(zip(*(c.tolist() for c in columns), strict=True)):
            key = (samples[i], places[i]) if samples[i] >= 0 else (-1, len(out))
            out[key] = Share(scale * coefficient, old, advantage, trained, unit, _at_border(samples, places, i))
    return out


def _at_border(samples: Sequence[int], places: Sequence[int], i: int) -> bool:
    """Return whether a neighbour of position i is missing, or is of another sample or another part of the same one."""
    for j, gap in ((i - 1, -1), (i + 1, 1)):
        if not 0 <= j < len(samples) or samples[j] != samples[i] or places[j] != places[i] + gap:
            return True
    return False


def _largest(shares_of_positions: Mapping[Position, Share]) -> float:
    return max((abs(share.coefficient) for share in shares_of_positions.values()), default=0.0)


def _has_gradient(share: Share, largest: float) -> bool:
    return abs(share.coefficient) > _SAME * largest


def single_process_cause(masked: Outcome, case: Case) -> str:
    """Return the cause if the loss is wrong on one process already, because it trains positions that the mask leaves
    out; else an empty text."""
    own = shares(case, masked)
    largest = _largest(own)
    outside = {key for key, share in own.items() if not share.trained and _has_gradient(share, largest)}
    if not outside:
        return ""
    silent = {key for key, share in own.items() if share.trained and not _has_gradient(share, largest)}
    for gap in (-1, 1):
        moved = {(sample, place + gap) for sample, place in silent}
        if silent and all((sample, place - gap) in own for sample, place in outside) and moved & outside:
            return _SHIFTED.format(where="positions beside the mask's borders are trained, and trained ones are not")
    return f"{_MASK} ({len(outside)} such positions have a gradient)"


def lost_tokens_cause(on_policy: Outcome, case: Case) -> str:
    """Return the cause if at ratios of 1 the first or the last trained token of every sample has no gradient, which
    shows a shift; else an empty text."""
    own = shares(case, on_policy)
    largest = _largest(own)
    trained: dict[int, list[int]] = {}
    for (sample, place), share in own.items():
        if share.trained:
            trained.setdefault(sample, []).append(place)
    several = {sample: sorted(places) for sample, places in trained.items() if len(places) > 1}
    silent = {
        (sample, place)
        for sample, places in several.items()
        for place in places
        if not _has_gradient(own[sample, place], largest)
    }
    for name, which in (("first", 0), ("last", -1)):
        if several and silent == {(sample, places[which]) for sample, places in several.items()}:
            return _SHIFTED.format(where=f"the {name} trained token of every sample has no gradient, all others have")
    return ""


@dataclass(frozen=True, slots=True)
class _Comparison:
    """The shares of a layout beside those of one process. largest: absolute coefficient on one process."""

    own: Mapping[Position, Share]
    reference: Mapping[Position, Share]
    largest: float

    def has_gradient(self, share: Share) -> bool:
        return _has_gradient(share, self.largest)

    def trained(self) -> list[Position]:
        return [key for key, share in self.own.items() if share.trained and key in self.reference]

    def differing(self) -> set[Position]:
        """Return the trained positions whose coefficients differ."""
        gaps = {key: self.own[key].coefficient - self.reference[key].coefficient for key in self.trained()}
        return {key for key, gap in gaps.items() if abs(gap) > _SAME * self.largest}

    def is_silent(self, unit: Unit) -> bool:
        """Return whether nothing of a unit is trained although some of it is trained on one process."""
        keys = [key for key in self.trained() if self.own[key].unit == unit]
        return all(not self.has_gradient(self.own[key]) for key in keys) and any(
            self.has_gradient(self.reference[key]) for key in keys
        )

    def scales(self) -> Sequence[float]:
        """Return the factor of each unit, sorted. Return none if a unit has several factors, or if all units hold a
        single position, where a common factor means nothing."""
        factors: dict[Unit, list[float]] = {}
        for key in self.trained():
            if self.has_gradient(self.reference[key]):
                ratio = self.own[key].coefficient / self.reference[key].coefficient
                factors.setdefault(self.own[key].unit, []).append(ratio)
        uneven = any(max(unit) - min(unit) > _SAME * max(map(abs, unit)) for unit in factors.values())
        if uneven or all(len(unit) == 1 for unit in factors.values()):
            return ()
        return sorted(unit[0] for unit in factors.values())


@dataclass(frozen=True, slots=True)
class Part:
    """A case whose gradient is off by the factor `ratio`, and its traces."""

    ratio: float
    traces: Sequence[Trace]

    @property
    def is_of_counts(self) -> bool:
        """Whether the factor is a ratio of counts (tokens, samples, positions) of micro-batches, ranks or the step."""
        units: dict[Unit, Counter[str]] = {}
        for trace in (trace for trace in self.traces if trace.tensor == 0):
            count = units.setdefault((trace.data, trace.micro_batch, 0), Counter())
            count["tokens"] += int(trace.mask_T.sum())
            count["positions"] += len(trace.mask_T)
            count["samples"] = len(set(trace.samples_T.tolist()) - {-1})
            count["trained samples"] = len(set(trace.samples_T[trace.mask_T].tolist()) - {-1})
        return any(self._is_among({unit[name] for unit in units.values()}, units, name) for name in _COUNTED)

    def _is_among(self, of_units: set[int], units: Mapping[Unit, Counter[str]], name: str) -> bool:
        ranks = Counter[int]()
        for (data, _, _), count in units.items():
            ranks[data] += count[name]
        counts = {*of_units, *ranks.values(), ranks.total()} - {0}
        scales = (1, len(units), 1 / len(units))
        wanted = (scale * a / b for a in counts for b in counts for scale in scales)
        return any(abs(self.ratio - one) < _EXACTLY * one for one in wanted)


def likely_cause(
    case: Case,
    outcome: Outcome,
    wanted: Outcome,
    *,
    plain: Sequence[Trace] = (),
    part: Part | None = None,
    order_matters: bool = False,
) -> str:
    """Say what most likely makes this case differ.

    Args:
        case: differs, and has few axes.
        outcome: of the case.
        wanted: the outcome of the same samples on one process.
        plain: traces of all samples on one process.
        part: the smallest case, if its gradient is off by a constant factor; used if this case has no such factor.
        order_matters: whether another order of the samples in one micro-batch also changes the gradient.
    """
    finite = all(bool(g.isfinite().all()) for g in outcome.gradients.values())
    if case.poison or not finite:
        return _MASK + ": 0 * NaN is NaN; choose with torch.where before anything is multiplied"
    reference = shares(case.reference(), wanted)
    compared = _Comparison(shares(case, outcome), reference, _largest(reference))
    if not compared.largest:
        return f"the whole step on one process is not trained, though it is in this layout: {_LIMIT}"
    if any(not share.trained and compared.has_gradient(share) for share in compared.own.values()):
        return f"{_MASK}: padded positions are trained" if case.padding else _MASK
    if case.padding and case.context == 1 and case.world_size == 1:
        return "padded positions are counted in a denominator: count the mask, not the positions"
    if cause := _by_position(compared):
        return cause
    ratio = constant_ratio(outcome.gradients, wanted.gradients)
    if ratio is None and order_matters:
        return _ACROSS_SAMPLES
    return _by_layout(case, ratio, outcome.traces, plain, part, compared.scales())


def _by_position(compared: _Comparison) -> str:
    """Return a cause that shows in which positions differ, and how; empty if there is none."""
    own, differing = compared.own, compared.differing()
    if not differing:
        return ""
    if _only_borders_differ(compared, differing):
        return _SHIFTED.format(where="only positions at the border of a part differ, all others are right")
    if any(_reads_old_of(gap, compared, differing) for gap in (-1, 1)):
        return _SHIFTED.format(where="ratios are to the old log-prob of the position beside")
    units = {own[key].unit for key in compared.trained()}
    silent = {unit for unit in units if compared.is_silent(unit)}
    if all(own[key].unit in silent for key in differing):
        if silent == units:
            return f"no micro-batch is trained, though the whole step is on one process: {_LIMIT}"
        data, micro_batch, _ = min(silent)
        return f"micro-batch {micro_batch + 1} of data-parallel rank {data} is not trained: {_LIMIT}"
    if not compared.scales() and _has_others_advantages(compared, differing):
        return (
            "advantages are taken by position and not by sample: tokens have those of other samples; take columns of "
            "the same samples, in the order of the micro-batch"
        )
    return ""


def _only_borders_differ(compared: _Comparison, differing: set[Position]) -> bool:
    """Return whether only positions at borders differ, and most parts with such positions also have right ones: a part
    that is wrong as a whole, however short, does not show a shift."""
    parts: dict[tuple[Unit, int], list[Position]] = {}
    for key in compared.trained():
        parts.setdefault((compared.own[key].unit, key[0]), []).append(key)
    wrong = [keys for keys in parts.values() if differing.intersection(keys)]
    partly = [keys for keys in wrong if not differing.issuperset(keys)]
    return all(compared.own[key].border for key in differing) and 2 * len(partly) > len(wrong)


def _reads_old_of(gap: int, compared: _Comparison, differing: set[Position]) -> bool:
    """Return whether most differing positions look as if they used the old log-prob of the position `gap` away."""
    own, reference = compared.own, compared.reference
    fits = tried = 0
    for sample, place in differing:
        beside = own.get((sample, place + gap))
        got, want = own[sample, place].coefficient, reference[sample, place].coefficient
        if beside is None or not compared.has_gradient(reference[sample, place]) or got * want <= 0:
            continue
        tried += 1
        fits += abs(math.log(got / want) - (own[sample, place].old - beside.old)) < 1e-3
    return tried >= 4 and fits > tried / 2


def _has_others_advantages(compared: _Comparison, differing: set[Position]) -> bool:
    """Return whether most differing positions look as if they used the advantage of another sample."""
    own, reference = compared.own, compared.reference
    every = torch.tensor(sorted({share.advantage for key, share in own.items() if key[0] >= 0}), dtype=torch.float64)
    fits = tried = 0
    for key in differing:
        if not compared.has_gradient(own[key]) or not compared.has_gradient(reference[key]):
            continue
        tried += 1
        wanted = own[key].coefficient / reference[key].coefficient * own[key].advantage
        fits += bool(((every - wanted).abs() < 1e-6).any())
    return tried >= 4 and fits > 0.6 * tried


def _by_layout(
    case: Case,
    ratio: float | None,
    traces: Sequence[Trace],
    plain: Sequence[Trace],
    part: Part | None,
    scales: Sequence[float],
) -> str:
    """Return a cause from the axes that the case still has, and the factor of its gradient or those of its units."""
    if not case.axes:
        return "the order or the masks of the samples alone change it: something is taken by position, not by sample"
    if case.per_token and ratio is not None and (returned := _constant_number(plain)):
        return (
            f"the number of tokens that is returned is {returned:g} in each micro-batch, not that of its trained "
            "tokens: with calculate_per_token_loss Megatron divides by their sum; return batch.mask_T.sum()"
        )
    name, size = next(iter(case.axes.items()))
    if len(case.axes) > 1:
        together = " and ".join(f"{n} {s}" for n, s in case.axes.items())
        confused = "a factor or a denominator of one stands in the place of the other"
        if ratio is None:
            return f"not certain: it fails with {together} together, by no constant factor; perhaps {confused}"
        return f"only {together} together fail, by the constant factor {ratio:.4g}: {confused}"
    if ratio is None and name == "micro-batches" and part is not None:
        return _of_a_micro_batch(part)
    if ratio is None and scales and name in _SCALED:
        return _SCALED[name].format(least=scales[0], most=scales[-1])
    if ratio is None:
        return (
            f"not certain: it fails with {name} {size} alone, by no constant factor; most often it is {_UNEVEN[name]}"
        )
    if abs(ratio - size) < _SAME * size:
        return _TIMES[name].format(size=size)
    if abs(ratio * size - 1) < _SAME:
        return _DIVIDED[name].format(size=size)
    whole = Part(ratio, traces)
    if name == "micro-batches":
        return _of_a_micro_batch(whole)
    off = f"the gradient is off by the constant factor {ratio:.4g} under {name} {size}"
    if whole.is_of_counts:
        return f"{off}: a count that is not the step's"
    return f"not certain: {off}, which is no ratio of counts; most often it is {_UNEVEN[name]}"


def _of_a_micro_batch(part: Part) -> str:
    return (_PART if part.is_of_counts else _NO_COUNT).format(ratio=part.ratio)


def _constant_number(plain: Sequence[Trace]) -> float | None:
    """Return the number of tokens that the function returned on one process, if it is not that of trained tokens."""
    for trace in plain:
        if trace.returned is not None and trace.returned != int(trace.mask_T.sum()):
            return trace.returned
    return None


_PART = (
    "a denominator per micro-batch in a part of the loss (factor {ratio:.4g} in the smallest case): divide by the "
    "count of the whole step"
)
_NO_COUNT = (
    "not certain: a factor per micro-batch ({ratio:.4g} in the smallest case) that is no ratio of token or sample "
    "counts; look for a statistic of the micro-batch that scales its loss (a deviation, a maximum, a norm), or a "
    "denominator per micro-batch of some of its tokens or samples; take it from the whole step"
)
_MASK = "what the mask leaves out reaches the loss"
_SHIFTED = (
    "something is shifted by one position: {where}; align log-probs, old log-probs, mask and advantages per sample, "
    "before samples are packed or split"
)
PRECISION = (
    "the loss computes in {types}, and what is rounded depends on the layout (up to {size:.2g} of the gradient): in "
    "float64 it is exact; compute ratios, sums and denominators in float32 or more"
)
ROUNDED = (
    "the loss computes in {types}: on one process its gradient is already {size:.2g} of its size from that in float64; "
    "compute ratios, sums and denominators in float32 or more"
)
NOT_REPEATABLE = (
    "depends on something that is not in its inputs, such as state kept from call to call or random numbers"
)

HUNG = (
    "ranks wait for each other or ended in a collective (see the error): most likely it is called on some of them "
    "only, such as those that have tokens or are of a stage; call it on every rank of its group, in the same order"
)
_LIMIT = (
    "its loss is dropped, or a limit (clamp, max) on what is summed over a micro-batch or a rank ends its gradient; "
    "limit only what is of one token or one sample"
)
_ACROSS_SAMPLES = (
    "the gradient of a sample depends on those that are packed before it, since another order of the same samples in "
    "one micro-batch changes it as well: something runs across the border of samples (a cumulative sum, a shift) or is "
    "taken by position; start anew at each sample, see batch.sequence_T"
)
_SCALED = {
    "micro-batches": (
        "each micro-batch is off by a factor of its own ({least:.4g} to {most:.4g}): most likely a mean of means, or a "
        "statistic (a largest value, a deviation) of the micro-batch that scales its loss; take it from the whole step"
    ),
    "data": (
        "each data-parallel rank is off by a factor of its own ({least:.4g} to {most:.4g}): most likely a missing "
        "all-reduce, where a denominator or a statistic is of this rank alone; reduce it over the data-parallel group "
        "before the first micro-batch. A limit on the loss of a rank would look the same"
    ),
}
_UNEVEN = {
    "micro-batches": (
        "a mean of means (a denominator of tokens, samples or a subset of them that is the micro-batch's own) in a "
        "part of the loss, or a statistic of the micro-batch; take that of the whole step"
    ),
    "data": (
        "a missing all-reduce: a denominator or a statistic is of this data-parallel rank alone; sum it over the "
        "data-parallel group before the first micro-batch"
    ),
    "context": (
        "a context-parallel rank's part of a sample that is taken for the whole: reduce what is per sample (lengths, "
        "denominators, sequence ratios, statistics, whether it is left out) over the context-parallel group"
    ),
    "tensor": "a loss that is not the same on tensor-parallel ranks: something differs or is summed between them",
    "pipeline": "a loss that depends on the pipeline stage: state is shared between stages, or a stage is skipped",
    "expert": "a loss that is reduced over the wrong ranks: experts have groups of their own",
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
