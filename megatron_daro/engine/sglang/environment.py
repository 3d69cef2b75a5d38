"""The environment variables of an SGLang server.

A server starts from inside a Ray worker of the trainer with another interpreter, so much of the trainer's environment
is wrong for it and is left out. Kept are CUDA_VISIBLE_DEVICES as Ray set it (this is how the server learns its GPUs),
NCCL_*, SGLANG_*, OMP_*, LD_LIBRARY_PATH and HF_HOME; `engine.sglang.env` wins over every rule.
"""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Mapping
from pathlib import Path

from megatron_daro.config import nccl_environment

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
    kept |= _ADDED | nccl_environment.nccl_of_both_ends(inherited)
    kept["PATH"] = os.pathsep.join(part for part in (str(python.parent), inherited.get("PATH", os.defpath)) if part)
    if is_loopback(host):
        kept["GLOO_SOCKET_IFNAME"] = "lo"
    for name in ("NO_PROXY", "no_proxy"):
        listed = [part for part in inherited.get(name, "").split(",") if part]
        kept[name] = ",".join(dict.fromkeys([*listed, host, "127.0.0.1", "localhost"]))
    return {**kept, **user}
