"""Run every check that needs a GPU on this machine, measure its speed, and write docs/gpu_check.html and .json.

Place in the data flow: none; run by people on a machine with an NVIDIA GPU. The checks are those of tests/gpu.

    python tools/gpu_check.py                  # exit code 0: all passed, 1: a check failed, 2: there is no GPU
    python tools/gpu_check.py --resume         # what was good before on the same GPU and packages is not run again
    python tools/gpu_check.py --no-speed
    python tools/gpu_check.py --rehearse       # on a CPU, small sizes; writes no report and proves nothing about a GPU
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import html
import json
import platform
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests" / "gpu"), str(ROOT / "benchmarks")]

REPORT = ROOT / "docs" / "gpu_check.html"
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
    """One line of the table. gpus: that it needs."""

    name: str
    result: str
    difference: str
    tolerance: str
    seconds: float
    peak_gib: float | None
    gpus: int = 1

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
    parser.add_argument("--resume", action="store_true", help="keep what passed on the same GPU and packages")
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
    known, speeds, rows = facts(device), Speeds(), list[Row]()
    before, measured = found_before(arguments.report, known) if arguments.resume else ({}, {})

    def keep(rows: list[Row], speeds: Speeds) -> None:
        if not arguments.rehearse:  # on the disk before the next check, which may take the machine along
            write(arguments.report, rows, speeds, known)

    try:
        for rows in run_checks(device, arguments.only, before):
            keep(rows, speeds)
        for speeds in () if arguments.no_speed else run_speed(device, measured, small=arguments.rehearse):
            keep(rows, speeds)
    finally:
        parallel.shutdown()
    show(rows, speeds, known)
    if arguments.rehearse:
        print("A rehearsal on the CPU: no report was written.")
    else:
        print(f"written: {arguments.report}, {arguments.report.with_suffix('.json')}")
    failed = {row.result for row in rows} | {result_of(line) for lines in speeds.values() for line in lines}
    return 1 if {"FAILED", "ERROR"} & failed else 0


Speeds = dict[str, list[list[str]]]
"""Lines of the second table by what was measured, one of SPEEDS."""


def write(report: Path, rows: list[Row], speeds: Speeds, known: dict[str, str]) -> None:
    """Write the page, and the data beside it."""
    report.write_text(page(rows, speeds, known), encoding="utf-8")
    report.with_suffix(".json").write_text(as_json(rows, speeds, known), encoding="utf-8")


def found_before(report: Path, known: dict[str, str]) -> tuple[dict[str, Row], Speeds]:
    """Return what an earlier run found to pass, and measured without a failure, on the same GPU and packages, by name;
    the date may be another."""
    data = report.with_suffix(".json")
    if not data.exists():
        return {}, {}
    earlier = json.loads(data.read_text(encoding="utf-8"))
    if {**earlier["facts"], "date": ""} != {**known, "date": ""}:
        return {}, {}
    speeds = Speeds()
    for line in earlier["speed"]:
        speeds.setdefault(line["item"], []).append([line[column] for column in SPEED_COLUMNS])
    bad = {"FAILED", "ERROR", "not here"}
    good = {name: lines for name, lines in speeds.items() if not bad & {result_of(line) for line in lines}}
    return {row["name"]: Row(**row) for row in earlier["checks"] if row["result"] == "passed"}, good


def result_of(line: Sequence[str]) -> str:
    """Return how a measurement ended: "ERROR" or "not here", which stand for its numbers, or how its goal begins."""
    return line[1] if line[1] in ("ERROR", "not here") else line[-1].partition(":")[0]


def run_checks(device: Any, only: str, before: Mapping[str, Row]) -> Iterator[list[Row]]:
    """Run every check but those of `before`; what one raises is its result. Yields all rows so far after each."""
    from gpu_checks import CHECKS, gpus_of

    rows: list[Row] = []
    for name, check in CHECKS.items():
        if only in name:
            done = before[name] if name in before else run_check(name, check, device)
            rows.append(dataclasses.replace(done, gpus=gpus_of(check)))
            print("  ".join(rows[-1].cells()), flush=True)
            yield rows


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
            traceback.print_exc()
            result, difference, tolerance = "ERROR", "", f"{type(error).__name__}: {error}"[:300]
        if on_gpu:
            torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() / 2**30 if on_gpu else None
    return Row(name, result, difference, tolerance, time.perf_counter() - start, peak)


STEPS = ("train step 1.5B bf16", "train step 1.5B fp8", "train step 7B bf16", "train step 7B fp8")
SPEEDS = ("log-probs fp32", "log-probs bf16", *STEPS)
SPEED_COLUMNS = ("measured", "median, ms", "tokens/s", "extra peak memory, GiB", "of the GPU's peak", "goal")
GOALS = dict(zip(STEPS, (0.30, 0.30, 0.45, 0.45), strict=True))
"""Part of the GPU's bf16 peak that a measurement must reach, or the tool fails. fp8 has twice the peak."""
LOGPROB_GOAL = 3.0
"""Log-probs with entropy may take this many times the bare products."""


