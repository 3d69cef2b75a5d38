"""Entry point of the group `verl.plugins`: imports plugins/verl.py, and logs the reason if that fails.

verl's own loader logs the reason at level DEBUG only, and goes on without DARO.
"""

from __future__ import annotations

import logging

try:
    import megatron_daro.plugins.verl  # noqa: F401
except Exception as error:
    logging.getLogger(__name__).error("DARO is off in this process, its adapter of verl was not loaded: %s", error)
    raise
