r"""Rows of problem files: each a problem with its gold answers.

A row's layout is recognized by its fields: DAPO (`prompt` is a list of chat messages, gold in
`reward_model.ground_truth`), GSM8K (gold after `####`), and plain rows (`problem`, `question`, `prompt` or
`messages`; gold in `answer`, `final_answer`, `ground_truth`, or the last \boxed{} of `solution`). A gold may be a
list of alternatives. A pass rate with the name of its model, as `megatron-daro curate` writes them, or a plain
`pass_rate` from 0 to 1 is read too. A row that cannot be used is a RowProblem, which the caller counts.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import Any

from megatron_daro.boxed import last_box
from megatron_daro.config.sections import DataFormat
from megatron_daro.data.containers import RowProblem, WrittenNumber

FIELD = "pass_rate"
SAMPLES, MODEL, WEIGHTS = "pass_rate_samples", "pass_rate_model", "pass_rate_weights"


@dataclass(frozen=True, slots=True)
class PassRate:
    """How often a model solved a problem. rate: in [0, 1]; samples: answers asked for, 0 if not said; model: its name;
    weights: a digest of its weights (empty: not said)."""

    rate: float
    samples: int = 0
    model: str = ""
    weights: str = ""


def pass_rate_of(row: object) -> PassRate | None:
    """Return the pass rate of a row; None where it has none that is a number from 0 to 1."""
    if not isinstance(row, Mapping):
        return None
    rate = _number(row.get(FIELD))
    if rate is None or not 0 <= rate <= 1:
        return None
    samples, model, weights = _number(row.get(SAMPLES)), row.get(MODEL), row.get(WEIGHTS)
    return PassRate(
        rate,
        int(samples) if samples is not None and samples >= 0 else 0,
        model if isinstance(model, str) else "",
        weights if isinstance(weights, str) else "",
    )


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float, Decimal, WrittenNumber)):
        return None
    # Of text: an integer of 400 digits would raise.
    number = float(value.text if isinstance(value, WrittenNumber) else str(value))
    return number if math.isfinite(number) else None


PROBLEM_FIELDS = ("problem", "question", "prompt", "messages")
CATEGORY_FIELDS = ("category", "difficulty", "level")
ANSWER_FIELDS = ("answer", "final_answer", "reward_model.ground_truth", "ground_truth", "solution")
_BESIDE_MESSAGES = ("tools", "functions", "documents", "chat_template_kwargs")
_SEPARATED_NUMBER = re.compile(r"-?\d{1,3}(,\d{3})+(\.\d+)?")
_SURROGATE = re.compile(r"[\ud800-\udfff]")
_MOST_ALTERNATIVES = 64
_EXACT_AS_FLOAT = 2**53


@dataclass(frozen=True, slots=True)
class ParsedRow:
    """A usable row: `text` or `messages`, the gold answers (each is right), the row's own source, category and
    stored pass rate."""

    answers: tuple[str, ...]
    text: str | None = None
    messages: tuple[Mapping[str, Any], ...] | None = None
    source: str | None = None
    category: str = ""
    pass_rate: PassRate | None = None


class _UnusableRowError(Exception):
    """Carries a RowProblem's reason out of the field readers; never leaves this module."""


def parse_row(
    row: object, data_format: DataFormat = "auto", problem_field: str | None = None, answer_field: str | None = None
) -> ParsedRow | RowProblem:
    """Return the problem and the gold answer of a row.

    Args:
        row: an object as read from the file.
        data_format: "gsm8k" and "dapo" insist on that layout; the others recognise it.
        problem_field: name of the field with the problem; dots go into nested objects.
        answer_field: name of the field with the answer; dots go into nested objects.

    Returns:
        The parsed row, or why it cannot be used.
    """
    if isinstance(row, RowProblem):
        return row
    if not isinstance(row, Mapping):
        return RowProblem("row is not an object")
    try:
        source = row.get("data_source")
        problem = _problem(row, data_format, problem_field)
        parsed = ParsedRow(
            answers=_answers(row, data_format, answer_field),
            source=source if isinstance(source, str) and source else None,
            category=_category(row),
            pass_rate=pass_rate_of(row),
            **problem,
        )
    except _UnusableRowError as unusable:
        return RowProblem(str(unusable))
    # JSON can write half of a character (\ud800 alone); no tokenizer and no file takes it.
    if any(_SURROGATE.search(text) for text in _texts(parsed)):
        return RowProblem("text that is not Unicode (a lone surrogate)")
    return parsed


