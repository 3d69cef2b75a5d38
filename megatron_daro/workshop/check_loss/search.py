"""The check itself: every axis, random cases while there is time, the smallest case that differs, its cause (`causes`).

`module:function` -> a Report. Each case is compared with the same samples on one process in one
micro-batch; nothing else is asked of the loss than that the layout must not show, that what it claims to use has an
influence, and that it has a gradient at all.

Which cases are tried: one axis at a time first, then several, then random ones; and what is simpler than a case.

Names of axes and Cases -> `search`. An axis that fails alone names the cause.

The smallest failing case is written as one script for torchrun, which somebody runs, changes and runs again.
"""

from __future__ import annotations

import itertools
import json
import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from megatron_daro.errors import AlgorithmError
from megatron_daro.workshop.check_loss.causes import (
    NOT_REPEATABLE,
    PRECISION,
    ROUNDED,
    constant_ratio,
    likely_cause,
    lost_tokens_cause,
    single_process_cause,
)
from megatron_daro.workshop.check_loss.pool import CasePool
from megatron_daro.workshop.check_loss.records import Case, Outcome, as_json

PROMPTS, RESPONSES, GROUP = (3, 2, 4, 2, 5, 3, 2, 4), (5, 2, 9, 3, 4, 7, 1, 6), 4
_BASE = Case(
    tensor=1, pipeline=1, context=1, schedule=(((0, 1, 2, 3, 4, 5, 6, 7),),), prompts=PROMPTS, responses=RESPONSES,
    group=GROUP,
)  # fmt: skip
_SPLIT = (((0, 1, 2, 3), (4,), (5, 6, 7)),)
_RANKS = (((0, 1, 2, 3, 4),), ((5, 6, 7),))
_BOTH = (((0, 1, 2), (3, 4)), ((5,), (6, 7)))
_ORDER = replace(_BASE, schedule=(((3, 6, 0, 7, 1, 5, 2, 4),),))
_HOLES = ((0, 1), (2, 0), (2, 4), (5, 3), (5, 6), (7, 0))

AXES: dict[str, Case] = {
    "micro-batches": replace(_BASE, schedule=_SPLIT),
    "data parallel": replace(_BASE, schedule=_RANKS),
    "context parallel": replace(_BASE, context=2),
    "tensor parallel": replace(_BASE, tensor=2),
    "pipeline parallel": replace(_BASE, pipeline=2),
    "masks with holes, micro-batches": replace(_BASE, schedule=_SPLIT, holes=_HOLES),
    "masks with holes, context parallel": replace(_BASE, context=2, holes=_HOLES),
    "padding": replace(_BASE, padding=3),
    "NaN under the mask": replace(_BASE, holes=_HOLES, poison=True),
    "a micro-batch without trained tokens": replace(_BASE, schedule=_SPLIT, masked=(4,)),
    "a rank without trained tokens": replace(_BASE, schedule=_RANKS, masked=(5, 6, 7)),
    "order of samples": _ORDER,
    "data parallel, micro-batches": replace(_BASE, schedule=_BOTH, holes=_HOLES),
    "data and context parallel": replace(_BASE, schedule=_RANKS, context=2, holes=_HOLES),
    "context parallel, micro-batches": replace(_BASE, schedule=_SPLIT, context=2),
    "tensor and pipeline parallel": replace(_BASE, schedule=_SPLIT, tensor=2, pipeline=2),
    "tensor and data parallel": replace(_BASE, schedule=_BOTH, tensor=2, masked=(5,)),
    "pipeline and data parallel": replace(_BASE, schedule=_BOTH, pipeline=2, padding=1),
    "pipeline and context parallel": replace(_BASE, schedule=_SPLIT, pipeline=2, context=2),
    "expert parallel": replace(_BASE, schedule=_BOTH, holes=_HOLES, expert=2),
    "expert and context parallel": replace(_BASE, schedule=_SPLIT, context=2, expert=2),
    "expert, data and context parallel": replace(_BASE, schedule=_RANKS, context=2, expert=2),
}
"""In the order in which they are tried."""


def base(*, per_token: bool) -> Case:
    """Return all samples on one process."""
    return replace(_BASE, per_token=per_token)


def axes(*, per_token: bool, whole: bool = False) -> Iterator[tuple[str, Case]]:
    """Return the named cases; whole: context-parallel ranks see whole samples."""
    for name, case in AXES.items():
        yield name, replace(case, per_token=per_token, whole=whole)


