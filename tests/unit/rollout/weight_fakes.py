"""The receiving end of a weight sync for tests of the loop, without processes."""

from __future__ import annotations

from typing import Any

from megatron_daro.sync.plan import SendReport


class FakeUpdate:
    """Takes the weights that a FakePolicy exports."""

    def __init__(self, engine: Any, version: int) -> None:
        self.engine, self.version, self.received, self.report = engine, version, [], SendReport()

    async def prepare(self) -> list:
        return self.received

    async def install(self, report: SendReport) -> None:
        self.report = report
        (self.engine.weights,), self.engine.version = self.received, self.version

    async def probe(self) -> dict:
        return {}

    async def accept(self) -> dict:
        return {"sync/bytes": float(self.report.num_bytes)}
