"""The interpreter and the environment variables of the servers.

`engine.sglang.python` is inspected before anything starts: its SGLang version and argument names, with which the
user's arguments are compared. Rejects interpreters that are missing, cannot run, or have no sglang or one that is too
old; a version newer than those tested is not an error here.

A server starts from inside a Ray worker of the trainer with another interpreter, so much of the trainer's environment
is wrong for it and is left out. Kept are CUDA_VISIBLE_DEVICES as Ray set it (this is how the server learns its GPUs),
NCCL_*, SGLANG_*, OMP_*, LD_LIBRARY_PATH and HF_HOME; `engine.sglang.env` wins over every rule.
"""

from __future__ import annotations

import ipaddress
import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_daro import nccl_environment
from megatron_daro.config.problems import Problem, config_error
from megatron_daro.config.sections import SGLangSection
from megatron_daro.engine.sglang import upstream_names
from megatron_daro.engine.sglang.arguments import argument_problems

_DROPPED_PREFIXES = ("PYTHON", "RAY_", "TORCHELASTIC_")
"""PYTHONPATH and PYTHONHOME point into the trainer's environment; PYTHONDONTWRITEBYTECODE makes every start of a
server compile all its modules again."""
_DROPPED = frozenset(
    {
        "VIRTUAL_ENV",
        "VIRTUAL_ENV_PROMPT",
        # The trainer's process group, which a server must not join.
        *("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK"),
        # Expandable segments exclude the memory saver of a server; one connection serializes a server's streams.
        *("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "CUDA_DEVICE_MAX_CONNECTIONS"),
    }
)
_ADDED = {
    "HF_HUB_OFFLINE": "1",  # Model files are local; a server must not hang on a network look-up.
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONUNBUFFERED": "1",  # The end of the log is there when the process died.
    "PYTHONSAFEPATH": "1",  # A folder called `torch` in the working directory is no module. Python 3.11 and newer.
}
CPU_SERVER = {
    # The C library keeps freed memory for the next bucket of weights; else the system clears every page of every bucket
    # anew, which takes longer than to send it.
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(2**40),
}
"""Added for a server that runs on a CPU."""


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches the host."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def server_environment(
    user: Mapping[str, str], *, host: str, python: Path, inherited: Mapping[str, str] | None = None
) -> dict[str, str]:
    """All environment variables of a server process.

    Args:
        user: added last.
        host: the server's host. For a loopback host gloo is told to use the loopback interface; requests to the host
            go past any HTTP proxy, as SGLang asks itself over HTTP.
        python: the server's interpreter; its folder comes first in PATH (SGLang compiles kernels with its `ninja`).
        inherited: default os.environ.
    """
    inherited = os.environ if inherited is None else inherited
    kept = {
        name: value
        for name, value in inherited.items()
        if name not in _DROPPED and not name.startswith(_DROPPED_PREFIXES)
    }
    kept |= _ADDED | nccl_environment.for_both_ends(inherited)
    kept["PATH"] = os.pathsep.join(part for part in (str(python.parent), inherited.get("PATH", os.defpath)) if part)
    if is_loopback(host):
        kept["GLOO_SOCKET_IFNAME"] = "lo"
    for name in ("NO_PROXY", "no_proxy"):
        listed = [part for part in inherited.get(name, "").split(",") if part]
        kept[name] = ",".join(dict.fromkeys([*listed, host, "127.0.0.1", "localhost"]))
    return {**kept, **user}


OLDEST_SGLANG = (0, 5, 18)
INSPECTION_TIMEOUT_S = 120.0
"""One start of Python and 15 files; 0.1 s on an idle machine, more on a cold network disk."""
_STDERR_CHARS = 400
_FIELD = "engine.sglang.python"


@dataclass(frozen=True, slots=True)
class ServerEnvironment:
    """An interpreter with sglang.

    version: as installed, such as `0.5.23`.
    argument_names: names of the command line's arguments, with underscores, aliases included; empty when a new
        version declares them in another way, then the server itself is left to refuse unknown ones.
    nccl: the NCCL that its torch brought, as `package==version`; None without CUDA.
    """

    version: str
    argument_names: frozenset[str]
    nccl: str | None = None


