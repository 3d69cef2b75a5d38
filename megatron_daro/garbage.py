"""Python's garbage collector in a process whose event loop must not be held."""

from __future__ import annotations

import gc

_YOUNG_BETWEEN_FULL = 1000
"""Collections of younger objects before one that looks at all: about 8 million more objects than were freed."""


def spare_event_loop() -> None:
    """Leave what is there now out of the collector's search, and look through all of the rest seldom.

    A full collection holds every thread: 0.3 s for 300,000 objects of modules, 0.4 s for 10,000 conversations. By
    default one comes as often as what lives has grown by a quarter. What a run makes is freed by its reference counts:
    of 2,000 conversations a full collection finds nothing.
    """
    gc.freeze()
    gc.set_threshold(*gc.get_threshold()[:2], _YOUNG_BETWEEN_FULL)
