"""Accounts, on a real Slurm with an accounting database: a wrong one is refused at once, with those that there are."""

from __future__ import annotations

import re

import pytest
from slurm_jobs import SlurmJob

pytestmark = [pytest.mark.heavy, pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.mark.parametrize("options", [(), ("--test-only",)], ids=["submit", "test-only"])
def test_a_wrong_account_is_refused_with_the_right_ones(slurm_with_accounts, tiny, tmp_path, options):
    with pytest.raises(AssertionError, match="configuration error") as refused:
        SlurmJob(slurm_with_accounts, tiny.config, tmp_path / "run", {"account": "reserch"}, *options)
    said = re.sub(r"\s+", " ", str(refused.value))
    assert "account: got 'reserch', which Slurm refuses you in partition 'main'; allowed: of yours, research" in said
    assert not slurm_with_accounts.run("squeue", "-h")


def test_the_right_account_is_taken_and_stands_with_the_job(slurm_with_accounts, tiny, tmp_path):
    """Up to the check of the node, which fails for want of disk."""
    site = {"account": "research", "free_disk_gib": 10**7}
    job = SlurmJob(slurm_with_accounts, tiny.config, tmp_path / "run", site)
    assert job.slurm.run("squeue", "-h", "-t", "all", "-j", job.number, "-o", "%a").strip() == "research"
    assert "GiB free; free_disk_gib asks for" in job.ended()
