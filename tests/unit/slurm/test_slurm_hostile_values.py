"""Values of recipe and cluster file that break out of a batch script elsewhere: refused by name, or taken as they are.

Every field that reaches the script meets every value. Three readers judge: pydantic and `job_of` (which refuse),
sbatch's own way of cutting an option line into words (opt.c, imitated below; tests/slurm asks the real one), and a real
bash that runs the script with an `srun` that writes down what it was given.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from megatron_daro.config import Config
from megatron_daro.errors import ConfigError
from megatron_daro.workshop.slurm.cluster_file import read_cluster_file
from megatron_daro.workshop.slurm.script import script_of
from megatron_daro.workshop.slurm.submission import job_of

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[3]
CLASSES = {
    "control characters": [
        "a\ntouch HACKED\n#", "a\rb", "a\tb", "a\x00b", "a\x1b[2Jb", "a\x7fb", "a\x85b", "a\u2028b",
        "\n#SBATCH --wrap=x",
    ],
    "the shell's": [
        "$(touch HACKED)", "`touch HACKED`", "${HOME}", "$HOME", "a;touch HACKED", "a&&touch HACKED", "a|touch HACKED",
        "a>HACKED", "~", "*", "a'b", 'a"b', "a\\", "a\\nb", "!x", "'; touch HACKED; '", '"; touch HACKED; "',
    ],
    "sbatch's": ["a --wrap=HACKED", "a#b", " a", "a b", "-a", "--wrap=HACKED"],
    "of Slurm's patterns": ["a%j", "a%%b", "100%"],
    "of the template": ["@{folder}", "@@"],
    "of other scripts": ["é漢", "a" * 300, "=", "a=b", ","],
}  # fmt: skip
VALUES = [value for values in CLASSES.values() for value in values]
FIELDS: dict[str, Callable[[str], dict[str, Any]]] = {
    "partition": lambda v: {"partition": v},
    "account": lambda v: {"account": v},
    "qos": lambda v: {"qos": v},
    "time": lambda v: {"time": v},
    "python": lambda v: {"python": v},
    "container.image": lambda v: {"container": {"image": v}},
    "container.mounts": lambda v: {"container": {"image": "docker://x", "runtime": "apptainer", "mounts": [v]}},
    "environment": lambda v: {"environment": {"A": v}},
    "environment's names": lambda v: {"environment": {v: "x"}},
    "sbatch": lambda v: {"sbatch": [f"--comment={v}"]},
    "sbatch's names": lambda v: {"sbatch": [v]},
    "network_interface": lambda v: {"network_interface": v},
    "addresses": lambda v: {"addresses": {"node1": v}},
    "addresses' names": lambda v: {"addresses": {v: "10.0.0.1"}},
}
RECIPE_FIELDS = ("trainer.run_dir", "the working directory", "RECIPE", "an option")


def words_of_sbatch(line: str) -> list[str]:
    """The words of an option line: sbatch's _get_next_opt (src/sbatch/opt.c, Slurm 22.05). A backslash takes the next
    character as it is, also in quotes; a # outside of quotes ends the line."""
    words, word, quote, escaped, begun = [], "", "", False, False
    for c in line:
        if escaped:
            word, escaped = word + c, False
        elif c == "\\":
            escaped = begun = True
        elif quote:
            quote, word = ("", word) if c == quote else (quote, word + c)
        elif c in "'\"":
            quote, begun = c, True
        elif c == "#":
            break
        elif c.isspace():
            words, word, begun = words + [word] * begun, "", False
        else:
            word, begun = word + c, True
    assert not quote and not escaped, f"sbatch would not find the end of {line!r}"
    return words + [word] * begun


def option_words(script: str) -> list[list[str]]:
    """The words of each of the script's options."""
    lines = script.splitlines()
    return [words_of_sbatch(line.removeprefix("#SBATCH ")) for line in lines if line.startswith("#SBATCH")]


def site_of(fields: dict[str, Any], place: Path):
    file = place / "cluster.yaml"
    file.write_text(json.dumps({"partition": "gpu", "gpus_per_node": 0, "nodes": 1, **fields}))
    return read_cluster_file(file)


