"""Benchmark: recording a step's rollouts and reading them back, Parquet beside JSON lines under zstandard, in one run.

Tokens follow a Zipf law over 151,000 ids, as words do; a token's text is a made-up word of its own, so texts compress
about as English does; log-probs are float32 from near 0 to -20. Both writers get the same groups in turns, fsync their
file, and read it back to the same groups; the medians are over the turns. A second thread meanwhile asks for the time
every millisecond: its longest wait is how long the interpreter's lock was held. --encodings writes single columns with
other encodings and levels instead, in CPU seconds.

    python benchmarks/recording.py [--tokens 10000000] [--repeats 3] [--directory DIR] [--json]
    python benchmarks/recording.py --encodings
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import zstandard
from rich.console import Console
from rich.table import Table

from megatron_daro.rollout.group_columns import SCHEMA, WRITER_OPTIONS, RecordedGroup, blocks
from megatron_daro.rollout.recorder import read_groups, write_groups
from megatron_daro.types import Group, Prompt, Rollout, Verdict

RESULTS = Path(__file__).parent / "results" / "recording.json"
VOCABULARY, ROLLOUTS, PER_PROMPT, PROMPT_TOKENS = 151_000, 2048, 16, 150
Seconds = dict[str, float]


def make_groups(tokens: int, seed: int = 0) -> list[Group]:
    """2,048 rollouts of 128 prompts with `tokens` response tokens in all."""
    rng = np.random.default_rng(seed)
    length = tokens // ROLLOUTS
    weights = 1 / (np.arange(VOCABULARY) + 2.7) ** 1.05
    ranks = np.searchsorted(np.cumsum(weights / weights.sum()), rng.random(length * ROLLOUTS))
    ids = rng.permutation(VOCABULARY).astype(np.int32)[np.minimum(ranks, VOCABULARY - 1)]
    spread = np.exp(rng.normal(-2.5, 2.5, length * ROLLOUTS))
    logprobs = np.maximum(-rng.exponential(1.0, length * ROLLOUTS) * spread, -20).astype(np.float32)
    words = _words(rng)
    groups = []
    for group_id in range(ROLLOUTS // PER_PROMPT):
        problem = tuple(rng.integers(0, VOCABULARY, PROMPT_TOKENS).tolist())
        text = "".join(words[token] for token in problem)
        prompt = Prompt(f"problem-{group_id}", str(group_id), "benchmark", text=text, tokens=problem)
        rollouts = [_random_rollout(prompt, group_id, i, length, ids, logprobs, words) for i in range(PER_PROMPT)]
        verdicts = [
            Verdict(bool(right), float(right), "match" if right else "no_match") for right in rng.random(16) > 0.5
        ]
        groups.append(Group(group_id, prompt, tuple(rollouts), tuple(verdicts)))
    return groups


def _words(rng: np.random.Generator) -> list[str]:
    letters = np.frombuffer(b"etaoinshrdlucmfwypvbgkqjxz0123456789\\{}+-=", dtype=np.uint8)
    sizes = rng.integers(2, 6, VOCABULARY)
    return [" " + bytes(letters[np.minimum(rng.geometric(0.09, n) - 1, len(letters) - 1)]).decode() for n in sizes]


def _random_rollout(
    prompt: Prompt, group_id: int, index: int, length: int, ids: np.ndarray, logprobs: np.ndarray, words: list[str]
) -> Rollout:
    start = (group_id * PER_PROMPT + index) * length
    own = ids[start : start + length]
    return Rollout(
        prompt_id=prompt.id,
        group_id=group_id,
        attempt=0,
        index=index,
        tokens=np.concatenate([np.asarray(prompt.tokens, np.int32), own]),
        prompt_length=len(prompt.tokens),
        loss_mask=np.ones(length, np.uint8),
        logprobs=logprobs[start : start + length],
        finish_reason="stop",
        weight_version=7,
        text="".join([words[token] for token in own.tolist()]),
    )


def write_jsonl(path: Path, groups: Sequence[RecordedGroup]) -> Path:
    """Write JSON lines under zstandard's level 3, with its checksum and fsync: the measure for Parquet."""
    with path.open("wb") as file:
        compressor = zstandard.ZstdCompressor(level=3, write_checksum=True)
        with compressor.stream_writer(file, closefd=False) as stream:
            for entry in groups:
                stream.write(json.dumps(_group_to_json(entry), separators=(",", ":")).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())
    return path


