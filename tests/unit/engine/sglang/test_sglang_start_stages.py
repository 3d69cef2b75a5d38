"""While servers load, a person is told which is still to come."""

from __future__ import annotations

import asyncio

from sglang_pool import expected, section
from sglang_stub_fleets import StubHandle, run
from stub_server import StubServer

from megatron_daro.engine.sglang.asking import DirectAsker
from megatron_daro.engine.sglang.engine import SGLangEngine
from megatron_daro.routed_experts import ExpertsFolder


class LateHandle(StubHandle):
    """A server that is launched when it may."""

    def __init__(self, url):
        super().__init__(url)
        self.may_start = asyncio.Event()

    async def launch(self):
        await self.may_start.wait()
        return await super().launch()


def test_each_server_that_loads_is_named_in_turn(tmp_path):
    async def scenario():
        told = []
        async with StubServer() as one, StubServer() as two:
            handles = [LateHandle(one.url), LateHandle(two.url)]
            engine = SGLangEngine(
                {f"server {i}": handle for i, handle in enumerate(handles)},
                section(),
                expected(tmp_path),
                asker=DirectAsker(str, ExpertsFolder(tmp_path)),
                warn=print,
                loads=told.append,
                run_dir=tmp_path,
                seed=0,
                temperature=1.0,
                probe_tokens=[0, 1, 2],
            )
            starting = asyncio.ensure_future(engine.start())
            for so_far, handle in enumerate([None, handles[1], handles[0]]):
                if handle:
                    handle.may_start.set()
                while len(told) < min(so_far + 1, 2):
                    await asyncio.sleep(0.01)
            await starting
            await engine.close()
        assert told == ["server 1 of 2 loads", "server 2 of 2 loads"]

    run(scenario())
