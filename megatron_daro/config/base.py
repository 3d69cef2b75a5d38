"""What every section of the configuration has in common.

Place in the data flow: YAML -> loading -> these frozen records -> the component that owns the section. Refuses
unknown keys, writes after construction, infinities and NaN.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Decay = Annotated[float, Field(ge=0, lt=1)]
"""A decay rate of Adam."""


class Section(BaseModel):
    """A frozen group of options. The string under a field documents it; its default stands on the field only."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)
