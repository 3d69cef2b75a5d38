"""From a cluster file to numbers of jobs: what is asked of Slurm's commands, and what is said where they refuse.

The commands are shell scripts that answer as those of Slurm 22.05 do, and write down how they were called.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_daro.config import Config
from megatron_daro.errors import ConfigError
from megatron_daro.workshop.slurm import submission
from megatron_daro.workshop.slurm.cluster_file import ClusterFile
from megatron_daro.workshop.slurm.script import Job, script_of


def cluster(**fields: object) -> ClusterFile:
    return ClusterFile.model_validate({"partition": "gpu", **fields})


def config(**sections: object) -> Config:
    return Config.model_validate({"model": {"path": "x"}, "data": {"train": ("x",)}, **sections})


def job_in(place: Path, nodes: int = 4) -> Job:
    return Job("my-run", nodes, place / "run", place, (f"{place}/run.yaml",), 100, 300, 0)


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    """Set the body of one of Slurm's commands."""
    folder = tmp_path / "commands"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")

    def command(name: str, body: str) -> None:
        (folder / name).write_text(f'#!/bin/bash\necho "$*" >>{tmp_path}/calls\n{body}\n')
        (folder / name).chmod(0o755)

    return command


def calls(place: Path) -> list[str]:
    return (place / "calls").read_text().splitlines()


def test_a_chain_of_jobs_runs_one_script_each_after_the_one_before(tmp_path, slurm):
    """With several clusters sbatch --parsable prints number;cluster."""
    slurm("sbatch", f'echo "$(wc -l <{tmp_path}/calls);east"')
    job = job_in(tmp_path)
    job.folder.mkdir(parents=True)
    (job.folder / "finished").touch()
    assert submission.submit(job, cluster(), chain=3) == ["1", "2", "3"]
    script = job.folder / "job.sbatch"
    assert calls(tmp_path) == [
        f"--parsable {script}",
        f"--parsable --dependency=afterany:1 {script}",
        f"--parsable --dependency=afterany:2 {script}",
    ]
    assert script.read_text() == script_of(job, cluster()) and not (job.folder / "finished").exists()
    assert submission.submit(job, cluster()) == ["4"]


def test_slurms_own_opinion_of_a_job_is_returned_and_it_gets_the_script(tmp_path, slurm):
    """`sbatch --test-only` says when it would run on standard error."""
    slurm("sbatch", f"cat >{tmp_path}/given; echo 'sbatch: Job 7 to start at 2026-01-01' >&2")
    job = job_in(tmp_path)
    assert submission.ask_slurm(job, cluster()) == "sbatch: Job 7 to start at 2026-01-01"
    assert (tmp_path / "given").read_text() == script_of(job, cluster()) and calls(tmp_path) == ["--test-only"]


@pytest.mark.parametrize(("words", "hint"), [("allocation failure: Nodes are DOWN", True), ("Invalid qos", False)])
def test_nodes_that_are_only_down_for_now_are_no_reason_not_to_submit(tmp_path, slurm, words, hint):
    slurm("sbatch", f"echo '{words}' >&2; exit 1")
    with pytest.raises(ConfigError) as caught:
        submission.ask_slurm(job_in(tmp_path), cluster())
    assert words in str(caught.value)
    assert ("--no-test-only" in str(caught.value)) is hint


def test_a_command_that_is_not_there_or_fails_is_named(tmp_path, slurm, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path / "commands"))
    with pytest.raises(ConfigError, match=r"sbatch.*--dry-run"):
        submission.submit(job_in(tmp_path), cluster())
    slurm("sbatch", "echo said on standard output; exit 1")
    with pytest.raises(ConfigError, match=r"sbatch.*said on standard output"):
        submission.submit(job_in(tmp_path), cluster())


def test_a_partition_that_is_not_there_is_told_with_those_that_are(tmp_path, slurm):
    slurm("sinfo", '[ "$2" = --format=%R ] && printf "long\\ncpu\\nlong\\n"; exit 0')
    with pytest.raises(ConfigError, match=r"partition: got 'gpu'.*cpu, long"):
        submission.check_cluster(job_in(tmp_path), cluster())


