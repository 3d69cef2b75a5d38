"""Python's garbage collector: out of the way of an event loop that must not be held, and of modules being loaded."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator
from contextlib import contextmanager

_PAUSE_S = 0.1
_YOUNG_BETWEEN_FULL = 50_000
"""Collections of younger objects before one that looks at all: more than an hour."""


@contextmanager
def paused() -> Iterator[None]:
    """Collect nothing meanwhile. For loading modules or a model: hundreds of thousands of objects are made then, none
    of them garbage, and looking for some takes a sixth of the time."""
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()


def spare_event_loop() -> None:
    """Leave what is there now out of the collector's search, look at what is new ten times a second, and at all of the
    rest hardly ever. On a running event loop, until that is closed.

    A full collection holds every thread: 0.3 s for 300,000 objects of modules, 0.4 s for 10,000 conversations. By
    default one comes as often as what lives has grown by a quarter; and where old objects are freed while new ones are
    made, 100,000 new ones gather before the next look. What a run makes is freed by its reference counts: of 2,000
    conversations a full collection finds nothing.
    """
    gc.freeze()
    gc.set_threshold(*gc.get_threshold()[:2], _YOUNG_BETWEEN_FULL)
    loop = asyncio.get_running_loop()

    def look() -> None:
        gc.collect(1)
        loop.call_later(_PAUSE_S, look)

    look()
