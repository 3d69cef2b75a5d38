import os

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="module")  # not longer: idle ranks keep busy threads of gloo
def rank_pool():
    from ranks import RankPool

    pool = RankPool(4)
    yield pool
    pool.close()
