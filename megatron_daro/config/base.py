"""What every section of the configuration has in common.

YAML -> loading -> frozen sections -> the component that each belongs to. Refuses unknown keys, writes after
construction, infinities and NaN.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, TypeVar
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    ValidationInfo,
    field_validator,
)
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

T = TypeVar("T")
Decay = Annotated[float, Field(ge=0, lt=1)]
"""A decay rate of Adam."""


_LARGEST_INTEGER = 2**31 - 1
_FLOATS = (1e-30, 1e30)
OUT_OF_RANGE = "out_of_range"
"""Type of pydantic errors whose message is the text of what is allowed."""


def _named(value: object) -> object:
    if isinstance(value, str) and not value.strip():
        raise PydanticCustomError(OUT_OF_RANGE, "a path that is not empty (. is the working directory)")
    return value


def _expanded(path: Path) -> Path:
    if any(character < " " for character in str(path)) or any(len(os.fsencode(part)) > 255 for part in path.parts):
        allowed = "a path without control characters, each part of at most 255 bytes"
        raise PydanticCustomError(OUT_OF_RANGE, allowed)
    try:
        return path.expanduser()
    except RuntimeError as error:  # no such user, or no home directory
        raise ValueError(str(error)) from error


ExpandedPath = Annotated[Path, AfterValidator(_expanded), BeforeValidator(_named)]
"""A path in which a leading ~ is the home directory."""


def _greedy_or_warm(value: float) -> float:
    if 0 < value < _LEAST_TEMPERATURE:
        raise PydanticCustomError(
            OUT_OF_RANGE, f"0 (greedy), or at least {_LEAST_TEMPERATURE:g}: logits are divided by it"
        )
    return value


_LEAST_TEMPERATURE = 1e-3
Temperature = Annotated[float, AfterValidator(_greedy_or_warm)]
"""A sampling temperature."""


def _with_port(url: str) -> str:
    try:
        usable = urlsplit(url).port != 0
    except ValueError:
        usable = False
    if not usable:
        raise PydanticCustomError(OUT_OF_RANGE, "a URL with a port from 1 to 65535, or none")
    return url


def _each_once(urls: tuple[str, ...]) -> tuple[str, ...]:
    if len(set(urls)) < len(urls):
        raise PydanticCustomError(OUT_OF_RANGE, "each server once")
    return urls


Servers = Annotated[
    tuple[Annotated[str, Field(pattern=r"^https?://[^/\s]+$"), AfterValidator(_with_port)], ...],
    AfterValidator(_each_once),
]
"""Addresses of servers."""
Seed = Annotated[int, Field(ge=0, lt=2**63)]
"""A seed for 64-bit random generators."""


class Section(BaseModel):
    """A frozen group of options. The string under a field documents it; its default is given only at the field."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)

    @field_validator("*", mode="after")
    @classmethod
    def _refuse_senseless_numbers(cls, value: object, info: ValidationInfo) -> object:
        """Refuse numbers that C or fp32 could not hold later, whatever the field's own range."""
        for number in value if isinstance(value, tuple) else (value,):
            if isinstance(number, int) and abs(number) > _LARGEST_INTEGER and "seed" not in str(info.field_name):
                raise PydanticCustomError(OUT_OF_RANGE, "integers below 2^31")
            if isinstance(number, float) and number and not _FLOATS[0] <= abs(number) <= _FLOATS[1]:
                raise PydanticCustomError(OUT_OF_RANGE, "0, or numbers of a size from 1e-30 to 1e30")
        return value


def changed(section: Section) -> list[str]:
    """Return the names of the options that differ from their defaults."""
    return [name for name, field in type(section).model_fields.items() if getattr(section, name) != field.default]


def filled(value: T | None) -> T:
    """Return the value of a field that a file may leave unset, and that loading has filled in by now."""
    assert value is not None, "config.loading fills in what a file leaves open; make a Config with `resolve`"
    return value


@dataclass(frozen=True, slots=True)
class OneOf:
    """Allows these names, and `module:Class` for a user's own class; used in `Annotated[str, ...]`.

    package: a package whose tasksets are allowed too, as `package:TASKSET`, in the form of its hub. own: what messages
    call a user's own class or function.
    """

    names: tuple[str, ...]
    package: str = ""
    own: str = "module:Class"

    @property
    def words(self) -> str:
        """What is allowed, in words."""
        tasksets = (f"{self.package}:TASKSET",) if self.package else ()
        return f"one of {', '.join((*self.names, *tasksets))}, or {self.own} of your own"

    def __get_pydantic_core_schema__(self, source: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Pydantic's hook."""
        return core_schema.no_info_after_validator_function(self._checked, handler(source))

    def _checked(self, value: str) -> str:
        package, _, name = value.partition(":")
        form = r"[\w./@+-]+" if package == self.package else r"[A-Za-z_]\w*"
        if value not in self.names and not (re.fullmatch(r"[A-Za-z_][\w.]*", package) and re.fullmatch(form, name)):
            raise ValueError(self.words)
        return value
