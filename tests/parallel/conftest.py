import os

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")

COLOURED = {
    "test_fresh_moments",
    "test_host_memory",
    "test_kl_in_reward",
    "test_snapshots",
    "test_token_advantages",
}
"""Files whose policies always have storages of two colours (two_colours.py); a step takes five times as long then. The
others have them with --colours only."""


@pytest.fixture(scope="module")  # not longer: four idle ranks keep a gigabyte
def rank_pool(request):
    from ranks import RankPool

    name = request.module.__name__
    coloured = name in COLOURED or (request.config.getoption("--colours") and name != "test_two_colours")  # by itself
    pool = RankPool(4, coloured=coloured)
    yield pool
    pool.close()
