"""Worker processes that are killed when they exceed time or memory, for verifiers and environments.

Requests in JSON -> pool.py (one queue, one request in flight per worker) -> process.py -> child.py -> replies in JSON.
"""
