"""One log file for each process of a run, RUN/logs/NAME.log: lines with time, level and name, and how a process died.

The driver logs what it tells a person, each step and the failure that ends it, with its chain
of causes; workers log failures that nobody foresaw, and all that they and their libraries write to standard output and
error, the stack of a crash included. Ray's own files are gone with its session. A later start appends. A node that does
not see the run directory keeps what its processes write where Ray puts it.
"""

from __future__ import annotations

import faulthandler
import functools
import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import ParamSpec, TypeVar

from megatron_daro.errors import DaroError

FOLDER = "logs"
"""In the run directory."""
_PACKAGE = logging.getLogger("megatron_daro")
_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


def file_name(process: str) -> str:
    """Return the file of a process: "actor rank 0" is in actor_rank_0.log."""
    return process.replace(" ", "_") + ".log"


def take_over(directory: Path | None, process: str) -> None:
    """In a worker: what this process writes goes to its file from now on; only where the driver made the folder."""
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
    """Log a worker's unforeseen errors where they happen; whoever called the method gets them all the same."""

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
    """While it is open, what the driver tells is in driver.log too, and so is the error that ends the block.

    Args:
        directory: of the logs. terminal: whether messages are shown there anyway; else warnings go to standard error.

    Raises:
        OSError: the file cannot be written.
    """
    directory.mkdir(parents=True, exist_ok=True)
    handlers = [_formatted(logging.FileHandler(directory / file_name("driver"), delay=True), "driver")]
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
