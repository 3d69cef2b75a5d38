import pytest
from sglang_stub_fleets import Weights

from megatron_daro.engine.sglang import engine as engine_module
from megatron_daro.engine.sglang import fleet as fleet_module
from megatron_daro.sync.plan import Digest


@pytest.fixture
def weights():
    """Version 3, with a checksum, so that servers are asked for theirs."""
    made = Weights(3)
    made.digests = {"norm.weight": Digest("float32", "abc", "abc")}
    return made


@pytest.fixture
def no_pauses(monkeypatch):
    """Requests are made again at once, and a server whose requests fail is given up without a wait."""
    monkeypatch.setattr(engine_module, "_PAUSE_S", 0.001)
    monkeypatch.setattr(engine_module, "_LONGEST_PAUSE_S", 0.01)
    monkeypatch.setattr(fleet_module, "_FAILING_S", 0.0)
