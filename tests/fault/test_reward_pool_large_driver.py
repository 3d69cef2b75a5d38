"""A driver with much memory does not count against its verifier workers."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
ballast = bytearray(900 * 2**20)
ballast[::4096] = b"x" * len(ballast[::4096])
import resource
assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss > 800 * 1024
from megatron_daro.reward.pool import RewardPool
with RewardPool("math", workers=1, memory_mib=512) as pool:
    print([v.correct for v in pool.score([(r"\\boxed{3}", "3"), (r"\\boxed{4}", "3")])])
"""


def test_workers_start_under_a_driver_larger_than_their_limit():
    command = [sys.executable, "-c", SCRIPT]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.stdout.strip() == "[True, False]", done.stderr
