"""Writes the smallest failing case as a script for torchrun, to be run, changed and run again."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from megatron_daro.workshop.check_loss.cases import Case

_TEXT = '''"""{title}

{cause}

    torchrun --nproc-per-node {processes} {name}
"""

import json
import sys

sys.path.insert(0, "")

from megatron_daro.workshop.check_loss.cases import from_json
from megatron_daro.workshop.check_loss.pool import find_function
from megatron_daro.workshop.check_loss.rank import under_torchrun

CASE = json.loads(
    """
{case}
"""
)

if __name__ == "__main__":
    under_torchrun(from_json(CASE), find_function("{function}"))
'''


def write_script(path: Path, function: str, case: Case, cause: str) -> None:
    """Write the script. Raises OSError."""
    text = _TEXT.format(
        title=f"{function} differs from one process: {case.describe()}.",
        cause=f"Likely cause: {cause}.",
        processes=case.world_size,
        name=path.name,
        case=json.dumps(asdict(case), indent=1),
        function=function,
    )
    path.write_text(text, encoding="utf-8")
