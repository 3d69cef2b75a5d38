"""The sections in words: which paths exist, and what a field allows.

Place in the data flow: read by loading for messages and by tools/config_reference.py for the documentation.
Everything comes from the annotations, so no text can disagree with what is checked.
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, TypeGuard, Union, get_args, get_origin

import annotated_types
from pydantic.fields import FieldInfo

from megatron_daro.config.base import OneOf, Section

ITEM = "*"
"""Stands for the position in a list in a dotted path, as in `data.eval.*.name`."""

_SCALARS = {bool: "true or false", int: "an integer", float: "a number", str: "text", Path: "a path", Any: "anything"}


def is_section(annotation: object) -> TypeGuard[type[Section]]:
    """Whether the annotation is a Section class."""
    return isinstance(annotation, type) and issubclass(annotation, Section)


def strip(annotation: object) -> tuple[Any, list[Any]]:
    """Return an annotation without `Annotated` and `| None`, and the constraints that stood on it."""
    metadata: list[Any] = []
    while True:
        if get_origin(annotation) is Annotated:
            annotation, *extra = get_args(annotation)
            metadata += [m for e in extra for m in (e.metadata if isinstance(e, FieldInfo) else [e])]
        elif get_origin(annotation) in (Union, types.UnionType):
            (annotation,) = [a for a in get_args(annotation) if a is not type(None)]
        else:
            return annotation, metadata


def section_of(annotation: object) -> type[Section] | None:
    """Return the Section that an annotation is, or that its list items are."""
    plain, _ = strip(annotation)
    if get_origin(plain) is tuple:
        plain, _ = strip(get_args(plain)[0])
    return plain if is_section(plain) else None


def walk(section: type[Section], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Every path below a section with its field; a nested section itself comes before its fields."""
    for name, field in section.model_fields.items():
        path = f"{prefix}{name}"
        yield path, field
        inner = section_of(field.annotation)
        if inner is not None:
            item = "" if is_section(strip(field.annotation)[0]) else f"{ITEM}."
            yield from walk(inner, f"{path}.{item}")


def _bounds(metadata: list[Any]) -> str:
    words = []
    for kind, sign in (
        (annotated_types.Ge, ">="),
        (annotated_types.Gt, ">"),
        (annotated_types.Le, "<="),
        (annotated_types.Lt, "<"),
    ):
        bounds = [getattr(m, kind.__name__.lower()) for m in metadata if isinstance(m, kind)]
        words += [f"{sign} {bound if isinstance(bound, int) else f'{bound:g}'}" for bound in bounds]
    return " and ".join(words)


def _text(metadata: list[Any]) -> str:
    names = [m.words for m in metadata if isinstance(m, OneOf)]
    if names:
        return names[0]
    patterns = [m.pattern for m in metadata if getattr(m, "pattern", None)]
    if patterns:
        return f"text that matches {patterns[0]}"
    return "text, not empty" if any(isinstance(m, annotated_types.MinLen) for m in metadata) else "text"


def _list(items: tuple[Any, ...], metadata: list[Any]) -> str:
    if items[-1] is not Ellipsis:
        return f"a list of {len(items)}: {', '.join(allowed(item) for item in items)}"
    least = [m.min_length for m in metadata if isinstance(m, annotated_types.MinLen)]
    size = f" of at least {least[0]}" if least else ""
    return f"a list{size}, each {allowed(items[0])}"


def allowed(annotation: object, metadata: list[Any] | None = None) -> str:
    """Return what an annotation allows, in words."""
    optional = get_origin(annotation) in (Union, types.UnionType) and type(None) in get_args(annotation)
    plain, inner = strip(annotation)
    metadata = [*(metadata or []), *inner]
    if get_origin(plain) is Literal:
        text = f"one of {', '.join(map(str, get_args(plain)))}"
    elif get_origin(plain) is tuple:
        text = _list(get_args(plain), metadata)
    elif get_origin(plain) is dict:
        text = "a mapping"
    elif is_section(plain):
        text = f"a mapping with the keys {', '.join(plain.model_fields)}"
    elif plain is str:
        text = _text(metadata)
    else:
        text = " ".join(filter(None, [_SCALARS[plain], _bounds(metadata)]))
    return f"{text}, or null" if optional else text


def field_allowed(field: FieldInfo) -> str:
    """Return what a field allows, in words."""
    return allowed(field.annotation, field.metadata)


def choices(annotation: object, metadata: list[Any]) -> tuple[str, ...]:
    """Return the names that a Literal annotation or a `OneOf` knows, else nothing."""
    annotation, inner = strip(annotation)
    if get_origin(annotation) is Literal:
        return get_args(annotation)
    return next((m.names for m in [*metadata, *inner] if isinstance(m, OneOf)), ())