def field_names(row: object) -> list[str]:
    """Return the names that `problem_field` and `answer_field` could have: the row's fields and the fields of its
    objects."""
    if not isinstance(row, Mapping):
        return []
    inner = [f"{name}.{key}" for name, value in row.items() if isinstance(value, Mapping) for key in value]
    return [*map(str, row), *inner]


def answer_text(value: object) -> str | None:
    """Return a gold answer as text: 27.0 is "27", a number of a JSON file keeps its digits, a one-element list is
    its element.

    Args:
        value: what a file holds.

    Returns:
        The text, without space around it; None where the value is not an answer (an object, several answers, NaN,
        true or false, nothing).
    """
    if isinstance(value, list) and len(value) == 1:
        return answer_text(value[0])
    if isinstance(value, str):
        return value.strip() or None
    if isinstance(value, WrittenNumber):
        return _number_text(_decimal(value.text), value.text)
    if isinstance(value, Decimal):
        return _number_text(value, f"{value:f}") if value.is_finite() else None
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    if isinstance(value, int):
        return str(value)
    return _number_text(Decimal(repr(value)), repr(value)) if math.isfinite(value) else None


def _decimal(written: str) -> Decimal | None:
    """Return the number; None if its exponent has more digits than the library takes."""
    try:
        return Decimal(written)
    except InvalidOperation:
        return None


def _number_text(value: Decimal | None, written: str) -> str:
    """Return the number as it is written, but 27.0 as 27 and 0.50 as 0.5."""
    # copy_abs and not abs, which rounds and overflows.
    if value is not None and value.copy_abs() <= _EXACT_AS_FLOAT and value == int(value):
        return str(int(value))
    if "e" in written.lower() or "." not in written:
        return written
    return written.rstrip("0").rstrip(".")


def _texts(parsed: ParsedRow) -> Iterator[str]:
    """Yield every text that is kept of a row."""
    yield from (*parsed.answers, parsed.text or "", parsed.source or "", parsed.category)
    for message in parsed.messages or ():
        yield json.dumps(message, ensure_ascii=False)


def _field(row: Mapping[str, Any], dotted: str) -> object:
    if dotted in row:
        return row[dotted]
    value: object = row
    for name in dotted.split("."):
        if not isinstance(value, Mapping) or name not in value:
            return None
        value = value[name]
    return value


def _first_field(row: Mapping[str, Any], names: Sequence[str]) -> tuple[str, Any]:
    """Return the first field that says something; an empty `answer` beside a `solution` says nothing."""
    return next(((name, _field(row, name)) for name in names if not _is_blank(_field(row, name))), ("", None))


def _is_blank(value: object) -> bool:
    return value is None or (isinstance(value, str) and not value.strip()) or value == []


def _problem(row: Mapping[str, Any], data_format: DataFormat, field: str | None) -> dict[str, Any]:
    default = {"gsm8k": ("question",), "dapo": ("prompt",)}.get(data_format, PROBLEM_FIELDS)
    names = (field,) if field else default
    _, value = _first_field(row, names)
    if value is None:
        values = [_field(row, name) for name in names]
        if [] in values:
            raise _UnusableRowError("the chat does not end with a user message")
        missing = all(one is None for one in values)
        raise _UnusableRowError(f"no problem (field {' or '.join(names)})" if missing else "problem is empty")
    if isinstance(value, str):
        value = _chat_in_text(value) or value
    if isinstance(value, list):
        offered = [name for name in _BESIDE_MESSAGES if _offers(row.get(name))]
        if offered:
            raise _UnusableRowError(f"{', '.join(offered)}, which only an environment can offer (environment.kind)")
        return {"messages": _messages(value)}
    if not isinstance(value, str):
        raise _UnusableRowError("problem is not text")
    return {"text": value}


