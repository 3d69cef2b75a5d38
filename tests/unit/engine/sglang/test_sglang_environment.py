"""Inspection of interpreters: real virtual environments with a small package called sglang."""

from __future__ import annotations

import sys
import venv
from pathlib import Path

import pytest

from megatron_daro.config.sections import SGLangSection
from megatron_daro.engine.sglang import interpreter
from megatron_daro.engine.sglang.interpreter import check_environments, inspect_environment
from megatron_daro.errors import ConfigError

ONE_CLASS = """
from __future__ import annotations
import torch_that_is_not_there

@dataclasses.dataclass
class ServerArgs:
    model_path: A[str, Arg(help="x", aliases=["--model"])]
    tp_size: A[int, Arg(help="x", aliases=["--tensor-parallel-size", "--tp"])] = 1
    fp8_runner: A[str, Arg(help="x", cli_name="--fp8-backend", choices=CHOICES)] = "auto"
    host: Annotated[str, "The host."] = "127.0.0.1"
    port: A[int, "The port of " "the server."] = 30000
    text: A[str, f"Default {DEFAULT}."] = ""
    two_ways: A[bool, Arg(help="x", action=argparse.BooleanOptionalAction)] = True
    hidden: A[int, Arg(help="x", no_cli=True)] = 1
    computed: A[int, Derived(doc="x")] = 1
    plain: int = 0

    @staticmethod
    def add_cli_args(parser):
        parser.add_argument("--config", type=str)
        parser.add_argument("-q", "--quiet-mode", "--be-quiet")
        parser.add_argument("positional")
"""
ONE_CLASS_NAMES = {
    "model_path",
    "model",
    "tp_size",
    "tensor_parallel_size",
    "tp",
    "fp8_backend",
    "host",
    "port",
    "text",
}
ONE_CLASS_NAMES |= {"two_ways", "no_two_ways", "config", "quiet_mode", "be_quiet"}


@pytest.fixture(scope="module")
def empty_environment(tmp_path_factory):
    directory = tmp_path_factory.mktemp("environment")
    venv.create(directory, with_pip=False, symlinks=True)
    return directory


@pytest.fixture
def environment_with(empty_environment):
    """Makes an interpreter that has distributions, given as {name: version}, and files, given as {path: text}."""
    (site,) = empty_environment.glob("lib/python*/site-packages")
    before = set(site.rglob("*"))

    def make(distributions: dict[str, str], files: dict[str, str]) -> Path:
        for name, version in distributions.items():
            info = site / f"{name.replace('-', '_')}-{version}.dist-info"
            info.mkdir()
            (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        for path, text in files.items():
            (site / path).parent.mkdir(parents=True, exist_ok=True)
            (site / path).write_text(text)
        return empty_environment / "bin" / "python"

    yield make
    for path in sorted(set(site.rglob("*")) - before, reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()


EXPLODES = "raise RuntimeError('imported')"


def test_arguments_of_one_class_as_in_0_5_18(environment_with):
    files = {"sglang/__init__.py": EXPLODES, "sglang/srt/server_args.py": ONE_CLASS}
    found = inspect_environment(environment_with({"sglang": "0.5.18"}, files))
    assert found.version == "0.5.18"
    assert found.argument_names == ONE_CLASS_NAMES


def test_arguments_in_several_files_as_in_0_5_23(environment_with):
    files = {
        "sglang/__init__.py": EXPLODES,
        "sglang/srt/server_args.py": "class ServerArgs:\n  def f(p):\n    p.add_argument('--config')\n  x: int\n",
        "sglang/srt/arg_groups/fields/__init__.py": "",
        "sglang/srt/arg_groups/fields/device.py": "class D:\n  _NS = 'd'\n  random_seed: A[int | None, 'x'] = None\n",
        "sglang/srt/arg_groups/fields/serving.py": "class S:\n  host: A[str, 'x'] = 'h'\n",
    }
    found = inspect_environment(environment_with({"sglang": "0.5.23.post1"}, files))
    assert found == interpreter.ServerEnvironment("0.5.23.post1", frozenset({"config", "random_seed", "host"}))


def test_newer_version_with_another_layout_has_unknown_names(environment_with):
    found = inspect_environment(environment_with({"sglang": "1.0.0"}, {"sglang/__init__.py": EXPLODES}))
    assert found == interpreter.ServerEnvironment("1.0.0", frozenset())


def refused(python):
    with pytest.raises(ConfigError) as caught:
        inspect_environment(python)
    text = str(caught.value)
    assert "engine.sglang.python" in text and str(python) in text
    return text


def test_interpreter_without_the_package(environment_with):
    assert "no sglang" in refused(environment_with({}, {}))


@pytest.mark.parametrize("version", ["0.5.17", "0.5.9", "dev"])
def test_version_that_is_too_old(environment_with, version):
    text = refused(environment_with({"sglang": version}, {"sglang/__init__.py": ""}))
    assert version in text and "0.5.18" in text


def test_files_that_are_no_interpreters(tmp_path):
    refused(tmp_path / "python")
    refused(tmp_path)
    text = tmp_path / "text"
    text.write_text("#!/bin/sh\necho broken; exit 3\n")
    refused(text)
    text.chmod(0o700)
    assert "broken" in refused(text)
    binary = tmp_path / "binary"
    binary.write_bytes(b"\x7fELF nothing")
    binary.chmod(0o700)
    refused(binary)
    for number, said in enumerate(("no json", "[1]", "{}", '{"version": "0.5.23"}')):
        other = tmp_path / f"other{number}"
        other.write_text(f"#!/bin/sh\necho '{said}'\n")
        other.chmod(0o700)
        refused(other)


def test_interpreter_that_hangs_is_given_up(tmp_path, monkeypatch):
    monkeypatch.setattr(interpreter, "INSPECTION_TIMEOUT_S", 0.2)
    slow = tmp_path / "slow"
    slow.write_text("#!/bin/sh\nexec sleep 600\n")
    slow.chmod(0o700)
    refused(slow)


def test_import_path_of_the_trainer_does_not_count_but_that_of_the_user_does(environment_with, tmp_path, monkeypatch):
    package = tmp_path / "extra" / "sglang"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(EXPLODES)
    info = tmp_path / "extra" / "sglang-0.5.20.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: sglang\nVersion: 0.5.20\n")
    python = environment_with({}, {})
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "extra"))
    refused(python)
    assert inspect_environment(python, env={"PYTHONPATH": str(tmp_path / "extra")}).version == "0.5.20"


