"""The error tree: one root, picklable, every message says what was given, what is allowed and how to fix it.

Every layer raises these. They cross process borders (Ray workers, verifier workers), so the errors of this file carry
only their message.
"""

from __future__ import annotations

import errno
from pathlib import Path

EXIT_INTERRUPTED = 130
"""Exit code of a command that a signal ended, as a shell reports for a child that SIGINT ended."""
_NO_SPACE = {errno.ENOSPC, errno.EDQUOT}


class DaroError(Exception):
    """Root of every error this package raises on purpose."""


class ConfigError(DaroError):
    """The configuration is wrong; the message lists every wrong field."""


class DataError(DaroError):
    """Prompts, answers or a data file are unusable."""


class ModelError(DaroError):
    """Model files are missing, torn, or of an unsupported shape."""


class CheckpointError(DaroError):
    """A checkpoint is torn, edited, missing, or does not fit the run."""


class LostSaveError(CheckpointError):
    """A rank died while a checkpoint was written, and training has gone on since; the next checkpoint takes its
    place."""


class EngineError(DaroError):
    """A rollout engine failed, died or missed its deadline."""


class RolloutError(DaroError):
    """An environment returned something that cannot be trained on, or failed again and again."""


class SandboxError(DaroError):
    """Code cannot be run in the isolation that was asked for (not: the code failed)."""


class RefusedError(EngineError):
    """A server refused a request (4xx). The same request would fail again."""


class SyncError(DaroError):
    """Weights could not be moved from the actor to the engines."""


class LostReceiversError(SyncError):
    """None of the receivers of the weights is left; one that is restarted may take them."""


class LostSenderError(SyncError):
    """A rank died while weights were sent, and was replaced; the update has to begin again."""


class RewardError(DaroError):
    """The verifier pool itself failed (not: an answer was wrong)."""


class NonFiniteError(DaroError):
    """A loss or a gradient was NaN or infinite; no optimizer step was taken."""


class WorkerError(DaroError):
    """A Ray worker died or a collective call failed on it."""


class DeadlineError(DaroError):
    """A named deadline passed; the message names it, its length and what was awaited."""


class AlgorithmError(DaroError, ValueError):
    """A loss, an advantage or a weighting was handed something it cannot use."""


def how_to_go_on(run_dir: Path) -> str:
    """Return how the user can go on with a run that ended; one that recorded nothing has no directory left."""
    if any((run_dir / "checkpoints").glob("step_*[0-9]")):
        return "--resume"
    metrics = run_dir / "metrics.jsonl"
    if metrics.is_file() and metrics.stat().st_size:
        return "--resume, which begins at step 0: there is no checkpoint yet"
    return "start again: there is no checkpoint yet"


def disk_fault(error: OSError, directory: Path, then: str | None = None) -> tuple[str, str]:
    """Return why a file could not be written, and what to do about it.

    Args:
        error: what the system said. directory: where the file belongs; for a file of a run, the run directory.
        then: what to do once the disk takes files again; unset: what `how_to_go_on` returns.

    Returns:
        (cause, advice), each a part of a sentence.
    """
    if error.errno == errno.ENOENT or not directory.is_dir():
        return (
            f"the directory {directory} is gone, or a file in it: it was removed, or its disk is not mounted any more",
            f"bring it back and {then or '--resume, or start in a new run_dir'}",
        )
    then = then or how_to_go_on(directory)
    if error.errno in _NO_SPACE:
        return f"the disk is full: {error}", f"free disk space and {then}"
    if error.errno == errno.EFBIG:
        return f"the file would be larger than this process may write: {error}", f"raise `ulimit -f` and {then}"
    return f"the disk refused: {error}", f"make the directory writable and {then}"
