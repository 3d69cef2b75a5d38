"""A machine that is only busy: Ray gets the time it needs, and what it lacked is named."""

from __future__ import annotations

import inspect
import os
import time
from types import SimpleNamespace

import psutil
import pytest
from ray._private import node, services

from megatron_daro.errors import WorkerError
from megatron_daro.runtime import cluster

TOO_SLOW = "The current node timed out during startup. This could happen because some of the raylet failed."


@pytest.fixture
def slow_ray(monkeypatch):
    """Ray whose raylet answers after so many seconds; its start as `Node.__init__` has it."""
    now, known = [1000.0], SimpleNamespace(after=0.0, lives=True)
    raylet = SimpleNamespace(pid=2**22 + 1, name=lambda: "raylet", status=lambda: "running", suspend=lambda: None)
    raylet.children = list
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(time, "sleep", lambda s: now.__setitem__(0, now[0] + s))
    monkeypatch.setattr(psutil.Process, "children", lambda self, recursive=False: [raylet] if known.lives else [])

    def get_node(address, node_id):
        if now[0] < started[-1] + known.after:
            now[0] += 0.5
            raise RuntimeError("not there yet")
        return {}

    def init(**options):
        started.append(now[0])
        while True:
            try:
                return services.get_node("address", "id")
            except RuntimeError:
                if now[0] - started[-1] > 30:
                    raise Exception(TOO_SLOW) from None

    started: list[float] = []
    monkeypatch.setattr(services, "get_node", get_node)
    monkeypatch.setattr(cluster.ray, "init", init)
    monkeypatch.setattr(cluster.ray, "shutdown", lambda: None)
    return known, started


def test_ray_asks_for_its_node_where_patience_is_put():
    source = inspect.getsource(node.Node.__init__)
    assert "ray._private.services.get_node(" in source and "raylet_start_wait_time_s = 30" in source


def test_a_raylet_that_needs_two_minutes_is_waited_for(slow_ray):
    known, started = slow_ray
    known.after, told = 120.0, []
    with cluster.cluster(1, tell=told.append):
        pass
    assert len(started) == 1 and told == ["starting Ray"]


def test_ray_that_never_starts_is_tried_three_times_and_the_load_is_named(slow_ray, monkeypatch):
    known, _ = slow_ray
    known.after, told = 1e9, []
    monkeypatch.setattr(os, "getloadavg", lambda: (312.4, 0.0, 0.0))
    with pytest.raises(WorkerError, match=r"load 312 on \d+ CPUs"), cluster.cluster(1, tell=told.append):
        pytest.fail("it did not start")
    assert told == ["starting Ray", "starting Ray, second try", "starting Ray, third try"]
    monkeypatch.setattr(os, "getloadavg", lambda: (0.1, 0.0, 0.0))
    with pytest.raises(WorkerError, match="free memory"), cluster.cluster(1):
        pytest.fail("it did not start")


def test_a_raylet_that_died_is_not_waited_for(slow_ray):
    known, started = slow_ray
    known.after, known.lives = 1e9, False
    with pytest.raises(WorkerError), cluster.cluster(1):
        pytest.fail("it did not start")
    assert started[-1] - started[0] < 100
