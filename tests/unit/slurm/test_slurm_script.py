"""The batch script and the cluster file: what is asked of Slurm, what is refused, and that bash can read it."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from megatron_daro.commands.submit import _signal_before_s
from megatron_daro.config import Config, resolve
from megatron_daro.errors import ConfigError
from megatron_daro.workshop.slurm.cluster_file import ClusterFile, control_characters, read_cluster_file, seconds_of
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


def test_what_a_cluster_file_does_not_say_has_a_value():
    text = script_of(JOB, cluster())
    assert "--gpus 8 --free-disk-gib 10 \\\n" in text and "--check-minutes 2 --stall-minutes 60 \\\n" in text
    assert (
        "--term-grace-s 20 \\\n" in text and "#SBATCH --time=1-00:00:00\n" in text and "python -m megatron_daro" in text
    )
    assert '[ "$attempt" -lt 50 ]' in text and "was the last of 50" in text and '[ -n "" ] || give_up "$cause"' in text
    assert "#SBATCH --exclusive\n" in text and "#SBATCH --gpus-per-node=8\n" in text
    assert not any(
        word in text for word in ("--account", "--qos", "--cpus-per-task", "--address", "IFNAME", "job_$SLURM")
    )


def test_everything_that_a_cluster_file_may_say_stands_in_the_script():
    fields = {
        "qos": "high",
        "cpus_per_node": 64,
        "exclusive": False,
        "memory_gib": 9,
        "gpu_option": "none",
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
        "--job-name=my-run", "--partition=gpu", "--qos=high", "--nodes=4", "--ntasks-per-node=1", "--cpus-per-task=64",
        "--mem=9G", "--time=1-00:00:00", "--output=/shared/me/runs/my-run/slurm/job_%j.log", "--open-mode=append",
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


def test_the_end_of_spares_waits_as_long_as_the_nodes_may_take():
    text = script_of(JOB, cluster(spare_nodes=1, term_grace_s=7))
    assert (
        '    sleep 12\n    kill -TERM "$payload" 2>/dev/null && sleep 12 && kill -KILL' in text and "GRACE" not in text
    )
    assert "until [ -e" not in script_of(JOB, cluster())


@pytest.mark.parametrize(("name", "own"), [("a%b", True), ("a\\b", True), ("a b", False)])
def test_a_folder_that_slurms_patterns_would_change_gets_its_log_from_the_script(name, own):
    text = script_of(Job("a", 1, Path("/r") / name, Path("/d"), ("/d/r.yaml",), 1, 300), cluster())
    assert ('exec >>"$folder/job_$SLURM_JOB_ID.log" 2>&1\n' in text) is own
    assert ("#SBATCH --output=/dev/null\n" in text) is own
    assert own or '#SBATCH --output="/r/a b/slurm/job_%j.log"\n' in text


@pytest.mark.parametrize(
    ("field", "wrong", "edge"),
    [
        ("stall_minutes", 0, 0.1), ("check_minutes", 0, 0.1), ("nodes", 0, 1), ("attempts", 0, 1),
        ("signal_before_s", 9, 10), ("term_grace_s", 3600.5, 3600), ("free_disk_gib", -0.1, 0),
    ],
)  # fmt: skip
def test_numbers_have_their_bounds(tmp_path, field, wrong, edge):
    file = tmp_path / "cluster.yaml"
    file.write_text(json.dumps({"partition": "gpu", field: wrong}))
    with pytest.raises(
        ConfigError, match=rf"{field}: got {wrong}; .*fix: correct it; docs/configuration\.md has every"
    ):
        read_cluster_file(file)
    file.write_text(json.dumps({"partition": "gpu", field: edge}))
    assert getattr(read_cluster_file(file), field) == edge


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"container": {"image": "x", "mounts": ["/a,/b"]}}, "a comma begins the next mount"),
        ({"setup": ["echo a \\\n"]}, "ends with a backslash"),
        ({"setup": ["cat <<END\na"]}, "bash cannot read it: .*here-document"),
        ({"container": {"imag": "x", "image": "y"}}, r"imag: got an unknown key with value 'x'.*container\.image"),
        ({"zzz": 1}, r"zzz: got an unknown key with value 1.*remove it; docs/configuration\.md has every field"),
        ({"time": "0:10", "signal_before_s": 600}, "time: got a pair that cannot be; .*correct one of them"),
        ({"environment": {"SLURM_X": "1"}}, "a name that Slurm, bash or the batch script itself uses"),
        ({"time": "00:00:59"}, "at least a minute"),
        ({"time": "1:00:60"}, "at most 59"),
        *(({"sbatch": [f"--{name}"]}, "remove it: the job sets it") for name in ("wrap", "ntasks", "array")),
        *(({"sbatch": [f"--{name}=1"]}, f"set {field}") for name, field in (("mem", "memory_gib"), ("nodes", "nodes"))),
    ],
)  # fmt: skip
def test_what_would_break_the_job_is_refused_with_its_reason(tmp_path, fields, said):
    file = tmp_path / "cluster.yaml"
    file.write_text(json.dumps({"partition": "gpu", **fields}))
    with pytest.raises(ConfigError, match=f"(?s){said}"):
        read_cluster_file(file)


def test_a_signal_may_come_a_second_after_the_start(tmp_path):
    assert cluster(time="0:10", signal_before_s=599).signal_before_s == 599
    assert cluster(time="59:59:59").time == "2-11:59:59" and cluster(time="0:01").time == "0-00:01:00"
    assert seconds_of("1-02:03:04") == 93784


def test_characters_that_break_lines_are_named():
    assert control_characters("a\n\t\x00\x1b\r\u2028\x07\ud800") == (
        "U+0000 (NUL), U+0007, U+0009 (tab), U+000A (newline), U+000D (carriage return), U+001B (escape), "
        "U+2028, U+D800"
    )
    assert control_characters("a\n\tb", but="\n") == "U+0009 (tab)" and control_characters("é漢 ~") == ""
