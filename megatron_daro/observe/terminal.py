"""The terminal of commands and runs: messages in one form, and a run that goes on when its reader is gone."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path

from rich.console import Console

from megatron_daro.observe.logs import safe_text


class StderrNotices:
    """Prints messages to stderr; stdout is for results."""

    def notice(self, message: str) -> None:
        """Print a message."""
        print(safe_text(message), file=sys.stderr, flush=True)

    def warn(self, message: str) -> None:
        """Print a warning."""
        self.notice(f"warning: {message}")


class RunConsole(Console):
    """A console that may lose its reader (`| head`, a closed terminal) without ending the run."""

    def on_broken_pipe(self) -> None:
        """Go on without output, where rich would end the program."""
        self._go_on_unread("its reader is gone")

    def _check_buffer(self) -> None:
        try:
            super()._check_buffer()
        except OSError as error:  # a terminal that was closed, a log file on a full disk
            self._go_on_unread(error.strerror or str(error))

    def _go_on_unread(self, why: str) -> None:
        self.quiet = True
        with suppress(OSError, ValueError), Path(os.devnull).open("wb") as null:
            os.dup2(null.fileno(), self.file.fileno())  # writing the buffered rest at exit would fail again
        with suppress(OSError):
            print(
                f"warning: stdout cannot be written ({why}); the run goes on, its numbers are in metrics.jsonl",
                file=sys.stderr,
                flush=True,
            )
