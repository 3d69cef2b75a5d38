"""Run every check that needs a GPU on this machine, measure its speed, and write docs/gpu_check.md.

Place in the data flow: none; run by people on a machine with an NVIDIA GPU. The checks are those of tests/gpu.

    python tools/gpu_check.py                  # exit code 0: all passed, 1: a check failed, 2: there is no GPU
    python tools/gpu_check.py --no-speed
    python tools/gpu_check.py --rehearse       # on a CPU, small sizes; writes no report and proves nothing about a GPU
"""

from __future__ import annotations

import argparse
import datetime
import platform
import socket
import sys
import tempfile
import time
import warnings
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests" / "gpu"), str(ROOT / "benchmarks")]

REPORT = ROOT / "docs" / "gpu_check.md"
NO_GPU = (
    "gpu_check: no GPU is visible to torch here, so nothing was checked. Run it on a machine with an NVIDIA GPU and a "
    "CUDA build of torch (python -c 'import torch; print(torch.version.cuda)'), and look at CUDA_VISIBLE_DEVICES."
)
SMALL_SHAPE = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 200,
    "tie_word_embeddings": True,
}


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table."""

    name: str
    result: str
    difference: str
    tolerance: str
    seconds: float
    peak_gib: float | None

    def cells(self) -> list[str]:
        """The columns as text."""
        peak = "" if self.peak_gib is None else f"{self.peak_gib:.2f}"
        return [self.name, self.result, self.difference, self.tolerance, f"{self.seconds:.1f}", peak]


COLUMNS = ("check", "result", "max difference", "allowed", "time, s", "peak memory, GiB")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--no-speed", action="store_true", help="checks only")
    parser.add_argument("--only", default="", help="only checks whose name contains this")
    parser.add_argument("--report", type=Path, default=REPORT)
    parser.add_argument("--rehearse", action="store_true", help="run on the CPU, to try the tool itself")
    return parser.parse_args()


def main() -> int:
    """See the module's docstring for the exit codes."""
    arguments = parse_arguments()
    import torch

    if not torch.cuda.is_available() and not arguments.rehearse:
        print(NO_GPU, file=sys.stderr)
        return 2
    warnings.simplefilter("ignore")
    from megatron_daro.actor import device as devices
    from megatron_daro.actor import parallel

    device = devices.prepare()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    address = f"tcp://127.0.0.1:{port}"
    parallel.initialize(parallel.Layout(), rank=0, init_method=address, seed=1, timeout_s=300)
    try:
        rows = run_checks(device, arguments.only)
        speeds = [] if arguments.no_speed else run_speed(device, small=arguments.rehearse)
    finally:
        parallel.shutdown()
    show(rows, speeds, facts(device))
    if arguments.rehearse:
        print("A rehearsal on the CPU: no report was written.")
    else:
        arguments.report.write_text(markdown(rows, speeds, facts(device)), encoding="utf-8")
        print(f"written: {arguments.report}")
    return 1 if any(row.result in ("FAILED", "ERROR") for row in rows) or any("ERROR" in s for s in speeds) else 0


def run_checks(device: Any, only: str) -> list[Row]:
    """Every check, one after the other; what one raises is its result."""
    from gpu_checks import CHECKS

    rows = []
    for name, check in CHECKS.items():
        if only in name:
            rows.append(run_check(name, check, device))
            print("  ".join(rows[-1].cells()), flush=True)
    return rows


def run_check(name: str, check: Any, device: Any) -> Row:
    import torch
    from gpu_checks import NotHereError

    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as directory:
        try:
            outcome = check(device, Path(directory))
            result = "passed" if outcome.passed else "FAILED"
            difference, tolerance = f"{outcome.difference:.2e}", f"{outcome.tolerance:.0e} ({outcome.of})"
        except NotHereError as reason:
            result, difference, tolerance = "not here", "", str(reason)
        except Exception as error:  # a supervisor's border: the other checks still run, and this one counts as failed
            result, difference, tolerance = "ERROR", "", f"{type(error).__name__}: {error}"[:300]
        if on_gpu:
            torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() / 2**30 if on_gpu else None
    return Row(name, result, difference, tolerance, time.perf_counter() - start, peak)


