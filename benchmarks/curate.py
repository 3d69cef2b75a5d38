"""Time, memory and accuracy of `megatron-daro curate` on 100,000 problems with planted duplicates and leaks.

Reads the training and evaluation files of a data folder (default `../shared/data`). Real statements that curation
itself finds to be repeats or leaks are left out first (counted), so that what is true of every other row is known.
Then the command runs on the planted set in a process of its own: seconds, peak memory, the part of each planted kind
that was dropped, and the honest rows that were. `--datasketch` times that library's MinHash LSH on the same tokens.
Usage: python benchmarks/curate.py [--rows 100000] [--datasketch] [--json].
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from curate_set import PLANTED, planted_set
from rich.console import Console
from rich.table import Table

from megatron_daro.data.prompts import load_problems
from megatron_daro.workshop.curate.alike import Ragged, sequence_hash, signatures, similar_pairs
from megatron_daro.workshop.curate.statements import statement_of

_SHOWN = 10
ROOT = Path(__file__).resolve().parent.parent


def curate(files: list[Path], against: Path, out: Path, *options: str) -> tuple[float, float]:
    """Run the command; returns seconds and peak resident memory of it, GiB."""
    command = [sys.executable, "-m", "megatron_daro", "curate", *map(str, files), "--out", str(out)]
    begin = time.perf_counter()
    subprocess.run([*command, "--against", str(against), "--verifier", "none", *options], check=True, cwd=ROOT)
    return time.perf_counter() - begin, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**20


def problems_of(path: Path) -> list[tuple[str, str]]:
    """Statement and answer of each row."""
    prompts, _ = load_problems([path], repeats="keep")
    return [(prompt.statement, prompt.answer) for prompt in prompts]


def measure(data: Path, total: int, folder: Path) -> tuple[dict[str, Any], list[str]]:
    """Plant, curate, compare; also a few texts to look at, which are printed only: they are not this project's."""
    train = sorted((data / "train").iterdir())
    curate(train, data / "eval", folder / "base")
    base = pq.read_table(folder / "base" / "notes.parquet", columns=["origin"])["origin"].to_pylist()
    noted = set(base)
    kept = pq.read_table(folder / "base" / "curated.parquet").to_pylist()
    real = [
        (row["problem"] or row["messages"][-1]["content"], row["answer"][0])
        for row in kept
        if row["origin"] not in noted
    ]
    held_out = [pair for file in sorted((data / "eval").glob("*.jsonl")) for pair in problems_of(file)]
    rows = planted_set(real, held_out, total)
    file = folder / "planted.jsonl"
    lines = (json.dumps({"problem": row.problem, "answer": row.answer}, ensure_ascii=False) for row in rows)
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    seconds, gib = curate([file], data / "eval", folder / "out")
    statistics = json.loads((folder / "out" / "statistics.json").read_text())
    dropped = pq.read_table(folder / "out" / "dropped.parquet").to_pylist()
    reasons = {int(row["origin"].rsplit(":", 1)[1]) - 1: row["reason"] for row in dropped}
    counts = Counter(row.truth for row in rows)
    hits = Counter(rows[index].truth for index in reasons)
    by_kind = {kind: Counter(r for i, r in reasons.items() if rows[i].truth == kind) for kind in counts}
    planted = sum(counts[kind] for kind in PLANTED)
    honest = len(rows) - planted
    result = {
        "rows": len(rows),
        "real_rows": len(real),
        "seconds": round(seconds, 1),
        "peak_gib": round(gib, 2),
        "found": {kind: round(hits[kind] / counts[kind], 5) for kind in PLANTED},
        "found_all": round(sum(hits[kind] for kind in PLANTED) / planted, 5),
        "false_alarms": round(sum(hits[kind] for kind in counts if kind not in PLANTED) / honest, 5),
        "false_alarms_by_kind": {kind: hits[kind] for kind in counts if kind not in PLANTED},
        "counts": dict(counts),
        "reasons": {kind: dict(found) for kind, found in by_kind.items()},
        "crowded_groups": statistics["crowded_groups"],
    }
    missed = [rows[i] for i in range(len(rows)) if rows[i].truth in PLANTED and i not in reasons]
    wrong = [rows[i] for i in sorted(reasons) if rows[i].truth not in PLANTED]
    texts = [f"missed: {one}" for one in missed[:_SHOWN]] + [f"wrongly dropped: {one}" for one in wrong[:_SHOWN]]
    return result, [text[:300] for text in texts]


def beside_datasketch(file: Path) -> dict[str, float]:
    """Seconds for candidates of all rows: numpy MinHash among equal numbers, and datasketch with the same bands."""
    from datasketch import MinHash, MinHashLSH

    statements = [statement_of(text) for text, _ in problems_of(file)]
    begin = time.perf_counter()
    ragged = Ragged([s.tokens for s in statements])
    found = signatures(ragged)
    keys = np.array([sequence_hash(s.numbers) for s in statements], np.uint64)
    pairs, _ = similar_pairs(found, keys)
    own_s = time.perf_counter() - begin
    begin = time.perf_counter()
    lsh = MinHashLSH(num_perm=120, params=(40, 3))
    sketches = MinHash.bulk([[t.encode() for t in set(s.tokens)] or [b""] for s in statements], num_perm=120)
    candidates = 0
    for index, sketch in enumerate(sketches):
        candidates += len(lsh.query(sketch))
        lsh.insert(index, sketch, check_duplication=False)
    return {
        "numpy_s": own_s,
        "datasketch_s": time.perf_counter() - begin,
        "numpy_pairs": len(pairs),
        "datasketch_pairs": candidates,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared" / "data")
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--datasketch", action="store_true", help="needs datasketch, which is no requirement")
    parser.add_argument("--json", action="store_true", help="also write benchmarks/results/curate.json")
    options = parser.parse_args()
    if not (options.data / "train").is_dir():
        print(f"{options.data}: no folder `train`; give --data with folders train and eval", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory() as temporary:
        result, texts = measure(options.data.resolve(), options.rows, Path(temporary))
        if options.datasketch:
            result["datasketch"] = beside_datasketch(Path(temporary) / "planted.jsonl")
    result["cores"] = os.cpu_count()
    table = Table("what", "must reach", "measured")
    table.add_row("seconds", "180", f"{result['seconds']}")
    table.add_row("peak memory, GiB", "4", f"{result['peak_gib']}")
    for kind, part in result["found"].items():
        table.add_row(f"{kind} found", "99 %", f"{part:.2%} of {result['counts'][kind]}")
    table.add_row("false alarms", "0.5 %", f"{result['false_alarms']:.3%} {result['false_alarms_by_kind']}")
    Console().print(table)
    Console().print(*texts, result.get("datasketch", ""), sep="\n", markup=False)
    if options.json:
        target = ROOT / "benchmarks" / "results" / "curate.json"
        target.parent.mkdir(exist_ok=True)
        target.write_text(json.dumps(result, indent=2, ensure_ascii=False) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
