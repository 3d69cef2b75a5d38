"""A problem of a configuration, how a rule states it, and how a list of problems is reported.

Loading and checks collect Problems; one ConfigError carries them all, so nothing stops at the first.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_daro.config.base import Section, changed
from megatron_daro.errors import ConfigError

_LONGEST_VALUE = 120
_ALIKE = 0.6
"""Least similarity of names for a typing error: one of two letters missing gives 0.67, unrelated words give less than
0.5."""


@dataclass(frozen=True, slots=True)
class Problem:
    """A wrong field: its dotted path, the value that was given, what is allowed, how to fix it.

    also: further fields on which the check depends; if one of them is wrong itself, this problem says nothing new and
        is left out.
    place: `file:line`, if known.
    """

    field: str
    got: str
    allowed: str
    fix: str
    also: tuple[str, ...] = ()
    place: str = ""

    def __str__(self) -> str:
        place = f" ({self.place})" if self.place else ""
        return f"{self.field}{place}: got {self.got}; allowed: {self.allowed}; fix: {self.fix}"


def show(value: object) -> str:
    """Return a value as a user would write it, cut to one line."""
    text = "null" if value is None else str(value).lower() if isinstance(value, bool) else repr(value)
    return text if len(text) <= _LONGEST_VALUE else text[: _LONGEST_VALUE - 3] + "..."


def wrong(settings: object, field: str, allowed: str, fix: str, *, beside: str = "", got: str = "") -> Problem:
    """Return the problem that a field has a value that it must not have, given the values of other fields.

    Args:
        settings: a Config, or a mapping with some of its sections.
        field: dotted path, such as `rollout.keep_surplus`.
        allowed, fix: texts for the user.
        beside: paths, separated by spaces, of the other fields that the rule looked at: the message shows their values,
            and if one of them is wrong itself the problem is not reported.
        got: text in place of the values.
    """
    also = tuple(beside.split())
    if not got:
        others = {path: _value_at(settings, path) for path in also}
        texts = [f"{path} {_text(value)}" for path, value in others.items() if value is not _ABSENT]
        got = _text(_value_at(settings, field)) + (f" with {', '.join(texts)}" if texts else "")
    return Problem(field, got, allowed, fix, also=also)


_ABSENT = object()


def _value_at(settings: object, path: str) -> object:
    """Return the value of a dotted path; `_ABSENT` if the settings do not have it."""
    for part in path.split("."):
        if isinstance(settings, Mapping):
            settings = settings.get(part, _ABSENT)
        elif isinstance(settings, Sequence) and not isinstance(settings, str):
            settings = settings[int(part)]
        else:
            settings = getattr(settings, part, _ABSENT)
    return settings


def _text(value: object) -> str:
    """Return a resolved value as a user would write it; for a section, the names of its options that were changed."""
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, Section):
        return ", ".join(changed(value))
    if isinstance(value, tuple):
        return f"[{', '.join(map(_text, value))}]"
    return show(str(value) if isinstance(value, Path) else value)


def config_error(source: str, problems: Sequence[Problem]) -> ConfigError:
    """Return one error with every problem on its own line.

    Args:
        source: the file, for the first line.
        problems: at least one.
    """
    noun = "problem" if len(problems) == 1 else "problems"
    return ConfigError("\n".join([f"{source}: {len(problems)} {noun}", *(f"  {problem}" for problem in problems)]))


def concerns(problem: Problem, fields: Iterable[str]) -> bool:
    """Return whether the problem depends on one of the fields (or on a field inside or around one of them)."""
    used = (problem.field, *problem.also)
    return any(a == b or a.startswith(f"{b}.") or b.startswith(f"{a}.") for a in used for b in fields)


def similarity(a: str, b: str) -> float:
    """Return how alike two names are, 0 to 1; case does not matter, and hyphens equal underscores."""
    a, b = (name.lower().replace("-", "_") for name in (a, b))
    return difflib.SequenceMatcher(None, a, b).ratio()


def nearest_paths(unknown: str, known: Sequence[str], *, at_most: int = 4) -> list[str]:
    """Return the known dotted paths that an unknown one most likely means, best first; empty if none is similar.

    The last part decides; among equals, paths in the same section come first. So `actor.learning_rate` finds
    `actor.optimizer.learning_rate`.
    """
    *parents, leaf = unknown.split(".")

    def score(path: str) -> float:
        *path_parents, path_leaf = path.split(".")
        shared = sum(1 for a, b in zip(parents, path_parents, strict=False) if a == b)
        distance = len(parents) + len(path_parents) - 2 * shared
        return similarity(leaf, path_leaf) - 0.05 * distance

    alike = [path for path in known if similarity(leaf, path.rpartition(".")[2]) >= _ALIKE]
    ranked = sorted(alike, key=score, reverse=True)[:at_most]
    best = score(ranked[0]) if ranked else 0.0
    return [path for path in ranked if score(path) > best - 0.1]


def did_you_mean(names: Sequence[str], otherwise: str) -> str:
    """Return `did you mean a or b?`, or `otherwise` if there is no name."""
    return f"did you mean {' or '.join(names)}?" if names else otherwise


def check_passthrough(section: str, given: Mapping[str, Any], known: Iterable[str]) -> list[Problem]:
    """Return the problems of keys that are passed on to an upstream library under its own names.

    Args:
        section: dotted path of the mapping, such as `engine.sglang.arguments`.
        given: the mapping of the user.
        known: upstream's names, without those that other options of this package set.
    """
    names = sorted(known)
    return [
        Problem(
            field=f"{section}.{key}",
            got=f"the unknown key {show(key)} with value {show(value)}",
            allowed=f"the {len(names)} names that upstream has and no other option sets",
            fix=did_you_mean(nearest_paths(key, names), "remove it, or look its name up in upstream's documentation"),
        )
        for key, value in given.items()
        if key not in names
    ]