def run_speed(device: Any, before: Mapping[str, list[list[str]]], *, small: bool) -> Iterator[Speeds]:
    """Measure everything but what is in `before`. Yields all lines so far after each."""
    speeds = Speeds()
    for name in SPEEDS:
        speeds[name] = before[name] if name in before else speed_lines(name, device, small=small)
        yield speeds


def speed_lines(name: str, device: Any, *, small: bool) -> list[list[str]]:
    """Lines of the second table: what was measured, and its numbers, or why there are none."""
    try:
        measured = _measured(name, device, small)
        goals = logprob_goals(measured) if name.startswith("log-probs") else [_mfu_goal(name, measured[0], device)]
        return [
            [*_speed_line(speed, device), goal if device.type == "cuda" else "no goal on a CPU"]
            for speed, goal in zip(measured, goals, strict=True)
        ]
    except Exception as error:  # as above: say it in the report and go on
        result = "not here" if type(error).__name__ == "NotHereError" else "ERROR"
        if result == "ERROR":
            traceback.print_exc()
        return [[name, result, f"{type(error).__name__}: {error}"[:300], "", "", ""]]


def logprob_goals(measured: Sequence[Any]) -> list[str]:
    """Whether ours is near enough to the bare products; of (ours, plain, bare products, and on a GPU ours with the
    other kernel, which has no goal: it is not the default), by their seconds."""
    ours, _, bare, *others = (speed.seconds for speed in measured)
    reached = verdict(ours / bare <= LOGPROB_GOAL, f"{ours / bare:.1f} of at most {LOGPROB_GOAL:g} bare products")
    return [reached, "", "", *(f"{other / bare:.1f} bare products" for other in others)]


def verdict(reached: bool, text: str) -> str:
    """The last cell of a measurement; `main` fails for one that begins with FAILED."""
    return f"{'reached' if reached else 'FAILED'}: {text}"


def _mfu_goal(name: str, speed: Any, device: Any) -> str:
    share = mfu(speed, device)
    if share is None:
        return "no goal: the peak of this GPU is not known"
    return verdict(share >= GOALS[name], f"{share:.0%} of the peak, at least {GOALS[name]:.0%}")


def _measured(name: str, device: Any, small: bool) -> list[Any]:
    import torch
    from gpu_checks import build_policy, check_fp8
    from gpu_speed import QWEN_7B, QWEN_15B, bracketed, logprob_speed

    sizes = {"tokens": 64, "vocab": 300, "hidden": 32, "repeats": 2} if small else {}
    if name.startswith("log-probs"):
        return logprob_speed(device, torch.bfloat16 if name.endswith("bf16") else torch.float32, **sizes)
    options: dict[str, Any] = {"shape": QWEN_7B if "7B" in name else QWEN_15B}
    if name.endswith("fp8"):
        check_fp8(device)
    if small:
        options = {"shape": SMALL_SHAPE, "depths": (1, 8), "samples": 8, "sample_tokens": 32, "repeats": 2}
        options["rehearsed"] = True
    with tempfile.TemporaryDirectory() as directory:
        speed = bracketed(device, Path(directory), build_policy, precision=name.rpartition(" ")[2], **options)
    return [dataclasses.replace(speed, name=f"{name}: {speed.name}")]


def _speed_line(speed: Any, device: Any) -> list[str]:
    peak = "" if speed.peak_gib is None else f"{speed.peak_gib:.2f}"
    return [speed.name, f"{speed.seconds * 1e3:.1f}", f"{speed.tokens_per_s:,.0f}", peak, _share_of_peak(speed, device)]


def _share_of_peak(speed: Any, device: Any) -> str:
    share = mfu(speed, device)
    return "" if share is None else f"{share:.0%}"


