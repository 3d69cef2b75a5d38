"""Run what needs GPUs, most worth first, within a budget of seconds; write each result at once, then the report.

Place in the data flow: none; run by people on a machine with NVIDIA GPUs (docs/first_gpus.md). Items: tests/gpu.

    python tools/gpu_proof.py                  # exit code 0: nothing failed; 1: something did; 2: there is no GPU
    python tools/gpu_proof.py --budget 540     # seconds: nothing begins that would take longer
    python tools/gpu_proof.py --resume         # but for what passed or was measured on the same GPUs and packages
    python tools/gpu_proof.py --only "ranks on one GPU"
    python tools/gpu_proof.py --rehearse       # on a CPU, tiny sizes; writes no report and proves nothing about a GPU
    python tools/gpu_proof.py --report         # only write the report again

A result is a line of docs/gpu_proof.jsonl. An item that hangs or kills its process costs itself: the next one begins in
another process.
"""

from __future__ import annotations

import argparse
import ctypes
import datetime
import faulthandler
import gc
import itertools
import json
import platform
import subprocess
import sys
import tempfile
import textwrap
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests" / "gpu"), str(ROOT)]
RESULTS = ROOT / "docs" / "gpu_proof.jsonl"
PACKAGES = ("torch", "megatron-core", "transformer-engine", "transformers")
DONE, BAD = ("passed", "measured"), ("FAILED", "ERROR", "begun")
MARKS = "<!-- written by tools/gpu_proof.py -->\n", "<!-- end -->\n"
NO_GPU = (
    "gpu_proof: no GPU is visible to torch here, so nothing was run. Run it on a machine with an NVIDIA GPU and a CUDA "
    "build of torch (python -c 'import torch; print(torch.version.cuda)'), and look at CUDA_VISIBLE_DEVICES."
)
Row = dict[str, Any]
"""A result: name, result, said, numbers, seconds, peak_gib, gpus, date and `on`, the GPUs and packages."""


def parts() -> dict[str, dict[str, Any]]:
    """Title of a part -> its items, what is worth most first: what never ran, then what did."""
    from gpu_checks import CHECKS, gpus_of
    from gpu_measures import MEASURES

    first = ("ten steps, GPUs shared with a server", "memory paused under handles")
    kinds: dict[str, Callable[[str], bool]] = {
        "A server on the trainer's GPU": lambda name: name in first,
        "Several GPUs": lambda name: gpus_of(CHECKS[name]) > 1,
        "Ranks that share one GPU": lambda name: name.startswith("ranks on one GPU"),
    }
    found = {title: {name: CHECKS[name] for name in CHECKS if fits(name)} for title, fits in kinds.items()}
    taken = set(itertools.chain(*found.values()))
    return found | MEASURES | {"One GPU": {name: check for name, check in CHECKS.items() if name not in taken}}


def expected_s(name: str, rows: Iterable[Row]) -> float:
    """Seconds that an item took when it last ended well on any machine; else a guess, for a GPU."""
    took = [row["seconds"] for row in rows if row["name"] == name and row["result"] in DONE]
    return took[-1] if took else 120.0 if name.startswith("ten steps") else 30.0


def read(path: Path) -> list[Row]:
    """All results so far, the last of each item on each machine."""
    if not path.exists():
        return []
    rows = (json.loads(line) for line in path.read_text(encoding="utf-8").splitlines())
    return list({(row["name"], json.dumps(row["on"])): row for row in rows}.values())


def append(path: Path, row: Row) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


def facts(device: Any) -> dict[str, str]:
    """What the numbers are of."""
    import torch

    found = {"python": platform.python_version(), "GPU": "none (a rehearsal on the CPU)"}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    if device.type == "cuda":
        gpu = torch.cuda.get_device_properties(device)
        number, memory = torch.cuda.device_count(), f"{gpu.total_memory / 2**30:.0f} GiB"
        found["GPU"] = f"{number} x {gpu.name}, {memory}, CUDA {torch.version.cuda}"
    return found