def _offers(value: object) -> bool:
    # Parquet gives each struct every key of the column.
    values = value.values() if isinstance(value, Mapping) else [value]
    return not all(map(_is_blank, values))


def _chat_in_text(text: str) -> list[Any] | None:
    """Return the chat, if all of the text is a JSON array of messages: files without lists keep chats in this form."""
    if not text.lstrip().startswith("["):
        return None
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    is_chat = isinstance(value, list) and value and all(isinstance(m, dict) and "role" in m for m in value)
    return value if is_chat else None


def _messages(value: list[Any]) -> tuple[Mapping[str, Any], ...]:
    """Return the messages with all that a chat template may read of them: `tool_calls`, `reasoning_content`, `name`."""
    messages = []
    for message in value:
        # Parquet gives each message every key of the column, None where a message has none.
        fields = {k: v for k, v in message.items() if v is not None} if isinstance(message, Mapping) else {}
        if fields.get("tool_calls") and "content" not in fields:
            fields["content"] = ""
        if not isinstance(fields.get("role"), str) or not isinstance(fields.get("content"), str):
            raise _UnusableRowError("a chat message lacks role or content as text")
        try:
            messages.append(json.loads(json.dumps(fields, allow_nan=False, default=_plain_number)))
        except (TypeError, ValueError, RecursionError):
            raise _UnusableRowError("a chat message holds what is no JSON") from None
    if not messages or messages[-1]["role"] != "user" or not messages[-1]["content"].strip():
        raise _UnusableRowError("the chat does not end with a user message")
    return tuple(messages)


def _plain_number(value: object) -> float:
    """Return a WrittenNumber as a number for templates. Raises TypeError: anything else is no JSON."""
    if not isinstance(value, WrittenNumber):
        raise TypeError
    return float(value.text)


def _answers(row: Mapping[str, Any], data_format: DataFormat, field: str | None) -> tuple[str, ...]:
    """Return the gold and its alternatives, each once, in the file's order."""
    default = {"gsm8k": ("answer",), "dapo": ("reward_model.ground_truth",)}.get(data_format, ANSWER_FIELDS)
    name, value = _first_field(row, (field,) if field else default)
    alternatives = [one for one in value if not _is_blank(one)] if isinstance(value, list) else [value]
    if value is None or not alternatives:
        raise _UnusableRowError("no answer")
    if len(alternatives) > _MOST_ALTERNATIVES:
        raise _UnusableRowError(f"answer is a list of more than {_MOST_ALTERNATIVES}")
    return tuple(dict.fromkeys(_answer(one, name, data_format, is_named=bool(field)) for one in alternatives))


def _answer(value: object, name: str, data_format: DataFormat, *, is_named: bool) -> str:
    if name == "solution":
        boxed = last_box(value) if isinstance(value, str) else None
        if not boxed and not is_named:
            raise _UnusableRowError(r"no answer (no \boxed{} in the solution)")
        value = boxed or value
    text = answer_text(value)
    if text is None:
        raise _UnusableRowError(f"answer is not text ({_kind(value)})")
    if data_format == "gsm8k" and "####" not in text:
        raise _UnusableRowError("no answer (no #### in a GSM8K answer)")
    return _after_hashes(text) if "####" in text else text


def _category(row: Mapping[str, Any]) -> str:
    """Return the category, a number (a level of difficulty) as text; empty if it is neither text nor a number."""
    _, value = _first_field(row, CATEGORY_FIELDS)
    return answer_text(value) or "" if not isinstance(value, list) else ""


def _after_hashes(text: str) -> str:
    """Return the answer after ####. GSM8K writes thousands with a comma, which elsewhere separates answers: 1,080 is
    1080."""
    answer = text.rsplit("####", 1)[1].strip()
    if not answer:
        raise _UnusableRowError("no answer (nothing after ####)")
    return answer.replace(",", "") if _SEPARATED_NUMBER.fullmatch(answer) else answer


def _kind(value: object) -> str:
    if isinstance(value, list):
        return f"a list of {len(value)}"
    return (
        "an object" if isinstance(value, Mapping) else f"{value}" if isinstance(value, float) else type(value).__name__
    )