def read_jsonl(path: Path) -> list[RecordedGroup]:
    """Read what `write_jsonl` wrote."""
    lines = zstandard.ZstdDecompressor().decompressobj().decompress(path.read_bytes()).splitlines()
    return [_group(json.loads(line)) for line in lines]


def _group(record: Mapping[str, Any]) -> RecordedGroup:
    messages = record.get("messages")
    prompt = Prompt(
        id=record["prompt_id"],
        answer=record["answer"],
        source=record["source"],
        text=record["prompt"] if messages is None else None,
        messages=None if messages is None else tuple(dict(message) for message in messages),
        tokens=tuple(record["prompt_tokens"]),
        alternatives=tuple(record.get("alternatives", ())),
    )
    rollouts = tuple(_rollout(r, record["group_id"], prompt) for r in record["rollouts"])
    verdicts = tuple(Verdict(r["correct"], float(r["reward"]), r["reason"]) for r in record["rollouts"])
    return RecordedGroup(Group(record["group_id"], prompt, rollouts, verdicts), record["used"])


def _rollout(record: Mapping[str, Any], group_id: int, prompt: Prompt) -> Rollout:
    length = record["length"]
    loss_mask = record.get("loss_mask", [1] * length)
    if not length == len(record["tokens"]) == len(record["logprobs"]) == len(loss_mask):
        raise ValueError(f"rollout {record['index']}: tokens, logprobs or loss_mask are not {length} long")
    return Rollout(
        prompt_id=prompt.id,
        group_id=group_id,
        attempt=record["attempt"],
        index=record["index"],
        tokens=np.asarray([*prompt.tokens, *record["tokens"]], dtype=np.int32),
        prompt_length=len(prompt.tokens),
        loss_mask=np.asarray(loss_mask, dtype=np.uint8),
        logprobs=np.asarray(record["logprobs"], dtype=np.float32),
        finish_reason=record["finish_reason"],
        weight_version=record["weight_version"],
        text=record["text"],
        version_spans=tuple((int(version), int(count)) for version, count in record["version_spans"]),
    )


def _group_to_json(entry: RecordedGroup) -> dict[str, Any]:
    group = entry.group
    prompt, pairs = group.prompt, zip(group.rollouts, group.verdicts, strict=True)
    return {
        "group_id": group.group_id,
        "prompt_id": prompt.id,
        "prompt": prompt.text,
        "answer": prompt.answer,
        "source": prompt.source,
        "attempt": max((r.attempt for r in group.rollouts), default=0),
        "prompt_tokens": list(prompt.tokens),
        "rollouts": [
            _rollout_to_json(r) | {"correct": v.correct, "reward": v.reward, "reason": v.reason} for r, v in pairs
        ],
        "used": entry.used,
    }


def _rollout_to_json(rollout: Rollout) -> dict[str, Any]:
    return {
        "index": rollout.index,
        "attempt": rollout.attempt,
        "text": rollout.text,
        "tokens": rollout.tokens[rollout.prompt_length :].tolist(),
        "logprobs": rollout.logprobs.astype(np.float64).tolist(),
        "finish_reason": rollout.finish_reason,
        "weight_version": rollout.weight_version,
        "version_spans": [list(span) for span in rollout.version_spans],
        "length": rollout.response_length,
    }


@contextmanager
def lock_watch() -> Iterator[Callable[[], float]]:
    """Yields a function that tells the longest wait of another thread so far, in seconds, beyond its millisecond."""
    longest, ended = 0.0, threading.Event()

    def watch() -> None:
        nonlocal longest
        while not ended.is_set():
            before = time.perf_counter()
            time.sleep(0.001)
            longest = max(longest, time.perf_counter() - before - 0.001)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield lambda: longest
    finally:
        ended.set()
        thread.join()


def timed(what: Callable[[], Any]) -> tuple[Any, Seconds]:
    """The result of a call, and its seconds: on the clock, of CPU, and held back another thread at most."""
    with lock_watch() as longest:
        wall, cpu = time.perf_counter(), time.process_time()
        result = what()
        return result, {
            "wall_s": time.perf_counter() - wall,
            "cpu_s": time.process_time() - cpu,
            "longest_wait_s": longest(),
        }