def random_case(seed: int, *, per_token: bool) -> Case:
    """Return a case of up to four processes."""
    rng = random.Random(seed)
    ranges = itertools.product((1, 2), (1, 2), (1, 2, 4), (1, 2, 3, 4))
    sizes = [(t, p, c, d) for t, p, c, d in ranges if t * p * c * d <= 4]
    tensor, pipeline, context, data = rng.choice(sizes)
    number = rng.randint(1, 3)
    count = max(GROUP * rng.randint(1, 3), data * number)
    order = rng.sample(range(count), count)
    cuts = sorted(rng.sample(range(1, count), data * number - 1))
    parts = [tuple(order[a:b]) for a, b in zip([0, *cuts], [*cuts, count], strict=True)]
    responses = tuple(rng.randint(1, 12) for _ in range(count))
    return Case(
        tensor=tensor,
        pipeline=pipeline,
        context=context,
        schedule=tuple(tuple(parts[r * number : (r + 1) * number]) for r in range(data)),
        prompts=tuple(rng.randint(1, 6) for _ in range(count)),
        responses=responses,
        holes=tuple((i, r) for i in range(count) for r in range(responses[i]) if rng.random() < 0.15),
        masked=tuple(i for i in range(count) if rng.random() < 0.1),
        group=GROUP,
        per_token=per_token,
        poison=rng.random() < 0.2,
        padding=rng.choice((0, 0, 1, 5)),
        seed=seed,
        expert=2 if tensor == 1 and context * data % 2 == 0 and rng.random() < 0.3 else 0,
    )


def simpler(case: Case) -> Iterator[Case]:
    """Return cases with less in them, the largest steps first."""
    if case.expert:
        yield replace(case, expert=0)
    for smaller in _simpler(case):
        fits = case.expert <= 1 or smaller.context * smaller.data % case.expert == 0
        yield smaller if fits else replace(smaller, expert=1)


