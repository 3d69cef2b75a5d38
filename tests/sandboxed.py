"""Skips what needs a sandbox where the kernel gives no namespaces, and nothing else: a sandbox that is broken fails."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_daro.errors import SandboxError
from megatron_daro.process_tree import descendants
from megatron_daro.sandbox import Sandbox, child


def require(box: Sandbox | None = None) -> None:
    try:
        (box or Sandbox()).check()
    except SandboxError as error:
        if "unshare" not in str(error).split(";")[0]:
            raise
        pytest.skip(str(error))


def processes(pid: int) -> list[int]:
    """Those of sandboxes below a process; of one whose code runs, three: two of its own, then the code."""
    found = []
    for one in descendants(pid):
        try:
            line = Path(f"/proc/{one}/cmdline").read_text().split("\0")
        except OSError:
            continue
        if child.__file__ in line or "main.py" in line:
            found.append(one)
    return found
