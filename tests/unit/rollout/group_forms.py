"""Groups as values that compare equal only where every bit is equal, and as they come back from a file."""

from __future__ import annotations

from dataclasses import fields

import numpy as np

from megatron_daro.rollout.group_columns import RecordedGroup, decode, encode
from megatron_daro.types import Group, Rollout


def plain_rollout(rollout: Rollout) -> list:
    values = [getattr(rollout, field.name) for field in fields(rollout)]
    return [(v.dtype.str, v.tobytes()) if isinstance(v, np.ndarray) else v for v in values]


def plain_group(group: Group) -> tuple:
    return group.group_id, group.prompt, [plain_rollout(r) for r in group.rollouts], group.verdicts


def through_parquet(records: list[RecordedGroup]) -> list[RecordedGroup]:
    """What a reader of the file gets."""
    return list(decode([encode(records)])) if records else []
