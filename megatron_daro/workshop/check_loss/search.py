"""The check itself: compares every case with the same samples on one process; finds the smallest that differs, and its
cause.

    one process: there is a gradient, repeatable and precise; each claimed input has an influence; the mask is respected
      -> every named case (`cases.AXES`), then random ones while there is time
      -> the first case that differs again when repeated, made as small as possible
      -> its cause: rounding alone, or what `causes` derives from the positions and axes

Only one thing is required of the loss: it must not depend on the layout.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from megatron_daro.errors import AlgorithmError
from megatron_daro.workshop.check_loss.cases import ANOTHER_ORDER, HOLES, Case, axes, base, random_case, simpler
from megatron_daro.workshop.check_loss.causes import (
    HUNG,
    NOT_REPEATABLE,
    PRECISION,
    ROUNDED,
    Part,
    likely_cause,
    lost_tokens_cause,
    single_process_cause,
)
from megatron_daro.workshop.check_loss.outcomes import Outcome, constant_ratio, difference
from megatron_daro.workshop.check_loss.pool import CasePool

TOLERANCE = 1e-5
_MOST_SHRINKING = 150
_MOST_HUNG = 2
"""The search ends early after this many cases whose ranks hang, since each of them takes until a timeout."""
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
    """What was found. case: the smallest that differs, if any. cause: a sentence; also set if an input has no influence
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
        pool: of processes, started.
        flags: values of calculate_per_token_loss that the function supports.
        uses: inputs that must have an influence on the gradient, of INPUTS.
        whole: whether a context-parallel rank sees whole samples, as with verl's Megatron engine.
        to_the_end: whether named cases are still tried after the first that differs; this does not change the cause.
        seconds: no random case begins later than this after the start; named cases are tried however long they take.
        num_random: random cases that are tried even after `seconds`.
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
    differing: list[Case] = []

    def compare(name: str, case: Case) -> None:
        row = Row(name, case.per_token, oracle.difference(case))
        report.rows.append(row)
        progress(row)
        if not row.exact:
            differing.append(case)

    def is_over() -> bool:
        return oracle.hung >= _MOST_HUNG or bool(differing and not to_the_end)

    for flag in flags:
        if is_over():
            break
        report.cause, report.error = _single_process_fault(oracle, flag, uses)
        if report.cause:
            report.seconds = time.monotonic() - started
            return report
        for name, case in axes(per_token=flag, whole=whole):
            compare(name, case)
            if is_over():
                break
    number = 0
    while not differing and (number < num_random or time.monotonic() - started < seconds):
        case = random_case(seed + number, per_token=flags[number % len(flags)])
        compare(f"random case {seed + number}", replace(case, whole=whole))
        number += 1
    if differing:
        _explain(report, oracle, differing)
    report.seconds = time.monotonic() - started
    return report


class _Oracle:
    """Runs cases and their references, whose outcomes it keeps. hung: how many cases had ranks that hung or ended."""

    def __init__(self, function: str, pool: CasePool) -> None:
        self._function, self._pool = function, pool
        self._references: dict[Case, Outcome] = {}
        self.last_error = ""
        self.hung = 0

    def run(self, case: Case) -> Outcome:
        outcome = self._pool.run(case, self._function)
        self.hung += outcome.hung
        self.last_error = outcome.error or self.last_error
        return outcome

    def reference(self, case: Case) -> Outcome:
        """Return what the same samples give on one process."""
        plain = case.reference()
        if plain not in self._references:
            self._references[plain] = self.run(plain)
        return self._references[plain]

    def difference(self, case: Case) -> float:
        return difference(self.run(case), self.reference(case))


