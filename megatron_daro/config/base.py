"""What every section of the configuration has in common, and classes of a user's own that one names by `module:Class`.

YAML -> loading -> these frozen records -> the component that owns the section. Refuses unknown keys, writes after
construction, infinities and NaN.

`import_own_class` imports what a field names (`engine.kind`, `reward.verifier`, `environment.kind`) and compares it
with its Protocol, before any process is started.
"""

from __future__ import annotations

import importlib
import inspect
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

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

from megatron_daro.errors import ConfigError

T = TypeVar("T")
Decay = Annotated[float, Field(ge=0, lt=1)]
"""A decay rate of Adam."""


_LARGEST_INTEGER = 2**31 - 1
_FLOATS = (1e-30, 1e30)
OUT_OF_RANGE = "out_of_range"
"""Pydantic's type of an error that says itself what is allowed."""


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
Seed = Annotated[int, Field(ge=0, lt=2**63)]
"""What generators of 64 bits take."""


class Section(BaseModel):
    """A frozen group of options. The string under a field documents it; its default stands on the field only."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)

    @field_validator("*", mode="after")
    @classmethod
    def _refuse_senseless_numbers(cls, value: object, info: ValidationInfo) -> object:
        """Refuse what no field means, whatever its own range: numbers that C or fp32 cannot hold later."""
        for number in value if isinstance(value, tuple) else (value,):
            if isinstance(number, int) and abs(number) > _LARGEST_INTEGER and "seed" not in str(info.field_name):
                raise PydanticCustomError(OUT_OF_RANGE, "integers below 2^31")
            if isinstance(number, float) and number and not _FLOATS[0] <= abs(number) <= _FLOATS[1]:
                raise PydanticCustomError(OUT_OF_RANGE, "0, or numbers of a size from 1e-30 to 1e30")
        return value


def filled(value: T | None) -> T:
    """Return the value of a field that may be left open in a file, and that loading has filled in by now."""
    assert value is not None, "config.loading fills in what a file leaves open; make a Config with `resolve`"
    return value


@dataclass(frozen=True, slots=True)
class OneOf:
    """Allows these names, and `module:Class` for what a user brings along; stands in `Annotated[str, ...]`."""

    names: tuple[str, ...]

    @property
    def words(self) -> str:
        """What is allowed."""
        return f"one of {', '.join(self.names)}, or module:Class of your own"

    def __get_pydantic_core_schema__(self, source: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Pydantic's hook."""
        return core_schema.no_info_after_validator_function(self._checked, handler(source))

    def _checked(self, value: str) -> str:
        if value not in self.names and not re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", value):
            raise ValueError(self.words)
        return value


def import_own_class(
    field: str,
    name: str,
    *,
    builtin: str,
    protocol: type,
    methods: Mapping[str, int],
    arguments: Mapping[str, Any],
    options: str,
) -> type[Any]:
    """Import a class and compare its signatures with those of its Protocol; make nothing.

    Args:
        field: of the configuration, for messages. name: module:Class. builtin: the names that the field takes besides.
        protocol: what it must offer. methods: method -> number of positional arguments, `self` aside; those that are
            coroutines in the Protocol must be some here, the others must not.
        arguments: keyword arguments of its constructor. options: the field that holds the user's part of them.

    Raises:
        ConfigError: it cannot be imported, is no class, lacks a method, or takes other arguments.
    """
    module, _, attribute = name.partition(":")
    try:
        own = getattr(importlib.import_module(module), attribute)
    except Exception as error:  # a user's module may raise anything
        raise ConfigError(
            f"{field}: got {name!r}, which cannot be imported ({type(error).__name__}: {error}); allowed are "
            f"{builtin}, or module:Class of your own; fix: put the folder of the module into PYTHONPATH"
        ) from error
    if not isinstance(own, type):
        raise ConfigError(f"{field}: got {name!r}, which is no class; allowed: a class that offers {protocol.__name__}")
    for method, count in methods.items():
        function, wanted = getattr(own, method, None), getattr(protocol, method)
        asynchronous = inspect.iscoroutinefunction(wanted)
        if inspect.iscoroutinefunction(function) != asynchronous or not _accepts(function, count + 1):
            text = f"{'async ' if asynchronous else ''}def {method}{inspect.signature(wanted)}"
            raise ConfigError(f"{field}: {name}.{method} does not fit {protocol.__name__}; write it as `{text}`")
    try:
        inspect.signature(own).bind(**arguments)
    except (TypeError, ValueError) as error:
        taken = f"must take {', '.join(arguments)} by keyword" if arguments else "must need no arguments"
        raise ConfigError(
            f"{field}: {name}: {error}; its constructor {taken}; fix: correct the class or {options}"
        ) from None
    return own


def _accepts(function: Callable[..., Any] | None, count: int) -> bool:
    try:
        assert function is not None
        inspect.signature(function).bind(*range(count))
    except (AssertionError, TypeError, ValueError):
        return False
    return True
