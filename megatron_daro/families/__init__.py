"""Model families, one table each: a file here with a `FAMILY` is a supported family, with no other change.

Place in the data flow: config.json -> the family of its `model_type` -> config/model_shape.py (keys and defaults) and
convert/mapping.py (tensor names). docs/models.md shows how to add one.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from functools import cache

from megatron_daro.families.table import Family


@cache
def families() -> Mapping[str, Family]:
    """Return `model_type` of config.json -> table, for every file in this folder that has a `FAMILY`."""
    by_kind = {}
    for module in pkgutil.iter_modules(__path__):
        family = getattr(importlib.import_module(f"{__name__}.{module.name}"), "FAMILY", None)
        if family is not None:
            by_kind[family.model_type] = family
    return by_kind
