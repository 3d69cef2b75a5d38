"""The check itself: every axis, random cases while there is time, the smallest case that differs, its cause.

Place in the data flow: `module:function` -> a Report. Each case is compared with the same samples on one process in one
micro-batch; nothing else is asked of the loss than that the layout must not show, that what it claims to use has an
influence, and that it has a gradient at all.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from megatron_daro.check_loss import cases
from megatron_daro.check_loss.causes import constant_ratio, likely_cause
from megatron_daro.check_loss.pool import CasePool
from megatron_daro.check_loss.records import Case, Outcome
from megatron_daro.errors import AlgorithmError

TOLERANCE = 1e-5
MOST_SHRINKING = 150
INPUTS = ("advantages", "rewards", "old_logprobs")


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
        for name, case in cases.axes(per_token=flag):
            row = Row(name, flag, oracle.difference(case))
            report.rows.append(row)
            progress(row)
            failed += [] if row.exact else [case]
    number = 0
    while not failed and (number < num_random or time.monotonic() - started < seconds):
        flag = flags[number % len(flags)]
        case = cases.random_case(seed + number, per_token=flag)
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
    plain = cases.base(per_token=flag)
    outcome = oracle.run(plain)
    if outcome.error:
        return "the function fails on one process with one micro-batch", outcome.error
    if not any(bool(g.any()) for g in outcome.gradients.values()):
        return "the loss has no gradient: it is detached, masked wholly, or its inputs never reach it", ""
    for name in uses:
        changed = oracle.run(replace(plain, changed=name))
        if not changed.error and difference(changed, outcome) <= TOLERANCE:
            return f"{name} have no influence on the gradient: they never reach the loss, which is silently inert", ""
    return "", ""


class _Oracle:
    """Runs cases beside their references, which are kept."""

    def __init__(self, function: str, pool: CasePool) -> None:
        self._function, self._pool = function, pool
        self._references: dict[Case, Outcome] = {}
        self.last_error = ""

    def run(self, case: Case) -> Outcome:
        outcome = self._pool.run(case, self._function)
        self.last_error = outcome.error or self.last_error
        return outcome

    def reference(self, case: Case) -> Outcome:
        plain = case.reference()
        if plain not in self._references:
            self._references[plain] = self.run(plain)
        return self._references[plain]

    def difference(self, case: Case) -> float:
        return difference(self.run(case), self.reference(case))


def difference(found: Outcome, wanted: Outcome) -> float:
    """Return the largest difference of any gradient, relative to the largest reference gradient; inf after an error."""
    if found.error or wanted.error:
        return 0.0 if found.error and wanted.error else math.inf
    worst = 0.0
    for name, want in wanted.gradients.items():
        gap = float((found.gradients[name] - want).abs().max())
        size = float(want.abs().max())
        worst = max(worst, math.inf if math.isnan(gap) else gap / size if size else gap)
    return worst


def _explain(report: Report, oracle: _Oracle, failed: Sequence[Case]) -> None:
    """Make the first case that fails again as small as it gets, and name its cause."""
    again = next((case for case in failed if oracle.difference(case) > TOLERANCE), failed[0])
    case = _shrunk(oracle, again)
    found, wanted = oracle.run(case), oracle.reference(case)
    report.case, report.difference, report.error = case, difference(found, wanted), found.error
    if found.error:
        report.cause = "the function fails in this layout: see the error"
        return
    if report.difference <= TOLERANCE:
        report.error = oracle.last_error
        report.cause = (
            "the same case failed and then did not: it depends on something that is not in its inputs, such as state "
            "kept from call to call or random numbers" + ("; see the error of the first time" if report.error else "")
        )
        return
    finite = all(bool(g.isfinite().all()) for g in found.gradients.values())
    report.cause = likely_cause(case, constant_ratio(found.gradients, wanted.gradients), finite=finite)


def _shrunk(oracle: _Oracle, case: Case) -> Case:
    runs, smaller = 0, True
    while smaller:
        smaller = False
        for candidate in cases.simpler(case):
            runs += 1
            if runs > MOST_SHRINKING:
                return case
            if oracle.difference(candidate) > TOLERANCE:
                case, smaller = candidate, True
                break
    return case
