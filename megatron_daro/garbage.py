"""Keeps Python's garbage collector out of the way of an event loop that must not stall, and of modules being loaded."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator
from contextlib import contextmanager

_PAUSE_S = 0.1
_YOUNG_BETWEEN_FULL = 50_000
"""Collections of younger objects between two full ones: more than an hour."""


@contextmanager
def paused() -> Iterator[None]:
    """Collect nothing within the block. For loading modules or a model: that makes hundreds of thousands of objects,
    none of them garbage, and searching them takes a sixth of the time."""
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()


def spare_event_loop() -> None:
    """Exclude the objects that exist now from collections, collect new ones ten times a second, and run a full
    collection hardly ever. Needs a running event loop, and lasts until that is closed.

    A full collection stops every thread: 0.3 s for 300,000 objects of modules, 0.4 s for 10,000 conversations. By
    default one runs whenever the living objects have grown by a quarter; and if old objects are freed while new ones
    are made, 100,000 new ones gather before the next collection. A run's objects are freed by reference counting: after
    2,000 conversations a full collection finds nothing.
    """
    gc.freeze()
    gc.set_threshold(*gc.get_threshold()[:2], _YOUNG_BETWEEN_FULL)
    loop = asyncio.get_running_loop()

    def look() -> None:
        gc.collect(1)
        loop.call_later(_PAUSE_S, look)

    look()
