"""Ctrl-C, SIGTERM and SIGHUP: while a command starts, in the training loop, and during shutdown.

`interruptible` surrounds a whole command; `stop_on_signals` surrounds the start of the processes that train and the
loop, and restores the previous handlers afterwards. All three signals mean the same. A shutdown that has begun is
finished in order, unless the user insists.
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
"""How many signals end the process by force; those that asked for the stop count."""
_AGAIN_S = 0.02
_ABORT_ALARM_S = 3


class Interrupts:
    """The first signal raises KeyboardInterrupt; those after it, and all after `ending`, are counted.

    Where Python cannot raise (in `__del__`, in a callback of a weak reference such as importlib's own) it swallows the
    exception: then `swallowed` has the same signal sent again.
    """

    def __init__(self) -> None:
        self._ending = False
        self._ignored = 0
        self._raised: int | None = None

    def ending(self) -> None:
        """Note that the command is shutting down: from here on no signal raises."""
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
        """Return whether Python swallowed what `handle` raised; if so, have the signal sent again in a moment."""
        if self._raised is None or not issubclass(exception, KeyboardInterrupt):
            return False
        number, self._raised, self._ending = self._raised, None, False
        again = threading.Timer(_AGAIN_S, os.kill, (os.getpid(), number))  # sent at once, it would be swallowed here
        again.daemon = True
        again.start()
        return True


@contextmanager
def interruptible() -> Iterator[Interrupts]:
    """Handle the three signals in the block, then restore the previous handlers. For the main thread."""
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
    """Restore the handlers of the three signals after code that replaces them."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def signals_after() -> Iterator[None]:
    """Let no signal interrupt the block; if it ends without an error, raise the first signal again that came during it.

    For the start of Ray: an exception in the middle of its C++ code leaves that hanging, where no further signal
    reaches it (Ray 2.60, `~GlobalStateAccessor` of an accessor whose constructor was interrupted). INSISTING signals
    end the process by force. For the main thread.

    If the handler of Ray's C++ code (`RayLog::InstallFailureSignalHandler`) gets a SIGTERM first, it passes it on, but
    sets an alarm that aborts the process three seconds later (Abseil, `alarm_on_failure_secs`): that alarm is
    cancelled.
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
    """In the block, have the three signals ask the controller to stop; then restore the previous handlers. INSISTING
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
    if left_s > _ABORT_ALARM_S:  # not Ray's
        signal.alarm(left_s)


def _end_by_force() -> None:
    """Kill all that this process has started, then this process: no exit handler runs, so none can hang."""
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            child.kill()
    print("interrupted again and again: ended by force, without a checkpoint", file=sys.stderr, flush=True)
    os._exit(EXIT_INTERRUPTED)