def main() -> int:
    """See the module's docstring for the exit codes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", type=float, default=3600.0, help="seconds, all in all")
    parser.add_argument(
        "--only", nargs="+", default=[""], help="only items in whose or their part's name is one of these"
    )
    parser.add_argument("--out", type=Path, help=f"where results are appended; {RESULTS.relative_to(ROOT)}")
    parser.add_argument("--resume", action="store_true", help="leave out what was done on the same GPUs and packages")
    parser.add_argument("--rehearse", action="store_true", help="run on the CPU, to try the tool itself")
    parser.add_argument("--report", action="store_true", help="run nothing; write the report of what is there")
    parser.add_argument("--until", type=float, help=argparse.SUPPRESS)  # of the process that runs the items
    parser.add_argument("--after", default="", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.until:
        return run_items(given)
    if not given.report:
        import torch

        if not torch.cuda.is_available() and not given.rehearse:
            print(NO_GPU, file=sys.stderr)
            print("\n".join(f"not here  {name}" for items in parts().values() for name in items))
            return 2
        with tempfile.TemporaryDirectory() as directory:
            given.out = given.out or (Path(directory) / "rehearsed.jsonl" if given.rehearse else RESULTS)
            before = len(lines(given.out))
            supervise(given.out, time.time() + given.budget, partial(child, given))
            ended = {row["name"]: row for row in map(json.loads, lines(given.out)[before:])}
        failed = [name for name, row in ended.items() if row["result"] in BAD]
        print(f"{len(ended)} items, failed: {', '.join(failed) or 'none'}")
        if given.rehearse:
            print("A rehearsal on the CPU: no report was written.")
            return 1 if failed else 0
    else:
        failed = []
    print(f"written: {', '.join(map(str, write_report(given.out or RESULTS)))}")
    return 1 if failed else 0


def lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines() if path.exists() else []


def supervise(out: Path, until: float, start: Callable[[float, str], int]) -> None:
    """Have processes run all items until then. start: (until, name of the item to begin after) -> exit code."""
    after = ""
    while code := start(until, after):
        last = json.loads(([*lines(out), "{}"])[-2 if lines(out) else -1])
        if last.get("result") != "begun" or last["name"] == after:
            raise SystemExit(f"gpu_proof: the process that runs the items ended with {code} before the next one")
        after = last["name"]
        said = f"its process ended with {code} (time was up, or it crashed; above is where it stood)"
        append(out, {**last, "result": "ERROR", "said": said})
        if time.time() >= until:
            return


def child(given: argparse.Namespace, until: float, after: str) -> int:
    """Run items in a process of their own; end whatever it leaves behind. Returns its exit code."""
    import psutil

    ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER: what an item leaves behind becomes a child of this process
    options = ["--out", given.out, "--only", *given.only, "--until", until, "--after", after]
    command = [sys.executable, __file__, *map(str, options), *(["--resume"] if given.resume else [])]
    process = subprocess.Popen(command)
    try:
        return process.wait(max(until - time.time(), 0) + 30)
    except subprocess.TimeoutExpired:
        return -9
    finally:
        for left in psutil.Process().children(recursive=True):
            left.kill()
            left.wait()


def run_items(given: argparse.Namespace) -> int:
    """Run what fits into the time, in order; a line for each before it begins and when it ended."""
    warnings.simplefilter("ignore")
    from megatron_daro.actor import device as devices
    from megatron_daro.actor import parallel

    device = devices.prepare()
    on, rows = facts(device), read(given.out)
    done = {row["name"] for row in rows if given.resume and row["on"] == on and row["result"] in DONE}
    items = [
        (name, run)
        for title, some in parts().items()
        for name, run in some.items()
        if any(word in f"{title}: {name}" for word in given.only)
    ]
    names = [name for name, _ in items]
    parallel.initialize(parallel.Layout(), seed=1, timeout_s=300)
    for name, run in items[names.index(given.after) + 1 if given.after else 0 :]:
        needed, left = expected_s(name, rows), given.until - time.time()
        if name in done or needed > left:
            continue
        row = {"name": name, "date": datetime.date.today().isoformat(), "on": on}
        append(
            given.out, {**row, "result": "begun", "said": "", "numbers": {}, "seconds": 0.0, "peak_gib": 0.0, "gpus": 1}
        )
        faulthandler.dump_traceback_later(min(left, max(5 * needed, 300)), exit=True)
        row |= run_item(name, run, device)
        faulthandler.cancel_dump_traceback_later()
        append(given.out, row)
        print(f"{row['result']:9} {name}: {row['said']}  [{row['seconds']:.1f} s]", flush=True)
    parallel.shutdown()
    return 0


def run_item(name: str, run: Any, device: Any) -> Row:
    import torch
    from gpu_checks import gpus_of
    from gpu_outcomes import NotHereError, Outcome

    on_gpu, numbers = device.type == "cuda", {}
    gc.collect()
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as directory:
        try:
            found = run(device, Path(directory))
            numbers, result, said = dict(found.numbers), "measured", ""
            if isinstance(found, Outcome):
                result = "passed" if found.passed else "FAILED"
                said = f"{found.difference:.2e} of at most {found.tolerance:.0e} {found.of}"
        except NotHereError as reason:
            result, said = "not here", str(reason)
        except Exception as error:  # a supervisor's border: the other items still run, and this one counts as failed
            traceback.print_exc()
            result, said = "ERROR", f"{type(error).__name__}: {error}"[:300]
        if on_gpu:
            torch.cuda.synchronize()
    shown = ", ".join(f"{key} {value:,.4g}" for key, value in numbers.items())
    peak = torch.cuda.max_memory_allocated() / 2**30 if on_gpu else 0.0
    row = {"result": result, "said": "; ".join(filter(None, (said, shown))), "numbers": numbers}
    return row | {"seconds": round(time.perf_counter() - start, 1), "peak_gib": round(peak, 2), "gpus": gpus_of(run)}


def write_report(out: Path) -> list[Path]:
    """Write the page beside the results, and the part of verified.md there that is theirs. Returns what was written."""
    written, rows = [out.with_suffix(".md")], read(out)
    written[0].write_text("\n".join(page(rows)) + "\n", encoding="utf-8")
    verified = out.parent / "verified.md"
    if verified.exists():
        before, _, rest = verified.read_text(encoding="utf-8").partition(MARKS[0])
        after = rest.partition(MARKS[1])[2]
        verified.write_text(before + MARKS[0] + "\n".join(summary(rows)) + "\n" + MARKS[1] + after, encoding="utf-8")
        written.append(verified)
    return written


def machines(rows: list[Row]) -> Iterator[tuple[Mapping[str, str], list[Row]]]:
    """The GPUs and packages of each machine, and its results in the order of the parts."""
    order = {name: number for number, name in enumerate(itertools.chain(*parts().values()))}
    for on in {json.dumps(row["on"]): row["on"] for row in rows}.values():
        own = [row for row in rows if row["on"] == on]
        yield on, sorted(own, key=lambda row: order.get(row["name"], len(order)))


def heading(on: Mapping[str, str], rows: list[Row]) -> list[str]:
    """Its title, packages, date and counts."""
    packages = ", ".join(f"{name} {value}" for name, value in on.items() if name != "GPU" and value != "not installed")
    counts = ", ".join(f"{sum(row['result'] == r for row in rows)} {r}" for r in (*DONE, "not here", *BAD[:2]))
    return [
        f"## {on['GPU']}",
        "",
        *textwrap.wrap(f"{max(row['date'] for row in rows)}: {packages}. {counts}.", 120),
        "",
    ]


def page(rows: list[Row]) -> list[str]:
    """The report: every item with what it compares, by machine and part."""
    text = [
        "# Proved on GPUs",
        "",
        "Written by `python tools/gpu_proof.py`; [the data](gpu_proof.jsonl). A row proves what its last column says, ",
        "on that machine, with small or random models: not that a model learns, nor anything about a network.",
    ]
    for on, own in machines(rows):
        text += ["", *heading(on, own), "| item | result | found | s | GiB | compares |", "|---|---|---|---|---|---|"]
        for row in own:
            cells = [row["name"], row["result"], row["said"], f"{row['seconds']:g}", f"{row['peak_gib']:g}"]
            text.append("| " + " | ".join(cell.replace("|", "\\|") for cell in (*cells, compares(row["name"]))) + " |")
    return text


def compares(name: str) -> str:
    """What the function of an item says of itself."""
    run = next((items[name] for items in parts().values() if name in items), None)
    return " ".join(((run.func if isinstance(run, partial) else run).__doc__ or "").split()) if run else ""


def summary(rows: list[Row]) -> list[str]:
    """The part of docs/verified.md: what each machine showed, by part, and what none has."""
    text, never = [""], {title: list(items) for title, items in parts().items()}
    for on, own in machines(rows):
        text += ["#" + line for line in heading(on, own)[:1]] + heading(on, own)[1:]
        for title, items in {**parts(), "Formerly": {row["name"]: None for row in own}}.items():
            for result in (*DONE, *BAD):
                names = [row["name"] for row in own if row["result"] == result and row["name"] in items]
                own = [row for row in own if row["name"] not in names]
                never[title] = [name for name in never.get(title, ()) if name not in names]
                text += listed(f"{title}, {result}", names)
        text.append("")
    text += ["### On no GPU so far", ""]
    for title, names in never.items():
        text += listed(title, names)
    return [*text, ""]


def listed(what: str, names: list[str]) -> list[str]:
    line = f"* **{what}**: {'; '.join(names)}"
    return textwrap.wrap(line, 120, subsequent_indent="  ", break_on_hyphens=False) if names else []


if __name__ == "__main__":
    sys.exit(main())
