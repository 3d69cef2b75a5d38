"""How the user's Ctrl-C ends the work of another process between two pieces."""

from __future__ import annotations

from typing import Protocol


class StopFlag(Protocol):
    """Says whether the user wants the work to end."""

    def is_set(self) -> bool:
        """Whether it was raised."""


class StoppedError(Exception):
    """The work was ended from outside; the file is not complete."""


def raise_if_stopped(stop: StopFlag | None) -> None:
    """Raise StoppedError where the flag was raised."""
    if stop is not None and stop.is_set():
        raise StoppedError
