import pytest
from sglang_stub_fleets import Weights


@pytest.fixture
def weights():
    """Version 3, with a checksum, so that servers are asked for theirs."""
    made = Weights(3)
    made.checksums = {"norm.weight": ("float32", "abc")}
    return made
