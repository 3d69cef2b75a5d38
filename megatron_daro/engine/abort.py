"""A thread-safe request to stop generating, looked at between two decoding steps.

Place in the data flow: Engine.abort (event loop) -> AbortSignal -> decoding (worker thread).
"""

from __future__ import annotations

import threading
from collections.abc import Collection


class AbortSignal:
    """Which groups of one submission are to stop. Aborting cannot be taken back."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._all = False
        self._groups: frozenset[int] = frozenset()
        self.changes = 0

    def abort(self, group_ids: Collection[int] | None = None) -> None:
        """Asks the given groups to stop; None asks all."""
        with self._lock:
            self._all = self._all or group_ids is None
            self._groups |= frozenset(group_ids or ())
            self.changes += 1  # last: who sees the count sees the groups

    def hits(self, group_id: int) -> bool:
        """Whether that group is to stop."""
        return self._all or group_id in self._groups
