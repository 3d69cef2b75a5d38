"""The oracle's search over outcomes that are made up: what it asks for, in which order, and what it says in the end.

`Scripted` stands where the pool of processes does, whose own tests are in tests/parallel.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from megatron_daro.errors import AlgorithmError
from megatron_daro.workshop.check_loss.records import Case, Outcome, Trace, from_json
from megatron_daro.workshop.check_loss.search import (
    AXES,
    Report,
    Row,
    base,
    check,
    difference,
    random_case,
    write_script,
)


def gives(*numbers: float, types: tuple[str, ...] = (), error: str = "", lost: bool = False) -> Outcome:
    if error:
        return Outcome(error=error, lost=lost)
    none = torch.zeros(0, dtype=torch.float64)
    places = torch.zeros(0, dtype=torch.int64)
    trace = Trace(0, 0, 0, 0, places, places, places.bool(), none, none, none, types=types)
    return Outcome({"w": torch.tensor(numbers, dtype=torch.float64)}, [trace])


class Scripted:
    """Answers cases by a function of them, and remembers what it was asked."""

    def __init__(self, answer: Callable[[Case, int], Outcome]) -> None:
        self.asked: list[Case] = []
        self._answer = answer

    def run(self, case: Case, function: str) -> Outcome:
        assert function == "m:f"
        self.asked.append(case)
        return self._answer(case, self.asked.count(case))


def used(case: Case) -> Outcome:
    """An exact loss that reads its advantages."""
    return gives(1.0 + (case.changed == "advantages"), 2.0)


def report_of(answer: Callable[[Case, int], Outcome], **options: object) -> tuple[Report, Scripted]:
    pool = Scripted(answer)
    return check("m:f", pool=pool, **{"seconds": 0, "flags": (True,), **options}), pool


def test_an_unknown_input_is_refused_before_anything_runs():
    pool = Scripted(lambda case, time: used(case))
    with pytest.raises(
        AlgorithmError, match="uses: got values, x, allowed are advantages, rewards, old_logprobs, ref_"
    ):
        check("m:f", pool=pool, uses=("advantages", "values", "x"))
    assert pool.asked == []


def test_an_exact_loss_has_a_row_for_each_case_and_flag():
    seen: list[Row] = []
    report, pool = report_of(lambda case, time: used(case), flags=(False, True), progress=seen.append)
    assert report.exact and report.rows == seen and report.case is None and report.error == ""
    assert [(row.name, row.per_token) for row in seen] == [(name, flag) for flag in (False, True) for name in AXES]
    assert {row.difference for row in seen} == {0.0} and report.function == "m:f" and report.seconds > 0
    first = base(per_token=False)
    on_policy, masked = replace(first, on_policy=True), replace(first, holes=AXES["expert parallel"].holes, masked=(4,))
    assert pool.asked[:5] == [first, first, replace(first, changed="advantages"), masked, on_policy]
    assert pool.asked.count(first) == 3, "a reference is kept"


@pytest.mark.parametrize(
    ("answer", "words", "error"),
    [
        (
            lambda case, time: gives(error="Traceback"),
            "the function fails on one process with one micro-batch",
            "Traceback",
        ),
        (
            lambda case, time: gives(0.0, 0.0),
            "the loss has no gradient: it is detached, masked wholly, or its inputs",
            "",
        ),
        (
            lambda case, time: gives(1.0, 2.0 + 3e-5 * time),
            "the same case run twice on one process differs: the loss depends",
            "",
        ),
        (
            lambda case, time: gives(1.0, 2.0),
            "advantages have no influence on the gradient: they never reach the loss",
            "",
        ),
        (
            lambda case, time: gives(
                1.0, 2.0 + 1e-3 * case.precise, types=() if case.precise else ("float16", "bfloat16")
            ),
            "the loss computes in bfloat16 and float16: on one process its gradient is already 0.0005 of its size from",
            "",
        ),
    ],
)
def test_what_is_wrong_on_one_process_is_said_before_a_layout_is_tried(answer, words, error):
    report, pool = report_of(answer)
    assert report.cause.startswith(words) and report.error == error and report.rows == [] and not report.exact
    assert report.seconds > 0 and {case.world_size for case in pool.asked} == {1}


@pytest.mark.parametrize("size", [1e-7, math.inf])
def test_rounding_that_is_small_or_cannot_be_tried_is_no_finding(size):
    def answer(case: Case, time: int) -> Outcome:
        if case.precise and size == math.inf:
            return gives(error="no float64 here")
        return gives(
            1.0 + (case.changed == "advantages"), 2.0 + size * case.precise if case.precise else 2.0, types=("float32",)
        )

    assert report_of(answer)[0].exact


def test_an_input_whose_change_is_an_error_has_an_influence():
    def answer(case: Case, time: int) -> Outcome:
        return gives(error="negative rewards") if case.changed == "rewards" else used(case)

    assert report_of(answer, uses=("rewards", "advantages"))[0].exact


def parallel(case: Case, time: int) -> Outcome:
    """A factor of the data-parallel size too much."""
    return gives(*(case.data * (1.0 + (case.changed == "advantages")) * n for n in (1.0, 2.0)))


def test_a_loss_that_differs_is_made_small_and_its_cause_named():
    report, _ = report_of(parallel)
    assert report.cause.startswith(
        "gradients of data-parallel ranks are summed where they should be averaged, factor 2"
    )
    assert report.difference == 1.0 and report.error == "" and len(report.rows) == len(AXES)
    assert {row.name for row in report.rows if not row.exact} == {
        name for name in AXES if "data" in name or "rank " in name or name == "expert parallel"
    }
    case = report.case
    assert case is not None and case.data == 2 and case.num_micro_batches == 1 and case.world_size == 2
    assert [len(rank[0]) for rank in case.schedule] == [1, 1] and {
        case.responses[rank[0][0]] for rank in case.schedule
    } == {1}
    sooner, _ = report_of(parallel, to_the_end=False)
    assert [row.name for row in sooner.rows] == list(AXES)[:2] and sooner.case == case


def test_random_cases_are_tried_only_after_the_named_ones_and_as_many_as_asked():
    report, pool = report_of(lambda case, time: used(case), flags=(True, False), num_random=3, seed=7, whole=True)
    rows = report.rows[2 * len(AXES) :]
    assert [(row.name, row.per_token) for row in rows] == [
        ("random case 7", True),
        ("random case 8", False),
        ("random case 9", True),
    ]
    wanted = [replace(random_case(7 + i, per_token=i != 1), whole=True) for i in range(3)]
    assert [case for case in pool.asked if case in wanted] == wanted
    found, _ = report_of(parallel, num_random=3)
    assert not any(row.name.startswith("random") for row in found.rows)
    # Seed 1 is the first whose case has several data-parallel ranks.
    only = report_of(lambda case, time: parallel(case, time) if len(case.responses) == 9 else used(case), num_random=5)[
        0
    ]
    assert only.rows[-1].name == "random case 1" and not only.rows[-1].exact and only.case is not None


def test_a_case_that_fails_has_its_error_and_ranks_that_wait_are_a_cause():
    def fails(words: str, lost: bool = False) -> Callable[[Case, int], Outcome]:
        return lambda case, time: gives(error=words, lost=lost) if case.context > 1 else used(case)

    report, _ = report_of(fails("no such axis"))
    assert report.cause == "the function fails in this layout: see the error" and report.error == "no such axis"
    assert report.difference == math.inf and report.case is not None and report.case.world_size == 2
    every = sum(case.context > 1 for case in AXES.values())
    assert sum(not row.exact for row in report.rows) == every
    for words, lost in (
        ("rank 1 is gone", True),
        ("RuntimeError: Connection closed by peer", False),
        ("x timed out after y", False),
        ("Timed out waiting", False),
        ("Connection reset by peer", False),
    ):
        report, _ = report_of(fails(words, lost))
        assert report.cause.startswith("ranks wait for each other or ended in a collective") and report.error == words
        assert sum(not row.exact for row in report.rows) == 2, "each takes as long as one is waited for"


def test_what_differs_once_is_not_repeatable_and_has_the_error_of_that_time():
    def once(error: str) -> Callable[[Case, int], Outcome]:
        return lambda case, time: (
            (gives(error=error) if error else gives(5.0, 2.0)) if case.tensor > 1 and time == 1 else used(case)
        )

    report, _ = report_of(once(""), to_the_end=False)
    words = (
        "the same case failed and then did not: it depends on something that is not in its inputs, such as state kept "
        "from call to call or random numbers"
    )
    assert report.cause == words and report.error == ""
    report, _ = report_of(once("out of luck"), to_the_end=False)
    assert report.cause == f"{words}; see the error of the first time" and report.error == "out of luck"


def test_what_float64_makes_exact_is_rounding():
    def rounds(case: Case, time: int) -> Outcome:
        wrong = 0.0 if case.precise or case.context == 1 else 2e-3
        return gives(1.0 + (case.changed == "advantages"), 2.0 + wrong, types=() if case.precise else ("bfloat16",))

    report, _ = report_of(rounds)
    assert report.cause.startswith(
        "the loss computes in bfloat16, and what is rounded depends on the layout (up to 0.001 of"
    )
    untyped, _ = report_of(lambda case, time: replace(rounds(case, time), traces=()))
    assert "rounded" not in untyped.cause and untyped.cause


def test_shrinking_ends_after_150_cases_however_many_would_be_simpler():
    def any_layout(case: Case, time: int) -> Outcome:
        return gives(3.0, 2.0) if case == replace(AXES["tensor and pipeline parallel"]) else used(case)

    report, _ = report_of(any_layout)
    assert report.case == AXES["tensor and pipeline parallel"] and report.difference == 1.0
    endless = Scripted(lambda case, time: used(case) if case == case.reference() else gives(9.0, 9.0))
    from megatron_daro.workshop.check_loss import search

    before = len(endless.asked)
    big = replace(AXES["micro-batches"], responses=(4000,) * 8)
    search._shrunk(search._Oracle("m:f", endless), big)
    assert len({case for case in endless.asked[before:] if case.reference() != case}) <= 150


@pytest.mark.parametrize(
    ("got", "want", "wanted"),
    [
        (gives(1.0, -4.0), gives(1.0, -2.0), 1.0),
        (gives(1.0, 2.0), gives(0.0, 0.0), 2.0),
        (gives(math.nan, 2.0), gives(1.0, 2.0), math.inf),
        (gives(error="a"), gives(1.0), math.inf),
        (gives(1.0), gives(error="a"), math.inf),
        (gives(error="a"), gives(error="b"), 0.0),
    ],
)
def test_a_difference_is_relative_to_the_largest_gradient(got, want, wanted):
    assert difference(got, want) == wanted


def test_the_largest_difference_of_any_parameter_counts():
    wanted = {"a": torch.ones(2), "b": torch.full((2,), 4.0)}
    made = {"a": torch.tensor([1.0, 1.5]), "b": torch.tensor([4.0, 5.0])}
    assert difference(Outcome(made), Outcome(wanted)) == 0.5
    assert [Row("", True, d).exact for d in (0.0, 1e-5, 1.1e-5, math.inf)] == [True, True, False, False]


def test_a_script_holds_the_case_and_how_it_is_run(tmp_path):
    path, case = tmp_path / "loss_case.py", AXES["expert and context parallel"]
    write_script(path, "my.losses:mine", case, "a factor")
    text = path.read_text()
    head, _, rest = text.partition('"""\n\nimport json')
    assert head == (
        f'"""my.losses:mine differs from one process: {case.describe()}.\n\nLikely cause: a factor.\n\n'
        "    torchrun --nproc-per-node 2 loss_case.py\n"
    )
    assert 'under_torchrun(from_json(CASE), find_function("my.losses:mine"))' in rest
    _, case_text, _ = rest.split('"""')
    assert from_json(json.loads(case_text)) == case
    compile(text, path, "exec")
