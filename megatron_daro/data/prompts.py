"""Problem files become a list of Prompt, and a report of what was left out and why.

A bad row is dropped and counted with its line number, or rejected with `strict`; files without one usable row are
rejected. Whatever is dropped is in the report. The report also counts problems that stand in an evaluation set, by
exact match of normalized text (Unicode form, white space): paraphrases are not found.
"""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from megatron_daro.config.sections import DataFormat
from megatron_daro.data.containers import RowProblem, read_rows
from megatron_daro.data.formats import ParsedRow, PassRate, field_names, parse_row
from megatron_daro.errors import DataError
from megatron_daro.types import Prompt


def prompt_text(prompt: Prompt) -> str:
    """Return the problem as text: `text`, or the contents of the messages, one per line."""
    if prompt.text is not None:
        return prompt.text
    return "\n".join(str(message.get("content", "")) for message in prompt.messages or ())


def normalized_text(text: str) -> str:
    """Return the text in Unicode NFC, without white space except between digits. Case stays: x and X differ in
    mathematics."""
    words = " ".join(unicodedata.normalize("NFC", text).split())
    return re.sub(r"(?<!\d) | (?!\d)", "", words)


def problem_key(text: str, environment: str = "", answers: Sequence[str] = ()) -> tuple[str, ...]:
    """Return a key that only repeats of a problem have in common.

    Args:
        text: the problem.
        environment: name of its environment, if there are several: each has problems of its own.
        answers: with turns, since there they are part of the problem: a game hides different words behind one text.
    """
    return environment, normalized_text(text), *answers


def find_overlap(prompts: Sequence[Prompt], held_out: Mapping[str, Sequence[Prompt]]) -> dict[str, list[str]]:
    """Return the training prompts that also stand in an evaluation set.

    Args:
        prompts: the training set.
        held_out: evaluation sets by name.

    Returns:
        For each name, the ids of the training prompts found in it, in training order.
    """
    # By the statement: a chat that only adds a system message asks the same problem.
    held_out_keys = {name: {problem_key(prompt.statement) for prompt in rows} for name, rows in held_out.items()}
    keys = [(prompt.id, problem_key(prompt.statement)) for prompt in prompts]
    return {name: [prompt_id for prompt_id, key in keys if key in rows] for name, rows in held_out_keys.items()}


