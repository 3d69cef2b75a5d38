"""tools/sglang_cpu_env.sh without its downloads: what it refuses, when it builds, and the stand-ins it installs.

Building the environment itself takes minutes and gigabytes; `run.sh --engine sglang` does it.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
TOOL, FILES = ROOT / "tools/sglang_cpu_env.sh", ROOT / "tools/sglang_cpu"
STAND_INS = FILES / "stand_ins"

# Stands for Python 3.11: `-m venv DIR` puts a copy of it there, everything is written down, and pip does nothing.
PYTHON = """#!/bin/bash
echo "$*" >>"$CALLS"
case "$*" in
    "-m venv "*) mkdir -p "${@: -1}/bin" && cp "$0" "${@: -1}/bin/python" ;;
    *"pip --python"*) exit "${PIP_STATUS:-0}" ;;
    *purelib*) echo "$(dirname "$0")" ;;
    -VV) echo "Python ${FAKE_VERSION:-3.11.7}" ;;
esac
"""


def executable(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


class Tool:
    """The tool in a copy of its folder, on a PATH that has a recording Python and the system's programs."""

    def __init__(self, root: Path) -> None:
        self.dir, self.programs, self.calls = root / "an env", root / "programs", root / "calls"
        self.files = root / "project/tools/sglang_cpu"
        shutil.copytree(FILES, self.files)
        self.script = Path(shutil.copy(TOOL, self.files.parent))
        executable(self.programs / "python3.11", PYTHON)
        for name in (
            "bash",
            "cat",
            "cksum",
            "cp",
            "cut",
            "dirname",
            "du",
            "find",
            "grep",
            "ls",
            "mkdir",
            "rm",
            "sed",
            "sort",
        ):
            found = shutil.which(name)
            assert found, name
            (self.programs / name).symlink_to(found)

    def run(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        self.calls.write_text("")
        environment = {"PATH": str(self.programs), "CALLS": str(self.calls)} | environment
        command = ["bash", str(self.script), *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)

    def built(self) -> bool:
        return "-m venv" in self.calls.read_text()


@pytest.fixture
def tool(tmp_path):
    return Tool(tmp_path)


def test_it_builds_once_and_again_after_a_change(tool):
    first = tool.run(str(tool.dir))
    assert first.returncode == 0 and tool.built(), first.stderr
    assert (tool.dir / "bin/sglang_cpu.pth").read_text() == "import sglang_cpu_start\n"
    assert (tool.dir / "bin/sgl_kernel/__init__.py").exists()
    calls = tool.calls.read_text()
    assert f"--no-deps -r {tool.files}/requirements-no-deps.txt" in calls
    assert "sglang.launch_server" in calls

    again = tool.run(f"{tool.dir}/")
    assert again.returncode == 0 and not tool.built() and "installed already" in again.stdout
    tool.run(str(tool.dir), FAKE_VERSION="3.12.1")
    assert tool.built()
    tool.run(str(tool.dir))
    (tool.files / "requirements.txt").write_text("torch==0\n")
    (tool.dir / "left over").write_text("")
    tool.run(str(tool.dir))
    assert tool.built() and not (tool.dir / "left over").exists()


def test_the_directory_is_in_the_project_unless_given(tool):
    assert tool.run().returncode == 0
    assert (tool.script.parents[1] / ".venv-sglang/bin/python").exists()


def test_a_failure_of_pip_is_said_and_the_next_call_starts_anew(tool):
    failed = tool.run(str(tool.dir), PIP_STATUS="1")
    assert failed.returncode == 1 and "pip" in failed.stderr
    assert tool.run(str(tool.dir)).returncode == 0 and tool.built()


def test_somebody_elses_directory_is_not_touched(tool):
    (tool.dir / "bin").mkdir(parents=True)
    (tool.dir / "bin/python").write_text("mine")
    refused = tool.run("--force", str(tool.dir))
    assert refused.returncode == 1 and str(tool.dir) in refused.stderr
    assert (tool.dir / "bin/python").read_text() == "mine" and not tool.built()


@pytest.mark.parametrize("old", [False, True], ids=["none", "too old"])
def test_without_a_python_it_says_which_one_is_needed(tool, old):
    (tool.programs / "python3.11").unlink()
    if old:
        executable(tool.programs / "python3", "#!/bin/bash\nexit 1\n")
    refused = tool.run(str(tool.dir))
    assert refused.returncode == 1 and "Python 3.11" in refused.stderr and not tool.dir.exists()


def test_it_is_not_needed_where_there_is_a_gpu(tool):
    executable(tool.programs / "nvidia-smi", "#!/bin/bash\necho 'GPU 0: a card (UUID: GPU-1)'\n")
    refused = tool.run(str(tool.dir))
    assert refused.returncode == 1 and "pip install sglang" in refused.stderr and not tool.built()
    assert tool.run("--force", str(tool.dir)).returncode == 0 and tool.built()
    executable(tool.programs / "nvidia-smi", "#!/bin/bash\necho 'No devices found.'\nexit 6\n")
    assert tool.run(f"{tool.dir}-2").returncode == 0 and tool.built()


@pytest.mark.parametrize("arguments", [("--none",), ("",), ("a", "b")])
def test_other_arguments_are_refused(tool, arguments):
    refused = tool.run(*arguments)
    assert refused.returncode == 2 and "got " in refused.stderr and not tool.built()


def test_every_version_is_exact_and_no_place_is_named():
    lists = {path.name: path.read_text() for path in FILES.glob("*.txt")}
    assert sorted(lists) == ["requirements-no-deps.txt", "requirements.txt"]
    lines = [line for text in lists.values() for line in text.splitlines() if not line.startswith("#")]
    assert all(re.fullmatch(r"[A-Za-z0-9_.-]+==[0-9][0-9a-z.]*", line) for line in lines)
    names = [line.partition("==")[0].lower() for line in lines]
    assert len(set(names)) == len(names) > 90
    assert "torch==2.13.0" in lines and "sglang" in names


def start(program: str, *folders: Path, **environment: str) -> str:
    """What a program prints in a Python that begins with the stand-ins, as `sglang_cpu.pth` makes it begin."""
    path = os.pathsep.join(map(str, [*folders, STAND_INS]))
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": path} | environment
    command = [sys.executable, "-c", f"import sglang_cpu_start, os, sys\n{program}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_settings_are_made_unless_the_caller_made_them():
    show = "print(*(os.environ[n] for n in ('SGLANG_USE_CPU_ENGINE', 'OMP_NUM_THREADS', 'HF_HUB_OFFLINE')))"
    assert start(show) == "1 1 1"
    assert start(show, OMP_NUM_THREADS="4", HF_HUB_OFFLINE="0") == "1 4 0"
    assert start("print('torch' in sys.modules)") == "False", "every start of Python would take seconds"
