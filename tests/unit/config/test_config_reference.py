"""docs/configuration.md says what the sections say."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def test_the_configuration_reference_is_up_to_date():
    command = [sys.executable, str(ROOT / "tools" / "config_reference.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
