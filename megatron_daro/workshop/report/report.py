"""`megatron-daro report RUN`: one self-contained HTML page about a run, finished or not.

Reads metrics.jsonl, config.yaml and rollouts/ of a run directory, or the metric files of a host (`host_metrics`), and
writes report.html. Needs no network, no torch and no running job, leaves everything else in the directory alone, and
names what was not recorded. It shows some groups of the first, middle and last recorded step and of the newest
untrainable batch; their text is written by a model, so it is cut to a length and escaped. A rollout file that is torn
or lacks columns is left out and named.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, islice
from pathlib import Path
from statistics import fmean
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from megatron_daro.observe import logs
from megatron_daro.observe.logs import safe_text
from megatron_daro.workshop.report.conversations import (
    Decode,
    conversation_values,
    decoder,
    sequences,
    sums_of,
    turns_table,
)
from megatron_daro.workshop.report.host_metrics import load_host_run
from megatron_daro.workshop.report.page import Page, Table, write_page
from megatron_daro.workshop.report.run_data import RunData, ends_of, load_run
from megatron_daro.workshop.report.sections import build_sections

_TIME = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d")
_FILE = re.compile(r"(step|untrainable)_(\d+)\.parquet")
_COLUMNS = (
    *("group_id", "used", "prompt_id", "prompt", "answer", "text", "logprobs", "length"),
    *("correct", "reward", "reason", "finish_reason", "weight_version"),
)
_OF_CONVERSATIONS = ("turns", "reports", "rewards", "tokens", "contexts", "prompt_tokens")
_GROUPS_PER_FILE = 3
_MOST_GROUPS = 256
_MOST_BYTES = 64 << 20
_ROWS_AT_ONCE = 64
_PROMPT_CHARACTERS = 2000
_ANSWER_CHARACTERS = 6000
_HEADING_CHARACTERS = 100


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
    """Some groups of one file. verdicts, turns: over all groups that were read, how often each reason was given, and
    means by turn of conversations."""

    step: int
    untrainable: bool
    groups: list[Group]
    verdicts: Mapping[str, int]
    turns: Table | None


def load_samples(run_dir: Path) -> tuple[list[Samples], list[str]]:
    """Return samples of recorded steps in order, then of the newest untrainable batch; and a line for each file that is
    left out.

    Args:
        run_dir: the run directory.
    """
    folder = run_dir / "rollouts"
    files = sorted((m[1], int(m[2]), path) for path in folder.glob("*") if (m := _FILE.fullmatch(path.name)))
    steps = [file for file in files if file[0] == "step"]
    untrainable = [file for file in files if file[0] == "untrainable"]
    notes = []
    if not files:
        notes.append("sample rollouts (rollouts/step_*.parquet; observe.save_rollouts writes them)")
    chosen = dict.fromkeys(_with_groups(steps, i) for i in (0, len(steps) // 2, len(steps) - 1)) if steps else []
    samples: list[Samples] = []
    for kind, step, path in [*chosen, *untrainable[-1:]]:
        try:
            groups = list(islice(_read(path), _MOST_GROUPS))
        except (OSError, pa.ArrowException, ValueError, KeyError) as error:
            what = "the untrainable batch before step" if kind == "untrainable" else "step"
            reason = safe_text(error, 200, one_line=True)
            notes.append(f"sample rollouts of {what} {step}: {path.name} is damaged ({reason})")
            continue
        verdicts = Counter(str(r["reason"]) for group in groups for r in group.rollouts)
        turns = turns_table(sums_of(r for group in groups for r in group.rollouts))
        samples.append(Samples(step, kind == "untrainable", _pick(groups), verdicts, turns))
    return samples, notes


def _with_groups(steps: Sequence[tuple[str, int, Path]], number: int) -> tuple[str, int, Path]:
    """Return the last file up to this number that has groups: a step that trains on a batch again records none."""
    return next((steps[i] for i in range(number, 0, -1) if _has_rows(steps[i][2])), steps[0])


def _has_rows(path: Path) -> bool:
    try:
        return pq.read_metadata(path).num_rows > 0
    except (OSError, pa.ArrowException):
        return True  # reading it will report the damage


def _file_values(file: Samples, decode: Decode | None) -> dict[str, Any]:
    """Return what the template shows of one file."""
    groups = [_group_values(group, decode) for group in file.groups]
    verdicts = Counter(file.verdicts).most_common()
    return {
        "step": file.step,
        "untrainable": file.untrainable,
        "verdicts": verdicts,
        "groups": groups,
        "turns": file.turns,
    }


def _read(path: Path) -> Iterator[Group]:
    """Yield the groups of a file that have a rollout, until enough bytes were read. Raises ValueError if columns are
    missing, and what Arrow raises if the file is torn."""
    with pq.ParquetFile(path, page_checksum_verification=True) as file:
        if missing := [name for name in (*_COLUMNS, *_OF_CONVERSATIONS) if name not in file.schema_arrow.names]:
            raise ValueError(f"it has no columns {', '.join(missing)}")
        for _, rows in groupby(_rows(file), key=lambda row: row["group_id"]):
            # A group without rollouts is one row without a verdict.
            if rollouts := [row for row in rows if row["correct"] is not None]:
                yield Group(rollouts)


def _rows(file: pq.ParquetFile) -> Iterator[dict[str, Any]]:
    read = 0
    columns = [*_COLUMNS, *(_OF_CONVERSATIONS if _has_conversations(file) else ())]
    for batch in file.iter_batches(_ROWS_AT_ONCE, columns=columns):
        yield from batch.to_pylist()
        read += batch.nbytes
        if read >= _MOST_BYTES:
            return


def _has_conversations(file: pq.ParquetFile) -> bool:
    turns = file.read(columns=["turns"]).column("turns")
    return turns.null_count < len(turns)


def _pick(groups: list[Group]) -> list[Group]:
    """Return some groups: first those with both verdicts, which are the ones that train, spread over the pass rates."""
    mixed = sorted((g for g in groups if g.mixed), key=lambda g: g.correct / len(g.rollouts))
    count = min(_GROUPS_PER_FILE, len(mixed))
    spread = [mixed[round(i * (len(mixed) - 1) / max(1, count - 1))] for i in range(count)]
    return spread + [g for g in groups if not g.mixed][: _GROUPS_PER_FILE - count]


def _shown(group: Group) -> Sequence[Mapping[str, Any]]:
    """Return a right and a wrong answer; if all have the same verdict, two of them."""
    if group.mixed:
        return [next(r for r in group.rollouts if bool(r["correct"]) == wanted) for wanted in (True, False)]
    return group.rollouts[:2]


def _group_values(group: Group, decode: Decode | None) -> dict[str, Any]:
    first = {name: group.rollouts[0][name] for name in ("prompt_id", "used", "prompt", "answer")}
    shown = [_rollout_values(rollout, decode) for rollout in _shown(group)]
    return first | {"correct": group.correct, "samples": len(group.rollouts), "shown": shown}


def _rollout_values(rollout: Mapping[str, Any], decode: Decode | None = None) -> dict[str, Any]:
    facts = [
        f"verdict {rollout['reason']}",
        f"reward {rollout['reward']}",
        *(f"{one['name']} {one['value']:g}" for one in rollout.get("rewards") or ()),
        *_lengths(rollout),
        f"finish {rollout['finish_reason']}",
        f"weight version {rollout['weight_version']}",
    ]
    if logprobs := _generated(rollout):
        facts.append(f"mean log-prob {fmean(logprobs):.3f}")
    turns = conversation_values(rollout, decode) if decode and rollout.get("turns") else None
    tree = sequences(rollout) if rollout.get("turns") else []
    return {"correct": bool(rollout["correct"]), "facts": facts, "text": rollout["text"], "turns": turns, "tree": tree}


def _lengths(rollout: Mapping[str, Any]) -> list[str]:
    """Return the rollout's length in words; for a conversation, generated and observed tokens separately."""
    turns = rollout.get("turns")
    if not turns:
        return [f"{rollout['length']} tokens"]
    observed = sum(turn["observed"] for turn in turns)
    num_generated = sum(turn["generated"] > 0 for turn in turns)
    turn_count = "1 turn" if num_generated == 1 else f"{num_generated} turns"
    return [turn_count, f"{rollout['length'] - observed} tokens generated", f"{observed} observed"]