def check_environments(options: SGLangSection) -> None:
    """Look at the interpreter of servers to be started: NCCL, names of arguments. Raises ConfigError."""
    if options.urls:
        return
    python = interpreter(options)
    found = inspect_environment(python, env=options.env)
    problems = argument_problems(options.arguments, found.argument_names)
    problems += _nccl_problems(options, python, found.nccl)
    if problems:
        raise config_error(f"SGLang {found.version} of {python}", problems)


def interpreter(options: SGLangSection) -> Path:
    """Return the Python of the servers: not resolved, since a virtual environment is known by the path of its link."""
    return options.python.absolute() if options.python else Path(sys.executable)


def inspect_environment(python: Path, *, env: Mapping[str, str] | None = None) -> ServerEnvironment:
    """Version and argument names of the sglang that an interpreter has. Runs it once, 0.1 s; sglang is not imported.

    Args:
        python: `engine.sglang.python`.
        env: `engine.sglang.env`; a PYTHONPATH in it counts.

    Raises:
        ConfigError: naming engine.sglang.python.
    """
    wanted = f"a Python interpreter that has sglang {'.'.join(map(str, OLDEST_SGLANG))} or newer"

    def refuse(got: str, fix: str) -> Exception:
        return config_error("SGLang", [Problem(_FIELD, f"{str(python)!r}, {got}", wanted, fix)])

    if not python.is_file():
        raise refuse("which is no file" if python.exists() else "which does not exist", "correct the path")
    if not os.access(python, os.X_OK):
        raise refuse("which is not executable", "give the path of the interpreter, such as VENV/bin/python")
    found = _run(python, env or {})
    if isinstance(found, str):
        raise refuse(found, f"run `{python} -c 'import json, ast'` and repair the interpreter")
    version = found["version"]
    if version is None:
        fix = f"install it there, or correct {_FIELD}"
        if python == Path(sys.executable):
            fix = f"SGLang needs another torch than the trainer: give it an environment of its own and set {_FIELD}"
        raise refuse(f"which has no sglang (Python {found['python']})", fix)
    numbers = version_numbers(version)
    if numbers is None or numbers < OLDEST_SGLANG:
        raise refuse(f"which has sglang {version}", f"install a newer sglang there, or correct {_FIELD}")
    return ServerEnvironment(version, frozenset(found["names"]), found.get("nccl"))


def _nccl_problems(options: SGLangSection, python: Path, theirs: str | None) -> list[Problem]:
    """NCCL compares versions when a group is made, and refuses (its init.cc: "Mismatched NCCL version detected")."""
    own = upstream_names.nccl_package()
    if options.sync != "distributed" or not own or not theirs:
        return []
    package, own_version, version = own.partition("==")[0], own.partition("==")[2], theirs.partition("==")[2]
    if own_version == version:
        return []
    got = f"distributed, between the trainer's NCCL {own_version} and NCCL {version} of {python}"
    fix = f"run `pip install --no-deps {package}=={version}` for the trainer, or set engine.sglang.sync=disk"
    return [Problem("engine.sglang.sync", got, "one version of NCCL at both ends of a broadcast", fix, also=(_FIELD,))]


def version_numbers(version: str) -> tuple[int, int, int] | None:
    """Return the first three numbers of a version; None for a text that does not begin with three."""
    found = re.match(r"(\d+)\.(\d+)\.(\d+)", version)
    return None if found is None else (int(found[1]), int(found[2]), int(found[3]))


def _run(python: Path, env: Mapping[str, str]) -> dict[str, Any] | str:
    """Return what upstream_names.py prints, or what went wrong, as the end of a sentence about the interpreter."""
    try:
        done = subprocess.run(
            [str(python), upstream_names.__file__],
            env=server_environment(env, host="127.0.0.1", python=python),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=INSPECTION_TIMEOUT_S,
        )
    except OSError as error:
        return f"which cannot be run ({error})"
    except subprocess.TimeoutExpired:
        return f"which did not answer within {INSPECTION_TIMEOUT_S:g} s"
    if done.returncode == 0:
        try:
            # The last line: a site directory's start-up files may print as well.
            found = json.loads(done.stdout.strip().rpartition("\n")[2])
        except ValueError:
            found = None
        if isinstance(found, dict) and {"version", "names", "python"} <= found.keys():
            return found
    said = " ".join((done.stderr or done.stdout)[-_STDERR_CHARS:].split())
    return f"which failed (status {done.returncode}; it wrote: {said or 'nothing'})"
