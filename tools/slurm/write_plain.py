"""Writes tools/slurm/train.sbatch: the batch script of examples/slurm/cluster.yaml, to be edited by hand."""

from pathlib import Path

from megatron_daro.workshop.slurm.cluster_file import read_cluster_file
from megatron_daro.workshop.slurm.script import Job, script_of

ROOT = Path(__file__).resolve().parents[2]
JOB = Job("my-run", 4, Path("/shared/me/runs/my-run"), Path("/shared/me"), ("/shared/me/run.yaml",), 100, 300)

if __name__ == "__main__":
    text = script_of(JOB, read_cluster_file(ROOT / "examples" / "slurm" / "cluster.yaml"))
    (ROOT / "tools" / "slurm" / "train.sbatch").write_text(text, encoding="utf-8")
