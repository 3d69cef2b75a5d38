"""Signals outside the training loop: one interrupts, more are patient, many end by force."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import psutil
import pytest

from megatron_daro.runtime.interrupts import (
    EXIT_INTERRUPTED,
    INSISTING,
    SIGNALS,
    interruptible,
    kept_handlers,
    signals_after,
    stop_on_signals,
)


@pytest.mark.parametrize("number", SIGNALS)
def test_the_first_signal_interrupts_and_the_next_ones_do_not_hurry_the_clean_up(number):
    before = {n: signal.getsignal(n) for n in SIGNALS}
    steps = []
    with pytest.raises(KeyboardInterrupt), interruptible():
        try:
            signal.raise_signal(number)
        finally:
            for other in SIGNALS:
                signal.raise_signal(other)
            steps.append("cleaned up")
    assert steps == ["cleaned up"]
    assert {n: signal.getsignal(n) for n in SIGNALS} == before


def test_what_ends_already_is_not_interrupted():
    with interruptible() as interrupts:
        interrupts.ending()
        signal.raise_signal(signal.SIGTERM)


def test_handlers_that_other_code_replaces_come_back():
    with interruptible():
        before = {n: signal.getsignal(n) for n in SIGNALS}
        with kept_handlers():
            signal.signal(signal.SIGTERM, lambda *_: sys.exit(15))
        assert {n: signal.getsignal(n) for n in SIGNALS} == before


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_waits_for_the_end_of_what_it_must_not_interrupt(number):
    steps = []
    with pytest.raises(KeyboardInterrupt), interruptible():
        before = {n: signal.getsignal(n) for n in SIGNALS}
        with signals_after():
            signal.raise_signal(number)
            signal.raise_signal(number)
            steps.append("started")
        steps.append("not reached")
    assert steps == ["started"] and signal.getsignal(number) != before[number]


class _Interrupted:
    """Gets a signal where Python cannot raise: what `__del__` raises is told to sys.unraisablehook, and goes on."""

    def __del__(self) -> None:
        signal.raise_signal(signal.SIGTERM)


def test_an_interrupt_that_python_had_to_swallow_comes_again(monkeypatch):
    told = []
    monkeypatch.setattr(sys, "unraisablehook", told.append)
    hook = sys.unraisablehook
    with pytest.raises(KeyboardInterrupt, match="SIGTERM"), interruptible():
        _Interrupted()
        time.sleep(20)
    assert sys.unraisablehook is hook and not told


@pytest.mark.parametrize(("alarm_s", "left"), [(3, False), (100, True)])
def test_the_alarm_of_rays_signal_handler_does_not_abort_the_clean_up(alarm_s, left):
    """`absl::InstallFailureSignalHandler` sets one of 3 s before it passes a signal on."""
    others = signal.alarm(0)  # pytest-timeout's own
    try:
        with pytest.raises(KeyboardInterrupt), interruptible(), signals_after():
            signal.alarm(alarm_s)
            signal.raise_signal(signal.SIGTERM)
        assert (signal.alarm(0) > 0) == left
    finally:
        signal.alarm(others)


def test_what_fails_with_a_signal_waiting_says_its_own_cause():
    with pytest.raises(ValueError, match="cause"), interruptible():
        before = {n: signal.getsignal(n) for n in SIGNALS}
        try:
            with signals_after():
                signal.raise_signal(signal.SIGINT)
                raise ValueError("cause")
        finally:
            assert {n: signal.getsignal(n) for n in SIGNALS} == before


def test_who_insists_ends_a_clean_up_that_hangs_with_its_children():
    code = (
        "import subprocess, time\n"
        "from megatron_daro.runtime.interrupts import interruptible\n"
        "with interruptible() as interrupts:\n"
        "    interrupts.ending()\n"
        "    child = subprocess.Popen(['sleep', '60'])\n"
        "    print(child.pid, flush=True)\n"
        "    time.sleep(60)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    child = int(process.stdout.readline())
    for _ in range(INSISTING + 3):
        process.send_signal(signal.SIGINT)
        time.sleep(0.02)  # two signals of one kind that wait together count once
        if process.poll() is not None:
            break
    _, stderr = process.communicate(timeout=20)
    assert process.returncode == EXIT_INTERRUPTED
    assert stderr and "Traceback" not in stderr
    # One that no init has collected yet is a zombie.
    assert not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE


def test_when_training_is_over_the_handlers_before_are_back_and_stay():
    """The event loop's end would put the defaults in the place of what it still handles."""

    async def trained():
        with stop_on_signals(SimpleNamespace(request_stop=asked.append)):
            signal.raise_signal(signal.SIGTERM)
            while not asked:
                await asyncio.sleep(0.01)

    asked, before = [], {number: signal.getsignal(number) for number in SIGNALS}
    own = {number: lambda *_: None for number in SIGNALS}
    try:
        for number, handler in own.items():
            signal.signal(number, handler)
        asyncio.run(trained())
        assert {number: signal.getsignal(number) for number in own} == own and asked == ["SIGTERM"]
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