def _simpler(case: Case) -> Iterator[Case]:
    yield from (c for c in (replace(case, tensor=1), replace(case, pipeline=1), replace(case, context=1)) if c != case)
    if case.data > 1:
        yield replace(case, schedule=case.schedule[:-1])
        merged = tuple(tuple(i for mb in rank for i in mb) for rank in zip(*case.schedule, strict=True))
        yield replace(case, schedule=(merged,))
    if case.num_micro_batches > 1:
        yield replace(case, schedule=tuple((tuple(i for mb in rank for i in mb),) for rank in case.schedule))
        yield replace(case, schedule=tuple(rank[:-1] for rank in case.schedule))
    emptied = (replace(case, poison=False), replace(case, padding=0), replace(case, holes=()), replace(case, masked=()))
    yield from (c for c in emptied if c != case)
    yield from _fewer_samples(case)
    for i, length in enumerate(case.responses):
        if length > 1:
            for shorter in {1, length // 2, length - 1} - {0, length}:
                yield replace(case, responses=(*case.responses[:i], shorter, *case.responses[i + 1 :]))


def _fewer_samples(case: Case) -> Iterator[Case]:
    for r, rank in enumerate(case.schedule):
        for m, micro_batch in enumerate(rank):
            for i in micro_batch if len(micro_batch) > 1 else ():
                left = tuple(j for j in micro_batch if j != i)
                ranks = list(case.schedule)
                ranks[r] = (*rank[:m], left, *rank[m + 1 :])
                yield replace(case, schedule=tuple(ranks))


TOLERANCE = 1e-5
MOST_SHRINKING = 150
INPUTS = ("advantages", "rewards", "old_logprobs", "ref_logprobs")


@dataclass(frozen=True, slots=True)
class Row:
    """One case that was tried: its name, flag, and largest difference relative to the largest gradient."""

    name: str
    per_token: bool
    difference: float

    @property
    def exact(self) -> bool:
        """Whether it is within the tolerance."""
        return self.difference <= TOLERANCE


@dataclass(slots=True)
class Report:
    """What was found. case: the smallest that differs, if any; cause: a sentence, also where an input has no influence
    or a rank failed. error: of the case, if it raised."""

    function: str
    rows: list[Row] = field(default_factory=list)
    case: Case | None = None
    difference: float = 0.0
    cause: str = ""
    error: str = ""
    seconds: float = 0.0

    @property
    def exact(self) -> bool:
        """Whether nothing was found."""
        return not self.cause


def check(
    function: str,
    *,
    pool: CasePool,
    flags: Sequence[bool] = (True, False),
    uses: Sequence[str] = ("advantages",),
    whole: bool = False,
    to_the_end: bool = True,
    seconds: float = 20.0,
    num_random: int = 0,
    seed: int = 0,
    progress: Callable[[Row], None] = lambda row: None,
) -> Report:
    """Look for a case that differs from one process.

    Args:
        function: `module:function`.
        pool: started.
        flags: values of calculate_per_token_loss that the function supports.
        uses: inputs that must have an influence on the gradient, of INPUTS.
        whole: whether a context-parallel rank sees whole samples, as with verl's Megatron engine.
        to_the_end: whether the named cases after the first that differs are tried as well; the cause is the same.
        seconds: in which random cases begin, counted from the start; the named cases are tried however long they take.
        num_random: random cases that are tried even when `seconds` are over.
        seed: of the random cases.
        progress: called with each row.

    Raises:
        AlgorithmError: `uses` names no input, or the function cannot be imported.
    """
    unknown = [name for name in uses if name not in INPUTS]
    if unknown:
        raise AlgorithmError(f"uses: got {', '.join(unknown)}, allowed are {', '.join(INPUTS)}")
    started, report = time.monotonic(), Report(function)
    oracle = _Oracle(function, pool)
    failed: list[Case] = []
    for flag in flags:
        report.cause, report.error = _without_layout(oracle, flag, uses)
        if report.cause:
            report.seconds = time.monotonic() - started
            return report
        for name, case in axes(per_token=flag, whole=whole):
            row = Row(name, flag, oracle.difference(case))
            report.rows.append(row)
            progress(row)
            failed += [] if row.exact else [case]
            if oracle.broken >= _MOST_LOST or (failed and not to_the_end):
                break
    number = 0
    while not failed and (number < num_random or time.monotonic() - started < seconds):
        flag = flags[number % len(flags)]
        case = replace(random_case(seed + number, per_token=flag), whole=whole)
        row = Row(f"random case {seed + number}", flag, oracle.difference(case))
        report.rows.append(row)
        progress(row)
        failed += [] if row.exact else [case]
        number += 1
    if failed:
        _explain(report, oracle, failed)
    report.seconds = time.monotonic() - started
    return report


def _without_layout(oracle: _Oracle, flag: bool, uses: Sequence[str]) -> tuple[str, str]:
    """Return (cause, error) of what is wrong on one process already: no gradient, or an input without influence."""
    plain = base(per_token=flag)
    outcome = oracle.run(plain)
    if outcome.error:
        return "the function fails on one process with one micro-batch", outcome.error
    if not any(bool(g.any()) for g in outcome.gradients.values()):
        return "the loss has no gradient: it is detached, masked wholly, or its inputs never reach it", ""
    if difference(oracle.run(plain), outcome) > TOLERANCE:
        return f"the same case run twice on one process differs: the loss {NOT_REPEATABLE}", ""
    if types := _types_of(outcome):
        precise = oracle.run(replace(plain, precise=True))
        size = math.inf if precise.error else difference(outcome, precise)
        if TOLERANCE < size < math.inf:
            return ROUNDED.format(types=types, size=size), ""
    for name in uses:
        changed = oracle.run(replace(plain, changed=name))
        if not changed.error and difference(changed, outcome) <= TOLERANCE:
            return f"{name} have no influence on the gradient: they never reach the loss, which is silently inert", ""
    masked = replace(plain, holes=_HOLES, masked=(4,))
    on_policy = replace(plain, on_policy=True)
    masked_outcome, on_policy_outcome = oracle.run(masked), oracle.run(on_policy)
    if not masked_outcome.error and (cause := single_process_cause(masked_outcome, masked)):
        return cause, ""
    if not on_policy_outcome.error and (cause := lost_tokens_cause(on_policy_outcome, on_policy)):
        return cause, ""
    return "", ""


class _Oracle:
    """Runs cases beside their references, which are kept."""

    def __init__(self, function: str, pool: CasePool) -> None:
        self._function, self._pool = function, pool
        self._references: dict[Case, Outcome] = {}
        self.last_error = ""
        self.broken = 0
        """Cases whose ranks never answered, or whose collectives did not come about."""

    def run(self, case: Case) -> Outcome:
        outcome = self._pool.run(case, self._function)
        self.broken += _hung(outcome)
        self.last_error = outcome.error or self.last_error
        return outcome

    def reference(self, case: Case) -> Outcome:
        plain = case.reference()
        if plain not in self._references:
            self._references[plain] = self.run(plain)
        return self._references[plain]

    def difference(self, case: Case) -> float:
        return difference(self.run(case), self.reference(case))


def difference(outcome: Outcome, wanted: Outcome) -> float:
    """Return the largest difference of any gradient, relative to the largest reference gradient; inf after an error."""
    if outcome.error or wanted.error:
        return 0.0 if outcome.error and wanted.error else math.inf
    worst = 0.0
    for name, want in wanted.gradients.items():
        gap = float((outcome.gradients[name] - want).abs().max())
        size = float(want.abs().max())
        worst = max(worst, math.inf if math.isnan(gap) else gap / size if size else gap)
    return worst


def _explain(report: Report, oracle: _Oracle, failed: Sequence[Case]) -> None:
    """Make the first case that fails again as small as it gets, and name its cause."""
    again = next((case for case in failed if oracle.difference(case) > TOLERANCE), failed[0])
    case = _shrunk(oracle, again)
    outcome, wanted = oracle.run(case), oracle.reference(case)
    report.case, report.difference, report.error = case, difference(outcome, wanted), outcome.error
    if outcome.error:
        report.cause = _LOST if _hung(outcome) else "the function fails in this layout: see the error"
        return
    if report.difference <= TOLERANCE:
        report.error = oracle.last_error
        report.cause = f"the same case failed and then did not: it {NOT_REPEATABLE}" + (
            "; see the error of the first time" if report.error else ""
        )
        return
    report.cause = _precision_cause(oracle, again) or _layout_cause(oracle, again, case)


def _types_of(outcome: Outcome) -> str:
    """Return the types shorter than float64 in which the loss computed."""
    return " and ".join(sorted({name for trace in outcome.traces for name in trace.types}))


def _precision_cause(oracle: _Oracle, case: Case) -> str:
    """Return that rounding alone makes the difference: computed in float64 there is none."""
    outcome = oracle.run(case)
    types = _types_of(outcome)
    if not types:
        return ""
    precise = replace(case, precise=True)
    size, left = difference(outcome, oracle.reference(case)), oracle.difference(precise)
    if outcome.error or not left <= TOLERANCE:
        return ""
    return PRECISION.format(types=types, size=size)


def _layout_cause(oracle: _Oracle, again: Case, smallest: Case) -> str:
    """Name the cause from the case that was found, which says more, if it has no other axes than the smallest."""
    case = again if _axes_of(again) == _axes_of(smallest) else smallest
    outcome, wanted = oracle.run(case), oracle.reference(case)
    if outcome.error or difference(outcome, wanted) <= TOLERANCE:
        case, outcome, wanted = smallest, oracle.run(smallest), oracle.reference(smallest)
    plain = oracle.run(base(per_token=case.per_token))
    part = constant_ratio(oracle.run(smallest).gradients, oracle.reference(smallest).gradients)
    ordered = oracle.difference(replace(_ORDER, per_token=case.per_token)) > TOLERANCE
    return likely_cause(case, outcome, wanted, plain=plain.traces, part=part, ordered=ordered)


def _axes_of(case: Case) -> tuple[bool, ...]:
    sizes = (case.num_micro_batches, case.data, case.context, case.tensor, case.pipeline, case.expert)
    return (*(size > 1 for size in sizes), case.poison, bool(case.padding))


_LOST = (
    "ranks wait for each other or ended in a collective (see the error): most likely it is called on some of them "
    "only, such as those that have tokens or are of a stage; call it on every rank of its group, in the same order"
)
_BROKEN_COLLECTIVE = ("Timed out waiting", "Connection closed by peer", "timed out after", "Connection reset by peer")
"""What gloo says on a rank whose neighbours do not come to a collective, or are gone."""
_MOST_LOST = 2
"""Cases of ranks that never answer: each takes as long as one is waited for."""


def _hung(outcome: Outcome) -> bool:
    return outcome.lost or any(words in outcome.error for words in _BROKEN_COLLECTIVE)


def _shrunk(oracle: _Oracle, case: Case) -> Case:
    runs, lost, smaller = 0, 0, True
    while smaller:
        smaller = False
        for candidate in simpler(case):
            runs += 1
            if runs > MOST_SHRINKING or lost >= _MOST_LOST:
                return case
            outcome = oracle.run(candidate)
            lost += _hung(outcome)
            if difference(outcome, oracle.reference(candidate)) > TOLERANCE:
                case, smaller = candidate, True
                break
    return case


_TEXT = '''"""{title}

{cause}

    torchrun --nproc-per-node {processes} {name}
"""

import json
import sys

sys.path.insert(0, "")

from megatron_daro.workshop.check_loss.pool import find_function
from megatron_daro.workshop.check_loss.rank import under_torchrun
from megatron_daro.workshop.check_loss.records import from_json

CASE = json.loads(
    """
{case}
"""
)

if __name__ == "__main__":
    under_torchrun(from_json(CASE), find_function("{function}"))
'''


def write_script(path: Path, function: str, case: Case, cause: str) -> None:
    """Write the script. Raises OSError."""
    text = _TEXT.format(
        title=f"{function} differs from one process: {case.describe()}.",
        cause=f"Likely cause: {cause}.",
        processes=case.world_size,
        name=path.name,
        case=json.dumps(as_json(case), indent=1),
        function=function,
    )
    path.write_text(text, encoding="utf-8")
