"""Processes: placement, Ray actors (thin shells around actor/ and engine/), supervision, and the launch of a run.

In the core the only package that imports ray. Files, in the order of a start:

    launch.py            checks (preflight.py, restart_audit.py, run_algorithm.py, provenance.py), data (inputs.py), RUN
                         (run_directory.py), Ray (cluster.py, ray_private.py), parts.py with the places of ranks and
                         servers (placement.py), the loop under supervisor.py, interrupts.py
    policy_group.py      the ranks: ranks.py -> workers.py; batch_shards.py, slow_replicas.py;
                         weight_export.py, shard_export.py
    healing.py           ranks that died are replaced: healing_states.py, snapshot_store.py, snapshot_keepers.py
    embedded_group.py    embedded engines; sglang_engine.py: SGLang's, with ray_servers.py and answer_workers.py
    node_pools.py        verifiers and environments on all nodes; node_workers.py: these and answer workers
    context.py           what all of these get
"""