def _single_process_fault(oracle: _Oracle, flag: bool, uses: Sequence[str]) -> tuple[str, str]:
    """Return (cause, error) of a fault that shows on one process already; empty texts if there is none."""
    plain = base(per_token=flag)
    outcome = oracle.run(plain)
    if outcome.error:
        return "the function fails on one process with one micro-batch", outcome.error
    if not any(bool(g.any()) for g in outcome.gradients.values()):
        return "the loss has no gradient: it is detached, masked wholly, or its inputs never reach it", ""
    if difference(oracle.run(plain), outcome) > TOLERANCE:
        return f"the same case run twice on one process differs: the loss {NOT_REPEATABLE}", ""
    if outcome.types:
        precise = oracle.run(replace(plain, precise=True))
        size = math.inf if precise.error else difference(outcome, precise)
        if TOLERANCE < size < math.inf:
            return ROUNDED.format(types=outcome.types, size=size), ""
    for name in uses:
        changed = oracle.run(replace(plain, changed=name))
        if not changed.error and difference(changed, outcome) <= TOLERANCE:
            return f"{name} have no influence on the gradient: they never reach the loss, which is silently inert", ""
    masked = replace(plain, holes=HOLES, masked=(4,))
    on_policy = replace(plain, on_policy=True)
    masked_outcome, on_policy_outcome = oracle.run(masked), oracle.run(on_policy)
    if not masked_outcome.error and (cause := single_process_cause(masked_outcome, masked)):
        return cause, ""
    if not on_policy_outcome.error and (cause := lost_tokens_cause(on_policy_outcome, on_policy)):
        return cause, ""
    return "", ""


def _explain(report: Report, oracle: _Oracle, differing: Sequence[Case]) -> None:
    """Shrink the first case that differs again when repeated, and name its cause."""
    again = next((case for case in differing if oracle.difference(case) > TOLERANCE), differing[0])
    smallest = _shrunk(oracle, again)
    outcome, wanted = oracle.run(smallest), oracle.reference(smallest)
    report.case, report.difference, report.error = smallest, difference(outcome, wanted), outcome.error
    if outcome.error:
        report.cause = HUNG if outcome.hung else "the function fails in this layout: see the error"
    elif report.difference <= TOLERANCE:
        report.error = oracle.last_error
        report.cause = f"the same case failed and then did not: it {NOT_REPEATABLE}" + (
            "; see the error of the first time" if report.error else ""
        )
    else:
        report.cause = _precision_cause(oracle, again) or _layout_cause(oracle, again, smallest)


def _shrunk(oracle: _Oracle, case: Case) -> Case:
    """Return the simplest case found that still differs; each round takes the first simpler case that does."""
    runs, hung, shrinks = 0, 0, True
    while shrinks:
        shrinks = False
        for candidate in simpler(case):
            runs += 1
            if runs > _MOST_SHRINKING or hung >= _MOST_HUNG:
                return case
            outcome = oracle.run(candidate)
            hung += outcome.hung
            if difference(outcome, oracle.reference(candidate)) > TOLERANCE:
                case, shrinks = candidate, True
                break
    return case


def _precision_cause(oracle: _Oracle, case: Case) -> str:
    """Return a cause if rounding alone makes the difference, so that there is none in float64; else an empty text."""
    outcome = oracle.run(case)
    if not outcome.types:
        return ""
    size, left = difference(outcome, oracle.reference(case)), oracle.difference(replace(case, precise=True))
    if outcome.error or not left <= TOLERANCE:
        return ""
    return PRECISION.format(types=outcome.types, size=size)


def _layout_cause(oracle: _Oracle, again: Case, smallest: Case) -> str:
    """Return the cause, from the case `again`, which shows more than the smallest, if both have the same axes, padding
    and NaN and `again` still differs; else from the smallest."""
    case = again if _kind_of(again) == _kind_of(smallest) else smallest
    outcome, wanted = oracle.run(case), oracle.reference(case)
    if outcome.error or difference(outcome, wanted) <= TOLERANCE:
        case, outcome, wanted = smallest, oracle.run(smallest), oracle.reference(smallest)
    plain = oracle.run(base(per_token=case.per_token))
    small = oracle.run(smallest)
    ratio = constant_ratio(small.gradients, oracle.reference(smallest).gradients)
    part = None if ratio is None else Part(ratio, small.traces)
    order_matters = oracle.difference(replace(ANOTHER_ORDER, per_token=case.per_token)) > TOLERANCE
    return likely_cause(case, outcome, wanted, plain=plain.traces, part=part, order_matters=order_matters)


def _kind_of(case: Case) -> tuple[set[str], bool, bool]:
    return set(case.axes), case.poison, bool(case.padding)
