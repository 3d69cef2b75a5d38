"""Which worker processes of pools (worker_pool/) a test has started."""

from __future__ import annotations

import os

import psutil


def workers() -> list[psutil.Process]:
    """Those that are alive; forks of them keep their command line, wherever they went."""
    mine = f'"parent_pid": {os.getpid()}'
    lines = [(one, one.info["cmdline"] or [""]) for one in psutil.process_iter(["cmdline"])]
    return [one for one, line in lines if mine in line[-1] and one.status() != psutil.STATUS_ZOMBIE]


def worker_pids() -> set[int]:
    """Their process ids."""
    return {one.pid for one in workers()}
