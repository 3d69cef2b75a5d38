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
import contextlib
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
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests" / "gpu"), str(ROOT)]
RESULTS = ROOT / "docs" / "gpu_proof.jsonl"
PACKAGES = ("torch", "megatron-core", "transformer-engine", "transformers")
DONE, BAD = ("passed", "measured"), ("FAILED", "ERROR", "begun")
MARKS = "<!-- written by tools/gpu_proof.py -->", "<!-- end -->"
PAGE = (
    "# Proved on GPUs\n",
    "Written by `python tools/gpu_proof.py`; [the data](gpu_proof.jsonl). A row proves what stands above it, on that",
    "machine, with small or random models: not that a model learns, nor anything about a network.\n",
)
NO_GPU = 2
WITHOUT_GPU = (
    "gpu_proof: no GPU is visible to torch here, so nothing was run. Run it on a machine with an NVIDIA GPU and a CUDA "
    "build of torch (python -c 'import torch; print(torch.version.cuda)'), and look at CUDA_VISIBLE_DEVICES."
)
Row = dict[str, Any]
"""A result: name, result, said, numbers, seconds, peak_gib, date and `on`, the GPUs and packages."""


def parts() -> dict[str, dict[str, Any]]:
    """Return title of a part -> its items, those worth most first."""
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
    """Return the seconds that an item took when it last ended well on any machine; else a guess, for a GPU."""
    took = [row["seconds"] for row in rows if row["name"] == name and row["result"] in DONE]
    return took[-1] if took else 120.0 if name.startswith("ten steps") else 30.0


def read(path: Path) -> list[Row]:
    """Return all results so far, the last of each item on each machine."""
    if not path.exists():
        return []
    rows = (json.loads(line) for line in path.read_text(encoding="utf-8").splitlines())
    return list({(row["name"], json.dumps(row["on"])): row for row in rows}.values())


def append(path: Path, row: Row) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


