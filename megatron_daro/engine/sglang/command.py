"""How an SGLang server is started: its command line, its interpreter and its environment variables.

`engine.sglang.arguments` keep upstream's names -> `argument_problems` (before anything starts) -> `server_command` ->
ManagedProcess. Refuses arguments that this package owns, and values that a command line cannot carry.

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
import math
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_daro.config import hardware
from megatron_daro.config.problems import Problem, check_passthrough, config_error, show
from megatron_daro.config.sections import SGLangSection
from megatron_daro.engine.sglang import upstream_names

SECTION = "engine.sglang.arguments"

_ONE_SERVER = (
    "one process group of tensor_parallel ranks is one server; set engine.replicas and engine.sglang.tensor_parallel"
)
_REPLICAS = "set engine.replicas: several servers, each ended and updated by itself"
_PLACEMENT = "remove it: GPUs are chosen by placement (CUDA_VISIBLE_DEVICES)"
_NODES = "set engine.sglang.nodes: where its parts are and meet follows from their placement"
_HTTP_ONLY = "remove it: servers are asked over plain HTTP"
_NO_KEY = "remove it: requests carry no key"

OWNED_ARGUMENTS: Mapping[str, str] = {
    "model_path": "set model.path",
    "model": "set model.path",
    "config": "write its content under engine.sglang.arguments, where it is checked",
    "host": "remove it: it follows from where servers run",
    "port": "remove it: a free port is reserved for each server",
    "nccl_port": "remove it: a free port is reserved for each server",
    "random_seed": "set engine.seed",
    "weight_version": "remove it: it counts the weight updates",
    **dict.fromkeys(("tp_size", "tensor_parallel_size", "tp"), "set engine.sglang.tensor_parallel"),
    **dict.fromkeys(("dp_size", "data_parallel_size", "dp"), _REPLICAS),
    **dict.fromkeys(("attn_dp_size", "attention_data_parallel_size", "enable_dp_attention"), _REPLICAS),
    **dict.fromkeys(("pp_size", "pipeline_parallel_size", "pp"), _ONE_SERVER),
    **dict.fromkeys(("dist_init_addr", "nccl_init_addr", "nnodes", "node_rank", "use_ray"), _NODES),
    **dict.fromkeys(("base_gpu_id", "gpu_id_step"), _PLACEMENT),
    **dict.fromkeys(("grpc_mode", "smg_grpc_mode", "encoder_only", "ssl_keyfile", "ssl_certfile"), _HTTP_ONLY),
    **dict.fromkeys(("disaggregation_mode", "fastapi_root_path"), _HTTP_ONLY),
    **dict.fromkeys(("api_key", "admin_api_key"), _NO_KEY),
}
"""Names (with underscores) that are not the user's to give, and what to do instead."""

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]*\Z")


@dataclass(frozen=True, slots=True)
class ServerPart:
    """Which part of a server a process is, of how many, and where all of them meet: host:port of the first one's."""

    number: int
    parts: int
    meeting: str


def server_command(
    python: Path,
    *,
    model_path: Path,
    host: str,
    port: int,
    nccl_port: int,
    tensor_parallel: int,
    seed: int,
    arguments: Mapping[str, Any],
    part: ServerPart | None = None,
) -> list[str]:
    """Return the command that starts a server, or a part of one.

    Args:
        python: interpreter that has sglang.
        model_path: a local Hugging Face directory.
        host: address to listen on.
        port: HTTP port, reserved.
        nccl_port: port of the server's own process group, reserved (see megatron_daro/ports.py for why it is given).
        tensor_parallel: ranks.
        seed: of sampling.
        arguments: further arguments under upstream's names, with hyphens or underscores. True is a flag by itself;
            False and None leave upstream's default; a list is several values; a dict is JSON text.
        part: of a server that is spread over nodes; None: all of it.

    Raises:
        ConfigError: with every argument that is owned or cannot be written.
    """
    problems = argument_problems(arguments)
    if problems:
        raise config_error("SGLang servers", problems)
    own = {
        "model-path": str(model_path),
        "host": host,
        "port": port,
        "nccl-port": nccl_port,
        "tp-size": tensor_parallel,
        "random-seed": seed,
    }
    if part is not None:
        own |= {"nnodes": part.parts, "node-rank": part.number, "dist-init-addr": part.meeting}
    words = [word for name, value in {**own, **arguments}.items() for word in _words(name, value)]
    return [str(python), "-m", "sglang.launch_server", *words]