def run_speed(device: Any, *, small: bool) -> list[list[str]]:
    """Lines of the second table: what was measured, milliseconds, tokens per second, peak memory."""
    import torch
    from gpu_checks import build_policy
    from gpu_speed import logprob_speed, train_step_speed

    sizes = {"tokens": 64, "vocab": 300, "hidden": 32, "repeats": 2} if small else {}
    train = {"shape": SMALL_SHAPE, "samples": 8, "sample_tokens": 32, "repeats": 2} if small else {}
    lines: list[list[str]] = []

    def train_step() -> list[Any]:
        with tempfile.TemporaryDirectory() as directory:
            return [train_step_speed(device, Path(directory), build_policy, **train)]

    measurements = {
        "log-probs fp32": lambda: logprob_speed(device, torch.float32, **sizes),
        "log-probs bf16": lambda: logprob_speed(device, torch.bfloat16, **sizes),
        "train step": train_step,
    }
    for name, measure in measurements.items():
        try:
            for s in measure():
                peak = "" if s.peak_gib is None else f"{s.peak_gib:.2f}"
                lines.append([s.name, f"{s.seconds * 1e3:.1f}", f"{s.tokens_per_s:,.0f}", peak])
        except Exception as error:  # as above: say it in the report and go on
            lines.append([name, "ERROR", f"{type(error).__name__}: {error}"[:300], ""])
    return lines


SPEED_COLUMNS = ("measured", "median, ms", "tokens/s", "extra peak memory, GiB")


def facts(device: Any) -> dict[str, str]:
    """What the numbers were measured on."""
    import torch

    found = {"date": datetime.date.today().isoformat(), "python": platform.python_version()}
    for name in ("torch", "megatron-core", "transformer-engine", "transformers"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found["GPU"] = f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB, CUDA {torch.version.cuda}"
    else:
        found["GPU"] = "none (a rehearsal on the CPU)"
    return found


def show(rows: list[Row], speeds: list[list[str]], known: dict[str, str]) -> None:
    """The tables on the terminal."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console()
    colour = {"passed": "green", "FAILED": "red", "ERROR": "red", "not here": "yellow"}
    table = Table(*COLUMNS, title=escape(f"GPU checks: {known['GPU']}"))
    for row in rows:
        name, result, *rest = (escape(cell) for cell in row.cells())
        table.add_row(name, f"[{colour[row.result]}]{result}[/]", *rest)
    console.print(table)
    if speeds:
        table = Table(*SPEED_COLUMNS, title="Speed")
        for line in speeds:
            table.add_row(*(escape(cell) for cell in line))
        console.print(table)


def markdown(rows: list[Row], speeds: list[list[str]], known: dict[str, str]) -> str:
    """The report."""
    failed = sum(row.result in ("FAILED", "ERROR") for row in rows)
    missing = sum(row.result == "not here" for row in rows)
    lines = [
        "# Checked on a GPU",
        "",
        "Written by `python tools/gpu_check.py`; run it again to repeat every number.",
        "",
        *(f"- {name}: {value}" for name, value in known.items()),
        "",
        f"{len(rows) - failed - missing} of {len(rows)} checks passed, {failed} failed, "
        f"{missing} could not be run here.",
        "",
        *_markdown_table(COLUMNS, [row.cells() for row in rows]),
    ]
    if speeds:
        lines += ["", "## Speed", "", *_markdown_table(SPEED_COLUMNS, speeds)]
    return "\n".join(lines) + "\n"


def _markdown_table(columns: tuple[str, ...], lines: list[list[str]]) -> list[str]:
    def line(cells: Any) -> str:
        return "| " + " | ".join(str(cell).replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"

    return [line(columns), line("---" for _ in columns), *(line(cells) for cells in lines)]


if __name__ == "__main__":
    sys.exit(main())
