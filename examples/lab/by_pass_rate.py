"""What training did at each pass rate, in the runs of a language model: the figures of DARO's paper, over seeds.

Place in the data flow: metrics.jsonl of each compared run -> `training.parquet`, a row for each optimizer step with
lists over the pass rates 0/K to K/K -> shares of the loss, lengths, pass@k: for `page` and `smollm2_findings`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from arms import section_of
from results import Outcome
from tiny_run import run_directory

FILE = "training.parquet"
_LISTS = ("groups", "tokens", "loss", "predicted_loss", "weight", "length_right", "length_wrong")


@dataclass(frozen=True, slots=True)
class Step:
    """One optimizer step. Lists have an entry for each pass rate k/K, 0 <= k <= K; None where nothing was measured.

    groups: trained or filtered. tokens: trained. loss, predicted_loss: L_k and what the mean lengths say that it is.
    kept, dropped: groups trained, and usable ones that were left over. entropy: of the sampled tokens, in nats.
    """

    step: int
    entropy: float
    kept: int
    dropped: int
    groups: list[float]
    tokens: list[float]
    loss: list[float | None]
    predicted_loss: list[float | None]
    weight: list[float | None]
    length_right: list[float | None]
    length_wrong: list[float | None]

    def sampled(self) -> list[float]:
        """Groups by pass rate as they were sampled. Those left over are not in `groups`: they are counted here among
        the pass rates that were trained, in the same shares."""
        more = 1 + self.dropped / self.kept if self.kept else 1.0
        return [count * (more if tokens > 0 else 1.0) for count, tokens in zip(self.groups, self.tokens, strict=True)]

    def parts_of_the_loss(self, per_bin: bool, *, predicted: bool = False) -> list[float]:
        """What each pass rate has of the loss, without its sign: w_k |L_k| N_k / N, or w_k |L_k| where every bin is
        divided by its own tokens (`per_bin`)."""
        losses, total = self.predicted_loss if predicted else self.loss, sum(self.tokens) or 1.0
        parts = []
        for loss, weight, tokens in zip(losses, self.weight, self.tokens, strict=True):
            paid = 1.0 if weight is None else weight
            parts.append(paid * abs(loss or 0.0) * (1.0 if per_bin else tokens / total))
        return parts


Runs = Mapping[int, Sequence[Step]]
"""Seed -> the steps of a run."""


def read_run(run_dir: Path) -> list[Step]:
    """The optimizer steps in the metrics of a run directory."""
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    rows = [row for row in rows if row.get("loss/total") is not None]
    size = max((_bin(name) for row in rows for name in row if name.startswith("difficulty/groups/")), default=0)
    steps, before = [], dict[str, float]()
    for row in rows:
        lists = {name: [row.get(f"difficulty/{name}/{k}") for k in range(size + 1)] for name in _LISTS}
        for name in ("groups", "tokens"):
            lists[name] = [value or 0.0 for value in lists[name]]
        grown = {name: int(row[f"rollout/groups_{name}"] - before.get(name, 0)) for name in ("trained", "dropped")}
        before = {name: row[f"rollout/groups_{name}"] for name in grown}
        entropy = row.get("policy/entropy", math.nan)
        steps.append(Step(int(row["step"]), entropy, grown["trained"], grown["dropped"], **lists))
    return steps


def _bin(name: str) -> int:
    return int(name.rpartition("/")[2])


def write(out: Path, outcomes: Iterable[Outcome], beside: Path | None = None) -> None:
    """Write `training.parquet` of the compared runs with a language model whose directories are there, after the rows
    of the folder `beside`; nothing if there are none."""
    rows = []
    if beside and (beside / FILE).exists():
        rows = pq.read_table(beside / FILE).to_pylist()
    known = {(row["world"], row["arm"], row["seed"]) for row in rows}
    for job in (outcome.job for outcome in outcomes if not outcome.ended and outcome.job.purpose == "compare"):
        run_dir = run_directory(out / job.world, job.arm, job.learning_rate, job.seed)
        if (job.world, job.arm, job.seed) in known or not (run_dir / "metrics.jsonl").exists():
            continue
        named = {"world": job.world, "arm": job.arm, "seed": job.seed}
        rows += [named | asdict(step) for step in read_run(run_dir)]
    if rows:
        lists = [(name, pa.list_(pa.float32())) for name in _LISTS]
        plain = [("world", pa.string()), ("arm", pa.string()), ("seed", pa.int32()), ("step", pa.int32())]
        counts = [("entropy", pa.float32()), ("kept", pa.int32()), ("dropped", pa.int32())]
        table = pa.Table.from_pylist(rows, pa.schema([*plain, *counts, *lists]))
        pq.write_table(table, out / FILE, compression="zstd", compression_level=19)


def read(folder: Path) -> dict[str, dict[str, dict[int, list[Step]]]]:
    """World -> arm -> seed -> steps; empty where the folder has no such file."""
    if not (folder / FILE).exists():
        return {}
    found: dict[str, dict[str, dict[int, list[Step]]]] = {}
    rows = pq.read_table(folder / FILE).to_pylist()
    for (world, arm, seed), steps in groupby(rows, key=lambda row: (row["world"], row["arm"], row["seed"])):
        values = [{name: row[name] for name in row if name not in ("world", "arm", "seed")} for row in steps]
        found.setdefault(world, {}).setdefault(arm, {})[seed] = [Step(**value) for value in values]
    return found


def quarter(steps: Sequence[Step], *, last: bool) -> Sequence[Step]:
    """The first or the last fourth of a run, at least one step."""
    size = max(1, len(steps) // 4)
    return steps[-size:] if last else steps[:size]


def divides_by_bin(arm: str) -> bool:
    """Whether the arm's loss divides every pass rate by its own tokens."""
    section = section_of(arm.partition("@")[0])
    return section.name == "daro" and section.daro.normalizer == "bin"