def test_symbolic_link_to_the_interpreter_stays_in_its_environment(environment_with):
    """A virtual environment's python is a link to another; following it would inspect that one."""
    python = environment_with({"sglang": "0.5.20"}, {"sglang/__init__.py": ""})
    assert python.is_symlink() and python.resolve() == Path(sys.executable).resolve()
    assert inspect_environment(python).version == "0.5.20"


@pytest.mark.parametrize("lacking", ["servers", "trainer"])
def test_mooncake_is_wanted_at_both_ends(environment_with, monkeypatch, lacking):
    files = {"sglang/__init__.py": EXPLODES, "sglang/srt/server_args.py": ONE_CLASS}
    if lacking == "trainer":
        files["mooncake/__init__.py"] = ""
    python = environment_with({"sglang": "0.5.23"}, files)
    monkeypatch.setattr(interpreter.upstream_names, "has_mooncake", lambda: lacking == "servers")
    check_environments(SGLangSection(python=python, sync="shards"))
    with pytest.raises(ConfigError, match="shards_over") as caught:
        check_environments(SGLangSection(python=python, sync="shards", shards_over="rdma"))
    assert f"{python if lacking == 'servers' else sys.executable} -m pip install mooncake" in str(caught.value)
    monkeypatch.setattr(interpreter.upstream_names, "has_mooncake", lambda: True)
    if lacking == "trainer":
        check_environments(SGLangSection(python=python, sync="shards", shards_over="rdma"))


def test_two_versions_of_nccl_are_refused_before_a_broadcast(environment_with, monkeypatch):
    """NCCL would say so itself, at the first weight update and in C++."""
    packages = {"sglang": "0.5.23", "nvidia-nccl-cu13": "2.30.7"}
    python = environment_with(packages, {"sglang/__init__.py": ""})
    options = SGLangSection(python=python)
    monkeypatch.setattr(interpreter.upstream_names, "nccl_package", lambda: None)
    check_environments(options)  # a trainer without NCCL
    monkeypatch.setattr(interpreter.upstream_names, "nccl_package", lambda: "nvidia-nccl-cu13==2.29.7")
    with pytest.raises(ConfigError) as caught:
        check_environments(options)
    for text in ("2.29.7", "2.30.7", "engine.sglang"):
        assert text in str(caught.value)
    check_environments(options.model_copy(update={"sync": "disk"}))
    check_environments(options.model_copy(update={"arguments": {"device": "cpu"}}))
    monkeypatch.setattr(interpreter.upstream_names, "nccl_package", lambda: "nvidia-nccl-cu12==2.30.7")
    check_environments(options)


def test_the_trainers_own_interpreter_is_no_place_for_sglang(monkeypatch, environment_with):
    monkeypatch.setattr(sys, "executable", str(environment_with({}, {})))
    with pytest.raises(ConfigError, match=r"engine\.sglang\.python"):
        check_environments(SGLangSection())
