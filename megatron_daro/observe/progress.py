"""What a person sees in the terminal while a run goes on.

Place in the data flow: the controller calls `step(step, metrics)` once per optimizer step and `notice`/`warn` for
messages. On a terminal it draws a live panel; elsewhere (CI, a log file) it prints one plain line per step; off, it
prints nothing. Messages and steps also go to the run's log (logs.py). Text it is given may hold model output: control
characters are made visible and nothing is read as markup. It computes no metric and never raises where one is missing.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Literal

from rich.console import Console
from rich.live import Live
from rich.text import Text

from megatron_daro.observe.escape import safe_text
from megatron_daro.observe.progress_view import ProgressState, ProgressView, plain_line
from megatron_daro.observe.trace import Phases

Mode = Literal["auto", "live", "plain", "off"]
_logger = logging.getLogger("megatron_daro")
_MESSAGE_LIMIT = 4000
_LOG_WIDTH = 160


class _Terminal(Console):
    """A console that may lose its reader (`| head`, a closed terminal): the run goes on without one."""

    def on_broken_pipe(self) -> None:
        """Rich would end the program here."""
        self._go_on_unread("its reader is gone")

    def _check_buffer(self) -> None:
        try:
            super()._check_buffer()
        except OSError as error:  # a terminal that was closed, a log file on a full disk
            self._go_on_unread(error.strerror or str(error))

    def _go_on_unread(self, why: str) -> None:
        self.quiet = True
        with suppress(OSError, ValueError), Path(os.devnull).open("wb") as null:
            os.dup2(null.fileno(), self.file.fileno())  # what is buffered would fail again at the end
        with suppress(OSError):
            print(
                f"warning: stdout cannot be written ({why}); the run goes on, its numbers are in metrics.jsonl",
                file=sys.stderr,
                flush=True,
            )


class Progress:
    """Live progress of one run; a context manager."""

    def __init__(
        self,
        *,
        total_steps: int,
        rollouts_per_prompt: int,
        start_step: int = 0,
        mode: Mode = "auto",
        title: str = "",
        phases: Phases | None = None,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Print nothing until `start` (or `with`).

        Args:
            total_steps: optimizer steps of the whole run.
            rollouts_per_prompt: K, the number of rollouts per prompt.
            start_step: steps done before this process started (a resumed run).
            mode: "auto" is "live" on a terminal that can draw (TERM not dumb), else "plain"; "off" prints nothing.
            title: the panel's title, such as the run directory.
            phases: asked for the phase that runs now.
            console: where to draw; stdout if None.
            clock: seconds, for elapsed time and ETA.
        """
        self._console = console or _Terminal(highlight=False)
        can_draw = self._console.is_terminal and not self._console.is_dumb_terminal
        self.mode: Mode = ("live" if can_draw else "plain") if mode == "auto" else mode
        title = self._encodable(safe_text(title, 200, one_line=True))
        self._state = ProgressState(
            total_steps=total_steps,
            rollouts_per_prompt=rollouts_per_prompt,
            first_step=start_step,
            title=title,
            clock=clock,
            active=phases.active if phases else tuple,
        )
        self._live: Live | None = None

    def start(self) -> Progress:
        """Start drawing; a second call does nothing."""
        if self.mode == "live" and self._live is None:
            view = ProgressView(self._state)
            self._live = Live(view, console=self._console, refresh_per_second=4, transient=False)
            self._live.start()
        return self

    def stop(self) -> None:
        """Leaves the last panel on the screen and gives the terminal back."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def step(self, step: int, metrics: Mapping[str, float | None]) -> None:
        """Show a finished step.

        Args:
            step: optimizer step, counted from 1.
            metrics: the step's metrics by key path (docs/metrics.md); any of them may be missing, null or NaN.
        """
        self._state.add(step, metrics)
        if _logger.handlers:
            _logger.info("%s", plain_line(self._state))
        if self._live is not None:
            self._live.refresh()
        elif self.mode == "plain":
            self._print(Text(plain_line(self._state)))

    @property
    def width(self) -> int:
        """Columns that a table may have: those of the terminal, else of a wide log line."""
        return self._console.width if self._console.is_terminal else _LOG_WIDTH

    def notice(self, text: str) -> None:
        """Print a message above the panel."""
        self._message(text, logging.INFO)

    def warn(self, text: str) -> None:
        """Print a warning above the panel; when off, it goes to the logger `megatron_daro`."""
        self._message(text, logging.WARNING)

    def __enter__(self) -> Progress:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _message(self, text: str, level: int) -> None:
        clean = self._encodable(safe_text(text, _MESSAGE_LIMIT))
        if self.mode == "off" or _logger.handlers:
            _logger.log(level, "%s", clean)
        if self.mode == "off":
            return
        if level >= logging.WARNING:
            self._print(Text.assemble(("warning: ", "bold yellow"), clean))
        else:
            self._print(Text(clean))

    def _print(self, text: Text) -> None:
        # A log line stays one line, however narrow rich believes a pipe to be.
        self._console.print(text, soft_wrap=not self._console.is_terminal, highlight=False)

    def _encodable(self, text: str) -> str:
        """Text that the terminal's encoding can express; what it cannot becomes a visible code."""
        encoding = self._console.encoding or "utf-8"
        return text.encode(encoding, "backslashreplace").decode(encoding)
