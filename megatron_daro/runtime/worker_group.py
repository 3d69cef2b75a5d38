"""A set of worker processes that belong together: Ray actor handles by name, ended together.

Place in the data flow: policy_group.py and engine_group.py each own one; the supervisor watches them.
"""

from __future__ import annotations

from collections import UserDict
from typing import Any

import ray


class WorkerGroup(UserDict[str, Any]):
    """Handles by name. `dismissed` tells the supervisor that the end of a process is wanted."""

    def __init__(self) -> None:
        super().__init__()
        self.dismissed = False

    def dismiss(self) -> None:
        """End every process. May be called twice."""
        self.dismissed = True
        for worker in self.data.values():
            ray.kill(worker, no_restart=True)
        self.data.clear()
