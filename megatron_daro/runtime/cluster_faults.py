"""What keeps a Ray cluster from starting, found before Ray meets it or said in a sentence afterwards.

Place in the data flow: asked by cluster.py. Ray waits a quarter of an hour for an address where nobody listens, and
ends with tracebacks where a file cannot be written or a limit is too low.
"""

from __future__ import annotations

import re
import resource
import socket
import tempfile
from pathlib import Path

from ray._private import services

from megatron_daro.errors import ConfigError, WorkerError

CONNECT_TIMEOUT_S = 10.0
LEAST_OPEN_FILES = 512
"""A driver with few workers holds about 150; Ray's own servers hold more."""
_MOST_TEXT = 300
# Linux limits the path of a socket to 107 bytes, and Ray nests its sockets deep below its directory.
_MOST_TEMP_PATH = 40
_UNSET = "fix: start the cluster, correct the address, or unset RAY_ADDRESS for a private cluster on this machine"


def check_address(address: str) -> None:
    """Refuses an address of RAY_ADDRESS where nobody listens.

    Raises:
        ConfigError: within twice CONNECT_TIMEOUT_S.
    """
    given = re.sub(r"^\w+://", "", address)
    try:
        found = services.canonicalize_bootstrap_address(given)
    except ConnectionError:
        found = None
    except (ValueError, OSError) as error:
        raise ConfigError(f"RAY_ADDRESS: got {address!r} ({error}); allowed: host:port or auto; {_UNSET}") from error
    if found is None:
        raise ConfigError(f"RAY_ADDRESS: got {address!r}, but no Ray cluster runs on this machine; {_UNSET}")
    # Ray puts the address of the network card in the place of a loopback one; either may be listened on.
    failures = [_failure(one) for one in dict.fromkeys((found, given)) if one != "auto"]
    if all(failures):
        raise ConfigError(
            f"RAY_ADDRESS: got {address!r}, but nobody answers at {found} ({failures[0]}); allowed: a Ray cluster that "
            f"runs; {_UNSET}"
        )


def _failure(address: str) -> str:
    """Why no connection to host:port can be made; empty if one can."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_TIMEOUT_S).close()
    except (OSError, ValueError) as error:
        return str(error)
    return ""


def check_limits() -> None:
    """Raise the limit of open files as far as this user may.

    Raises:
        ConfigError: it stays too low for Ray.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 65536 if hard == resource.RLIM_INFINITY else min(hard, 65536)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    if soft != resource.RLIM_INFINITY and soft < LEAST_OPEN_FILES:
        raise ConfigError(
            f"open files: this process may have {soft} (`ulimit -n`); allowed: at least {LEAST_OPEN_FILES}; fix: raise "
            "the limit of the shell, the container or the service"
        )


def own_directory() -> Path:
    """Return a new directory for Ray's session: sockets, logs and spilled objects. To be removed with the cluster.

    Raises:
        ConfigError: no temporary directory can be written.
    """
    try:
        base = tempfile.gettempdir()
        return Path(tempfile.mkdtemp(prefix="daro_ray_", dir=base if len(base) <= _MOST_TEMP_PATH else "/tmp"))
    except OSError as error:
        raise ConfigError(
            f"TMPDIR: no temporary directory can be written ({error}); fix: free space there, or set TMPDIR"
        ) from error


def not_started(error: Exception) -> WorkerError | ConfigError:
    """Return what Ray raised when it should have started, as a sentence."""
    if isinstance(error, OSError) and error.filename:
        return ConfigError(
            f"Ray cannot write {error.filename} ({error.strerror}); fix: set HOME and TMPDIR to directories that exist "
            "and can be written"
        )
    return WorkerError(
        f"Ray did not start: {plain(str(error))}; look at free memory, free disk space and `ulimit -a`, and start again"
    )


def plain(text: str) -> str:
    """Ray's words on one line, without colours, cut to a few hundred characters."""
    line = " ".join(re.sub(r"\x1b\[[0-9;]*m", "", text).split())
    return line if len(line) <= _MOST_TEXT else f"{line[:_MOST_TEXT]}..."
