"""What verifiers on several nodes say of their starts; real workers are lost in tests/fault/test_lost_workers.py."""

import asyncio

from run_configuration import run_context

from megatron_daro.runtime.node_pools import VerifierPools


def test_failed_starts_are_summed_over_the_pools_of_all_nodes(monkeypatch):
    verdicts = VerifierPools(run_context())
    said = iter([(["right"], 0, 2), (["wrong"], 1, 3), (["right"], 0, 4)])  # of a pool: since it began

    async def call(method, *pairs):
        return next(said)

    monkeypatch.setattr(verdicts.workers, "call", call)
    counts = [(asyncio.run(verdicts.score_async([("a", "b", "c")])), verdicts.failed_starts) for _ in range(3)]
    assert counts == [(["right"], 2), (["wrong"], 5), (["right"], 7)]
