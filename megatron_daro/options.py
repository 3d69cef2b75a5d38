"""Options of a class: the keyword arguments of its constructor, as its signature has them.

The algorithms and verifiers of the package and those of a user take theirs from a mapping of the configuration
(`algorithm.options`, `reward.options`). Types are judged here, by annotations; ranges by the constructors. Standard
library only: `algo` is used inside other frameworks.
"""

from __future__ import annotations

import difflib
import inspect
import re
import types
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints


@dataclass(frozen=True, slots=True)
class Option:
    """annotation, default: from the signature; Parameter.empty if it has none. meaning: from the docstring."""

    annotation: Any
    default: Any
    meaning: str


_WORDS = {bool: "true or false", int: "an integer", float: "a number", str: "text", type(None): "null"}


def options_of(own: type, *, without: Collection[str] = ()) -> dict[str, Option]:
    """Return the options that a class takes, and those of its bases that its constructor hands on as `**name`.

    Args:
        own: the class. without: arguments that the user does not give.
    """
    found: dict[str, Option] = {}
    for base in own.__mro__:
        function = vars(base).get("__init__")
        if function is None or base is object:
            continue
        parameters = list(inspect.signature(function).parameters.values())[1:]
        hints, meanings = _hints(function), _meanings(function)
        for parameter in parameters:
            if parameter.kind in (parameter.KEYWORD_ONLY, parameter.POSITIONAL_OR_KEYWORD):
                annotation = hints.get(parameter.name, parameter.empty)
                option = Option(annotation, parameter.default, meanings.get(parameter.name, ""))
                found.setdefault(parameter.name, option)
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
            break
    return {name: option for name, option in found.items() if name not in without}


def wrong_option(options: Mapping[str, Option], given: Mapping[str, Any]) -> str:
    """Return what is wrong with the first given option of a wrong type, as `name: got ..., allowed ...`; empty if all
    fit.

    Names that the class does not have are left to its constructor, which may know more (`unknown_option`).
    """
    for name, value in given.items():
        annotation = options[name].annotation if name in options else inspect.Parameter.empty
        if not _fits(value, annotation):
            return f"{name}: got {value!r}, allowed is {allowed(annotation)}"
    return ""


def unknown_option(name: str, options: Collection[str]) -> str:
    """Return, in the form of `wrong_option`, that a class has no such option."""
    near = difflib.get_close_matches(name, options, n=1)
    fix = f"did you mean {near[0]}?" if near else "remove it"
    return f"{name}: got the unknown option {name!r}, allowed are {', '.join(options) or 'none'}; {fix}"


def allowed(annotation: object) -> str:
    """Return in words what an annotation allows; empty if values are not checked against it."""
    if get_origin(annotation) is Literal:
        return f"one of {', '.join(map(str, get_args(annotation)))}"
    if get_origin(annotation) in (Union, types.UnionType):
        return ", or ".join(map(allowed, get_args(annotation)))
    return _WORDS.get(annotation, "") if isinstance(annotation, type) else ""


def _fits(value: object, annotation: object) -> bool:
    if get_origin(annotation) in (Union, types.UnionType):
        return any(_fits(value, one) for one in get_args(annotation))
    if get_origin(annotation) is Literal:
        return value in get_args(annotation)
    if annotation in (int, float):
        kinds = (int, float) if annotation is float else int
        return isinstance(value, kinds) and not isinstance(value, bool)
    return isinstance(value, annotation) if isinstance(annotation, type) and annotation in _WORDS else True


def _meanings(function: Callable[..., Any]) -> dict[str, str]:
    """Return what the section Args of a docstring says of each argument."""
    _, _, section = (inspect.getdoc(function) or "").partition("\nArgs:\n")
    entries = re.findall(r"^    (\w+): (.*(?:\n {5,}.*)*)", section.partition("\n\n")[0], flags=re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in entries}


def _hints(function: Callable[..., Any]) -> Mapping[str, Any]:
    try:
        return get_type_hints(function)
    except (NameError, TypeError):  # names that only a type checker imports
        return {}