def facts(device: Any) -> dict[str, str]:
    """Return the GPUs and packages that the numbers are of."""
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
    parser.add_argument("--only", nargs="+", default=[""], help="items in whose or whose part's name is one of these")
    parser.add_argument("--out", type=Path, help=f"where results are appended; {RESULTS.relative_to(ROOT)}")
    parser.add_argument("--resume", action="store_true", help="leave out what was done on the same GPUs and packages")
    parser.add_argument("--rehearse", action="store_true", help="run on the CPU, to try the tool itself")
    parser.add_argument("--report", action="store_true", help="run nothing; write the report of what is there")
    parser.add_argument("--until", type=float, help=argparse.SUPPRESS)  # of the process that runs the items
    parser.add_argument("--after", default="", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.until:
        return run_items(given)
    code = 0 if given.report else prove(given)
    if code != NO_GPU and not given.rehearse:
        print(f"written: {', '.join(map(str, write_report(given.out or RESULTS)))}")
    return code


def prove(given: argparse.Namespace) -> int:
    """Run the items. Return the exit code."""
    import torch

    if not torch.cuda.is_available() and not given.rehearse:
        print(WITHOUT_GPU, file=sys.stderr)
        print("\n".join(f"not here  {name}" for items in parts().values() for name in items))
        return NO_GPU
    with tempfile.TemporaryDirectory() as directory:
        given.out = given.out or (Path(directory) / "rehearsed.jsonl" if given.rehearse else RESULTS)
        before = len(lines(given.out))
        code = supervise(given.out, time.time() + given.budget, partial(child, given))
        ended = {row["name"]: row["result"] for row in map(json.loads, lines(given.out)[before:])}
    failed = [name for name, result in ended.items() if result in BAD]
    print(f"{len(ended)} items, failed: {', '.join(failed) or 'none'}")
    return int(bool(failed or code))


def lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines() if path.exists() else []


def supervise(out: Path, until: float, start: Callable[[float, str], int]) -> int:
    """Run all items in other processes, until a time. start: (until, name of the item to begin after) -> exit code.
    Return 0, or the exit code of a process that ended outside an item."""
    after = ""
    while code := start(until, after):
        last = json.loads((lines(out) or ["{}"])[-1])
        if last.get("result") != "begun":
            print(f"gpu_proof: the process that runs the items ended with {code}, not within one", file=sys.stderr)
            return code
        after = last["name"]
        said = f"its process ended with {code} (time was up, or it crashed; above is where it stood)"
        append(out, {**last, "result": "ERROR", "said": said})
        if time.time() >= until:
            break
    return 0


def child(given: argparse.Namespace, until: float, after: str) -> int:
    """Run items in a process of their own, and end whatever it leaves behind. Return its exit code."""
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
            with contextlib.suppress(psutil.Error):
                left.kill()
                left.wait()


def run_items(given: argparse.Namespace) -> int:
    """Run the items that fit into the time, in order; write a line for each before it begins and when it has ended."""
    warnings.simplefilter("ignore")
    from megatron_daro.actor import device as devices
    from megatron_daro.actor import parallel

    device = devices.current()
    on, rows = facts(device), read(given.out)
    done = {row["name"] for row in rows if given.resume and row["on"] == on and row["result"] in DONE}
    items = [(name, run, f"{title}: {name}") for title, some in parts().items() for name, run in some.items()]
    items = [item for item in items if any(word in item[2] for word in given.only)]
    begin = [name for name, _, _ in items].index(given.after) + 1 if given.after else 0
    parallel.initialize(parallel.Layout(), seed=1, timeout_s=300)
    for name, run, _ in items[begin:]:
        needed, left = expected_s(name, rows), given.until - time.time()
        if name in done or needed > left:
            continue
        row = {"name": name, "date": datetime.date.today().isoformat(), "on": on}
        append(given.out, row | {"result": "begun", "said": "", "numbers": {}, "seconds": 0.0, "peak_gib": 0.0})
        faulthandler.dump_traceback_later(min(left, max(5 * needed, 300)), exit=True)
        row |= run_item(run, device)
        faulthandler.cancel_dump_traceback_later()
        append(given.out, row)
        print(f"{row['result']:9} {name}: {row['said']}  [{row['seconds']:.1f} s]", flush=True)
    parallel.shutdown()
    return 0


def run_item(run: Any, device: Any) -> Row:
    import torch
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
        except Exception as error:  # a boundary: the other items still run, and this one counts as failed
            traceback.print_exc()
            result, said = "ERROR", f"{type(error).__name__}: {error}"[:300]
        if on_gpu:
            torch.cuda.synchronize()
    shown = ", ".join(f"{key} {value:,.4g}" for key, value in numbers.items())
    peak = torch.cuda.max_memory_allocated() / 2**30 if on_gpu else 0.0
    row = {"result": result, "said": "; ".join(filter(None, (said, shown))), "numbers": numbers}
    return row | {"seconds": round(time.perf_counter() - start, 1), "peak_gib": round(peak, 2)}


def write_report(out: Path) -> list[Path]:
    """Write the page beside the results, and their part of the verified.md there. Return the files."""
    rows, verified = read(out), out.parent / "verified.md"
    written = {out.with_suffix(".md"): [*PAGE, *page(rows)]}
    if verified.exists():
        before, _, rest = verified.read_text(encoding="utf-8").partition(MARKS[0])
        written[verified] = [before + MARKS[0], *summary(rows), MARKS[1] + rest.partition(MARKS[1])[2].rstrip()]
    for path, text in written.items():
        path.write_text("\n".join(text) + "\n", encoding="utf-8")
    return list(written)


def machines(rows: list[Row]) -> Iterator[tuple[list[str], dict[str, list[Row]]]]:
    """Yield the heading of each machine, and its results by part, in order."""
    for on in {json.dumps(row["on"]): row["on"] for row in rows}.values():
        own = {row["name"]: row for row in rows if row["on"] == on}
        packages = ", ".join(f"{name} {value}" for name, value in on.items() if name != "GPU")
        said = f"{max(row['date'] for row in own.values())}: {packages}"
        some = {title: [own.pop(name) for name in items if name in own] for title, items in parts().items()}
        yield [f"## {on['GPU']}", "", said, ""], {**some, "Formerly": list(own.values())}


def page(rows: list[Row]) -> Iterator[str]:
    """Yield every item by machine and part, under the first paragraph of its function's docstring."""
    items = [item for some in parts().values() for item in some.items()]
    said_by = {name: " ".join(getattr(run, "func", run).__doc__.split("\n\n")[0].split()) for name, run in items}
    for said, some in machines(rows):
        yield from said
        for title, own in some.items():
            ran = [row for row in own if row["result"] != "not here"]
            missing = [row["name"] for row in own if row["result"] == "not here"]
            yield from [f"### {title}", ""] if own else []
            yield from ["| item | result | found | s | GiB |", "|---|---|---|---|---|"] if ran else []
            for sentence, alike in itertools.groupby(ran, lambda row: said_by.get(row["name"])):
                yield from [f"| *{sentence}* | | | | |"] if sentence else []
                for row in alike:
                    found = row["said"].replace("|", "\\|")
                    yield f"| {row['name']} | {row['result']} | {found} | {row['seconds']:g} | {row['peak_gib']:g} |"
            yield from [""] if ran else []
            yield from [f"Not here: {'; '.join(missing)}", ""] if missing else []


def summary(rows: list[Row]) -> Iterator[str]:
    """Yield the part of docs/verified.md: counts of each machine and part, and the items that no machine has passed."""
    shown = {row["name"] for row in rows if row["result"] in DONE}
    for said, some in machines(rows):
        yield from ["#" + said[0], *said[1:]]
        for title, own in some.items():
            counts = Counter(row["result"] for row in own)
            yield from [f"* {title}: {', '.join(f'{n} {result}' for result, n in counts.items())}"] if own else []
    yield from ["", "### On no GPU so far", ""]
    for title, items in parts().items():
        names = "; ".join(name for name in items if name not in shown)
        yield from textwrap.wrap(f"* {title}: {names}", 120, subsequent_indent="  ") if names else []


if __name__ == "__main__":
    sys.exit(main())
