"""Ctrl-C, SIGTERM and SIGHUP: while a command starts, in the training loop, and while everything is taken apart.

`interruptible` is around a whole command; `stop_on_signals` is around the start of the processes and the loop, and
gives the handlers back when they end. All three signals mean the same. What ends already is ended in order, unless
somebody insists.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import TYPE_CHECKING

import psutil

from megatron_daro.errors import EXIT_INTERRUPTED

if TYPE_CHECKING:
    from megatron_daro.controller import Controller

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
INSISTING = 5
"""Signals while a command ends already, after which it is ended by force."""
_AGAIN_S = 0.02
_ABORT_ALARM_S = 3


class Interrupts:
    """The first signal raises KeyboardInterrupt; those after it, and all after `ending`, are counted.

    Where Python cannot raise (in `__del__`, in a callback of a weak reference such as importlib's own) it swallows the
    exception: `swallowed` lets the same signal come again.
    """

    def __init__(self) -> None:
        self._ending = False
        self._ignored = 0
        self._raised: int | None = None

    def ending(self) -> None:
        """From here on nothing is left to be interrupted."""
        self._ending = True

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Raise KeyboardInterrupt at the first of the three signals; end by force at the INSISTING-th counted one."""
        if not self._ending:
            self._ending, self._raised = True, number
            raise KeyboardInterrupt(signal.Signals(number).name)
        self._ignored += 1
        if self._ignored >= INSISTING:
            _end_by_force()

    def swallowed(self, exception: type[BaseException]) -> bool:
        """Whether Python swallowed what `handle` raised; the signal comes again then, in a moment."""
        if self._raised is None or not issubclass(exception, KeyboardInterrupt):
            return False
        number, self._raised, self._ending = self._raised, None, False
        again = threading.Timer(_AGAIN_S, os.kill, (os.getpid(), number))  # at once it would be swallowed here
        again.daemon = True
        again.start()
        return True


@contextmanager
def interruptible() -> Iterator[Interrupts]:
    """Handle the three signals in the block; the handlers before come back after it. For the main thread."""
    interrupts, hook = Interrupts(), sys.unraisablehook

    def heard(unraisable: sys.UnraisableHookArgs) -> None:
        if not interrupts.swallowed(unraisable.exc_type):
            hook(unraisable)

    before = {number: signal.signal(number, interrupts.handle) for number in SIGNALS}
    sys.unraisablehook = heard
    try:
        yield interrupts
    finally:
        sys.unraisablehook = hook
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def kept_handlers() -> Iterator[None]:
    """Put the handlers of the three signals back after code that replaces them."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def signals_after() -> Iterator[None]:
    """Let no signal interrupt the block; the first one that came in it is raised again when it has ended well.

    For the start of Ray: an exception between the parts of its C++ code leaves that hanging, out of reach of any
    further signal (Ray 2.60, `~GlobalStateAccessor` of an accessor whose constructor was interrupted). INSISTING
    signals end the process by force. For the main thread.

    A SIGTERM that meets the handler of Ray's C++ code (`RayLog::InstallFailureSignalHandler`) is passed on by it, with
    an alarm set to abort the process three seconds later (Abseil, `alarm_on_failure_secs`): the alarm is taken back.
    """
    received: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        _take_back_alarm()
        received.append(number)
        if len(received) == 1:
            print("interrupted: this ends as soon as Ray has started", file=sys.stderr, flush=True)
        if len(received) >= INSISTING:
            _end_by_force()

    with kept_handlers():
        for number in SIGNALS:
            signal.signal(number, note)
        yield
    if received:
        signal.raise_signal(received[0])


@contextmanager
def stop_on_signals(controller: Controller) -> Iterator[None]:
    """Let the three signals ask the controller to stop, in the block; then the handlers before are back. INSISTING
    signals end the process by force.

    Needs the running event loop of the main thread.
    """
    loop, heard = asyncio.get_running_loop(), itertools.count(1)

    def stop(name: str) -> None:
        if next(heard) >= INSISTING:
            _end_by_force()
        controller.request_stop(name)

    with kept_handlers():
        for number in SIGNALS:
            loop.add_signal_handler(number, stop, number.name)
        try:
            yield
        finally:
            for number in SIGNALS:
                loop.remove_signal_handler(number)


def _take_back_alarm() -> None:
    left_s = signal.alarm(0)
    if left_s > _ABORT_ALARM_S:  # another one
        signal.alarm(left_s)


def _end_by_force() -> None:
    """Kills what this process has started, then this process: no exit handler runs, so none can hang."""
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            child.kill()
    print("interrupted again and again: ended by force, without a checkpoint", file=sys.stderr, flush=True)
    os._exit(EXIT_INTERRUPTED)
