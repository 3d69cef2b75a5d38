"""Weights from the policy's ranks to the engine, and whether they arrived. Its rooms:

The driver: publish.py runs an update, step by step (colocation.py: whose turn it is on shared GPUs); routes.py says
    which rank hands out what on which host; plan.py has what goes between the two ends; check.py compares their
    log-probs.
A rank: senders.py -> digests.py, fp8_cast.py -> sender.py, buckets.py -> broadcast.py, handles.py or adapters.py;
    files.py writes, and sends nothing.
From shards to shards: shard_layouts.py -> shard_plan.py -> shard_sender.py -> in_server/, which runs inside SGLang.
"""
