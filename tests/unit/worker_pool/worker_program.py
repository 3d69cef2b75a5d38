"""The program that the workers of these tests are said to run: nothing starts it."""

from __future__ import annotations

from megatron_daro.errors import RewardError
from megatron_daro.worker_pool.process import Program

PROGRAM = Program("module", {}, "judge", "reward", "it needs 100", RewardError)
