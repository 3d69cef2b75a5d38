"""The files of a dump, and their records as mappings: JSONL, Parquet, and slime's files of torch.save."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any

from megatron_daro.config.data_file import why_no_file
from megatron_daro.errors import DataError
from megatron_daro.workshop.analyze.host_lines import rollouts_of
from megatron_daro.workshop.analyze.torch_files import load_torch_file

SUFFIXES = (".parquet", ".jsonl", ".pt")
_NO_TRAINING = ("untrainable_", "eval_", "val_data_step")
"""Prefixes of files with rollouts that were not trained: this package's, and those of NeMo-RL's validation."""

Records = Iterator[Mapping[str, object]]


def files_of(path: Path) -> list[Path]:
    """Return the files of a dump, or of the rollouts in a run directory, in the order of their numbers.

    Raises:
        DataError: there are none.
    """
    folder = path / "rollouts" if (path / "rollouts").is_dir() else path
    files = [folder] if folder.is_file() else [p for p in folder.rglob("*") if p.suffix in SUFFIXES]
    files = [p for p in files if not p.name.startswith(_NO_TRAINING)]
    if not files:
        raise DataError(f"dump: {path} has no file of {', '.join(SUFFIXES)}, allowed is a file or a folder with some")
    return sorted(files, key=lambda p: ([int(n) for n in re.findall(r"\d+", p.name)], str(p)))


def most_sequences(files: Sequence[Path]) -> tuple[Path, Mapping[str, Any]] | None:
    """Return (file, rollout) of the rollout in which an agent's model read the most sequences; None if none read two.

    Args:
        files: of this package.
    """
    import pyarrow.compute as compute
    import pyarrow.parquet as parquet

    best, most = None, 1
    for path in files:
        if path.suffix != ".parquet" or "contexts" not in parquet.read_schema(path).names:
            continue
        counts = compute.list_value_length(parquet.read_table(path, columns=["contexts"])["contexts"])
        if (count := compute.max(counts).as_py() or 0) > most:
            best, most = (path, compute.index(counts, count).as_py()), count
    if best is None:
        return None
    path, number = best
    return path, parquet.read_table(path).slice(number, 1).to_pylist()[0]


def open_records(path: Path) -> tuple[set[str], Callable[[Sequence[str]], Records]]:
    """Return the names of a file's columns, and a function that reads its records once.

    The function takes the names of the wanted columns; from Parquet only these are read.

    Raises:
        DataError: it is no file, or torn, which may also show while records are read.
    """
    if why := why_no_file(path):
        raise DataError(f"dump: {path} {why}; allowed are files with records: remove it, or name another dump")
    if path.suffix == ".parquet":
        return _parquet_names(path), lambda names: _parquet(path, names)
    records = _torch(path) if path.suffix == ".pt" else _json_lines(path)
    head = list(islice(records, 1))
    return set(head[0]) if head else set(), lambda names: chain(head, records)


def _parquet_names(path: Path) -> set[str]:
    import pyarrow
    import pyarrow.parquet as parquet

    try:
        return set(parquet.read_schema(path).names)
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"dump: {path} cannot be read as Parquet ({error})") from None


def _parquet(path: Path, names: Sequence[str]) -> Records:
    import pyarrow
    import pyarrow.parquet as parquet

    try:
        file = parquet.ParquetFile(path)
        wanted = [name for name in dict.fromkeys(names) if name in file.schema_arrow.names]
        for batch in file.iter_batches(columns=wanted):
            yield from batch.to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"dump: {path} cannot be read as Parquet ({error})") from None


def _json_lines(path: Path) -> Records:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            line = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
            if not line.strip():
                continue
            where = f"{path}:{number}"
            try:
                record = json.loads(line.decode("utf-8"))
                rollouts = list(rollouts_of(record if isinstance(record, dict) else {}, where))
            except UnicodeDecodeError as error:
                raise DataError(f"dump: {where} is no UTF-8 ({error}); the file is damaged") from None
            except ValueError as error:
                raise DataError(f"dump: {where} is no JSON ({error}); the file is torn or no JSONL") from None
            except RecursionError:
                raise DataError(
                    f"dump: {where} has values nested too deep to be read; repair the line or leave it out"
                ) from None
            yield from rollouts


def _torch(path: Path) -> Records:
    loaded = load_torch_file(path)
    samples = loaded.get("samples") if isinstance(loaded, dict) else None
    if not isinstance(samples, list) or not all(isinstance(sample, dict) for sample in samples):
        raise DataError(
            f"dump: {path} has no list `samples` of mappings, which slime's --save-debug-rollout-data writes"
        )
    yield from samples
