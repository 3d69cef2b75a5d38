"""Skips what needs a sandbox where the kernel gives no namespaces, and nothing else: a sandbox that is broken fails."""

from __future__ import annotations

import pytest

from megatron_daro.errors import SandboxError
from megatron_daro.sandbox import Sandbox


def require(box: Sandbox | None = None) -> None:
    try:
        (box or Sandbox()).check()
    except SandboxError as error:
        if "unshare" not in str(error).split(";")[0]:
            raise
        pytest.skip(str(error))