def rendered(place: Path, fields: dict[str, Any], run_dir: str = "run", recipe: str = "r.yaml", option: str = "a=b"):
    """The job and its script."""
    site = site_of(fields, place)
    config = Config.model_validate({"model": {"path": "x"}, "data": {"train": ("x",)}, "trainer": {"run_dir": run_dir}})
    job = job_of(config, Path(recipe), [option], site)
    return job, site, script_of(job, site)


def run(script: str, place: Path, **left_behind: str) -> tuple[list[str], dict[str, str]]:
    """Run the script with commands of Slurm that write down what they are given; arguments of srun, its environment."""
    programs = place / "programs"
    programs.mkdir(exist_ok=True)
    for name, body in {
        "srun": 'printf "%s\\0" "$@" >"$SEEN"; env -0 >"$SEEN.env"',
        "squeue": "echo RUNNING None",
        "scontrol": "exit 1",
        "sleep": "exit 0",
    }.items():
        (programs / name).write_text(f"#!/bin/bash\n{body}\n")
        (programs / name).chmod(0o755)
    environment = {
        "PATH": f"{programs}:/usr/bin:/bin",
        "HOME": str(place),
        "SLURM_JOB_ID": "7",
        "SEEN": f"{place}/seen",
        **left_behind,
    }
    ended = subprocess.run(
        ["bash"], input=script.encode(), capture_output=True, cwd=place, env=environment, timeout=60, check=False
    )
    assert (place / "seen").exists(), ended
    seen = (place / "seen").read_bytes().decode().split("\0")[:-1]
    variables = (place / "seen.env").read_bytes().decode().split("\0")[:-1]
    return seen, dict(variable.split("=", 1) for variable in variables)


