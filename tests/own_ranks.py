"""Ranks of another class in the runs of this process: ones that kill themselves.

Used by tests/fault/killed_ranks.py.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import ray.cloudpickle

from megatron_daro.runtime.ranks import Ranks
from megatron_daro.runtime.ray_calls import actor_class, remote_class
from megatron_daro.runtime.train_worker import _GROUPS, TrainWorker


def install(make: Callable[[Any], Any]) -> None:
    """Have every rank be of the class that `make` derives from the product's; its module goes to the ranks by value,
    since they cannot import it."""
    made_in = make.func if isinstance(make, partial) else make
    ray.cloudpickle.register_pickle_by_value(sys.modules[made_in.__module__])
    rank_class = TrainWorker.__ray_metadata__.modified_class  # type: ignore[attr-defined]
    made = remote_class(concurrency_groups=_GROUPS, max_restarts=0, max_task_retries=0)(make(rank_class))

    def start_process(self: Ranks, rank: int) -> Any:
        return actor_class(made).options(**self._placement.rank(rank)).remote(rank, self._run.log_dir)

    Ranks.start_process = start_process  # type: ignore[method-assign]