def loss_shares(arm: str, steps: Iterable[Step], *, predicted: bool = False) -> list[float]:
    """The share that each pass rate has of the loss of some steps; what it is of: `Step.parts_of_the_loss`."""
    per_bin = divides_by_bin(arm)
    parts = [
        sum(column) for column in zip(*(s.parts_of_the_loss(per_bin, predicted=predicted) for s in steps), strict=True)
    ]
    total = sum(parts)
    return [part / total if total else math.nan for part in parts]


def group_shares(steps: Iterable[Step]) -> list[float]:
    """The share of each pass rate among the groups sampled."""
    counts = [sum(column) for column in zip(*(step.sampled() for step in steps), strict=True)]
    return [count / sum(counts) for count in counts]


def mean_length(steps: Iterable[Step], k: int, verdict: str) -> float:
    """Mean trained tokens of the right or wrong answers of groups with k right ones; not a number if none."""
    pairs = [(step.groups[k], getattr(step, f"length_{verdict}")[k]) for step in steps]
    known = [(groups, length) for groups, length in pairs if length is not None]
    total = sum(groups for groups, _ in known)
    return sum(groups * length for groups, length in known) / total if total else math.nan


def pass_at(steps: Iterable[Step], k: int) -> float:
    """Chance that one of k answers is right, for the problems sampled in some steps, each seen for the first time.

    Without bias for each group of K answers (Chen et al. 2021, arXiv 2107.03374): 1 - C(K - right, k) / C(K, k).
    """
    shares = group_shares(steps)
    size = len(shares) - 1
    chances = [1 - math.comb(size - right, k) / math.comb(size, k) for right in range(size + 1)]
    return sum(share * chance for share, chance in zip(shares, chances, strict=True))


def powers(arms: Mapping[str, Runs]) -> list[int]:
    """The k of pass@k that groups of K answers allow: 1, 2, 4, ... up to K."""
    size = len(next(iter(next(iter(arms.values())).values()))[0].groups) - 1
    return [2**n for n in range(size.bit_length())]


def largest_error(arms: Mapping[str, Runs]) -> float:
    """The largest difference of a measured L_k and the predicted one."""
    steps = [step for runs in arms.values() for run in runs.values() for step in run]
    return max(
        abs(measured - predicted)
        for step in steps
        for measured, predicted in zip(step.loss, step.predicted_loss, strict=True)
        if measured is not None and predicted is not None
    )
