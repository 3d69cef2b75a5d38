"""The lab's own algorithms for tests: puts examples/lab on the import path (of child processes too), and names them."""

import sys
from pathlib import Path

_LAB = str(Path(__file__).resolve().parents[1] / "examples" / "lab")
if _LAB not in sys.path:
    sys.path.append(_LAB)

CONFIGURED = {
    "fade": "lab_algorithms:Fade",
    "lambda_grpo": "lab_algorithms:LambdaGrpo",
    "daro_cells": "lab_algorithms:DaroCells",
}
"""What `algorithm.name` is for each."""
ENVIRONMENT = {"PYTHONPATH": _LAB}
"""Of commands that use them."""


def configured(name: str) -> str:
    """Return what `algorithm.name` is for an algorithm of the package or of the lab."""
    return CONFIGURED.get(name, name)
