"""The batch script and the cluster file: what is asked of Slurm, what is refused, and that bash can read it."""

from __future__ import annotations

import json
import re
import struct
import subprocess
from pathlib import Path

import pytest

from megatron_daro.cli import main
from megatron_daro.config import Config
from megatron_daro.errors import ConfigError
from megatron_daro.workshop.slurm.cluster_file import ClusterFile, read_cluster_file
from megatron_daro.workshop.slurm.script import Job, script_of
from megatron_daro.workshop.slurm.submission import (
    ask_slurm,
    job_of,
    nodes_of,
)

ROOT = Path(__file__).resolve().parents[3]
JOB = Job("my-run", 4, Path("/shared/me/runs/my-run"), Path("/shared/me"), ("/shared/me/run.yaml",), 100, 300, 8)


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
    ],
)
def test_bash_reads_every_script(fields):
    text = script_of(JOB, cluster(**fields))
    done = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "@{" not in text and "$$" not in text


def test_the_script_asks_for_what_the_cluster_file_says():
    text = script_of(JOB, cluster(account="me", time="1-00:00:00", sbatch=("--constraint=h100",)))
    for line in ("--account=me", "--partition=gpu", "--nodes=4", "--gres=gpu:8", "--time=1-00:00:00", "--requeue"):
        assert f"#SBATCH {line}\n" in text
    assert "#SBATCH --signal=B:USR1@300\n" in text and "#SBATCH --constraint=h100\n" in text


def test_the_example_is_a_cluster_file():
    assert "--account=my-project\n" in script_of(JOB, read_cluster_file(ROOT / "examples/slurm/cluster.yaml"))


def test_no_secret_stands_in_the_script():
    assert not any(word in script_of(JOB, cluster()).lower() for word in ("token", "secret", "password"))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("partiton: gpu", "partiton: got .*partition"),
        ("{partition: gpu, gpus_per_node: eight}", "gpus_per_node: got 'eight'"),
        ("{partition: gpu, container: {img: x}}", r"container\.image"),
        ("{partition: gpu, nodes: 0}", "nodes: got 0"),
        ("account: me", "partition"),
        ("partition: [", "cluster.yaml"),
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


def test_a_cluster_without_gpus_needs_a_number_of_nodes():
    assert nodes_of(config(), cluster(gpus_per_node=0, nodes=2)) == 2
    with pytest.raises(ConfigError, match="gpus_per_node 0"):
        nodes_of(config(), cluster(gpus_per_node=0))


def test_cores_of_nodes_without_gpus_are_places_for_ranks_and_servers():
    recipe = config(actor={"tensor_parallel": 2}, engine={"replicas": 2})
    site = {"gpus_per_node": 0, "nodes": 2}
    assert nodes_of(recipe, cluster(cpus_per_node=2, **site)) == 2
    with pytest.raises(ConfigError, match="cpus_per_node: got 1"):
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
    with pytest.raises(ConfigError, match=r"spare_nodes: got 2.*trainer\.replace_lost_ranks"):
        job_of(config(trainer={"run_dir": str(tmp_path)}), Path("r.yaml"), [], site)


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
    with pytest.raises(ConfigError, match=r"account: got 'reserch'.*research, root"):
        ask_slurm(JOB, cluster(account="reserch"))
    with pytest.raises(ConfigError, match="account"):
        ask_slurm(JOB, cluster())


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
        ({"time": "forever"}, "time: got 'forever'"),
        ({"time": "00:00"}, "time: got '00:00'"),
        ({"time": "12:75"}, "time: got '12:75'"),
        ({"time": "0:10", "signal_before_s": 600}, "signal_before_s"),
    ],
)
def test_times_that_cannot_be_are_refused(tmp_path, fields, said):
    file = tmp_path / "cluster.yaml"
    file.write_text(json.dumps({"partition": "gpu", **fields}))
    with pytest.raises(ConfigError, match=said):
        read_cluster_file(file)


def test_memory_is_all_of_an_exclusive_node_or_what_is_given():
    assert "#SBATCH --mem=0\n" in script_of(JOB, cluster())
    assert "#SBATCH --mem=100G\n" in script_of(JOB, cluster(memory_gib=100))
    assert "--mem" not in script_of(JOB, cluster(exclusive=False))


