import pytest
from sglang_stub_fleets import Weights

from megatron_daro.sync.plan import Digest


@pytest.fixture
def weights():
    """Version 3, with a checksum, so that servers are asked for theirs."""
    made = Weights(3)
    made.digests = {"norm.weight": Digest("float32", "abc", "abc")}
    return made
