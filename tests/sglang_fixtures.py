"""Fixtures that tests/contract and tests/sglang share: the two servers of the session, and their logs on failure.

Both folders' conftest.py import them; the servers are cached by function, so that they are started once for both.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
from sglang_pool import Pool, required_environment


@pytest.fixture(scope="session")
def pool(tmp_path_factory):
    """The servers (`pool.up()` starts them); skips where SGLang is not installed."""
    required_environment()
    found = _pool(tmp_path_factory.getbasetemp())
    yield found
    found.down()


@cache
def _pool(base: Path) -> Pool:
    directory = base / "sglang_servers"
    directory.mkdir()
    return Pool(directory)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """Adds the ends of the servers' logs to the report of a test that failed."""
    report = yield
    if report.failed and "pool" in getattr(item, "funcargs", {}):
        report.sections.append(("logs of the SGLang servers", item.funcargs["pool"].tails()))
    return report
