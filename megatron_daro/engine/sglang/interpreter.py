"""The interpreter of SGLang servers: which SGLang it has, and whether it can serve this run.

`engine.sglang.python` is inspected before anything starts: for its SGLang version, and for the argument names against
which the user's arguments are checked. Rejects interpreters that are missing, cannot run, or have no sglang or one that
is too old; a version newer than those tested is not an error here.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_daro.config.problems import Problem, config_error
from megatron_daro.config.sections import SGLangSection
from megatron_daro.engine.sglang import upstream_names
from megatron_daro.engine.sglang.command import argument_problems, server_environment

OLDEST_SGLANG, LAST_TESTED = (0, 5, 18), (0, 5, 23)
INSPECTION_TIMEOUT_S = 120.0
"""It starts Python and reads 15 files: 0.1 s on an idle machine, more on a cold network disk."""
_STDERR_CHARS = 400
_FIELD = "engine.sglang.python"


@dataclass(frozen=True, slots=True)
class ServerEnvironment:
    """An interpreter with sglang.

    version: as installed, such as `0.5.23`.
    argument_names: names of the command line's arguments, with underscores, aliases included; empty if a new version
        declares them in another way, and then only the server itself refuses unknown ones.
    nccl: the NCCL package installed with its torch, as `package==version`; None without CUDA.
    mooncake: whether Mooncake's transfer engine is installed.
    """

    version: str
    argument_names: frozenset[str]
    nccl: str | None = None
    mooncake: bool = False


def check_environments(options: SGLangSection) -> None:
    """Check the interpreter of the servers to be started: NCCL, Mooncake, names of arguments. Raises ConfigError."""
    if options.urls:
        return
    python = interpreter(options)
    environment = inspect_environment(python, env=options.env)
    problems = argument_problems(options.arguments, environment.argument_names)
    problems += _nccl_problems(options, python, environment.nccl)
    problems += _mooncake_problems(options, python, environment.mooncake)
    if problems:
        raise config_error(f"SGLang {environment.version} of {python}", problems)


def interpreter(options: SGLangSection) -> Path:
    """Return the Python of the servers, links not resolved: a virtual environment is found by the path of its link."""
    return options.python.absolute() if options.python else Path(sys.executable)


def inspect_environment(python: Path, *, env: Mapping[str, str] | None = None) -> ServerEnvironment:
    """Return what an interpreter has of sglang. Runs it once, 0.1 s; sglang is not imported.

    Args:
        python: `engine.sglang.python`.
        env: `engine.sglang.env`; a PYTHONPATH in it is used.

    Raises:
        ConfigError: about engine.sglang.python.
    """
    allowed = f"a Python interpreter that has sglang {dotted(OLDEST_SGLANG)} or newer"

    def refuse(got: str, fix: str) -> Exception:
        return config_error("SGLang", [Problem(_FIELD, f"{str(python)!r}, {got}", allowed, fix)])

    if not python.is_file():
        raise refuse("which is no file" if python.exists() else "which does not exist", "correct the path")
    if not os.access(python, os.X_OK):
        raise refuse("which is not executable", "give the path of the interpreter, such as VENV/bin/python")
    facts = _run(python, env or {})
    if isinstance(facts, str):
        raise refuse(facts, f"run `{python} -c 'import json, ast'` and repair the interpreter")
    version = facts["version"]
    if version is None:
        fix = f"install it there, or correct {_FIELD}"
        if python == Path(sys.executable):
            fix = f"SGLang needs another torch than the trainer: give it an environment of its own and set {_FIELD}"
        raise refuse(f"which has no sglang (Python {facts['python']})", fix)
    if version_number(version) < OLDEST_SGLANG:
        raise refuse(f"which has sglang {version}", f"install a newer sglang there, or correct {_FIELD}")
    return ServerEnvironment(version, frozenset(facts["names"]), facts.get("nccl"), facts.get("mooncake", False))


def _nccl_problems(options: SGLangSection, python: Path, theirs: str | None) -> list[Problem]:
    """Return a problem if both ends of a broadcast have different versions of NCCL: it refuses to make such a group
    (its init.cc: "Mismatched NCCL version detected")."""
    own = upstream_names.nccl_package()
    on_cpu = options.named_arguments.get("device") == "cpu"  # then the broadcast is gloo's
    if not options.transport.collective or on_cpu or not own or not theirs:
        return []
    package, own_version, version = own.partition("==")[0], own.partition("==")[2], theirs.partition("==")[2]
    if own_version == version:
        return []
    got = f"{options.sync}, between the trainer's NCCL {own_version} and NCCL {version} of {python}"
    fix = f"run `pip install --no-deps {package}=={version}` for the trainer, or set engine.sglang.sync=disk"
    return [Problem("engine.sglang.sync", got, "one version of NCCL at both ends of a broadcast", fix, also=(_FIELD,))]


def _mooncake_problems(options: SGLangSection, python: Path, theirs: bool) -> list[Problem]:
    lacking = [sys.executable] * (not upstream_names.has_mooncake()) + [str(python)] * (not theirs)
    if options.shards_over == "tcp" or not lacking:
        return []
    got = f"{options.shards_over}, but no mooncake-transfer-engine for {' and '.join(lacking)}"
    fix = f"run `{lacking[0]} -m pip install mooncake-transfer-engine`, or set engine.sglang.shards_over=tcp"
    allowed = "Mooncake's transfer engine at both ends"
    return [Problem("engine.sglang.shards_over", got, allowed, fix, also=(_FIELD,))]


def version_number(text: str) -> tuple[int, ...]:
    """Return (0, 5, 23) for "0.5.23" or "0.5.23.post1"; () for a text that does not begin with a number."""
    match = re.match(r"\d+(?:\.\d+)*", text)
    return tuple(int(part) for part in match.group().split(".")) if match else ()


def dotted(version: tuple[int, ...]) -> str:
    """Write a version as text."""
    return ".".join(map(str, version))


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
            # Only the last line: start-up files of a site directory may print as well.
            facts = json.loads(done.stdout.strip().rpartition("\n")[2])
        except ValueError:
            facts = None
        if isinstance(facts, dict) and {"version", "names", "python"} <= facts.keys():
            return facts
    last_words = " ".join((done.stderr or done.stdout)[-_STDERR_CHARS:].split())
    return f"which failed (status {done.returncode}; it wrote: {last_words or 'nothing'})"
