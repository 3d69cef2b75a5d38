"""Which columns of a dump are read: those that a framework's dump is known to have, or that the user names.

| format | group | length | right |
|---|---|---|---|
| this package, Parquet | group_id | length, in tokens | correct |
| verl, `STEP.jsonl` of trainer.rollout_data_dir | input | characters of output | acc, else score |
| slime, .pt of --save-debug-rollout-data | group_index | response_length, in tokens | reward, or reward[--reward-key] |
| NeMo-RL, `train_data_stepN.jsonl` | tokens of the prompt | trained tokens | filtered_rewards, else rewards |
| ROLL, `rollout_dump_data.step_N.jsonl` | messages, else prompt or id | characters of responses | scores |
| other JSONL or Parquet | --columns | --columns; len(NAME) for a text or a chat | --columns |
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from megatron_daro.errors import ConfigError, DataError
from megatron_daro.workshop.analyze.host_lines import NEMO_RL, ROLL

_KNOWN: tuple[Mapping[str, str], ...] = (
    {"group": "group_id", "length": "length", "right": "correct"},
    {"group": "input", "length": "output", "right": "acc"},
    {"group": "input", "length": "output", "right": "score"},
    {"group": "group_index", "length": "response_length", "right": "reward"},
    NEMO_RL,
    ROLL,
)

_TEXTS = ("output", "responses")
"""Length columns that hold a text, whose characters are counted."""
_ANSWERS = ("text", "output", "response", "responses")
"""Columns of answers as text: of this package, verl, slime and ROLL."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What the user says about a dump. columns: by what they hold, see `named_columns`; a length `len(NAME)` counts the
    characters of a text or a chat. correct_above: the number above which an answer is right. reward_key: key of the
    reward in verdicts that are mappings. texts: whether the text of answers is read, too."""

    columns: Mapping[str, str] = field(default_factory=dict)
    correct_above: float | None = None
    reward_key: str | None = None
    texts: bool = False


@dataclass(frozen=True, slots=True)
class Columns:
    """Which columns are read. is_text: lengths are texts, whose characters are counted. text: column with the text of
    answers; None if it is not read. correct_above, reward_key: as in `Wanted`."""

    group: str
    length: str
    right: str
    is_text: bool = False
    correct_above: float | None = None
    reward_key: str | None = None
    text: str | None = None

    @property
    def names(self) -> list[str]:
        """All columns that are read."""
        return [self.group, self.length, self.right, *([self.text] if self.text else [])]

    @property
    def unit(self) -> str:
        """Unit of the lengths, for people."""
        return "characters" if self.is_text else "tokens"


def named_columns(option: str) -> dict[str, str]:
    """Return the columns that --columns names, by what they hold.

    Raises:
        ConfigError: a part of it is none of group=A, length=B and right=C, or names the same thing again.
    """
    named: dict[str, str] = {}
    for part in option.split(",") if option.strip() else ():
        holds, _, name = (word.strip() for word in part.partition("="))
        if holds not in ("group", "length", "right") or not name or holds in named:
            raise ConfigError(
                f"--columns: got {part.strip()!r}, allowed are group=A, length=B (or length=len(B)) and right=C, each "
                "once, with the name of a column; separate them by commas"
            )
        named[holds] = name
    return named


def choose_columns(path: Path, names: set[str], wanted: Wanted) -> Columns:
    """Return which columns to read from a file that has the columns `names`.

    Raises:
        DataError: a column is missing; the message lists those that are there.
    """
    named, answer = dict(wanted.columns), next((name for name in _ANSWERS if name in names), None)
    if wanted.texts and answer is None:
        raise DataError(
            f"dump: {path} has the columns {', '.join(sorted(names)) or 'none'}; --reflection needs answers as text: "
            f"one of {', '.join(_ANSWERS)}"
        )
    counted_text = re.fullmatch(r"len\((.+)\)", named.get("length", ""))
    if counted_text:
        named["length"] = counted_text[1]
    for known in [{**k, **named} for k in _KNOWN]:
        if set(known.values()) <= names:
            return Columns(
                **known,
                is_text=bool(counted_text) or ("length" not in named and known["length"] in _TEXTS),
                correct_above=wanted.correct_above,
                reward_key=wanted.reward_key,
                text=answer if wanted.texts else None,
            )
    raise DataError(
        f"dump: {path} has the columns {', '.join(sorted(names)) or 'none'}; needed are a group (group_id, input or "
        "group_index), a length (length, output or response_length) and a verdict (correct, acc, score or reward): "
        "name them with --columns group=...,length=...,right=...; without verdicts nothing but lengths could be shown"
    )