_PLACES_SHOWN = 5
_FIELDS_SHOWN = 20
_Rated = tuple[Prompt, PassRate | None]


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What loading found. rows = kept + the rows in `dropped` + duplicates + conflicting.

    dropped: reason -> "file:line" of every row dropped for it. duplicates: rows that repeat a problem with the same
    answer. conflicting: rows of problems that occur with different answers; conflicting_problems: how many problems.
    contaminated: evaluation set -> ids of the kept prompts that stand in it too (exact match of normalised text).
    pass_rates: id of a kept prompt -> the pass rate in its file, if there is one.
    """

    rows: int
    kept: int
    dropped: Mapping[str, Sequence[str]] = field(default_factory=dict)
    duplicates: int = 0
    conflicting: int = 0
    conflicting_problems: int = 0
    contaminated: Mapping[str, Sequence[str]] = field(default_factory=dict)
    pass_rates: Mapping[str, PassRate] = field(default_factory=dict)

    @property
    def num_dropped(self) -> int:
        """Rows that could not be used."""
        return sum(len(places) for places in self.dropped.values())

    def summary(self) -> str:
        """Return a few lines for the terminal and the log."""
        lines = [f"{self.rows} rows, {self.kept} prompts kept"]
        lines += [f"dropped {len(p)}: {reason} ({_shown(p)})" for reason, p in self.dropped.items()]
        if self.duplicates:
            lines.append(f"dropped {self.duplicates}: repeats of a problem with the same answer")
        if self.conflicting:
            lines.append(f"dropped {self.conflicting}: {self.conflicting_problems} problems with conflicting answers")
        for name, ids in self.contaminated.items():
            if ids:
                lines.append(f"contamination: {len(ids)} training problems stand word for word in {name}")
        return "\n".join(lines)


def load_problems(
    paths: Sequence[str | Path],
    format: DataFormat = "auto",
    problem_field: str | None = None,
    answer_field: str | None = None,
    *,
    strict: bool = False,
    repeats: Literal["drop", "keep"] = "drop",
    environment_of_source: Mapping[str, str] | None = None,
    with_turns: Collection[str] = (),
    ends: int | None = None,
    held_out: Mapping[str, Sequence[Prompt]] | None = None,
) -> tuple[list[Prompt], LoadReport]:
    """Return all usable problems of the files, in file order.

    Args:
        paths: Parquet, JSON-array or JSON-lines files, also packed with gzip or zstd.
        format: "auto" recognises container and layout; see `containers` and `formats`.
        problem_field: name of the field with the problem (dots go into objects); None takes the layout's own.
        answer_field: name of the field with the answer.
        strict: a bad row is an error instead of a counted drop.
        repeats: "drop" keeps the first of equal problems and none of those with conflicting answers (for training);
            "keep" takes every row (for evaluation sets, whose size is part of the score).
        environment_of_source: data source -> name of its environment, if there are several: repeats are looked for in
            each.
        with_turns: names of environments in which problems with different answers are different problems; a single
            environment is called "".
        ends: only this many first and as many last rows of each file, for a quick look.
        held_out: evaluation sets by name; problems found in them are reported, not dropped.

    Returns:
        Prompts without tokens, each with an id that depends on source and problem, for a repeat also on its ordinal;
        and the report.

    Raises:
        DataError: no paths, a missing, empty or torn file, a file without a usable row, or a bad row under `strict`.
    """
    if not paths:
        raise DataError("data.train: no file given; give at least one file of problems")
    rows: list[_Rated] = []
    dropped: dict[str, list[str]] = {}
    for path in map(Path, paths):
        own_rows, bad, fields = _load_file(path, format, problem_field, answer_field, ends)
        if bad and strict:
            raise DataError(f"{path}: {_reasons(bad)}; repair the rows, or turn strict off to drop and count them")
        if not own_rows:
            hint = (
                f"; the fields are {', '.join(fields)}: name two with problem_field and answer_field" if fields else ""
            )
            raise DataError(f"{path}: no usable row among {sum(map(len, bad.values()))}: {_reasons(bad)}{hint}")
        rows += own_rows
        for reason, places in bad.items():
            dropped.setdefault(reason, []).extend(places)
    report = LoadReport(rows=len(rows) + sum(map(len, dropped.values())), kept=len(rows), dropped=dropped)
    problems = [[row] for row in rows]
    if repeats == "drop":
        problems, report = _without_repeats(rows, environment_of_source or {}, with_turns, report)
    if not problems:
        raise DataError(
            f"no problem is left of {', '.join(map(str, paths))}: {'; '.join(report.summary().splitlines())}"
        )
    prompts = unique_ids([same[0][0] for same in problems])
    rates = [next((rate for _, rate in same if rate), None) for same in problems]
    return prompts, replace(
        report,
        contaminated=find_overlap(prompts, held_out or {}),
        pass_rates={prompt.id: rate for prompt, rate in zip(prompts, rates, strict=True) if rate},
    )


def _load_file(
    path: Path,
    data_format: DataFormat,
    problem_field: str | None,
    answer_field: str | None,
    ends: int | None,
) -> tuple[list[_Rated], dict[str, list[str]], list[str]]:
    """Return usable rows, the places of bad rows by reason, and the field names of the first row that has some."""
    rows: list[_Rated] = []
    bad: dict[str, list[str]] = {}
    fields: list[str] = []
    for number, row in read_rows(path, data_format, ends=ends):
        fields = fields or field_names(row)[:_FIELDS_SHOWN]
        parsed = parse_row(row, data_format, problem_field, answer_field)
        if isinstance(parsed, RowProblem):
            bad.setdefault(parsed.reason, []).append(f"{path.name}:{number}")
        else:
            rows.append((prompt_of(parsed, path.stem), parsed.pass_rate))
    if not rows and not bad:
        raise DataError(f"{path}: the file has no rows; give a file with at least one problem")
    return rows, bad, fields


def prompt_of(parsed: ParsedRow, stem: str) -> Prompt:
    """Return the prompt of a usable row, without tokens.

    Args:
        parsed: the row.
        stem: the file's name without its ending, the source where the row names none.
    """
    prompt = Prompt(
        id="",
        answer=parsed.answers[0],
        alternatives=parsed.answers[1:],
        source=parsed.source or stem,
        text=parsed.text,
        messages=parsed.messages,
        category=parsed.category,
    )
    digest = hashlib.sha256(f"{prompt.source}\0{prompt_text(prompt)}".encode("utf-8", "surrogatepass"))
    return replace(prompt, id=digest.hexdigest()[:16])


def unique_ids(prompts: Sequence[Prompt]) -> list[Prompt]:
    """Return the same prompts; repeats of a problem get their ordinal appended to the id."""
    seen: dict[str, int] = {}
    named = []
    for prompt in prompts:
        seen[prompt.id] = seen.get(prompt.id, 0) + 1
        ordinal = seen[prompt.id]
        named.append(prompt if ordinal == 1 else replace(prompt, id=f"{prompt.id}-{ordinal}"))
    return named


def _without_repeats(
    rows: Sequence[_Rated], names: Mapping[str, str], with_turns: Collection[str], report: LoadReport
) -> tuple[list[list[_Rated]], LoadReport]:
    """Return the rows of each problem that is kept. names: environments by data source."""
    same: dict[tuple[str, ...], list[_Rated]] = {}
    for prompt, rate in rows:
        name = names.get(prompt.source, "")
        key = problem_key(prompt_text(prompt), name, prompt.answers if name in with_turns else ())
        same.setdefault(key, []).append((prompt, rate))
    agreeing = [own for own in same.values() if all(_same_answers(own[0][0], prompt) for prompt, _ in own)]
    in_agreement = sum(map(len, agreeing))
    return agreeing, replace(
        report,
        kept=len(agreeing),
        duplicates=in_agreement - len(agreeing),
        conflicting=len(rows) - in_agreement,
        conflicting_problems=len(same) - len(agreeing),
    )


def _same_answers(first: Prompt, second: Prompt) -> bool:
    pairs = zip(first.answers, second.answers, strict=False)
    return len(first.answers) == len(second.answers) and all(_same_answer(a, b) for a, b in pairs)


def _same_answer(first: str, second: str) -> bool:
    if first == second:
        return True
    try:
        return float(first) == float(second)
    except ValueError:
        return False


def _shown(places: Sequence[str]) -> str:
    return ", ".join(places[:_PLACES_SHOWN]) + (", ..." if len(places) > _PLACES_SHOWN else "")


def _reasons(bad: Mapping[str, Sequence[str]]) -> str:
    return "; ".join(f"{reason} ({len(places)} rows: {_shown(places)})" for reason, places in bad.items())
