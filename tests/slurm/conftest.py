"""A real Slurm for these tests; they are skipped where it is not installed (tests/slurm_install.sh)."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import pytest
from run_fixtures import tiny  # noqa: F401
from slurm_jobs import Slurm

pytestmark = pytest.mark.heavy


@pytest.fixture(scope="session")
def slurm():
    """Two nodes; ended after the tests."""
    missing = [name for name in ("slurmctld", "slurmd", "munged", "sbatch") if not shutil.which(name)]
    if missing or os.geteuid() != 0:
        pytest.skip(f"needs root and {', '.join(missing) or 'Slurm'}: bash tests/slurm_install.sh")
    with tempfile.TemporaryDirectory(prefix="slurm") as directory:  # short: paths of sockets are limited
        cluster = Slurm(Path(directory))
        cluster.up()
        yield cluster
        cluster.down()
