"""The books of a run: every admitted group was trained, filtered, dropped, or is outstanding, and none twice; and what
of its files must be the same however it went."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron_daro.observe.metrics import comparable, read_metrics
from megatron_daro.rollout.recorder import read_step, recorded_steps


def assert_books_add_up(line: dict[str, Any]) -> None:
    """Of one line of metrics.jsonl."""
    books = {key: line[f"rollout/groups_{key}"] for key in ("trained", "filtered", "dropped", "outstanding")}
    assert line["rollout/groups_admitted"] == sum(books.values()), line


def check_books(run: Path) -> None:
    """Of every step."""
    for line in (line for line in read_metrics(run) if line["step"] > 0):
        assert_books_add_up(line)


def recorded_once(run: Path) -> list[tuple[int, Any, str]]:
    """(step, group, outcome) of everything recorded, in which no group comes twice."""
    recorded = [(step, group, used) for step in recorded_steps(run) for group, used in read_step(run, step)]
    ids = [group.group_id for _, group, _ in recorded]
    assert len(ids) == len(set(ids)), "a group is recorded with two outcomes"
    return recorded


def files_of(run: Path) -> dict:
    """Everything in a run directory that must not depend on time, order of arrival or crashes."""
    rollouts = {step: (run / "rollouts" / f"step_{step:06d}.parquet").read_bytes() for step in recorded_steps(run)}
    return {"metrics": [comparable(line) for line in read_metrics(run)], "rollouts": rollouts}
