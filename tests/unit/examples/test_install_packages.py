"""What the quickstart and tests/run.sh install with: nothing is installed a second time."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
INSTALLER = "tools/install_packages.sh"
PYTHON = """#!/usr/bin/env bash
case "$2" in
    'import sys; print(sys.prefix)') echo {prefix} ;;
    pip) echo "$@" >>{prefix}/pip.log ;;
    *) exec {python} "$@" ;;
esac
"""


def test_nothing_is_installed_twice_until_the_requirements_change(tmp_path):
    python = tmp_path / "python"
    python.write_text(PYTHON.format(prefix=tmp_path, python=sys.executable))
    python.chmod(0o755)
    checkout = tmp_path / "checkout"
    (checkout / "tools").mkdir(parents=True)
    for name in ("setup.py", "requirements.txt", INSTALLER):
        (checkout / name).write_text((ROOT / name).read_text())

    def installed() -> tuple[str, int]:
        done = subprocess.run(
            ["bash", str(checkout / INSTALLER), str(python)], capture_output=True, text=True, check=True
        )
        return done.stdout.split()[0], len((tmp_path / "pip.log").read_text().splitlines())

    assert installed() == ("installing", 1)
    assert installed() == ("already", 1)
    (checkout / "requirements.txt").open("a").write("# another\n")
    assert installed() == ("installing", 2)
