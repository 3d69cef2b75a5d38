"""A copy of an example's run.sh whose programs write down how they were called."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
SHARED = ("examples/one_command.sh", "examples/quickstart/sglang.yaml")

PROGRAM = """#!/usr/bin/env bash
case "$*" in
    "-c "* ) echo "{bin}/.." ;;
    * ) printf '%s\\0' {name} "$@" END >>"{calls}" ;;
esac
"""


def executable(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


class Copy:
    """An example's run.sh in a folder of its own, with programs that only record their arguments."""

    def __init__(self, root: Path, example: str) -> None:
        self.root, self.calls_file, self.script = root, root / "calls", f"examples/{example}/run.sh"
        for name in (self.script, f"examples/{example}/config.yaml", *SHARED):
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, root / name)
        for name in ("setup.py", "requirements.txt"):
            (root / name).write_text("")
        self.calls_file.write_text("")
        for name in ("python", "megatron-daro"):
            text = PROGRAM.format(bin=root / "env/bin", name=name, calls=self.calls_file)
            executable(root / "env/bin" / name, text)
        self.tool_fails(False)
        shutil.copy(ROOT / "tools/install_packages.sh", root / "tools")

    def tool_fails(self, fails: bool) -> None:
        text = PROGRAM.format(bin="", name="sglang_cpu_env", calls=self.calls_file) + f"exit {int(fails)}\n"
        executable(self.root / "tools/sglang_cpu_env.sh", text)

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        environment = {"PATH": f"{self.root}/first:/usr/bin:/bin", "VIRTUAL_ENV": str(self.root / "env")}
        command = ["bash", str(self.root / self.script), *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, cwd="/", env=environment)

    def calls(self, program: str) -> list[list[str]]:
        """The arguments of each call of a program, in order."""
        calls = [call.split("\0")[:-1] for call in self.calls_file.read_text().split("END\0")]
        return [call[1:] for call in calls if call[:1] == [program]]
