"""What a check finds: a difference beside its tolerance, or why it cannot run here."""

from __future__ import annotations

from dataclasses import dataclass


class NotHereError(Exception):
    """The check needs something that this machine or environment lacks; the message names it."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """difference: the largest found, in the unit that `of` names; passed where it is at most `tolerance`."""

    difference: float
    tolerance: float
    of: str

    @property
    def passed(self) -> bool:
        """Whether the difference is a number within the tolerance (NaN is not)."""
        return self.difference <= self.tolerance
