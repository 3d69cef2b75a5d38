"""Run every check that needs a GPU on this machine, measure its speed, and write docs/gpu_check.md and .json.

Place in the data flow: none; run by people on a machine with an NVIDIA GPU. The checks are those of tests/gpu.

    python tools/gpu_check.py                  # exit code 0: all passed, 1: a check failed, 2: there is no GPU
    python tools/gpu_check.py --no-speed
    python tools/gpu_check.py --rehearse       # on a CPU, small sizes; writes no report and proves nothing about a GPU
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import platform
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
        show(*nothing_run(arguments.only), facts(torch.device("cpu")))
        return 2
    warnings.simplefilter("ignore")
    from megatron_daro.actor import device as devices
    from megatron_daro.actor import parallel

    device = devices.prepare()
    parallel.initialize(parallel.Layout(), seed=1, timeout_s=300)
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
        as_data = arguments.report.with_suffix(".json")
        as_data.write_text(as_json(rows, speeds, facts(device)), encoding="utf-8")
        print(f"written: {arguments.report}, {as_data}")
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
    from gpu_outcomes import NotHereError

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


SPEEDS = ("log-probs fp32", "log-probs bf16", "train step bf16", "layers of 7B bf16", "layers of 7B fp8")
SPEED_COLUMNS = ("measured", "median, ms", "tokens/s", "extra peak memory, GiB", "of the GPU's peak")


def run_speed(device: Any, *, small: bool) -> list[list[str]]:
    """Lines of the second table: what was measured, and its numbers, or why there are none."""
    lines: list[list[str]] = []
    for name in SPEEDS:
        try:
            lines += [_speed_line(speed, device) for speed in _measured(name, device, small)]
        except Exception as error:  # as above: say it in the report and go on
            not_here = type(error).__name__ == "NotHereError"
            lines.append([name, "not here" if not_here else "ERROR", f"{type(error).__name__}: {error}"[:300], "", ""])
    return lines


def _measured(name: str, device: Any, small: bool) -> list[Any]:
    import torch
    from gpu_checks import build_policy, check_fp8
    from gpu_speed import QWEN_7B_LAYERS, logprob_speed, train_step_speed

    sizes = {"tokens": 64, "vocab": 300, "hidden": 32, "repeats": 2} if small else {}
    if name.startswith("log-probs"):
        return logprob_speed(device, torch.bfloat16 if name.endswith("bf16") else torch.float32, **sizes)
    options: dict[str, Any] = {"shape": QWEN_7B_LAYERS} if "7B" in name else {}
    if name.endswith("fp8"):
        check_fp8(device)
    if small:
        options = {"shape": SMALL_SHAPE, "samples": 8, "sample_tokens": 32, "repeats": 2}
    with tempfile.TemporaryDirectory() as directory:
        return [train_step_speed(device, Path(directory), build_policy, precision=name.rpartition(" ")[2], **options)]


def _speed_line(speed: Any, device: Any) -> list[str]:
    peak = "" if speed.peak_gib is None else f"{speed.peak_gib:.2f}"
    return [speed.name, f"{speed.seconds * 1e3:.1f}", f"{speed.tokens_per_s:,.0f}", peak, _share_of_peak(speed, device)]


def _share_of_peak(speed: Any, device: Any) -> str:
    """MFU in bf16 operations, where the GPU is one of those that `megatron-daro plan` knows."""
    import torch

    from megatron_daro.workshop.plan.gpus import GPUS

    if device.type != "cuda" or not speed.operations:
        return ""
    name = torch.cuda.get_device_name(device).upper()
    known = [gpu for gpu in GPUS.values() if gpu.name.partition("-")[0].upper() in name.split()]
    return f"{speed.mfu(known[0].bf16_tflops):.0%}" if known else ""


def nothing_run(only: str) -> tuple[list[Row], list[list[str]]]:
    """Both tables where there is no GPU: every item, and why it did not run."""
    from gpu_checks import CHECKS

    why = "no GPU is visible to torch"
    rows = [Row(name, "not here", "", why, 0.0, None) for name in CHECKS if only in name]
    return rows, [[name, "not here", why, "", ""] for name in SPEEDS]


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


def as_json(rows: list[Row], speeds: list[list[str]], known: dict[str, str]) -> str:
    """The same report as data."""
    checks = [dataclasses.asdict(row) for row in rows]
    speed = [dict(zip(SPEED_COLUMNS, line, strict=True)) for line in speeds]
    return json.dumps({"facts": known, "checks": checks, "speed": speed}, indent=1) + "\n"


def _markdown_table(columns: tuple[str, ...], lines: list[list[str]]) -> list[str]:
    def line(cells: Any) -> str:
        return "| " + " | ".join(str(cell).replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"

    return [line(columns), line("---" for _ in columns), *(line(cells) for cells in lines)]


if __name__ == "__main__":
    sys.exit(main())
