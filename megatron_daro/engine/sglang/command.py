"""The command line of an SGLang server, and its environment variables.

`engine.sglang.arguments`, under upstream's names -> `argument_problems` (before anything starts) -> `server_command` ->
ManagedProcess. Refuses arguments that this package sets itself, and values that a command line cannot carry.

A server starts from inside a Ray worker of the trainer with another interpreter, so much of the trainer's environment
is wrong for it and is left out. The rest is kept: CUDA_VISIBLE_DEVICES as Ray set it (this is how the server learns its
GPUs), NCCL_*, SGLANG_*, OMP_*, HF_HOME, ... `_ADDED` overrides these, and `engine.sglang.env` overrides everything.
"""

from __future__ import annotations

import ipaddress
import json
import math
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_daro.config import nccl_environment
from megatron_daro.config.problems import Problem, check_passthrough, config_error, show
from megatron_daro.proxies import past_proxies

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
    "weight_version": "remove it: it is the number of the optimizer step",
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
"""Names (with underscores) of arguments that users may not give -> what to do instead."""

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]*\Z")


@dataclass(frozen=True, slots=True)
class ServerPart:
    """number: which part of a server a process is. parts: how many there are. meeting: host:port, on the first part's
    host, at which all parts meet."""

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
        arguments: further arguments under upstream's names, with hyphens or underscores. True becomes a flag without a
            value; False and None leave upstream's default; a list becomes several values; a dict becomes JSON text.
        part: of a server that is spread over nodes; None: all of it.

    Raises:
        ConfigError: lists every argument that users may not give or that cannot be written.
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
    """Return everything that is wrong with the user's arguments; empty if nothing is.

    Args:
        arguments: `engine.sglang.arguments`.
        known: names that the installed SGLang has, with underscores (ServerEnvironment.argument_names). Empty: names
            are not checked.
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
    """Return one argument as words of a command line."""
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
    """Return at most one problem: a value that a command line cannot carry, or would read as something else."""
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
"""PYTHONPATH and PYTHONHOME point into the trainer's environment; with PYTHONDONTWRITEBYTECODE every start of a server
would compile all its modules again."""
_DROPPED = frozenset(
    {
        "VIRTUAL_ENV",
        "VIRTUAL_ENV_PROMPT",
        # The trainer's process group, which a server must not join.
        *("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK"),
        # Expandable segments cannot be used with a server's memory saver; a single connection would serialize its
        # streams.
        *("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "CUDA_DEVICE_MAX_CONNECTIONS"),
    }
)
_ADDED = {
    "HF_HUB_OFFLINE": "1",  # Model files are local; a server must not hang in a network request for them.
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONUNBUFFERED": "1",  # So that the log is complete when the process dies.
    "PYTHONSAFEPATH": "1",  # Not to import a folder called `torch` in the working directory. Python 3.11 and newer.
    # With false, DeepGEMM, which multiplies fp8 blocks, compiles each kernel when a batch first needs it, in seconds.
    # With true, the first batch of a kind would compile all its kernels: minutes without a token, in which
    # stall_timeout_s would end the server.
    "SGLANG_JIT_DEEPGEMM_PRECOMPILE": "false",
    # By default a server of several GPUs fails to start if one has less free memory than another, as happens beside
    # trainer ranks or remains of an earlier server. With false it takes on each what is free on the fullest one.
    "SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK": "false",
}
CPU_SERVER = {
    # Make the C library keep freed memory for the next bucket of weights; otherwise the system clears every page of
    # every bucket anew, which takes longer than sending it.
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(2**40),
}
"""Added for a server that runs on a CPU."""


def is_loopback(host: str) -> bool:
    """Whether the host can be reached only from this machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def server_environment(
    user: Mapping[str, str], *, host: str, python: Path, inherited: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Return all environment variables of a server process.

    Args:
        user: added last.
        host: the server's host. For a loopback host gloo is told to use the loopback interface. Requests to the host
            bypass any HTTP proxy, since SGLang sends requests to itself over HTTP.
        python: the server's interpreter; its folder comes first in PATH (SGLang compiles kernels with its `ninja`).
        inherited: default os.environ.
    """
    inherited = os.environ if inherited is None else inherited
    kept = {
        name: value
        for name, value in inherited.items()
        if name not in _DROPPED and not name.startswith(_DROPPED_PREFIXES)
    }
    kept |= _ADDED | nccl_environment.nccl_of_server(inherited)
    kept["PATH"] = os.pathsep.join(part for part in (str(python.parent), inherited.get("PATH", os.defpath)) if part)
    if is_loopback(host):
        kept["GLOO_SOCKET_IFNAME"] = "lo"
    return {**kept, **past_proxies(inherited, host), **user}
