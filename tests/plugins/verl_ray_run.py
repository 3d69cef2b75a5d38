"""verl's real worker group on a local Ray: which worker processes have DARO, and what the driver says of it.

    python verl_ray_run.py RANKS      such as 0,1: the workers that load the plug-in; the driver does

The worker is verl's ActorRolloutRefWorker in verl's WorkerDict (`verl_small_worker`); its actor trains nothing.
"""

from __future__ import annotations

import os
import sys

import ray
import torch
import verl_small_worker
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.single_controller.ray.base import create_colocated_worker_cls

import megatron_daro.plugins.verl as adapter


def main(ranks: str) -> None:
    variables = {"PYTHONPATH": os.environ["PYTHONPATH"], "RANKS_WITH_DARO": ranks}
    ray.init("local", num_cpus=4, include_dashboard=False, runtime_env={"env_vars": variables})
    classes = {"actor_rollout": RayClassWithInitArgs(ray.remote(verl_small_worker.SmallWorker))}
    pool = RayResourcePool([2], use_gpu=False, max_colocate_count=1)
    merged = RayWorkerGroup(pool, create_colocated_worker_cls(classes), device_name="cpu")
    group = merged.spawn(set(classes))["actor_rollout"]
    print("before:", group.update_actor(None))  # nobody scored a batch with DARO: as without it
    adapter.daro_advantage(torch.tensor([[1.0], [0.0]]), torch.ones(2, 1), ["a", "a"])
    print("after:", group.update_actor(None))


if __name__ == "__main__":
    main(sys.argv[1])
