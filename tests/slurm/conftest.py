"""A real Slurm for these tests; they are skipped where it is not installed (tests/slurm_install.sh)."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import pytest
from filelock import FileLock
from run_fixtures import tiny  # noqa: F401
from slurm_jobs import Slurm

pytestmark = pytest.mark.heavy
LOCKED_S = 800


@pytest.fixture(scope="module")
def slurm():
    """Two nodes; ended after the tests of a file."""
    yield from _cluster(("slurmctld", "slurmd", "munged", "sbatch"), "bash tests/slurm_install.sh")


@pytest.fixture(scope="module")
def slurm_with_accounts():
    """Another one beside it, which runs jobs of the account "research" only."""
    needed = ("slurmctld", "slurmd", "munged", "sbatch", "slurmdbd", "mariadbd")
    yield from _cluster(needed, "bash tests/slurm_install.sh --accounts", ACCOUNTS="yes", PORT="16917")


@pytest.fixture
def slurm_with_spares():
    """Another one of four nodes, which notices soon that one is gone."""
    needed = ("slurmctld", "slurmd", "munged", "sbatch")
    settings = {"NODES": "4", "SLURMD_TIMEOUT": "15", "PORT": "17017"}
    yield from _cluster(needed, "bash tests/slurm_install.sh", **settings)


def _cluster(needed, installed_by, **settings):
    missing = [name for name in needed if not shutil.which(name)]
    if missing or os.geteuid() != 0:
        pytest.skip(f"needs root and {', '.join(missing) or 'Slurm'}: {installed_by}")
    # Daemons and nodes have fixed ports and addresses: those of another process of pytest end first.
    mine = FileLock(Path(tempfile.gettempdir()) / "megatron_daro_slurm.lock", timeout=LOCKED_S)
    with mine, tempfile.TemporaryDirectory(prefix="slurm") as directory:  # short: paths of sockets are limited
        cluster = Slurm(Path(directory), **settings)
        try:
            cluster.up()
            yield cluster
        finally:
            cluster.down()
