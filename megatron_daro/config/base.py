"""What every section of the configuration has in common.

Place in the data flow: YAML -> loading -> these frozen records -> the component that owns the section. Refuses
unknown keys, writes after construction, infinities and NaN.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

T = TypeVar("T")
Decay = Annotated[float, Field(ge=0, lt=1)]
"""A decay rate of Adam."""


def _expanded(path: Path) -> Path:
    try:
        return path.expanduser()
    except RuntimeError as error:  # no such user, or no home directory
        raise ValueError(str(error)) from error


ExpandedPath = Annotated[Path, AfterValidator(_expanded)]
"""A path in which a leading ~ is the home directory."""
Seed = Annotated[int, Field(ge=0, lt=2**63)]
"""What generators of 64 bits take."""


class Section(BaseModel):
    """A frozen group of options. The string under a field documents it; its default stands on the field only."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)


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
