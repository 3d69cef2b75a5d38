"""The program of a worker that sleeps or works for as long as it is told, then says what it is told."""

from __future__ import annotations

import sys
import time
from typing import Any

from megatron_daro.errors import RewardError
from megatron_daro.worker_pool import child
from megatron_daro.worker_pool.process import Program

PROGRAM = Program("worker_program", {}, "judge", "reward", "it needs 100", RewardError)


def answer(request: dict[str, Any]) -> dict[str, Any]:
    time.sleep(request.get("sleeps_s", 0.0))
    begun = time.process_time()
    while time.process_time() - begun < request.get("works_s", 0.0):
        pass
    return {"reason": request.get("says", "right")}


if __name__ == "__main__":
    sys.exit(child.main(sys.argv[1], lambda settings: answer))
