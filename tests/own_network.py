"""Runs a test in a process whose network is its own loopback: for programs that listen on every address they find."""

from __future__ import annotations

import ctypes
import fcntl
import importlib
import multiprocessing
import os
import socket
import struct
import traceback
from typing import Any

import pytest

# Linux: sched.h, sockios.h, if.h.
_NEW_USER, _NEW_NETWORK = 0x10000000, 0x40000000
_SET_FLAGS, _UP = 0x8914, 0x1


def in_own_network(module: str, function: str, *arguments: Any, limit_s: float = 120.0) -> None:
    """Call a module's function there, and raise what it raises as AssertionError. Skips where no such network can be
    made."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_run, args=(theirs, module, function, arguments))
    process.start()
    theirs.close()
    try:
        assert ours.poll(limit_s), f"{function} took more than {limit_s:g} s"
        kind, text = ours.recv()
    except EOFError:
        kind, text = "failed", "the process ended without a word"
    finally:
        process.kill()
        process.join()
    if kind == "skipped":
        pytest.skip(text)
    assert kind == "passed", text


def _run(pipe: Any, module: str, function: str, arguments: tuple[Any, ...]) -> None:
    """In the process: nothing is imported before, since a process with threads cannot leave its user's namespace."""
    try:
        _unshare()
    except OSError as error:
        pipe.send(("skipped", f"no network of its own can be made here: {error}"))
        return
    try:
        getattr(importlib.import_module(module), function)(*arguments)
    except BaseException:
        pipe.send(("failed", traceback.format_exc()))
    else:
        pipe.send(("passed", ""))


def _unshare() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_NEW_NETWORK if os.geteuid() == 0 else _NEW_NETWORK | _NEW_USER):
        raise OSError(ctypes.get_errno(), "unshare")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        fcntl.ioctl(control, _SET_FLAGS, struct.pack("16sH14s", b"lo", _UP, b""))
