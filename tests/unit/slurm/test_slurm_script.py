"""The batch script and the cluster file: what is asked of Slurm, what is refused, and that bash can read it."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from megatron_daro.commands.submit import _signal_before_s
from megatron_daro.config import Config, resolve
from megatron_daro.errors import ConfigError
from megatron_daro.workshop.slurm.cluster_file import ClusterFile, read_cluster_file
from megatron_daro.workshop.slurm.script import Job, script_of
from megatron_daro.workshop.slurm.submission import (
    check_cluster,
    gpus_of,
    job_of,
    nodes_of,
    require_no_other_job,
    tried,
    with_detected_gpu_option,
)

ROOT = Path(__file__).resolve().parents[3]
JOB = Job("my-run", 4, Path("/shared/me/runs/my-run"), Path("/shared/me"), ("/shared/me/run.yaml",), 100, 300)


def cluster(**fields: object) -> ClusterFile:
    return ClusterFile.model_validate({"partition": "gpu", **fields})


def config(**sections: object) -> Config:
    return Config.model_validate({"model": {"path": "x"}, "data": {"train": ("x",)}, **sections})


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"container": {"image": "/images/a b.sqsh", "mounts": ("/a:/a", "/b:/b")}},
        {"container": {"image": "docker://x/y", "runtime": "apptainer", "mounts": ("/a:/a",)}},
        {"setup": ("module load cuda",), "environment": {"A": "it's $HOME"}, "exclude_bad_nodes": True},
        {"spare_nodes": 1},
        {"lost_nodes": 1},
    ],
)
def test_bash_reads_every_script(fields):
    text = script_of(JOB, cluster(**fields))
    done = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "@{" not in text and "$$" not in text


def test_the_script_asks_for_what_the_cluster_file_says():
    text = script_of(JOB, cluster(account="me", time="1-00:00:00", sbatch=("--constraint=h100",)))
    for line in ("--account=me", "--partition=gpu", "--nodes=4", "--gpus-per-node=8", "--time=1-00:00:00", "--requeue"):
        assert f"#SBATCH {line}\n" in text
    assert "#SBATCH --signal=B:USR1@300\n" in text and "#SBATCH --constraint=h100\n" in text


def test_values_with_spaces_and_quotes_reach_the_nodes_as_they_are():
    job = Job("a", 1, Path("/r/it's here"), Path("/d"), ("/d/run.yaml", "data.template={prompt} $x"), 1, 300)
    text = script_of(job, cluster(environment={"A": "it's $HOME"}))
    assert "'data.template={prompt} $x'" in text and """export A='it'"'"'s $HOME'""" in text
    assert """folder='/r/it'"'"'s here/slurm'""" in text


def test_no_secret_stands_in_the_script():
    assert not any(word in script_of(JOB, cluster()).lower() for word in ("token", "secret", "password"))


def test_the_plain_script_is_the_one_of_the_example():
    text = script_of(JOB, read_cluster_file(ROOT / "examples/slurm/cluster.yaml"))
    assert (ROOT / "tools/slurm/train.sbatch").read_text() == text, "python tools/slurm/write_plain.py"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("partiton: gpu", r"partiton: got an unknown key with value 'gpu'.*did you mean partition"),
        ("{partition: gpu, gpus_per_node: eight}", r"gpus_per_node: got 'eight'"),
        ("{partition: gpu, time: forever}", r"time: got 'forever'"),
        ("{partition: gpu, container: {img: x}}", r"container.image: got nothing"),
        ("account: me", r"partition: got nothing"),
        ("partition: [", r"cluster.yaml"),
    ],
)
def test_a_wrong_cluster_file_is_refused_by_field(tmp_path, text, said):
    file = tmp_path / "cluster.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=f"(?s){said}"):
        read_cluster_file(file)


def test_a_missing_cluster_file_is_a_configuration_error(tmp_path):
    with pytest.raises(ConfigError, match="--cluster"):
        read_cluster_file(tmp_path / "none.yaml")


def test_nodes_follow_the_gpus_of_the_recipe():
    recipe = config(
        actor={"tensor_parallel": 4, "data_parallel": 3},
        engine={"kind": "sglang", "replicas": 5, "sglang": {"tensor_parallel": 2}},
    )
    assert gpus_of(recipe) == 22 and nodes_of(recipe, cluster()) == 3
    assert nodes_of(recipe, cluster(nodes=4)) == 4
    with pytest.raises(ConfigError, match=r"nodes: got 2 of 8 GPUs; allowed: at least 3.*needs 22 GPUs"):
        nodes_of(recipe, cluster(nodes=2))


def test_a_cluster_without_gpus_needs_a_number_of_nodes():
    assert nodes_of(config(), cluster(gpus_per_node=0, nodes=2)) == 2
    with pytest.raises(ConfigError, match="gpus_per_node 0"):
        nodes_of(config(), cluster(gpus_per_node=0))


def test_cores_of_nodes_without_gpus_are_places_for_ranks_and_servers():
    recipe = config(actor={"tensor_parallel": 2}, engine={"replicas": 2})
    site = {"gpus_per_node": 0, "nodes": 2}
    assert nodes_of(recipe, cluster(cpus_per_node=2, **site)) == 2
    with pytest.raises(ConfigError, match=r"cpus_per_node: got 1; .*group of 2 .* no room for 1 of them"):
        nodes_of(recipe, cluster(cpus_per_node=1, **site))
    assert "--cores 2" in script_of(JOB, cluster(cpus_per_node=2, **site))
    assert "--cores" not in script_of(JOB, cluster(cpus_per_node=2))


def test_spare_nodes_are_asked_for_and_the_end_of_a_node_is_not_that_of_the_others(tmp_path):
    recipe = config(trainer={"run_dir": str(tmp_path), "replace_lost_ranks": True})
    site = cluster(nodes=3, spare_nodes=2)
    assert job_of(recipe, Path("r.yaml"), [], site).nodes == 5
    text, plain = script_of(JOB, site), script_of(JOB, cluster(nodes=3))
    for words in ("#SBATCH --no-kill\n", " --no-kill --kill-on-bad-exit=0 --wait=0 ", "--may-lose 2"):
        assert words in text and words not in plain
    assert 'kill -KILL "$payload"' in text and "--kill-on-bad-exit=1 --wait=25" in plain
    with pytest.raises(ConfigError, match=r"spare_nodes: got 2 without trainer\.replace_lost_ranks"):
        job_of(config(trainer={"run_dir": str(tmp_path)}), Path("r.yaml"), [], site)
    site = cluster(nodes=3, spare_nodes=2, lost_nodes=1)
    fewer = {"run_dir": str(tmp_path), "replace_lost_ranks": True, "fewer_replicas_after_s": 60}
    assert job_of(config(trainer=fewer), Path("r.yaml"), [], site).nodes == 5
    assert "--may-lose 3" in script_of(JOB, site)
    with pytest.raises(ConfigError, match=r"lost_nodes: got 1 without trainer\.fewer_replicas_after_s"):
        job_of(recipe, Path("r.yaml"), [], site)


def test_the_job_has_absolute_paths(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    recipe = config(trainer={"run_dir": "runs/a b"})
    job = job_of(recipe, Path("r.yaml"), ["trainer.steps=3"], cluster(nodes=1, gpus_per_node=1))
    assert job.name == "a-b" and job.run_dir == tmp_path / "runs/a b"
    assert job.train == (str(tmp_path / "r.yaml"), "trainer.steps=3")


def commands(directory: Path, **bodies: str) -> str:
    """A PATH with shell scripts of these names."""
    for name, body in bodies.items():
        (directory / name).write_text(f"#!/bin/bash\n{body}\n")
        (directory / name).chmod(0o755)
    return f"{directory}:/usr/bin:/bin"


REFUSED = "sbatch: error: Batch job submission failed: Invalid account or account/partition combination specified"


def test_a_refused_account_is_said_with_the_accounts_there_are(tmp_path, monkeypatch):
    """In the words of a real sbatch 22.05 with slurmdbd (tests/slurm/test_slurm_accounts.py asks it itself)."""
    sbatch = f"echo '{REFUSED}' >&2; exit 1"
    monkeypatch.setenv("PATH", commands(tmp_path, sbatch=sbatch, sacctmgr="printf 'root\\nresearch\\nroot\\n'"))
    with pytest.raises(ConfigError, match=r"account: got 'reserch', .* 'gpu'; allowed: of yours, research, root;"):
        tried(JOB, cluster(account="reserch"))
    with pytest.raises(ConfigError, match="account: got none"):
        tried(JOB, cluster())


def test_another_refusal_is_in_slurms_words(tmp_path, monkeypatch):
    path = commands(tmp_path, sbatch="echo 'sbatch: error: Invalid qos specification' >&2; exit 1", sacctmgr="echo me")
    monkeypatch.setenv("PATH", path)
    with pytest.raises(ConfigError, match="sbatch --test-only: refused: sbatch: error: Invalid qos specification"):
        tried(JOB, cluster())


def test_a_refused_account_without_a_database_to_ask_is_said_by_slurm(tmp_path, monkeypatch):
    sbatch = f"echo '{REFUSED}' >&2; exit 1"
    monkeypatch.setenv("PATH", commands(tmp_path, sbatch=sbatch, sacctmgr="exit 1"))
    with pytest.raises(ConfigError, match="Invalid account or account/partition"):
        tried(JOB, cluster(account="reserch"))


@pytest.mark.parametrize(
    ("given", "written"),
    [("12:30", "0-12:30:00"), ("24:00:00", "1-00:00:00"), ("2-3:04:05", "2-03:04:05"), ("90:00", "3-18:00:00")],
)
def test_times_are_written_as_slurm_cannot_misread_them(given, written):
    """Slurm reads 12:30 as minutes and seconds."""
    assert f"#SBATCH --time={written}\n" in script_of(JOB, cluster(time=given))


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"time": "00:00"}, "at least a minute"),
        ({"time": "12:75"}, "at most 59"),
        ({"time": "0:10", "signal_before_s": 600}, "before a time limit of 0-00:10:00"),
    ],
)
def test_times_that_cannot_be_are_refused(tmp_path, fields, said):
    file = tmp_path / "cluster.yaml"
    file.write_text(json.dumps({"partition": "gpu", **fields}))
    with pytest.raises(ConfigError, match=said):
        read_cluster_file(file)


@pytest.mark.parametrize(
    ("listed", "fields", "said"),
    [
        ("up|1:00:00|8", {"time": "24:00:00"}, r"time: got 1-00:00:00, beyond .* at most 1:00:00"),
        ("up|30:00|8", {"time": "0:31"}, r"at most 30:00"),
        ("up|infinite|3", {}, r"nodes: got 4, and partition 'gpu' has 3"),
        ("down|infinite|8", {}, r"which is down"),
        ("up|2-00:00:00|3\nup|2-00:00:00|1", {"time": "48:00:00"}, None),
    ],
)
def test_what_a_partition_never_runs_is_refused(tmp_path, monkeypatch, listed, fields, said):
    """In the words of `sinfo --format=%a|%l|%D` of Slurm 22.05, a line for each kind of node."""
    monkeypatch.setenv("PATH", commands(tmp_path, sinfo=f"echo '{listed}'"))
    if said is None:
        check_cluster(JOB, cluster(**fields))
        return
    with pytest.raises(ConfigError, match=said):
        check_cluster(JOB, cluster(**fields))


@pytest.mark.parametrize(("gres", "option"), [("gpu:8", "--gpus-per-node=8"), ("(null)", None)])
def test_gpus_are_asked_for_where_the_nodes_declare_them(tmp_path, monkeypatch, gres, option):
    monkeypatch.setenv("PATH", commands(tmp_path, sinfo=f"echo '{gres}'"))
    text = script_of(JOB, with_detected_gpu_option(cluster()))
    assert (f"#SBATCH {option}\n" in text) if option else ("--gpus-per-node" not in text and "gres" not in text)
    assert "#SBATCH --gres=gpu:8\n" in script_of(JOB, with_detected_gpu_option(cluster(gpu_option="gres")))


def test_a_run_directory_with_a_job_is_refused(tmp_path, monkeypatch):
    own, other = JOB.folder / "job.sbatch", "/shared/me/runs/other/slurm/job.sbatch"
    monkeypatch.setenv("PATH", commands(tmp_path, squeue=f"echo '7|RUNNING|{other}'; echo '8|PENDING|{own}'"))
    with pytest.raises(ConfigError, match=r"which job 8 has \(PENDING\).*scancel 8"):
        require_no_other_job(JOB)
    (tmp_path / "squeue").write_text(f"#!/bin/bash\necho '7|RUNNING|{other}'\n")
    require_no_other_job(JOB)


def test_memory_is_all_of_an_exclusive_node_or_what_is_given():
    assert "#SBATCH --mem=0\n" in script_of(JOB, cluster())
    assert "#SBATCH --mem=100G\n" in script_of(JOB, cluster(memory_gib=100))
    assert "--mem" not in script_of(JOB, cluster(exclusive=False))


def test_the_signal_comes_as_early_as_the_plan_needs(tmp_path):
    """Of a 70B model with 920 GiB of checkpoint."""
    configs = ROOT.parent / "shared" / "data" / "configs"
    if not configs.is_dir():
        pytest.skip(f"needs the model configurations in {configs}")
    (tmp_path / "config.json").write_bytes((configs / "Llama-3.3-70B.json").read_bytes())
    recipe = resolve(
        ROOT / "examples/recipes/llama-3.3-70b.yaml",
        [f"model.path={tmp_path}", "actor.data_parallel=64", "engine.replicas=64"],
    )
    seconds, remarks = _signal_before_s(recipe, cluster(), 128)
    assert seconds >= 480 and not remarks
    _, (remark,) = _signal_before_s(recipe, cluster(signal_before_s=300), 128)
    assert "a checkpoint of 9" in remark and f"which takes {seconds}" in remark
    assert _signal_before_s(recipe, cluster(signal_before_s=3600), 128)[1] == []
    assert _signal_before_s(config(), cluster(), 1) == (0, [])
    job = job_of(recipe, Path("r.yaml"), [], cluster(time="0:10"), seconds)
    assert job.signal_before_s == 300, "half of the time at most"
