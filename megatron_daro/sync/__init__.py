"""Weights from the policy's ranks to the engine, and whether they arrived. The files by where they run:

In the driver: publish.py runs an update, step by step (colocation.py: whose turn it is on shared GPUs); routes.py says
    which rank hands out what on which host; plan.py has the records that the two ends exchange; check.py compares their
    log-probs.
In a rank: senders.py -> digests.py, fp8_cast.py -> transport_sender.py, buckets.py -> the file of the transport
    (`SENDERS` in senders.py); files.py writes files instead of sending.
From shards to shards: shard_layouts.py -> shard_plan.py -> shard_sender.py -> in_server/, which runs inside SGLang.
"""
