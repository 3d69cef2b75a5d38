"""`a.b=c` overrides from the command line, laid over the values of the file.

Between the YAML file and the validation of sections. The value is read as YAML; a mapping is
merged key by key, anything else replaces; a number in the path is a position in a list; the last of two equal paths
wins. Whether a key exists is not judged here: validation does that for file and overrides alike.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from megatron_daro.config import yaml_text
from megatron_daro.config.problems import Problem, show

_FORM = "key.path=value, such as rollout.temperature=0.8 or data.train=[a.jsonl,b.jsonl]"


def apply_overrides(tree: Mapping[str, Any], overrides: Sequence[str]) -> tuple[dict[str, Any], list[Problem]]:
    """Lay overrides over a tree of plain values.

    Args:
        tree: values of the file; not changed.
        overrides: texts `a.b=c`.

    Returns:
        The new tree and the problems of overrides that could not be applied.
    """
    result = copy.deepcopy(dict(tree))
    problems: list[Problem] = []
    for text in overrides:
        path, equals, value_text = text.partition("=")
        parts = path.strip().split(".")
        if not equals or not all(parts):
            problems.append(Problem("command line", show(text), _FORM, "write the path, an equals sign, the value"))
            continue
        document = yaml_text.parse(value_text, f"command line {path.strip()}")
        if document.problems:
            problems += document.problems
            continue
        problem = _assign(result, parts, document.value)
        problems += [problem] if problem else []
    return result, problems


def _assign(tree: dict[str, Any], parts: list[str], value: object) -> Problem | None:
    target: Any = tree
    for depth, part in enumerate(parts):
        here = ".".join(parts[: depth + 1])
        key: Any = part
        if isinstance(target, list):
            if not part.isdecimal() or int(part) >= len(target):
                return _wrong_position(".".join(parts), part, len(target))
            key = int(part)
        elif not isinstance(target, dict):
            got = f"a path through {'.'.join(parts[:depth])}, which is {show(target)}"
            return Problem(".".join(parts), got, "a path through mappings and lists", "shorten the path")
        if here == ".".join(parts):
            target[key] = _merge(target.get(key) if isinstance(target, dict) else target[key], value)
            return None
        if isinstance(target, dict) and target.get(key) is None:
            target[key] = {}
        target = target[key]
    return None


def _merge(old: object, new: object) -> object:
    if not (isinstance(old, dict) and isinstance(new, dict)):
        return new
    return {**old, **{key: _merge(old.get(key), value) for key, value in new.items()}}


def _wrong_position(path: str, part: str, length: int) -> Problem:
    allowed = f"a position from 0 to {length - 1}" if length else "nothing: the list is empty"
    return Problem(path, f"the position {show(part)} in a list of {length}", allowed, "override the whole list")
