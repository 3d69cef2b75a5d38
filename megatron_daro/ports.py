"""Ports that stay reserved between being chosen and being bound by another process, up to seconds later.

The fleet reserves ports -> a server's arguments -> the server binds them. The port at which ranks meet, or Ray listens,
is reserved here too. A port found by binding port 0 lies in the kernel's range for outgoing connections and can be gone
when it is to be bound; these are chosen outside that range and held by a lock on a file, which the kernel drops when
the process dies, however it dies.

An SGLang server needs two: its HTTP port and `--nccl-port`. Without the latter SGLang picks a free port while it reads
its arguments and binds it seconds later in another process; two servers that start together can pick the same. Other
ports that SGLang derives (its port + 233 and above) belong to attention data parallelism, which is refused.

Each user of a machine has a directory of their own and does not see the locks of others; so ports are tried in random
order and tested with bind. A host that is not an address of this machine is refused.
"""

from __future__ import annotations

import errno
import fcntl
import os
import random
import socket
import stat
import tempfile
from pathlib import Path
from types import TracebackType

from megatron_daro.errors import EngineError

EPHEMERAL_RANGE_FILE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_DEFAULT_EPHEMERAL = (32768, 60999)
_LOWEST_PORT = 10241
_PREFERRED_LOWEST_PORT = 20000
"""Ray's workers listen between 10002 and 19999."""
_MOST_DIRECTORIES = 8


def in_address(host: str) -> str:
    """Return a host as it stands before a port: an IPv6 address in brackets."""
    return f"[{host}]" if ":" in host else host


class Reservation:
    """One port, ours until close() or the end of the process. Also a context manager.

    The holder may bind the port, or have a child bind it, meanwhile.
    """

    def __init__(self, port: int, descriptor: int, path: Path) -> None:
        self.port = port
        self._descriptor: int | None = descriptor
        self._path = path

    def close(self) -> None:
        """Give the port back. Safe to call twice."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is None:
            return
        # Unlinked under the lock: a process that opened the file before sees that it is no longer at its path, and a
        # forked child with a copy of the descriptor keeps a lock that is never asked for again.
        self._path.unlink(missing_ok=True)
        os.close(descriptor)

    def __enter__(self) -> Reservation:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def reserve_port(host: str) -> Reservation:
    """Reserve a TCP port that nothing listens on and no other caller of this function, of the same user, holds.

    Args:
        host: address or name of this machine that the server will listen on.

    Raises:
        EngineError: the host is no address of this machine, or every port is taken.
    """
    address = _local_address(host)
    directory = _lock_directory()
    candidates = candidate_ports()
    for port in random.Random(os.urandom(16)).sample(candidates, len(candidates)):
        reservation = _lock(directory, port)
        if reservation is None:
            continue
        if _is_free(address, port):
            return reservation
        reservation.close()
    raise EngineError(
        f"ports: got none free on {host} of the {len(candidates)} between {candidates[0]} and {candidates[-1]}; "
        f"allowed: at least one. End other servers, or processes that hold locks in {directory}"
    )


def candidate_ports(range_file: Path = EPHEMERAL_RANGE_FILE) -> list[int]:
    """Return the ports outside the range of outgoing connections, ascending.

    Only those above Ray's own range, if at least 1000 are left there. If the kernel uses every port above 10240 for
    outgoing connections, all of these: the lock and the bind test still hold.
    """
    low, high = _ephemeral_range(range_file)
    outside = [port for port in range(_LOWEST_PORT, 65536) if not low <= port <= high]
    preferred = [port for port in outside if port >= _PREFERRED_LOWEST_PORT]
    if len(preferred) >= 1000:
        return preferred
    return outside or list(range(_LOWEST_PORT, 65536))


def _ephemeral_range(range_file: Path) -> tuple[int, int]:
    try:
        low, high = (int(word) for word in range_file.read_text().split())
    except (OSError, ValueError):
        return _DEFAULT_EPHEMERAL
    return low, high


def _local_address(host: str) -> tuple[socket.AddressFamily, str]:
    """Return family and address of the host; that it can be bound, to any port, proves that it is ours."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind(address)
    except OSError as error:
        raise EngineError(
            f"ports: got host {host!r}, which this machine cannot listen on ({error}); allowed: an address of this "
            "machine, such as 127.0.0.1. Correct the host"
        ) from error
    return family, str(address[0])


def _is_free(address: tuple[socket.AddressFamily, str], port: int) -> bool:
    """Whether nothing listens on the port, on the host or on any address (torch's store binds them all)."""
    wildcard = (socket.AF_INET, "0.0.0.0")
    for family, where in (wildcard, address):
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            try:
                probe.bind((where, port))
            except OSError as error:
                if error.errno in (errno.EADDRINUSE, errno.EACCES):
                    return False
                raise
    return True


def _lock(directory: Path, port: int) -> Reservation | None:
    """Return the lock of a port, None when another holds it. Files that nobody locks are taken over."""
    path = directory / str(port)
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError:
        return None  # Something of another user or kind lies there: another port will do.
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Its holder may have removed the file between our open and our lock; then the lock means nothing.
        if os.path.samestat(os.fstat(descriptor), path.lstat()):
            return Reservation(port, descriptor, path)
    except OSError:
        os.close(descriptor)
        return None
    os.close(descriptor)
    return None


def _lock_directory() -> Path:
    """Return a directory that this user owns and can write: the first of a few names that is one or can be made one."""
    user = os.getuid()
    base = Path(tempfile.gettempdir())
    for number in range(_MOST_DIRECTORIES):
        path = base / f"megatron_daro-ports-{user}{f'-{number}' if number else ''}"
        try:
            path.mkdir(mode=0o700, exist_ok=True)
            status = path.lstat()
        except OSError:
            continue
        if stat.S_ISDIR(status.st_mode) and status.st_uid == user and os.access(path, os.W_OK | os.X_OK):
            return path
    raise EngineError(
        f"ports: got no usable directory megatron_daro-ports-{user} below {base}; allowed: one that this user owns and "
        "can write. Make room there, remove what stands in its place, or set TMPDIR"
    )