@pytest.mark.parametrize("field", FIELDS)
def test_every_field_of_the_cluster_file_is_taken_as_it_is_or_refused_by_name(tmp_path, monkeypatch, field):
    monkeypatch.chdir(tmp_path)
    taken = {}
    for value in VALUES:
        try:
            _, _, script = rendered(tmp_path, FIELDS[field](value))
        except ConfigError as error:
            assert field.removesuffix("' names").removesuffix("'s names") in str(error), (value, str(error))
            continue
        assert value not in CLASSES["control characters"], f"{field} takes {value!r}"
        taken[value] = script
        words = option_words(script)
        assert all(len(word) == 1 for word in words), (value, words)
        assert not any(word[0].startswith("--wrap") for word in words)
        assert subprocess.run(["bash", "-n"], input=script, text=True, check=False).returncode == 0
        if field in ("partition", "account", "qos"):
            assert [f"--{field}={value}"] in words
        if field == "sbatch":
            assert [f"--comment={value}"] in words
    for value in sorted(taken, key=len)[:: max(1, len(taken) // 6)]:  # bash takes 0.1 s for each
        _check_run(field, value, taken[value], tmp_path)
    assert not list(tmp_path.rglob("*HACKED*"))


def _check_run(field: str, value: str, script: str, place: Path) -> None:
    """What a real bash hands on is the value itself."""
    image = place / value if field == "container.image" and value.startswith(("/", ".")) else None
    assert image is None
    seen, environment = run(script, place)
    expected = {
        "python": value,
        "container.image": f"--container-image={value}",
        "container.mounts": f"--bind={value}",
        "network_interface": value,
        "addresses": f"node1={value}",
        "addresses' names": f"{value}=10.0.0.1",
    }
    if field in expected:
        assert expected[field] in seen, (field, value, seen)
    if field == "environment":
        assert environment["A"] == value
    (place / "seen").unlink()


@pytest.mark.parametrize("field", RECIPE_FIELDS)
def test_every_path_and_option_of_a_recipe_is_taken_as_it_is_or_refused_by_name(tmp_path, monkeypatch, field):
    monkeypatch.chdir(tmp_path)
    refused = []
    for number, value in enumerate(VALUES):
        if "\0" in value or "/" in value or len(value) > 200:
            continue  # no file can be called so
        place = tmp_path / str(number)
        place.mkdir()
        monkeypatch.chdir(place)
        monkeypatch.setenv("HOME", str(place))  # ~ is the home directory, as a person means it
        given: dict[str, str] = {"trainer.run_dir": "run_dir", "RECIPE": "recipe", "an option": "option"}
        if field == "the working directory":
            (place / value).mkdir(exist_ok=True)
            monkeypatch.chdir(place / value)
            arguments = {}
        else:
            arguments = {given[field]: f"x={value}" if field == "an option" else value}
        try:
            job, _, script = rendered(place, {}, **arguments)
        except ValidationError as error:  # which `resolve` tells as a ConfigError with the field's name
            assert "trainer.run_dir\n" in str(error), (value, str(error))
            refused.append(value)
            continue
        except ConfigError as error:
            named = {"an option": "the option 'x'"}.get(field, field)
            assert named in str(error) and "U+" in str(error), (value, str(error))
            refused.append(value)
            continue
        words = option_words(script)
        assert all(len(word) == 1 for word in words), words
        (output,) = [word[0] for word in words if word[0].startswith("--output")]
        clean = not {"%", "\\"} & set(str(job.folder))
        assert output == (f"--output={job.folder}/job_%j.log" if clean else "--output=/dev/null")
        if number % 3 and value not in CLASSES["the shell's"] + CLASSES["of Slurm's patterns"]:
            continue  # bash takes 0.1 s for each
        seen, _ = run(script, place)
        attempt = job.folder / "attempt_001"
        assert str(attempt) in seen and attempt.is_dir(), "the run directory is another one on the node"
        assert seen[seen.index("--") + 1 :] == list(job.train)
        assert clean or "job 7: attempt 1" in (job.folder / "job_7.log").read_text(), "the job has no log"
    assert not list(tmp_path.rglob("HACKED"))
    assert sorted(refused) == sorted(v for v in CLASSES["control characters"] if "\0" not in v)


def test_setup_may_be_several_lines_but_must_be_whole(tmp_path):
    assert site_of({"setup": ["if true\nthen\n\techo a\nfi"]}, tmp_path).setup
    for broken in ("echo 'a", "if true", "cat <<END", "echo a \\", ")", "echo \x1b[2J", "a\0b"):
        with pytest.raises(ConfigError, match=r"setup"):
            site_of({"setup": [broken]}, tmp_path)


@pytest.mark.parametrize(
    ("option", "said"),
    [("--constraint h100", "sbatch"), ("--output=/x", "output"), ("--time=1", "time"), ("-C x", "sbatch")],
)
def test_options_are_one_word_and_none_that_the_job_sets(tmp_path, option, said):
    with pytest.raises(ConfigError, match=said):
        site_of({"sbatch": [option]}, tmp_path)


def test_srun_is_told_the_cores_of_a_task_by_nobody(tmp_path, monkeypatch):
    """Newer Slurm ends with "cpus_per_task set by two different environment variables"."""
    monkeypatch.chdir(tmp_path)
    script = rendered(tmp_path, {"cpus_per_node": 64})[2]
    seen, environment = run(script, tmp_path, SLURM_CPUS_PER_TASK="64", SLURM_TRES_PER_TASK="cpu=1", SLURM_NNODES="1")
    assert not {"SLURM_CPUS_PER_TASK", "SLURM_TRES_PER_TASK"} & environment.keys() and "SLURM_NNODES" in environment
    assert not any(word.startswith("--cpus-per-task") for word in seen)


def test_a_variable_may_not_be_one_of_the_scripts_own(tmp_path):
    """`attempt_dir` would send the logs of all nodes elsewhere, and BASH_ENV run a file in each of them."""
    script = script_of(*rendered(tmp_path, {})[:2])
    after_the_export = script.split("\n(\n")[1].split("\n) &\n")[0]
    own = set(re.findall(r"\b([a-z_]+)=", script)) & set(re.findall(r"\$([a-z_]+)", after_the_export))
    assert own == {"attempt", "attempt_dir", "with_log"}
    for name in (*own, "SLURM_JOB_ID", "SLURM_PROCID", "BASH_ENV", "IFS"):
        with pytest.raises(ConfigError, match=rf"environment\.{name}"):
            site_of({"environment": {name: "x"}}, tmp_path)
    assert site_of({"environment": {"MY_ATTEMPT": "x", "PATH": "/bin"}}, tmp_path).environment
