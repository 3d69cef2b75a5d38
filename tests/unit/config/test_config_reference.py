"""docs/configuration.md says what the sections say."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def test_the_configuration_reference_is_up_to_date():
    command = [sys.executable, str(ROOT / "tools" / "config_reference.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_it_reads_the_sections_of_its_own_checkout(tmp_path):
    for folder in ("tools", "megatron_daro"):
        (tmp_path / folder).mkdir()
    script = Path(shutil.copy(ROOT / "tools" / "config_reference.py", tmp_path / "tools"))
    (tmp_path / "megatron_daro" / "__init__.py").write_text('raise SystemExit("the package beside tools/")')
    done = subprocess.run([sys.executable, str(script), "--check"], capture_output=True, text=True, check=False)
    assert "the package beside tools/" in done.stderr
