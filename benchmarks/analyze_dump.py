"""How long `megatron-daro analyze` takes for a dump of many rollouts, and how much memory.

    python benchmarks/analyze_dump.py

Writes a Parquet file of random rollouts in the form of this package's records (numbers only), reads it with the same
calls as the command, and prints seconds, rollouts per second and the growth of the process's largest resident size.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet as parquet

from megatron_daro.config.algorithm import DaroSection
from megatron_daro.workshop.analyze.rows import choose_columns, rows_of
from megatron_daro.workshop.analyze.views import read_dump, view_of

K = 16


def write_dump(path: Path, rollouts: int) -> None:
    """Random verdicts and lengths, a million rows at a time."""
    rng = np.random.default_rng(0)
    writer = None
    for start in range(0, rollouts, 1_000_000):
        count = min(1_000_000, rollouts - start)
        rows = {
            "group_id": np.arange(start, start + count) // K,
            "length": rng.integers(50, 4000, count),
            "correct": rng.random(count) < 0.4,
        }
        table = pyarrow.table(rows)
        writer = writer or parquet.ParquetWriter(path, table.schema)
        writer.write_table(table)
    assert writer is not None
    writer.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=10_000_000)
    rollouts = parser.parse_args().rollouts // K * K
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "step_000001.parquet"
        # In a process of its own: its memory must not hide that of the reader.
        writer = multiprocessing.Process(target=write_dump, args=(path, rollouts))
        writer.start()
        writer.join()
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        started = time.perf_counter()
        dump = read_dump([rows_of(path, choose_columns(path, {}, None))], K)
        view_of(dump, DaroSection())
        seconds = time.perf_counter() - started
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    print(f"{rollouts} rollouts: {seconds:.0f} s, {rollouts / seconds:.0f} rollouts/s, memory +{grown:.0f} MiB")
    print(f"groups held at once: {dump.most_open}")


if __name__ == "__main__":
    main()
