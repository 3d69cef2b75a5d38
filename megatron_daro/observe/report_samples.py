"""Sample rollouts for the report: some groups of the first, middle and last recorded step and of skipped batches.

Place in the data flow: RUN/rollouts/*.parquet -> `Sample`s -> HTML. What is in the files was written by a model: it is
data, cut to a length and escaped. Of a long file only the beginning is read. A file that is torn, of the older format
or of another shape is skipped and named; the report still comes out.
"""

from __future__ import annotations

import html
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, islice
from pathlib import Path
from statistics import fmean
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from megatron_daro.observe.escape import safe_text

_FILE = re.compile(r"(step|skipped)_(\d+)\.parquet")
_OLDER = "step_*.jsonl.zst"
_COLUMNS = (
    *("group_id", "used", "prompt_id", "prompt", "answer", "text", "logprobs", "length"),
    *("correct", "reward", "reason", "finish_reason", "weight_version"),
)
_GROUPS_PER_FILE = 3
_MOST_GROUPS = 256
_MOST_BYTES = 64 << 20
_ROWS_AT_ONCE = 64
_PROMPT_CHARACTERS = 2000
_ANSWER_CHARACTERS = 6000


@dataclass(frozen=True)
class Group:
    """The recorded rollouts of one prompt; each is a row of the file."""

    rollouts: Sequence[Mapping[str, Any]]

    @property
    def correct(self) -> int:
        """Number of right answers."""
        return sum(bool(r["correct"]) for r in self.rollouts)

    @property
    def mixed(self) -> bool:
        """Whether it has right and wrong answers."""
        return 0 < self.correct < len(self.rollouts)


@dataclass(frozen=True)
class Samples:
    """Some groups of one file. verdicts: how often each reason was given in what was read of it."""

    step: int
    skipped: bool
    groups: list[Group]
    verdicts: Mapping[str, int]


def load_samples(run_dir: Path) -> tuple[list[Samples], list[str]]:
    """Return samples of recorded steps in order, then of skipped batches; and a line for everything that was left out.

    Args:
        run_dir: the run directory.
    """
    folder = run_dir / "rollouts"
    found = sorted((m[1], int(m[2]), path) for path in folder.glob("*") if (m := _FILE.fullmatch(path.name)))
    steps = [file for file in found if file[0] == "step"]
    skipped = [file for file in found if file[0] == "skipped"]
    notes = []
    if older := next(folder.glob(_OLDER), None):
        notes.append(f"sample rollouts of an older format ({older.name}): megatron-daro convert-rollouts {run_dir}")
    elif not found:
        notes.append("sample rollouts (rollouts/step_*.parquet; observe.save_rollouts writes them)")
    chosen = [steps[i] for i in sorted({0, len(steps) // 2, len(steps) - 1})] if steps else []
    samples: list[Samples] = []
    for kind, step, path in [*chosen, *skipped[-1:]]:
        try:
            groups = list(islice(_read(path), _MOST_GROUPS))
        except (OSError, pa.ArrowException, ValueError, KeyError) as error:
            what = "the batch skipped before step" if kind == "skipped" else "step"
            reason = safe_text(error, 200, one_line=True)
            notes.append(f"sample rollouts of {what} {step}: {path.name} is damaged ({reason})")
            continue
        verdicts = Counter(str(r["reason"]) for group in groups for r in group.rollouts)
        samples.append(Samples(step, kind == "skipped", _pick(groups), verdicts))
    return samples, notes


def samples_html(samples: list[Samples]) -> str:
    """Return the samples as HTML; every piece of text in it is escaped."""
    return "\n".join(_file_html(file) for file in samples)


def _file_html(file: Samples) -> str:
    title = f"<h3>Step {file.step}</h3>"
    if file.skipped:
        title = (
            f"<h3>Skipped before step {file.step}</h3><p>Nothing of this batch could be trained: no group had both "
            "right and wrong answers.</p>"
        )
    said = ", ".join(f"{_text(reason, 40)} {count}" for reason, count in Counter(file.verdicts).most_common())
    return "\n".join([f"{title}<p>Verdicts: {said}</p>", *map(_group_html, file.groups)])


def _read(path: Path) -> Iterator[Group]:
    """Return the groups of a file with at least one rollout, until enough was read. Raises ValueError when it is
    torn."""
    with pq.ParquetFile(path, page_checksum_verification=True) as file:
        if missing := [name for name in _COLUMNS if name not in file.schema_arrow.names]:
            raise ValueError(f"it has no columns {', '.join(missing)}")
        for _, rows in groupby(_rows(file), key=lambda row: row["group_id"]):
            # A group without rollouts is one row without a verdict.
            if rollouts := [row for row in rows if row["correct"] is not None]:
                yield Group(rollouts)


def _rows(file: pq.ParquetFile) -> Iterator[dict[str, Any]]:
    read = 0
    for batch in file.iter_batches(_ROWS_AT_ONCE, columns=list(_COLUMNS)):
        yield from batch.to_pylist()
        read += batch.nbytes
        if read >= _MOST_BYTES:
            return


def _pick(groups: list[Group]) -> list[Group]:
    """Return groups with both verdicts first, since they are the ones that train; spread over the pass rates."""
    mixed = sorted((g for g in groups if g.mixed), key=lambda g: g.correct / len(g.rollouts))
    count = min(_GROUPS_PER_FILE, len(mixed))
    spread = [mixed[round(i * (len(mixed) - 1) / max(1, count - 1))] for i in range(count)]
    return spread + [g for g in groups if not g.mixed][: _GROUPS_PER_FILE - count]


def _shown(group: Group) -> Sequence[Mapping[str, Any]]:
    """Return a right and a wrong answer; where all are alike, two of them."""
    if group.mixed:
        return [next(r for r in group.rollouts if bool(r["correct"]) == wanted) for wanted in (True, False)]
    return group.rollouts[:2]


def _group_html(group: Group) -> str:
    first = group.rollouts[0]
    rollouts = "".join(_rollout_html(r) for r in _shown(group))
    return (
        f'<details class="sample"><summary><b>{_text(first["prompt_id"], 80)}</b> · pass rate '
        f"{group.correct}/{len(group.rollouts)} · {_text(first['used'], 40)}</summary><h4>Prompt</h4>"
        f"<pre>{_text(first['prompt'], _PROMPT_CHARACTERS)}</pre>"
        f"<p>Reference answer: <code>{_text(first['answer'], 300)}</code></p>{rollouts}</details>"
    )


def _rollout_html(rollout: Mapping[str, Any]) -> str:
    correct = bool(rollout["correct"])
    badge = f'<span class="badge {"right" if correct else "wrong"}">{"✓ correct" if correct else "✗ incorrect"}</span>'
    facts = [
        f"verdict {rollout['reason']}",
        f"reward {rollout['reward']}",
        f"{rollout['length']} tokens",
        f"finish {rollout['finish_reason']}",
        f"weight version {rollout['weight_version']}",
    ]
    if rollout["logprobs"]:
        facts.append(f"mean log-prob {fmean(rollout['logprobs']):.3f}")
    words = " · ".join(_text(f, 80) for f in facts)
    return f"<h4>{badge} <small>{words}</small></h4><pre>{_text(rollout['text'], _ANSWER_CHARACTERS)}</pre>"


def _text(value: object, limit: int) -> str:
    return html.escape(safe_text(value, limit), quote=True)
