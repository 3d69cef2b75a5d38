"""Recorded conversations for people: what was said and shown, how likely each token was, and sums by turn.

Rows of a rollout file -> pieces of text with a shade each (the report's samples), a table by turn (report, analyze).
Decodes with the model's tokenizer.json alone, without torch; if there is none, tokens are not coloured.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_daro.observe.logs import safe_text
from megatron_daro.workshop.report.page import Table

Decode = Callable[[Sequence[int]], str]
SHADES = (0.9, 0.5, 0.1, 0.01)
"""A token has shade i if its probability is at least the i-th of these and below those before; else the last shade."""
_MOST_TOKENS = 1500
_BROKEN = "\ufffd"
_LONGEST_CHARACTER = 8


@dataclass(slots=True)
class TurnSums:
    """Sums of one turn, over the conversations that have it. conversations: how many. seconds: of the environment."""

    conversations: int = 0
    observed: int = 0
    generated: int = 0
    tool_calls: int = 0
    tool_errors: int = 0
    reward: float = 0.0
    seconds: float = 0.0

    def add(self, turn: Mapping[str, Any], report: Mapping[str, Any]) -> None:
        """Add the turn of one conversation. report: of the environment; may be empty."""
        self.conversations += 1
        for values in (turn, report):
            for name, value in values.items():
                setattr(self, name, getattr(self, name) + value)


def add_turns(sums: list[TurnSums], row: Mapping[str, Any]) -> None:
    """Add a recorded rollout, turn by turn; one without turns adds nothing."""
    turns, reports = row.get("turns") or (), iter(row.get("reports") or ())
    sums += [TurnSums() for _ in range(len(turns) - len(sums))]
    for place, turn in zip(sums, turns, strict=False):
        place.add(turn, next(reports, {}) if turn["generated"] else {})


def turns_table(sums: Sequence[TurnSums]) -> Table | None:
    """Return a table of means by turn; None if there are no conversations."""
    rows = []
    for number, one in enumerate(sums, 1):
        count = max(one.conversations, 1)
        tokens = (one.observed / count, one.generated / count)
        calls = (one.tool_calls / count, one.tool_errors / count)
        counts = [f"{one.conversations:,}", *(f"{n:,.1f}" for n in tokens), *(f"{n:.2f}" for n in calls)]
        rows.append([str(number), *counts, f"{one.reward / count:.3f}", f"{1000 * one.seconds / count:,.1f}"])
    header = ["turn", "rollouts that have it", "tokens observed", "generated", "tool calls", "in vain", "reward", "ms"]
    return Table(header, rows, number_columns=7) if rows else None


def decoder(model: object) -> tuple[Decode | None, str]:
    """Return (function that decodes a model's tokens, ""), or (None, what the report lacks without it).

    Args:
        model: its directory, as the configuration has it.
    """
    from tokenizers import Tokenizer

    path = Path(str(model)) / "tokenizer.json"
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the tokenizers library raises a plain Exception
        return None, f"tokens of conversations one by one ({path}: {error})"
    return lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=False)), ""


def conversation_values(row: Mapping[str, Any], decode: Decode) -> list[dict[str, Any]]:
    """Return what a page shows of one conversation.

    Args:
        row: with tokens, logprobs, turns and reports of group_columns.SCHEMA.

    Returns:
        What the environment showed and what the model said, in order. Each has `said` (whether by the model), `facts`,
        `pieces` (text, shade or None, tooltip) and `left_out` (how many tokens).
    """
    reports, end, left, parts = iter(row.get("reports") or ()), 0, _MOST_TOKENS, list[dict[str, Any]]()
    for turn in row["turns"]:
        for name in ("observed", "generated"):
            begin, end = end, end + turn[name]
            if begin == end:
                continue
            generated = name == "generated"
            logprobs = row["logprobs"][begin:end] if generated else None
            ids = row["tokens"][begin:end]
            facts = [f"{end - begin} tokens", *(_facts(logprobs, next(reports, None)) if logprobs else ())]
            shown = min(len(ids), left)
            pieces = list(_pieces(ids[:shown], logprobs, decode))
            left -= shown
            parts.append({"said": generated, "facts": facts, "pieces": pieces, "left_out": len(ids) - shown})
    return parts


def sequences(row: Mapping[str, Any]) -> list[tuple[int, list[str]]]:
    """Return (depth, facts) of each sequence that an agent's model read from its first token on, as a tree: the parent
    of a sequence is the earlier one with the longest common beginning. Empty if the rollout is a single sequence.

    Args:
        row: with prompt_tokens, tokens, turns, reports and contexts of group_columns.SCHEMA.
    """
    whole, end = [*row["prompt_tokens"], *row["tokens"]], len(row["prompt_tokens"])
    reports, turns = iter(row.get("reports") or ()), iter(row["turns"])
    made: list[tuple[int, list[str]]] = []
    read: list[list[int]] = []
    begin = 0
    for number, length in enumerate(row.get("contexts") or (), 1):
        ids, sums, requests = whole[begin : begin + length], TurnSums(), 0
        begin += length
        while end < begin and (turn := next(turns, None)) is not None:
            end += turn["observed"] + turn["generated"]
            sums.add(turn, next(reports, {}) if turn["generated"] else {})
            requests += turn["generated"] > 0
        common = [_common(ids, other) for other in read]
        most = max(common, default=0)
        parent = common.index(most) if most else None
        read.append(ids)
        facts = [f"sequence {number}" + ("" if parent is None else f", from token {most} of sequence {parent + 1}")]
        facts.append(f"{requests} request{'s' * (requests != 1)}")
        facts.append(f"{sums.observed} tokens observed, {sums.generated} generated")
        if sums.tool_calls or sums.tool_errors:
            facts.append(f"tool calls {sums.tool_calls}, {sums.tool_errors} in vain")
        facts.append(f"{sums.seconds:.2f} s in the environment")
        made.append((0 if parent is None else made[parent][0] + 1, facts))
    return made


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """Return how many tokens are equal at the beginning of both."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _facts(logprobs: Sequence[float], report: Mapping[str, Any] | None) -> Iterator[str]:
    yield f"mean log-prob {math.fsum(logprobs) / len(logprobs):.3f}"
    if report is None:
        return
    if report["tool_calls"] or report["tool_errors"]:
        yield f"tool calls {report['tool_calls']}, {report['tool_errors']} in vain"
    if report["reward"]:
        yield f"reward {report['reward']:g}"
    yield f"{1000 * report['seconds']:.1f} ms in the environment"


def _pieces(
    ids: Sequence[int], logprobs: Sequence[float] | None, decode: Decode
) -> Iterator[tuple[str, int | None, str]]:
    """Yield (text, shade, tooltip) of each token, or of several that together make up one character. Without log-probs
    all tokens are one piece."""
    if logprobs is None:
        yield safe_text(decode(ids)), None, ""
        return
    begin, before = 0, ""
    for end in range(1, len(ids) + 1):
        text = decode(ids[max(begin - 1, 0) : end])
        if text.endswith(_BROKEN) and end < len(ids) and end - begin < _LONGEST_CHARACTER:
            continue
        lowest = min(logprobs[begin:end])
        yield safe_text(text.removeprefix(before)), _shade(lowest), f"p = {math.exp(lowest):.3g}"
        begin, before = end, decode(ids[end - 1 : end])


def _shade(logprob: float) -> int:
    return next((i for i, least in enumerate(SHADES) if math.exp(logprob) >= least), len(SHADES))


def sums_of(rows: Iterable[Mapping[str, Any]]) -> list[TurnSums]:
    """Return the sums of recorded rollouts."""
    sums: list[TurnSums] = []
    for row in rows:
        add_turns(sums, row)
    return sums