def _generated(rollout: Mapping[str, Any]) -> list[float]:
    """Return the log-probs of the model's own tokens."""
    logprobs, turns = rollout["logprobs"] or [], rollout.get("turns") or ()
    if not turns:
        return logprobs
    end, generated = 0, list[float]()
    for turn in turns:
        begin = end + turn["observed"]
        end = begin + turn["generated"]
        generated += logprobs[begin:end]
    return generated


_CONFIG_CHARACTERS = 200_000
_UNTRAINABLE = " Nothing of the newest batch could be trained: see the sample rollouts."


def write_report(run_dir: Path, output: Path | None = None, *, host: str | None = None) -> Path:
    """Write the report of a run.

    Args:
        run_dir: the run directory, or the folder of a host's metric files; the run may still be going.
        output: the file to write; RUN/report.html if None.
        host: whose metric files these are; None: a run of this package.

    Returns:
        The file written.

    Raises:
        DataError: there are no metrics, they are damaged before their last line, or the report cannot be written.
    """
    run_dir = Path(run_dir)
    target = run_dir / "report.html" if output is None else Path(output)
    page = build_page(load_run(run_dir) if host is None else load_host_run(run_dir, host))
    write_page(page, target, what="report", option="--output")
    return target


def _headings(prompts: Sequence[str]) -> dict[str, str]:
    """Return prompt -> its beginning. First and last lines that several prompts all share are left out: they are the
    template's."""
    lines = {prompt: prompt.splitlines() for prompt in prompts}
    shortest = min(map(len, lines.values()), default=0)
    if len(lines) < 2 or shortest < 2:
        return {prompt: safe_text(prompt, _HEADING_CHARACTERS, one_line=True) for prompt in prompts}
    first = next((i for i in range(shortest - 1) if len({one[i] for one in lines.values()}) > 1), shortest - 1)
    room = shortest - first
    last = next((i for i in range(room) if len({one[-1 - i] for one in lines.values()}) > 1), room - 1)
    return {
        prompt: safe_text(" ".join(one[first : len(one) - last]), _HEADING_CHARACTERS, one_line=True)
        for prompt, one in lines.items()
    }


