"""YAML text <-> plain values, strictly, and `a.b=c` overrides from the command line, laid over a file's values.

The only reader and writer of YAML in the package. Built on PyYAML's safe loader; scalars follow YAML 1.2, so `1e-6` is
a number, and `no`, `1:30` and dates are text; so are `010`, `0o17` and `0x1F`. Refuses duplicate keys, tags
(`!!python/...`), keys that are not text, and documents of more than 10,000 values after aliases are expanded.

An override's value is YAML: a mapping is merged key by key, any other value replaces the old one; a number in the path
is a position in a list; of two equal paths the last wins. Whether keys exist is checked later, for the file and
overrides together.

ruamel.yaml (0.19.1), a maintained library for YAML 1.2, would not make this file shorter: it reads `010` as 10, `0o17`
as 15 and `2024-01-01` as a date, so it too needs a table of scalars; it stops at the first duplicate key or tag, while
this file reports all problems with their lines; a `%YAML 1.1` line turns `yes` into true; aliases may expand without
end or contain themselves; and a text with U+0085 comes back changed.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import yaml

from megatron_daro.config.problems import Problem, show

_MOST_VALUES = 10_000
_CORE = "tag:yaml.org,2002:"
_CORE_TAGS = {_CORE + name for name in ("str", "int", "float", "bool", "null", "map", "seq", "merge")}
_SCALARS = (
    ("bool", r"^(?:true|True|TRUE|false|False|FALSE)$", "tTfF"),
    ("null", r"^(?:~|null|Null|NULL|)$", ["~", "n", "N", ""]),
    ("int", r"^[-+]?(?:0|[1-9][0-9_]*)$", "-+0123456789"),
    ("float", r"^[-+]?(?:\.[0-9]+|[0-9][0-9_]*(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?$", "-+.0123456789"),
    ("float", r"^(?:[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$", "-+."),
    ("merge", r"^<<$", "<"),
)


class _Loader(yaml.SafeLoader):
    """SafeLoader with the scalar rules of YAML 1.2."""

    yaml_implicit_resolvers: dict = {}


class _Dumper(yaml.SafeDumper):
    """SafeDumper that quotes every text that YAML 1.1 or YAML 1.2 would not read as text."""

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, False)


def _represent_text(dumper: yaml.Dumper, text: str) -> yaml.ScalarNode:
    # In plain and single-quoted style PyYAML folds line breaks, and loses U+0085, U+2028 and U+2029.
    style = '"' if any(c in text for c in "\n\r\x85\u2028\u2029") else None
    return dumper.represent_scalar(_CORE + "str", text, style=style)


_Dumper.add_representer(str, _represent_text)

for _name, _pattern, _first in _SCALARS:
    # A number with a leading zero ("010") is octal in YAML 1.1 and decimal in 1.2: here it stays text.
    _exact = re.compile(_pattern if _name != "float" else rf"^(?![-+]?0[0-9]){_pattern[1:]}")
    _Loader.add_implicit_resolver(_CORE + _name, _exact, list(_first))
    _Dumper.add_implicit_resolver(_CORE + _name, _exact, list(_first))


@dataclass(slots=True)
class Document:
    """The content of a text: plain values, the line (from 1) of each dotted path, and the problems."""

    value: object = None
    lines: dict[str, int] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)


def parse(text: str, source: str) -> Document:
    """Read one YAML document.

    Args:
        text: the document.
        source: its name in messages.

    Returns:
        A Document; with problems, its value is None.
    """
    document = Document()
    loader = None
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is not None:
            _Inspection(document, source).visit(node, "", ())
        if node is not None and not document.problems:
            document.value = loader.construct_document(node)
    except yaml.YAMLError as error:
        document.problems.append(_syntax_problem(error, source))
    except (ValueError, RecursionError) as error:
        document.problems.append(Problem(source, str(error), "plain YAML values", "write the value as plain text"))
    finally:
        if loader is not None:
            loader.dispose()
    return document


def dump(value: object) -> str:
    """Return plain values as YAML text, which `parse` reads back as equal values."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, default_flow_style=False, width=120)


class _Inspection:
    """Walks the nodes of a document before any value is constructed: notes lines, and reports duplicate keys, tags and
    too many values."""

    def __init__(self, document: Document, source: str) -> None:
        self.document, self.source = document, source
        self.count, self.exhausted = 0, False

    def visit(self, node: yaml.Node, path: str, parents: tuple[int, ...]) -> None:
        self.count += 1
        if self.exhausted:
            return
        if self.count > _MOST_VALUES or id(node) in parents:
            self.exhausted = True
            got = f"more than {_MOST_VALUES} values, aliases unfolded"
            self._report(node, path, got, f"at most {_MOST_VALUES}", "name fewer, or write aliases out")
            return
        if node.tag not in _CORE_TAGS:
            self._report(node, path, f"the tag {show(node.tag)}", "plain values without tags", "remove the tag")
        self.document.lines.setdefault(path, node.start_mark.line + 1)
        parents = (*parents, id(node))
        if isinstance(node, yaml.SequenceNode):
            for index, item in enumerate(node.value):
                self.visit(item, _join(path, str(index)), parents)
        elif isinstance(node, yaml.MappingNode):
            self._mapping(node, path, parents)

    def _mapping(self, node: yaml.MappingNode, path: str, parents: tuple[int, ...]) -> None:
        first_line: dict[str, int] = {}
        for key, value in node.value:
            if key.tag == _CORE + "merge":
                self.visit(value, _join(path, "<<"), parents)
                continue
            if not isinstance(key, yaml.ScalarNode) or key.tag != _CORE + "str":
                key_text = show(key.value) if isinstance(key, yaml.ScalarNode) else "a list or mapping"
                got = f"the key {key_text}"
                self._report(key, path or self.source, got, "keys that are text", "put it in quotes")
                continue
            line = key.start_mark.line + 1
            if key.value in first_line:
                got = f"the key twice, in lines {first_line[key.value]} and {line}"
                self._report(key, _join(path, key.value), got, "each key once", "remove one of the two")
            first_line.setdefault(key.value, line)
            self.visit(value, _join(path, key.value), parents)
            self.document.lines[_join(path, key.value)] = line

    def _report(self, node: yaml.Node, path: str, got: str, allowed: str, fix: str) -> None:
        place = f"{self.source}:{node.start_mark.line + 1}"
        self.document.problems.append(Problem(path or self.source, got, allowed, fix, place=place))


def _join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


def _syntax_problem(error: yaml.YAMLError, source: str) -> Problem:
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    place = f"{source}:{mark.line + 1}:{mark.column + 1}" if mark else source
    words = [getattr(error, "context", None), getattr(error, "problem", None) or getattr(error, "reason", None)]
    got = ": ".join(word for word in words if word) or str(error)
    fix = "indent with spaces, write `key: value`, and put text that holds : # { [ or quotes into quotes"
    return Problem(place, f"a YAML syntax error ({got})", "YAML", fix)


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
        document = parse(value_text, f"command line {path.strip()}")
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
        key: str | int = part
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
