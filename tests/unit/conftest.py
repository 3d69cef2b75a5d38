"""What several tests of the training loop in this folder need."""

import pytest


@pytest.fixture
def noted():
    """Deadlines of a loop that write down each wait (rollout/loop_fakes.py)."""
    from loop_fakes import NotedDeadlines

    NotedDeadlines.waits = []
    yield NotedDeadlines()
    NotedDeadlines.waits = []