def test_the_signal_comes_as_early_as_the_checkpoint_needs(tmp_path, capsys):
    """Of a 70B model with 920 GiB of checkpoint."""
    configs = ROOT.parent / "shared" / "data" / "configs"
    if not configs.is_dir():
        pytest.skip(f"needs the model configurations in {configs}")
    (tmp_path / "config.json").write_bytes((configs / "Llama-3.3-70B.json").read_bytes())
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", 2) + b"{}")
    for name in ("tokenizer.json", "rows.jsonl"):
        (tmp_path / name).write_text("{}")
    recipe = [f"{ROOT}/examples/recipes/llama-3.3-70b.yaml", f"model.path={tmp_path}", "data.eval=[]"]
    recipe += [f"data.train=[{tmp_path}/rows.jsonl]", f"trainer.run_dir={tmp_path}/run"]
    recipe += ["trainer.eval_every_steps=0"]

    def submitted(**fields: object) -> tuple[int, str]:
        site = tmp_path / "cluster.yaml"
        site.write_text(json.dumps({"partition": "gpu", "gpus_per_node": 8, **fields}))
        assert main(["submit", *recipe, "--cluster", str(site), "--dry-run"]) == 0
        said = capsys.readouterr()
        return int(re.search(r"--signal=B:USR1@(\d+)", said.out)[1]), said.err

    needed, said = submitted()
    assert needed >= 480 and "signal_before_s" not in said
    given, said = submitted(signal_before_s=300)
    assert given == 300 and "signal_before_s: got 300" in said and str(needed) in said
    assert "signal_before_s" not in submitted(signal_before_s=20_000)[1]


def test_everything_that_a_cluster_file_may_say_stands_in_the_script():
    fields = {
        "qos": "high",
        "cpus_per_node": 64,
        "exclusive": False,
        "memory_gib": 9,
        "attempts": 7,
    }
    fields |= {
        "network_interface": "ib0",
        "addresses": {"n1": "10.0.0.1"},
        "environment": {"A": "b"},
        "setup": ("load x",),
    }
    fields |= {"exclude_bad_nodes": True, "sbatch": ("--comment=a b#c", "--nice"), "term_grace_s": 30.5}
    text = script_of(JOB, cluster(**fields))
    options = [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH ")]
    assert options == [
        "--job-name=my-run", "--partition=gpu", "--qos=high", "--nodes=4", "--ntasks-per-node=1", "--gres=gpu:8",
        "--cpus-per-task=64", "--mem=9G", "--time=1-00:00:00",
        "--output=/shared/me/runs/my-run/slurm/job_%j.log", "--open-mode=append",
        "--requeue", "--signal=B:USR1@300", '--comment="a b#c"', "--nice",
    ]  # fmt: skip
    assert "export GLOO_SOCKET_IFNAME=ib0\nexport NCCL_SOCKET_IFNAME=ib0\nexport A=b\nload x\n" in text
    assert "--interface ib0 \\\n        --address n1=10.0.0.1 \\\n        -- /shared/me/run.yaml \\\n" in text
    assert "--wait=35 " in text and "was the last of 7" in text and '[ -n "yes" ] || give_up "$cause"' in text


def test_srun_or_apptainer_puts_each_node_into_the_container():
    container = {"image": "/i/a b.sqsh", "mounts": ("/a:/a", "/b:/b")}
    pyxis = script_of(JOB, cluster(container=container))
    words = "'--container-image=/i/a b.sqsh' --container-mounts=/a:/a,/b:/b --container-workdir=/shared/me"
    assert pyxis.count(words) == 2 and "apptainer" not in pyxis
    assert (
        """[ -e '/i/a b.sqsh' ] || give_up "the container image "'/i/a b.sqsh'" is not there on $(hostname)"\n"""
        in pyxis
    )
    assert "--container-mounts" not in script_of(JOB, cluster(container={"image": "x"}))
    inside = script_of(JOB, cluster(container=container | {"runtime": "apptainer"}))
    words = "apptainer exec --nv --bind=/a:/a --bind=/b:/b --pwd /shared/me '/i/a b.sqsh' "
    assert inside.count(words) == 2 and "--container" not in inside
    for image, checked in (("./x.sif", True), ("docker://x", False)):
        text = script_of(JOB, cluster(container={"image": image, "runtime": "apptainer"}))
        assert ("[ -e " + image + " ]" in text) is checked


@pytest.mark.parametrize(("name", "own"), [("a%b", True), ("a\\b", True), ("a b", False)])
def test_a_folder_that_slurms_patterns_would_change_gets_its_log_from_the_script(name, own):
    text = script_of(Job("a", 1, Path("/r") / name, Path("/d"), ("/d/r.yaml",), 1, 300, 0), cluster())
    assert ('exec >>"$folder/job_$SLURM_JOB_ID.log" 2>&1\n' in text) is own
    assert ("#SBATCH --output=/dev/null\n" in text) is own
    assert own or '#SBATCH --output="/r/a b/slurm/job_%j.log"\n' in text


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"container": {"image": "x", "mounts": ["/a,/b"]}}, "mounts"),
        ({"container": {"imag": "x", "image": "y"}}, r"imag: got .*container\.image"),
        ({"environment": {"SLURM_X": "1"}}, "SLURM_X"),
        ({"sbatch": ["--array"]}, "array"),
        *(({"sbatch": [f"--{name}=1"]}, f"set {field}") for name, field in (("mem", "memory_gib"), ("nodes", "nodes"))),
    ],
)  # fmt: skip
def test_what_would_break_the_job_is_refused_with_its_reason(tmp_path, fields, said):
    file = tmp_path / "cluster.yaml"
    file.write_text(json.dumps({"partition": "gpu", **fields}))
    with pytest.raises(ConfigError, match=f"(?s){said}"):
        read_cluster_file(file)
