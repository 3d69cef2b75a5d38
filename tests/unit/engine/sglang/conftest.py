import pytest
from sglang_stub_fleets import Weights

from megatron_daro.engine.sglang import fleet, generation, memory, receiving, starting, supervision, teacher
from megatron_daro.sync.plan import Digest

PAUSES = {
    generation: {"_PAUSE_S": 0.001, "_LONGEST_PAUSE_S": 0.01},
    fleet: {"_FAILING_S": 0.0},
    memory: {"_IDLE_POLL_S": 0.01},
    starting: {"_POLL_S": 0.02, "_SAY_S": 0.1},
    supervision: {
        **dict.fromkeys(("_WATCH_S", "_RESTART_PAUSE_S", "_SETTLE_POLL_S"), 0.02),
    },
    teacher: {"_PAUSE_S": 0.0},
    receiving: {"_FLUSH_PAUSE_S": 0.01},
}
"""Requests are made again at once, servers are looked at and started again at once."""


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch):
    for module, pauses in PAUSES.items():
        for name, seconds in pauses.items():
            monkeypatch.setattr(module, name, seconds)


@pytest.fixture
def weights():
    """Version 3, with a checksum, so that servers are asked for theirs."""
    made = Weights(3)
    made.digests = {"norm.weight": Digest("float32", "abc", "abc")}
    return made
