"""Processes: placement, Ray actors (thin shells around actor/ and engine/), their deaths, and the launch of a run.

The only package of the core that imports ray. Files, in the order of a start:

    launch.py            checks (run_algorithm.py, preflight.py), RUN (run_directory.py), data (inputs.py), where to go
                         on (provenance.py, restart_audit.py), Ray (cluster.py, ray_private.py), parts.py with the
                         places of ranks and servers (placement.py), the loop until it or a process ends, interrupts.py
    policy_group.py      the ranks: ranks.py, rank_info.py -> train_worker.py; step_shards.py, slow_replicas.py;
                         weight_export.py, shard_export.py, ray_sender.py
    healing.py           ranks that died are replaced: healing_states.py, snapshot_store.py, snapshot_keepers.py
    embedded_engines.py    embedded engines; sglang_engine.py: SGLang's, with ray_servers.py and answer_workers.py
    node_pools.py        verifiers and environments on all nodes; node_workers.py: actors of these and answer workers
    ray_calls.py         how all of these call actors; worker_group.py: notices deaths; frozen_workers.py:
                         frozen processes are killed
    context.py           what all of these get
"""
