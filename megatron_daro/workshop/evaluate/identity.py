"""What an evaluation is made of: OUT/evaluation.json (weights, files, verifier, how it asks).

Only the same evaluation may continue in a directory: every difference that would mix answers of two models, two ways of
asking or two verifiers is rejected and named. More samples or other sets may be asked for later.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megatron_daro import durable
from megatron_daro.errors import DataError

FILE = "evaluation.json"
_FORMAT = 1
_FREE_OF_SET = ("samples",)


def check_or_write(out: Path, made_of: Mapping[str, Any]) -> None:
    """Check that this evaluation may continue in the directory, and write there what it is made of.

    Args:
        out: directory of the evaluation. made_of: plain values; "sets" by name, "notes" are not compared.

    Raises:
        DataError: it holds answers of another evaluation; the message names each difference.
    """
    path = out / FILE
    saved = read(out) if path.is_file() else {}
    if saved:
        wrong = list(_differences(saved, made_of))
        if wrong:
            raise DataError(
                f"{out}: holds answers of another evaluation: {'; '.join(wrong)}; allowed: more samples, other sets. "
                "Use another --out"
            )
    sets = dict(saved.get("sets", {})) | dict(made_of["sets"])
    durable.replace(path, json.dumps({"format": _FORMAT, **made_of, "sets": sets}, indent=2) + "\n")


def template_date(out: Path, named: datetime.date | None) -> datetime.date:
    """Return the day that chat templates use as today: `named`, else the one recorded by the evaluation that continues
    in this directory, else today's. Another date would change the prompts."""
    saved = read(out).get("template_date") if (out / FILE).is_file() else None
    return named or (datetime.date.fromisoformat(saved) if saved else datetime.date.today())


def read(out: Path) -> dict[str, Any]:
    """Return what an evaluation is made of. Raises DataError if the directory holds none."""
    path = out / FILE
    try:
        summary = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(
            f"{out}: is no directory of an evaluation ({error}); give one that megatron-daro eval wrote"
        ) from error
    if not isinstance(summary, dict) or summary.get("format") != _FORMAT:
        raise DataError(f"{path}: is of another format; allowed: {_FORMAT}; evaluate again with another --out")
    return summary


def _differences(saved: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    for key in sorted({*saved, *now} - {"format", "sets", "notes"}):
        yield from _changed(key, saved.get(key), now.get(key))
    for name in sorted(saved["sets"].keys() & now["sets"].keys()):
        was, is_ = ({k: v for k, v in one["sets"][name].items() if k not in _FREE_OF_SET} for one in (saved, now))
        yield from _changed(f"set {name}", was, is_)


def _changed(name: str, was: object, is_: object) -> Iterator[str]:
    if isinstance(was, Mapping) and isinstance(is_, Mapping):
        for key in sorted({*was, *is_}):
            yield from _changed(f"{name} {key}", was.get(key), is_.get(key))
    elif was != is_:
        yield f"{name} was {json.dumps(was)}, is {json.dumps(is_)}"
