"""One log file for each process of a run, RUN/logs/NAME.log, and text of unknown origin made safe to print and log.

The driver logs what it shows, each step, and the failure that ends the run, with its chain of causes. Workers log
unforeseen failures, and everything that they and their libraries write to standard output and error, including the
stack of a crash. Ray's own files are deleted with its session. A later start appends. If a node does not see the run
directory, the output of its processes stays where Ray puts it.

`safe_text` stands between text from a model, a prompt or a file and a terminal, a log line or the report: characters
with an effect (terminal escapes, other control characters, direction overrides) become visible codes; nothing is
dropped silently.
"""

from __future__ import annotations

import faulthandler
import functools
import logging
import os
import sys
import unicodedata
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import ParamSpec, TypeVar

from megatron_daro.errors import DaroError

_KEPT = {"\n", "\t"}
# Cc: control characters, ANSI's ESC among them. Cf: invisible format characters, direction overrides among them.
# Cs: lone surrogates, which no encoder accepts. Zl, Zp: line breaks that HTML and JavaScript see differently.
_ACTIVE = {"Cc", "Cf", "Cs", "Zl", "Zp"}
# Joiners are format characters that ordinary writing needs (Persian, Hindi, emoji).
_JOINERS = {"‌", "‍"}


def safe_text(text: object, limit: int | None = None, *, one_line: bool = False) -> str:
    """Return a text with every control or format character but joiners replaced by a visible code such as `\\x1b`.

    Args:
        text: anything; turned into a string first.
        limit: most characters to keep, counted after replacement; the rest becomes `… (+n characters)`.
        one_line: replace newlines and tabs too, as a log line needs.

    Returns:
        Plain text, which is not safe as markup: print it as `rich.text.Text`, embed it with `html.escape`.
    """
    kept = set() if one_line else _KEPT
    raw = str(text)
    clean = "".join(c if c in kept or not _is_active(c) else _code(c) for c in raw)
    if limit is not None and len(clean) > limit:
        return f"{clean[:limit]}… (+{len(clean) - limit} characters)"
    return clean


def _is_active(character: str) -> bool:
    if " " <= character <= "~" or character in _JOINERS:
        return False
    return unicodedata.category(character) in _ACTIVE


def _code(character: str) -> str:
    named = {"\n": "\\n", "\t": "\\t", "\r": "\\r"}
    number = ord(character)
    if character in named:
        return named[character]
    return f"\\x{number:02x}" if number < 0x100 else f"\\u{number:04x}" if number < 0x10000 else f"\\U{number:08x}"


FOLDER = "logs"
"""Folder of the logs in the run directory."""
_PACKAGE = logging.getLogger("megatron_daro")
_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


def file_name(process: str) -> str:
    """Return the file name of a process's log: actor_rank_0.log for "actor rank 0"."""
    return process.replace(" ", "_") + ".log"


class _LogFile(logging.FileHandler):
    """A log file whose own failure, as on a full disk, is reported once and in one line, so that the run's own message
    comes last."""

    _failed = False

    def emit(self, record: logging.LogRecord) -> None:
        """Write a line. With delay=True this also opens the file, which may fail."""
        try:
            super().emit(record)
        except OSError:
            self.handleError(record)

    def handleError(self, record: logging.LogRecord) -> None:
        """Report why the log cannot be written."""
        self._tell(sys.exc_info()[1])

    def close(self) -> None:
        """Close the file, and report it if the rest cannot be written."""
        try:
            super().close()
        except OSError as error:
            self._tell(error)

    def _tell(self, error: BaseException | None) -> None:
        if not self._failed:
            self._failed = True
            print(f"{self.baseFilename} cannot be written any more: {error}", file=sys.stderr)


def take_over(directory: Path | None, process: str) -> None:
    """Send everything that this worker process writes to its log file from now on, if this node sees the folder that
    the driver made. Args: directory: of the logs; None: change nothing."""
    if directory is None:
        return
    try:
        file = os.open(directory / file_name(process), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    except OSError as error:
        print(f"{directory} cannot be written from this node ({error.strerror}); {process} logs here", file=sys.stderr)
        return
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        os.dup2(file, stream.fileno())
    os.close(file)
    faulthandler.enable()
    logging.getLogger().addHandler(_formatted(logging.StreamHandler(sys.stderr), process))
    _PACKAGE.setLevel(logging.INFO)


def failures_logged(method: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """Log a worker's unforeseen errors where they happen; they are still raised to the caller."""

    @functools.wraps(method)
    def logged(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        try:
            return method(*args, **kwargs)
        except DaroError:
            raise  # told to the driver in a sentence
        except Exception:
            _PACKAGE.exception("%s failed", method.__name__)
            raise

    return logged


@contextmanager
def driver_log(directory: Path, *, terminal: bool) -> Iterator[None]:
    """Write the driver's messages within the block to driver.log too, and the error that ends the block.

    Args:
        directory: of the logs. terminal: whether messages are shown on the terminal by other means; if not, warnings go
            to standard error.

    Raises:
        OSError: the directory cannot be made.
    """
    directory.mkdir(parents=True, exist_ok=True)
    handlers = [_formatted(_LogFile(directory / file_name("driver"), delay=True), "driver")]
    if not terminal:
        handlers.append(logging.StreamHandler())
        handlers[-1].setLevel(logging.WARNING)
    level = _PACKAGE.level
    for handler in handlers:
        _PACKAGE.addHandler(handler)
    _PACKAGE.setLevel(logging.INFO)
    try:
        yield
    except BaseException:
        handlers[0].handle(_failure())
        raise
    finally:
        _PACKAGE.setLevel(level)
        for handler in handlers:
            _PACKAGE.removeHandler(handler)
            handler.close()


def _failure() -> logging.LogRecord:
    return _PACKAGE.makeRecord(_PACKAGE.name, logging.ERROR, "", 0, "the run ended with", (), sys.exc_info())


def _formatted(handler: logging.Handler, process: str) -> logging.Handler:
    handler.setFormatter(logging.Formatter(f"%(asctime)s %(levelname)s {process} (%(process)d): %(message)s"))
    return handler