@pytest.mark.parametrize(
    ("listed", "time", "nodes", "refused"),
    [
        ("up|1-00:00:00|4", "24:00:00", 4, None),  # as long and as large as may be
        ("up|1-00:00:00|3", "24:00:00", 4, "nodes: got 4"),
        ("up|1:00:01|4", "1:00:02", 4, "1:00:01"),
        ("up|1:00:00|2\nup|2:00:00|2", "2:00:00", 4, None),  # the longest limit counts, and all nodes
        ("down|infinite|2\nup|infinite|2", "2:00:00", 4, None),
        ("inact|infinite|4", "2:00:00", 4, "inact"),
        ("up|2-00:00:00|4", "2-01:00:00", 4, "2-00:00:00"),
    ],
)
def test_the_limits_of_a_partition_are_its_own(tmp_path, slurm, listed, time, nodes, refused):
    slurm("sinfo", f"echo '{listed}'")
    if refused is None:
        submission.check_cluster(job_in(tmp_path, nodes), cluster(time=time))
        return
    with pytest.raises(ConfigError) as caught:
        submission.check_cluster(job_in(tmp_path, nodes), cluster(time=time))
    assert refused in str(caught.value)


def test_an_image_file_must_be_there_and_a_name_of_a_registry_need_not(tmp_path, slurm, monkeypatch):
    slurm("sinfo", "echo 'up|infinite|4'")
    monkeypatch.chdir(tmp_path)
    for image in ("/nowhere/a.sqsh", "./a.sqsh"):
        with pytest.raises(ConfigError, match=rf"container\.image: got '{image}'"):
            submission.check_cluster(job_in(tmp_path), cluster(container={"image": image}))
    (tmp_path / "a.sqsh").touch()
    for image in ("./a.sqsh", "docker://x/y"):
        submission.check_cluster(job_in(tmp_path), cluster(container={"image": image}))


def test_gpus_are_asked_for_unless_the_partition_declares_none(slurm, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path / "commands"))
    assert submission.gres_of(cluster(gpus_per_node=8)) == 8  # no Slurm to ask
    slurm("sinfo", "true")
    assert submission.gres_of(cluster(gpus_per_node=8)) == 8  # no word is no "(null)"
    slurm("sinfo", "echo '(null)'")
    assert submission.gres_of(cluster(gpus_per_node=8)) == 0


def test_jobs_of_the_user_are_searched_for_the_script_of_this_one(tmp_path, slurm, monkeypatch):
    monkeypatch.setenv("LOGNAME", "me")
    job = job_in(tmp_path)
    slurm("squeue", f"echo '8|RUNNING|{job.folder}/job.sbatch   '")
    with pytest.raises(ConfigError, match="job 8"):
        submission.require_no_other_job(job)
    slurm("squeue", f"echo '8|RUNNING|{job.folder}/other|job.sbatch'")
    submission.require_no_other_job(job)


def test_a_job_has_what_recipe_and_cluster_file_say(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    recipe = config(trainer={"run_dir": str(tmp_path / ("n" * 70)), "steps": 12})
    job = submission.job_of(recipe, Path("r.yaml"), [], cluster(nodes=1))
    assert (job.steps, job.name, job.directory, job.signal_before_s) == (12, "n" * 64, tmp_path, 300)
    assert job.folder == tmp_path / ("n" * 70) / "slurm"
    assert (
        submission.job_of(recipe, Path("r.yaml"), [], cluster(nodes=1, signal_before_s=77), 900).signal_before_s == 77
    )
    assert submission.job_of(recipe, Path("r.yaml"), [], cluster(nodes=1), 900).signal_before_s == 900
    short = cluster(nodes=1, time="0:21")
    assert submission.job_of(recipe, Path("r.yaml"), [], short, 900).signal_before_s == 630  # half of the time
    odd = config(trainer={"run_dir": str(tmp_path / "a:b#c")})
    assert submission.job_of(odd, Path("r.yaml"), [], cluster(nodes=1)).name == "a-b-c"


def test_without_a_number_of_nodes_a_job_takes_as_few_as_hold_its_gpus():
    recipe = config(actor={"data_parallel": 15}, engine={"kind": "sglang", "replicas": 1})
    assert submission.nodes_of(recipe, cluster()) == 2 and submission.nodes_of(recipe, cluster(gpus_per_node=5)) == 4
    assert submission.nodes_of(recipe, cluster(nodes=2)) == 2
    with pytest.raises(ConfigError, match=r"nodes: got 1 .*allowed: at least 2"):
        submission.nodes_of(recipe, cluster(nodes=1))
