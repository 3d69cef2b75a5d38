"""What a training step spends outside generation and forward/backward, read from the metrics of a run.

    python benchmarks/step_overhead.py runs/quickstart [--json]

Per step: 1 - (generation + forward/backward) / step. Generation is the rollout phase less all verification, also where
that ran beside it; checkpoints and evaluations are left out of the step. Given is the median over all steps but the
first.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table

from megatron_daro.observe.metrics import read_metrics

RESULTS = Path(__file__).parent / "results" / "step_overhead.json"
PARTS = ("rollout", "reward", "forward_backward", "train", "build", "logprob", "sync", "write", "other")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path, help="run directory")
    parser.add_argument("--json", action="store_true", help=f"also write {RESULTS.name}")
    arguments = parser.parse_args()
    lines = [line for line in read_metrics(arguments.run) if (line["step"] or 0) > 1]
    if not lines:
        raise SystemExit(f"{arguments.run}: fewer than two steps; train longer")
    result: dict[str, float] = {f"{part}_s": median(_seconds(line, part) for line in lines) for part in PARTS}
    result["step_s"] = median(_step_s(line) for line in lines)
    result["overhead_fraction"] = median(_overhead(line) for line in lines)
    result["steps"] = len(lines)
    table = Table("part", "median", title=f"{arguments.run}: {len(lines)} steps")
    for name, value in result.items():
        table.add_row(name, f"{value:.4f}" if isinstance(value, float) else str(value))
    Console().print(table)
    if arguments.json:
        RESULTS.parent.mkdir(exist_ok=True)
        RESULTS.write_text(json.dumps(result, indent=1) + "\n")


def _seconds(line: dict, part: str) -> float:
    return float(line.get(f"timing/{part}_s") or 0.0)


def _step_s(line: dict) -> float:
    return _seconds(line, "step") - _seconds(line, "checkpoint") - _seconds(line, "evaluate")


def _overhead(line: dict) -> float:
    generation = max(0.0, _seconds(line, "rollout") - _seconds(line, "reward"))
    return 1.0 - (generation + _seconds(line, "forward_backward")) / _step_s(line)


if __name__ == "__main__":
    main()
