"""rollout.finish_batch: what auto means for an engine, and which combinations are doubtful."""

from __future__ import annotations

import pytest

from megatron_daro.config import Hardware, check, resolve
from megatron_daro.config.sections import RolloutSection


def warnings(run_files, *overrides: str) -> list[str]:
    report = check(resolve(run_files.file, overrides), Hardware("cpu", 4))
    assert not report.problems
    return [str(problem) for problem in report.warnings]


@pytest.mark.parametrize(
    ("finish_batch", "engine", "early"),
    [
        ("auto", "embedded", False),
        ("auto", "sglang", True),
        ("all", "sglang", False),
        ("enough", "embedded", True),
    ],
)
def test_auto_is_resolved_by_the_engine(finish_batch, engine, early):
    assert RolloutSection(finish_batch=finish_batch).finishes_early(engine) is early


def test_enough_with_the_embedded_engine_is_a_warning(run_files):
    (line,) = [line for line in warnings(run_files, "rollout.finish_batch=enough") if "finish_batch" in line]
    assert "got enough with the embedded engine" in line
    assert not [line for line in warnings(run_files) if "finish_batch" in line]


@pytest.mark.parametrize(
    ("max_staleness", "keep_surplus", "ahead"), [(0, False, 0), (2, False, 2), (1, True, 0), (3, True, 2)]
)
def test_what_is_kept_costs_a_batch_of_running_ahead(max_staleness, keep_surplus, ahead):
    assert RolloutSection(max_staleness=max_staleness, keep_surplus=keep_surplus).batches_ahead == ahead
    segments = {"segment_tokens": 1000, "max_response_tokens": 2001}  # three batches
    assert RolloutSection(max_staleness=max_staleness + 3, keep_surplus=keep_surplus, **segments).batches_ahead == (
        max_staleness
    )
