"""What watches a run: the first that ends is the news, and nothing goes on waiting afterwards."""

from __future__ import annotations

import asyncio

import pytest

from megatron_daro.runtime.supervisor import supervised


@pytest.mark.parametrize("dies", [True, False])
def test_nothing_watches_on_when_the_run_has_ended(dies):
    async def endless():
        await asyncio.Future()

    async def ended():
        return OSError("gone")

    async def run():
        endings = [endless(), endless(), *([ended()] if dies else [])]
        work = endless() if dies else asyncio.sleep(0.01, "done")
        try:
            return await supervised(work, [], endings)
        finally:
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert asyncio.all_tasks() == {asyncio.current_task()}

    if dies:
        with pytest.raises(OSError, match="gone"):
            asyncio.run(run())
    else:
        assert asyncio.run(run()) == "done"
