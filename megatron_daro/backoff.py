"""How long to wait before the next try of what failed."""

_MOST_DOUBLINGS = 32
"""Beyond it no float could hold the pause of a server that may be started again thousands of times."""


def backoff_s(failures: int, *, first_s: float, longest_s: float) -> float:
    """Double the pause with each failure, up to the longest; the first one where nothing failed before."""
    return min(first_s * 2 ** min(failures, _MOST_DOUBLINGS), longest_s)
