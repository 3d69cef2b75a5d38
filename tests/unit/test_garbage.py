"""The collector of a driver: cycles that are new are found, and what is old is left alone."""

from __future__ import annotations

import asyncio
import gc
import weakref

import pytest

from megatron_daro.garbage import paused, spare_event_loop


@pytest.fixture(autouse=True)
def _as_before():
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)
    gc.unfreeze()


class Cycle:
    def __init__(self):
        self.me = self


async def gone(one):
    async with asyncio.timeout(20):
        while one() is not None:
            await asyncio.sleep(0.02)


@pytest.mark.parametrize("before", [True, False])
def test_while_modules_are_loaded_nothing_is_collected_and_then_it_is_as_before(before):
    (gc.enable if before else gc.disable)()
    try:
        with pytest.raises(KeyError), paused():
            assert not gc.isenabled()
            raise KeyError
        assert gc.isenabled() == before
    finally:
        gc.enable()


def test_new_cycles_are_found_and_a_full_collection_does_not_come():
    async def run():
        spare_event_loop()
        frozen, full = gc.get_freeze_count(), gc.get_stats()[2]["collections"]
        await gone(weakref.ref(Cycle()))
        kept = [[] for _ in range(300_000)]  # more than a quarter of what was there
        await gone(weakref.ref(Cycle()))
        assert gc.get_stats()[2]["collections"] == full and len(kept) == 300_000
        assert frozen > 10_000

    asyncio.run(run())
