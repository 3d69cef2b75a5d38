"""What a person sees in the terminal while a run goes on.

The controller calls `step(step, metrics)` once per optimizer step and `notice`/`warn` for messages. On a terminal that
can draw, a live panel is shown (panel.py, by rich); elsewhere (CI, a log file) each step is one plain line. Messages
and steps also go to the run's log. Text may contain model output: control characters are made visible, and nothing is
interpreted as markup.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Literal

from rich.console import Console
from rich.live import Live
from rich.text import Text

from megatron_daro.observe.logs import safe_text
from megatron_daro.observe.panel import ProgressState, draw_panel, plain_line
from megatron_daro.observe.phases import Phases
from megatron_daro.observe.terminal import RunConsole

Mode = Literal["auto", "live", "plain", "off"]
_logger = logging.getLogger("megatron_daro")
_MESSAGE_LIMIT = 4000
_LOG_WIDTH = 160


class Progress:
    """Live progress of one run; a context manager."""

    def __init__(
        self,
        *,
        total_steps: int,
        rollouts_per_prompt: int,
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
            mode: "auto" is "live" on a UTF-8 terminal that can draw, else "plain"; "off" prints nothing.
            title: the panel's title, such as the run directory.
            phases: asked for the phase that runs now.
            console: where to draw; stdout if None.
            clock: seconds, for elapsed time and ETA.
        """
        self._console = console or RunConsole(highlight=False)
        utf = self._console.encoding.lower().startswith("utf")
        can_draw = self._console.is_terminal and not self._console.is_dumb_terminal and utf
        self.mode: Mode = ("live" if can_draw else "plain") if mode == "auto" else mode
        title = self._encodable(safe_text(title, 200, one_line=True))
        self._state = ProgressState(
            total_steps=total_steps,
            rollouts_per_prompt=rollouts_per_prompt,
            title=title,
            clock=clock,
            active=phases.active if phases else tuple,
        )
        self._live: Live | None = None

    def start(self) -> Progress:
        """Start drawing; a second call does nothing."""
        if self.mode == "live" and self._live is None:
            self._live = Live(
                get_renderable=lambda: draw_panel(self._state, self._console.width),
                console=self._console,
                refresh_per_second=4,
            )
            self._live.start()
        return self

    def stop(self) -> None:
        """Leave the last panel on the screen and give the terminal back."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def resume(self, step: int) -> None:
        """Count from a step that an earlier process of the run has done."""
        self._state.step = step

    def stage(self, name: str, text: str = "") -> None:
        """Show what the run waits for while it starts; the first step ends every stage.

        Args:
            name: of the stage; several may run at once.
            text: what happens; an empty text ends the stage.
        """
        if not text:
            self._state.stages.pop(name, None)
        elif text != self._state.stages.get(name):
            self._state.stages[name] = text
            line = f"[{self._state.elapsed_s:3.0f} s] {text}"
            if _logger.handlers:
                _logger.info("%s", line)
            if self.mode == "plain":
                self._print(Text(line))

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
        """Columns for a table: those of the terminal, else those of a wide log line."""
        return self._console.width if self._console.is_terminal else _LOG_WIDTH

    def notice(self, text: str) -> None:
        """Print a message above the panel."""
        self._message(text, logging.INFO)

    def warn(self, text: str) -> None:
        """Print a warning above the panel; with mode "off" it only goes to the logger `megatron_daro`."""
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
        # A log line stays one line, whatever width rich assumes for a pipe.
        self._console.print(text, soft_wrap=not self._console.is_terminal, highlight=False)

    def _encodable(self, text: str) -> str:
        """Return a text that the terminal's encoding can express; other characters become visible codes."""
        encoding = self._console.encoding
        return text.encode(encoding, "backslashreplace").decode(encoding)