def mfu(speed: Any, device: Any) -> float | None:
    """MFU in bf16 operations; None where the GPU is none of those that `megatron-daro plan` knows."""
    import torch

    from megatron_daro.workshop.plan.gpus import GPUS

    if device.type != "cuda" or not speed.operations:
        return None
    name = torch.cuda.get_device_name(device).upper()
    known = [gpu for gpu in GPUS.values() if gpu.name.partition("-")[0].upper() in name.split()]
    return speed.mfu(known[0].bf16_tflops) if known else None


def nothing_run(only: str) -> tuple[list[Row], Speeds]:
    """Both tables where there is no GPU: every item, and why it did not run."""
    from gpu_checks import CHECKS

    why = "no GPU is visible to torch"
    rows = [Row(name, "not here", "", why, 0.0, None) for name in CHECKS if only in name]
    return rows, {name: [[name, "not here", why, "", "", ""]] for name in SPEEDS}


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


def show(rows: list[Row], speeds: Speeds, known: dict[str, str]) -> None:
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
        for line in (line for lines in speeds.values() for line in lines):
            table.add_row(*(escape(cell) for cell in line))
        console.print(table)


STYLE = (
    "body{font:15px system-ui,sans-serif;margin:2em;max-width:90em}table{border-collapse:collapse;margin:1em 0}"
    "td,th{border:1px solid #bbb;padding:.3em .6em;text-align:left;vertical-align:top}"
    ".passed{background:#dfd}.FAILED,.ERROR{background:#fcc}"
)


def page(rows: list[Row], speeds: Speeds, known: dict[str, str]) -> str:
    """The report: every check with what it compares, by the GPUs that it needs, and the speed with its goals."""
    failed = sum(row.result in ("FAILED", "ERROR") for row in rows)
    missing = sum(row.result == "not here" for row in rows)
    compared = what_each_compares()
    parts = [
        '<!doctype html><html lang="en"><meta charset="utf-8"><title>Checked on a GPU</title>',
        f"<style>{STYLE}</style><h1>Checked on a GPU</h1>",
        "<p>Written by <code>python tools/gpu_check.py</code>; run it again to repeat every number. A row proves what "
        "its last column compares, on this machine, with these packages and small models. No row proves that a model "
        "learns, that a large model fits, or anything about a network between machines.</p>",
        "<ul>" + "".join(f"<li>{html.escape(f'{name}: {value}')}</li>" for name, value in known.items()) + "</ul>",
        f"<p>{len(rows) - failed - missing} of {len(rows)} checks passed, {failed} failed, "
        f"{missing} could not be run here.</p>",
    ]
    for gpus in sorted({row.gpus for row in rows}):
        table = [(row.result, [*row.cells(), compared.get(row.name, "")]) for row in rows if row.gpus == gpus]
        parts += [f"<h2>{gpus} GPU{'s' * (gpus > 1)}</h2>", _table([*COLUMNS, "compares"], table)]
    if speeds:
        lines = [(result_of(line), line) for measured in speeds.values() for line in measured]
        parts += ["<h2>Speed</h2>", _table(SPEED_COLUMNS, lines)]
    return "\n".join(parts) + "\n"


def what_each_compares() -> dict[str, str]:
    """Name of a check -> what its function says of itself."""
    from gpu_checks import CHECKS

    functions = {name: check.func if isinstance(check, partial) else check for name, check in CHECKS.items()}
    return {name: " ".join((function.__doc__ or "").split()) for name, function in functions.items()}


def _table(columns: Iterable[str], lines: Iterable[tuple[str, Sequence[str]]]) -> str:
    """Lines of (class, cells)."""
    head = "".join(f"<th>{html.escape(column)}</th>" for column in columns)
    body = "".join(
        f'<tr class="{html.escape(kind)}">' + "".join(f"<td>{html.escape(cell)}</td>" for cell in cells) + "</tr>"
        for kind, cells in lines
    )
    return f"<table><tr>{head}</tr>{body}</table>"


def as_json(rows: list[Row], speeds: Speeds, known: dict[str, str]) -> str:
    """The same report as data."""
    checks = [dataclasses.asdict(row) for row in rows]
    named = ((name, line) for name, lines in speeds.items() for line in lines)
    speed = [{"item": name, **dict(zip(SPEED_COLUMNS, line, strict=True))} for name, line in named]
    return json.dumps({"facts": known, "checks": checks, "speed": speed}, indent=1) + "\n"


if __name__ == "__main__":
    sys.exit(main())