def compare(groups: Sequence[Group], directory: Path, repeats: int) -> dict[str, dict[str, float]]:
    """Medians of both formats, in turns."""
    entries = [RecordedGroup(group, "trained") for group in groups]
    formats = {
        "parquet": (lambda: write_groups(directory / "a.parquet", entries), lambda path: read_groups(path)),
        "jsonl.zst": (lambda: write_jsonl(directory / "a.jsonl.zst", entries), lambda path: read_jsonl(path)),
    }
    seen: dict[str, dict[str, list[float]]] = {name: {} for name in formats}
    for _ in range(repeats):
        for name, (write, read) in formats.items():
            path, writing = timed(write)
            back, reading = timed(partial(read, path))
            first = back[0][0] if name == "parquet" else back[0].group
            assert np.array_equal(first.rollouts[0].logprobs, groups[0].rollouts[0].logprobs)
            row = {f"record_{k}": v for k, v in writing.items()} | {f"read_{k}": v for k, v in reading.items()}
            for key, value in (row | {"file_mb": path.stat().st_size / 1e6}).items():
                seen[name].setdefault(key, []).append(value)
            del back, first
            path.unlink()
    return {name: {key: statistics.median(values) for key, values in row.items()} for name, row in seen.items()}


def encodings(groups: Sequence[Group]) -> None:
    """Single columns with other encodings: size, and CPU seconds of writing and reading."""
    batches = list(blocks(RecordedGroup(group, "trained") for group in groups))
    table = Table("column", "encoding", "level", "MB", "write", "read")
    plans = {
        "tokens": ("PLAIN", "DELTA_BINARY_PACKED", "BYTE_STREAM_SPLIT", "dictionary"),
        "logprobs": ("PLAIN", "BYTE_STREAM_SPLIT", "dictionary"),
        "text": ("PLAIN", "DELTA_LENGTH_BYTE_ARRAY"),
    }
    for name, encoding, level in ((n, e, level) for n, every in plans.items() for e in every for level in (1, 3)):
        leaf = f"{name}.list.element" if pa.types.is_list(SCHEMA.field(name).type) else name
        options = WRITER_OPTIONS | {"compression_level": level}
        options["use_dictionary"] = [leaf] if encoding == "dictionary" else False
        options["column_encoding"] = {} if encoding == "dictionary" else {leaf: encoding}
        sink, began = pa.BufferOutputStream(), time.process_time()
        with pq.ParquetWriter(sink, pa.schema([SCHEMA.field(name)]), **options) as writer:
            for batch in batches:
                writer.write_batch(batch.select([name]))
        written, content = time.process_time(), sink.getvalue()
        pq.read_table(pa.BufferReader(content), page_checksum_verification=True)
        seconds = (f"{written - began:.2f} s", f"{time.process_time() - written:.2f} s")
        table.add_row(name, encoding, str(level), f"{content.size / 1e6:.1f}", *seconds)
    Console(width=120).print(table)


def show(result: Mapping[str, Mapping[str, float]]) -> None:
    """The medians as a table."""
    table = Table("", *result)
    for key in next(iter(result.values())):
        table.add_row(key, *(f"{row[key]:.3f}" for row in result.values()))
    Console(width=120).print(table)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line. Returns 0 when every goal is met, else 1."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=10_000_000, help="response tokens of all rollouts")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--directory", type=Path, help="where files are written; unset: the temporary directory")
    parser.add_argument("--encodings", action="store_true", help="compare encodings of single columns instead")
    parser.add_argument("--json", action="store_true", help=f"also write {RESULTS.name}")
    options = parser.parse_args(arguments)
    groups = make_groups(options.tokens)
    if options.encodings:
        encodings(groups)
        return 0
    with tempfile.TemporaryDirectory(dir=options.directory) as directory:
        result = compare(groups, Path(directory), options.repeats)
    show(result)
    if options.json:
        RESULTS.write_text(json.dumps({"tokens": options.tokens, "repeats": options.repeats} | result, indent=1) + "\n")
    ours, older = result["parquet"], result["jsonl.zst"]
    met = ours["record_wall_s"] <= 1 and ours["read_wall_s"] <= 1 and ours["file_mb"] <= older["file_mb"]
    print("goals met" if met else "goals missed: record and read at most 1.0 s, file no larger than JSON lines")
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