def build_page(run: RunData) -> Page:
    """Return the page's content from what was recorded."""
    made = build_sections(run)
    sections = [replace(section, plots=[plot for plot in section.plots if not plot.unchanged]) for section in made]
    samples, sample_notes = load_samples(run.run_dir)
    decode, why_not = decoder(run.setting("model", "path")) if any(file.turns for file in samples) else (None, "")
    sample_notes += [why_not] if why_not else []
    missing = [f"{s.title}: {name}" for s in sections for name in s.missing] + sample_notes
    name = safe_text(run.run_dir.resolve().name, 120, one_line=True)
    algorithm = run.setting("algorithm", "name")
    title = f"{name} · {safe_text(algorithm, 40, one_line=True)}" if algorithm else name
    return Page(
        title=title,
        subtitle=" · ".join(filter(None, [_status(run), *_origin(run)]))
        + (_UNTRAINABLE if any(file.untrainable for file in samples) else ""),
        sections=sections,
        template="report.html.j2",
        values={
            "cards": _cards(run),
            "evaluations": _evaluation_table(run),
            "samples": [_file_values(file, decode) for file in samples],
            "headings": _headings([group.rollouts[0]["prompt"] for file in samples for group in file.groups]),
            "metrics": _metrics_table(run),
            "config_text": None if run.config_text is None else safe_text(run.config_text, _CONFIG_CHARACTERS),
            "unchanged": [
                safe_text(plot.unchanged, 300, one_line=True)
                for section in made
                for plot in section.plots
                if plot.unchanged
            ],
            "missing": [safe_text(one, 300, one_line=True) for one in missing],
            "prompt_characters": _PROMPT_CHARACTERS,
            "answer_characters": _ANSWER_CHARACTERS,
        },
    )


def _status(run: RunData) -> str:
    rows = run.train_rows
    if not rows:
        return "No optimizer step has been recorded yet."
    step, planned = int(rows[-1]["step"] or 0), run.setting("trainer", "steps")
    words = f"{step} optimizer steps"
    if isinstance(planned, int):
        words = f"{step} of {planned} optimizer steps" + ("" if step >= planned else " (going on or stopped early)")
    if run.window > 1:
        words += f"; plots show means of {run.window} steps"
    return words