def argument_problems(arguments: Mapping[str, Any], known: Iterable[str] = ()) -> list[Problem]:
    """Everything wrong with the user's arguments; empty if nothing is.

    Args:
        arguments: `engine.sglang.arguments`.
        known: names that the installed SGLang has, with underscores (ServerEnvironment.argument_names). Empty: names
            are not compared.
    """
    problems, spelled, unowned = [], dict[str, str](), dict[str, Any]()
    for name, value in arguments.items():
        key = str(name).replace("-", "_")
        first = spelled.setdefault(key, str(name))
        if first != name:
            problems.append(
                Problem(f"{SECTION}.{name}", f"{first} as well", "each argument once", f"keep {first} or {name}")
            )
        elif key in OWNED_ARGUMENTS:
            allowed = "arguments that no other option sets"
            problems.append(Problem(f"{SECTION}.{name}", show(value), allowed, OWNED_ARGUMENTS[key]))
        elif not _NAME.match(str(name)):
            allowed = "a name of letters, digits, underscores and hyphens, without leading hyphens"
            problems.append(Problem(f"{SECTION}.{name}", show(name), allowed, "write the name as upstream does"))
        else:
            unowned[key] = value
            problems += _value_problems(f"{SECTION}.{name}", value)
    names = frozenset(known) - frozenset(OWNED_ARGUMENTS)
    problems += [
        Problem(f"{SECTION}.{key}", "false, which leaves upstream's default", "true", f"write no_{key}: true")
        for key, value in unowned.items()
        if value is False and f"no_{key}" in names
    ]
    return problems + (check_passthrough(SECTION, unowned, names) if names else [])


def _words(name: str, value: object) -> list[str]:
    """One argument as words of a command line."""
    flag = "--" + name.replace("_", "-")
    if value is None or value is False:
        return []
    if value is True:
        return [flag]
    if isinstance(value, (list, tuple)):
        return [flag, *(_text(item) for item in value)]
    text = _text(value)
    return [f"{flag}={text}"] if text.startswith("-") else [flag, text]


def _text(value: object) -> str:
    return json.dumps(value) if isinstance(value, (dict, bool)) else str(value)


def _value_problems(field: str, value: object) -> list[Problem]:
    """At most one problem: what a command line cannot carry, or would read as something else."""
    items = list(value) if isinstance(value, (list, tuple)) else [value]
    allowed = "true, false, null, a number, text, a mapping, or a list of numbers and texts"
    if not items:
        return [Problem(field, "an empty list", allowed, "remove the argument or fill the list")]
    for item in items:
        if not isinstance(item, (bool, int, float, str, dict, type(None))) or (item is not value and item is None):
            return [Problem(field, show(value), allowed, "write the value as on SGLang's command line")]
        if isinstance(item, float) and not math.isfinite(item):
            return [Problem(field, show(value), "finite numbers", "write a number")]
        if isinstance(item, str) and "\0" in item:
            return [Problem(field, show(value), "text without a null character", "remove the character")]
        if item is not value and isinstance(item, str) and item.startswith("-"):
            fix = "give the value as one text, as upstream's flag with `=` takes it"
            return [Problem(field, show(value), "texts in a list begin with no hyphen", fix)]
        if isinstance(item, dict) and not _is_json(item):
            return [Problem(field, show(value), "a mapping that JSON can hold", "use texts, numbers, lists, mappings")]
    return []


def _is_json(value: object) -> bool:
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):
        return False
    return True


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
    kept |= _ADDED | hardware.nccl_of_both_ends(inherited)
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
    mooncake: whether Mooncake's transfer engine is there.
    """

    version: str
    argument_names: frozenset[str]
    nccl: str | None = None
    mooncake: bool = False


def check_environments(options: SGLangSection) -> None:
    """Look at the interpreter of servers to be started: NCCL, Mooncake, names of arguments. Raises ConfigError."""
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
    allowed = f"a Python interpreter that has sglang {'.'.join(map(str, OLDEST_SGLANG))} or newer"

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
    numbers = version_numbers(version)
    if numbers is None or numbers < OLDEST_SGLANG:
        raise refuse(f"which has sglang {version}", f"install a newer sglang there, or correct {_FIELD}")
    return ServerEnvironment(version, frozenset(facts["names"]), facts.get("nccl"), facts.get("mooncake", False))


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


def _mooncake_problems(options: SGLangSection, python: Path, theirs: bool) -> list[Problem]:
    lacking = [sys.executable] * (not upstream_names.has_mooncake()) + [str(python)] * (not theirs)
    if options.shards_over == "tcp" or not lacking:
        return []
    got = f"{options.shards_over}, but no mooncake-transfer-engine for {' and '.join(lacking)}"
    fix = f"run `{lacking[0]} -m pip install mooncake-transfer-engine`, or set engine.sglang.shards_over=tcp"
    allowed = "Mooncake's transfer engine at both ends"
    return [Problem("engine.sglang.shards_over", got, allowed, fix, also=(_FIELD,))]


def version_numbers(version: str) -> tuple[int, int, int] | None:
    """Return the first three numbers of a version; None for a text that does not begin with three."""
    match = re.match(r"(\d+)\.(\d+)\.(\d+)", version)
    return None if match is None else (int(match[1]), int(match[2]), int(match[3]))


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
            facts = json.loads(done.stdout.strip().rpartition("\n")[2])
        except ValueError:
            facts = None
        if isinstance(facts, dict) and {"version", "names", "python"} <= facts.keys():
            return facts
    last_words = " ".join((done.stderr or done.stdout)[-_STDERR_CHARS:].split())
    return f"which failed (status {done.returncode}; it wrote: {last_words or 'nothing'})"
