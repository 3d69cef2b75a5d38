"""Benchmark: recording a step's rollouts and reading them back.

Tokens follow a Zipf law over 151,000 ids, as words do; a token's text is a made-up word of its own, so texts compress
about as English does; log-probs are float32 from near 0 to -20. Files are written with fsync and read back to the same
groups; medians. A second thread meanwhile asks for the time every millisecond: its longest wait is how long the
interpreter's lock was held.

    OMP_NUM_THREADS=1 python benchmarks/recording.py --json    # 30 seconds
"""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import harness
import numpy as np

from megatron_daro.rollout.group_columns import RecordedGroup
from megatron_daro.rollout.recorder import read_groups, write_groups
from megatron_daro.types import Group, Prompt, Rollout, Verdict

VOCABULARY, ROLLOUTS, PER_PROMPT, PROMPT_TOKENS = 151_000, 2048, 16, 150
MOST_S = 1.0


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


def watched(what: Callable[[], Any]) -> tuple[Any, dict[str, float]]:
    """The result of a call, and its seconds: on the clock, of CPU, and held back another thread at most."""
    with lock_watch() as longest:
        result, seconds = harness.timed(what)
        return result, {"wall_s": seconds.wall, "cpu_s": seconds.cpu, "longest_wait_s": longest()}


def written_and_read(groups: Sequence[Group], directory: Path) -> dict[str, float]:
    """Seconds and bytes of one file."""
    entries = [RecordedGroup(group, "trained") for group in groups]
    path, writing = watched(lambda: write_groups(directory / "step.parquet", entries))
    back, reading = watched(lambda: read_groups(path))
    assert np.array_equal(back[0][0].rollouts[0].logprobs, groups[0].rollouts[0].logprobs)
    seconds = {f"record_{key}": value for key, value in writing.items()}
    row = {**seconds, **{f"read_{key}": value for key, value in reading.items()}, "file_mb": path.stat().st_size / 1e6}
    path.unlink()
    return row


def main() -> None:
    parser = harness.arguments_of(__doc__)
    parser.add_argument("--tokens", type=int, default=10_000_000, help="response tokens of all rollouts")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--directory", type=Path, help="where files are written; unset: the temporary directory")
    options = parser.parse_args()
    groups = make_groups(options.tokens)
    with tempfile.TemporaryDirectory(dir=options.directory) as directory:
        result = harness.medians([written_and_read(groups, Path(directory)) for _ in range(options.repeats)])
    harness.table(f"{options.tokens:,} response tokens", ("median",), {key: [value] for key, value in result.items()})
    problems = harness.at_most("seconds to record", result["record_wall_s"], MOST_S)
    problems += harness.at_most("seconds to read", result["read_wall_s"], MOST_S)
    setup = harness.setup_of(options, "directory")
    harness.conclude("recording", {**setup, "parquet": result}, problems, write=options.json)


if __name__ == "__main__":
    main()
