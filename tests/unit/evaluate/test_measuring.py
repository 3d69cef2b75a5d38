"""An evaluation gives servers no weights: what would leave them with random ones is refused before anything starts."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from megatron_daro.config.sections import SGLangSection
from megatron_daro.errors import ConfigError
from megatron_daro.workshop.evaluate.measuring import ask_all


def test_servers_that_wait_for_blocks_are_refused():
    engine = SimpleNamespace(sglang=SGLangSection(fp8_blocks=True))
    plan = SimpleNamespace(config=SimpleNamespace(engine=engine))
    with pytest.raises(ConfigError, match=r"engine\.sglang\.fp8_blocks: got true"):
        ask_all(plan, notices=None)