def _origin(run: RunData) -> Iterator[str]:
    """Yield the size of a batch, the model, and when the run began."""
    yield _version(run)
    if model := run.setting("model", "path"):
        yield f"model {safe_text(model, 120, one_line=True)}"
    log = run.run_dir / logs.FOLDER / logs.file_name("driver")
    if log.is_file():
        with log.open(encoding="utf-8", errors="replace") as file:
            began = _TIME.match(file.readline(100))
        if began:
            yield f"began {began[0]}"


def _cards(run: RunData) -> list[tuple[str, str, str]]:
    """Return heading, number and words of each card."""
    cards: list[tuple[str, str, str]] = []
    accuracy = run.values("accuracy/mean")
    if accuracy:
        first, last, count = ends_of(accuracy)
        words = f"mean of the first and last {count} steps" if count > 1 else "first and last step"
        cards.append(("training accuracy", f"{first:.1%} → {last:.1%}", words))
    for name, (before, after) in _evaluations(run).items():
        if "/accuracy/" not in name:
            cards.append(
                (f"{_evaluation_label(name)}, held out", f"{before:.1%} → {after:.1%}", _points(after - before))
            )
    length = run.values("response/length_mean")
    if length:
        first, last, count = ends_of(length)
        cards.append(("response length", f"{first:,.0f} → {last:,.0f}", "tokens"))
    tokens = sum(run.total(k) for k in run.under("difficulty/tokens/"))
    if tokens:
        cards.append(("trained tokens", _large(tokens), "all steps"))
    seconds = run.total("timing/step_s")
    if seconds:
        per_step = seconds / len(run.values("timing/step_s"))
        cards.append(("total time", _duration(seconds), f"{per_step:.2f} s per step"))
    bad = run.total("observe/nonfinite_values")
    if bad:
        cards.append(("non-finite values", f"{bad:.0f}", "metrics that were NaN or infinite"))
    skipped = max(run.values("rollout/steps_skipped"), default=0)
    if skipped:
        cards.append(("skipped steps", f"{skipped:.0f}", "loss or gradient was not finite"))
    return cards


def _version(run: RunData) -> str:
    per_prompt, prompts = run.rollouts_per_prompt, run.setting("rollout", "prompts_per_batch")
    if per_prompt and isinstance(prompts, int):
        return f"{prompts} prompts x {per_prompt} rollouts each"
    return f"{per_prompt} rollouts per prompt" if per_prompt else ""


def _evaluations(run: RunData) -> dict[str, tuple[float, float]]:
    """Return evaluation accuracy key -> (first, last)."""
    keys = [k for k in run.under("eval/") if k.endswith("/accuracy") or "/accuracy/" in k]
    return {k: (values[0], values[-1]) for k in keys if (values := run.values(k))}


def _evaluation_label(key: str) -> str:
    return safe_text(key.removeprefix("eval/").removesuffix("/accuracy"), 80, one_line=True)


def _evaluation_table(run: RunData) -> Table | None:
    evaluations = _evaluations(run)
    if not evaluations:
        return None
    rows = []
    for key, (before, after) in evaluations.items():
        name, _, level = key.removeprefix("eval/").partition("/accuracy")
        cells = [
            name,
            level.removeprefix("/") or "all",
            f"{before:.1%}",
            f"{after:.1%}",
            f"{(after - before) * 100:+.1f}",
        ]
        rows.append([safe_text(c, 80, one_line=True) for c in cells])
    steps = [r["step"] for r in run.rows if any(r.get(k) is not None for k in evaluations)]
    header = ["evaluation", "difficulty", f"step {steps[0]}", f"step {steps[-1]}", "points"]
    return Table(header, rows, number_columns=3)


def _metrics_table(run: RunData) -> Table:
    rows = []
    for key in sorted(run.keys):
        values = run.values(key)
        numbers = [f"{v:,.5g}" for v in (values[0], values[-1], min(values), max(values))]
        rows.append([safe_text(key, 120, one_line=True), *numbers, str(len(values))])
    return Table(["metric", "first", "last", "lowest", "highest", "steps"], rows, number_columns=5)


def _points(share: float) -> str:
    """Return a difference of two shares, in percentage points."""
    return f"{share * 100:+.1f} points"


def _large(number: float) -> str:
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number:.0f}"


def _duration(seconds: float) -> str:
    total = round(seconds)
    hours, minutes, rest = total // 3600, total // 60 % 60, total % 60
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {rest:02d} s" if minutes else f"{seconds:.1f} s"
