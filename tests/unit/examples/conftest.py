"""The examples are scripts, not a package: their folders go onto the import path for these tests."""

import sys
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
for folder in (EXAMPLES, *(EXAMPLES / name for name in ("quickstart", "lab", "smollm2", "environments", "tool_use"))):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
