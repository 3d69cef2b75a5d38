"""The second fifty thousand schedules of test_rank_schedules.py: pytest-xdist runs one file in one process."""

from __future__ import annotations

import pytest
from rank_schedules import no_ray
from test_rank_schedules import run_all


@pytest.fixture(autouse=True)
def patched():
    with no_ray() as patch:
        yield patch


@pytest.mark.heavy
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("part", range(10, 20))
def test_the_other_fifty_thousand_schedules(part):
    run_all(range(500 + 5_000 * part, 5_500 + 5_000 * part))
