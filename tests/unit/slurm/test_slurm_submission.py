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
    return Job("my-run", nodes, place / "run", place, (f"{place}/run.yaml",), 100, 300)


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


def test_the_directory_of_a_first_job_is_made_and_one_that_cannot_be_is_named(tmp_path, slurm):
    slurm("sbatch", "echo 7")
    assert submission.submit(job_in(tmp_path), cluster()) == ["7"]
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"trainer\.run_dir: got '.*/file/run', which cannot be written \(Not a dir"):
        submission.submit(job_in(tmp_path / "file"), cluster())


def test_slurms_own_opinion_of_a_job_is_returned_and_it_gets_the_script(tmp_path, slurm):
    """`sbatch --test-only` says when it would run on standard error."""
    slurm("sbatch", f"cat >{tmp_path}/given; echo 'sbatch: Job 7 to start at 2026-01-01' >&2")
    job = job_in(tmp_path)
    assert submission.tried(job, cluster()) == "sbatch: Job 7 to start at 2026-01-01"
    assert (tmp_path / "given").read_text() == script_of(job, cluster()) and calls(tmp_path) == ["--test-only"]


@pytest.mark.parametrize(("words", "hint"), [("allocation failure: Nodes are DOWN", True), ("Invalid qos", False)])
def test_nodes_that_are_only_down_for_now_are_no_reason_not_to_submit(tmp_path, slurm, words, hint):
    slurm("sbatch", f"echo '{words}' >&2; exit 1")
    with pytest.raises(ConfigError) as caught:
        submission.tried(job_in(tmp_path), cluster())
    assert f"sbatch --test-only: refused: {words}; fix: correct the cluster file" in str(caught.value)
    assert ("--no-test-only submits without asking" in str(caught.value)) is hint


def test_a_command_that_is_not_there_fails_or_does_not_answer_is_named(tmp_path, slurm, monkeypatch):
    monkeypatch.setattr(submission, "_TIMEOUT_S", 0.2)
    monkeypatch.setenv("PATH", str(tmp_path / "commands"))
    with pytest.raises(ConfigError, match=r"sbatch: not found; .*use --dry-run"):
        submission.submit(job_in(tmp_path), cluster())
    slurm("sbatch", "echo said on standard output; exit 1")
    with pytest.raises(ConfigError, match="sbatch --parsable: refused: said on standard output;"):
        submission.submit(job_in(tmp_path), cluster())
    slurm("sbatch", "exec /bin/sleep 5")
    with pytest.raises(ConfigError, match=r"sbatch: no answer in 0.2 s; Slurm's controller is down"):
        submission.submit(job_in(tmp_path), cluster())


def test_warnings_of_sbatch_are_no_part_of_a_jobs_number(tmp_path, slurm):
    slurm("sbatch", "echo 'sbatch: warning: x' >&2; echo 7")
    assert submission.submit(job_in(tmp_path), cluster()) == ["7"]


def test_accounts_are_asked_for_by_the_users_name(tmp_path, slurm, monkeypatch):
    monkeypatch.setenv("LOGNAME", "me")
    slurm("sacctmgr", "printf 'b\\na\\nb\\n'")
    assert submission._own_accounts() == ["a", "b"]
    assert calls(tmp_path) == ["--noheader --parsable2 show associations user=me format=account"]
    monkeypatch.setattr(submission.getpass, "getuser", lambda: {}["no such id"])
    assert submission._own_accounts() == []


def test_a_partition_that_is_not_there_is_told_with_those_that_are(tmp_path, slurm):
    slurm("sinfo", '[ "$2" = --format=%R ] && printf "long\\ncpu\\nlong\\n"; exit 0')
    with pytest.raises(
        ConfigError, match=r"partition: got 'gpu', which this cluster does not have; allowed: cpu, long;"
    ):
        submission.check_cluster(job_in(tmp_path), cluster())
    assert calls(tmp_path) == ["--noheader --partition=gpu --format=%a|%l|%D", "--noheader --format=%R"]


@pytest.mark.parametrize(
    ("listed", "time", "nodes", "refused"),
    [
        ("up|1-00:00:00|4", "24:00:00", 4, None),  # as long and as large as may be
        ("up|1-00:00:00|3", "24:00:00", 4, "nodes: got 4, and partition 'gpu' has 3"),
        ("up|1:00:01|4", "1:00:02", 4, "at most 1:00:01"),
        ("up|1:00:00|2\nup|2:00:00|2", "2:00:00", 4, None),  # the longest limit counts, and all nodes
        ("up|1:00:00|2\nup|2:00:00|2", "2:01:00", 4, "at most 2:00:00"),
        ("down|infinite|2\nup|infinite|2", "2:00:00", 4, None),
        ("inact|infinite|4", "2:00:00", 4, "which is inact"),
        ("up|10|4", "0:01", 4, "at most 10"),  # seconds
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


@pytest.mark.parametrize(
    ("limit", "seconds"), [("30", 30), ("2:03", 123), ("1:02:03", 3723), ("2-01:00:00", 176400), ("infinite", None)]
)
def test_limits_are_read_as_sinfo_writes_them(limit, seconds):
    assert submission._slurm_seconds(limit) == (seconds or float("inf"))


def test_an_image_file_must_be_there_and_a_name_of_a_registry_need_not(tmp_path, slurm, monkeypatch):
    slurm("sinfo", "echo 'up|infinite|4'")
    monkeypatch.chdir(tmp_path)
    for image in ("/nowhere/a.sqsh", "./a.sqsh"):
        with pytest.raises(ConfigError, match=rf"container\.image: got '{image}', which is not there"):
            submission.check_cluster(job_in(tmp_path), cluster(container={"image": image}))
    (tmp_path / "a.sqsh").touch()
    for image in ("./a.sqsh", "docker://x/y"):
        submission.check_cluster(job_in(tmp_path), cluster(container={"image": image}))


def test_gpus_are_asked_for_as_the_cluster_file_says_or_the_partition_shows(slurm, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path / "commands"))
    assert submission.with_detected_gpu_option(cluster()).gpu_option == "auto"  # no Slurm to ask
    slurm("sinfo", "true")
    assert submission.with_detected_gpu_option(cluster()).gpu_option == "gpus-per-node"  # no word is no "(null)"
    assert calls(tmp_path) == ["--noheader --partition=gpu --format=%G"]
    slurm("sinfo", "echo '(null)'")
    assert submission.with_detected_gpu_option(cluster()).gpu_option == "none"
    assert submission.with_detected_gpu_option(cluster(gpu_option="gres")).gpu_option == "gres"


def test_jobs_of_the_user_are_searched_for_the_script_of_this_one(tmp_path, slurm, monkeypatch):
    monkeypatch.setenv("LOGNAME", "me")
    job = job_in(tmp_path)
    slurm("squeue", f"echo '8|RUNNING|{job.folder}/job.sbatch   '")
    with pytest.raises(ConfigError, match=r"which job 8 has \(RUNNING\)"):
        submission.require_no_other_job(job)
    assert calls(tmp_path) == ["--noheader --user=me --format=%A|%T|%o"]
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
    with pytest.raises(ConfigError, match=r"nodes: got 1 of 8 GPUs; allowed: at least 2, .* \(trainers 15\)"):
        submission.nodes_of(recipe, cluster(nodes=1))


def test_the_hardware_of_a_job_is_that_of_its_nodes():
    found = submission.hardware_of(cluster(gpus_per_node=4), 3)
    assert found is not None and (found.kind, list(found.per_node)) == ("gpu", [4, 4, 4])
    assert submission.hardware_of(cluster(gpus_per_node=0, nodes=3), 3) is None
