"""How long to wait before retrying what failed."""

_MOST_DOUBLINGS = 32
"""Keeps the pause within a float: a server may be restarted thousands of times."""


def backoff_s(earlier: int, *, first_s: float, longest_s: float) -> float:
    """Return the pause after a failure: `first_s`, doubled by each of the `earlier` ones in a row, up to
    `longest_s`."""
    return min(first_s * 2 ** min(earlier, _MOST_DOUBLINGS), longest_s)
