"""TensorBoard and Weights & Biases: views of the metrics that metrics.jsonl keeps."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from megatron_daro.errors import ConfigError

_WANDB_ID_FILE = "wandb_run_id"


class Sink(Protocol):
    """A view of the metrics."""

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add one step."""

    def truncate_after(self, step: int) -> None:
        """Hide the steps after `step`; they will be written again."""

    def close(self) -> None:
        """Flush and close."""


class TensorBoardSink:
    """Scalars as event files."""

    def __init__(self, directory: Path) -> None:
        """Args: directory: where event files go; created if missing."""
        try:
            from tensorboard.summary.writer.event_file_writer import EventFileWriter
        except ImportError as error:
            raise ConfigError(
                "observe.tensorboard is true but tensorboard cannot be imported "
                f"({error}); install it (pip install tensorboard) or set observe.tensorboard=false"
            ) from error
        self._writer = EventFileWriter(str(directory))

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add one event that holds every scalar of the step."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=key, simple_value=float(value)) for key, value in metrics.items()]
        self._writer.add_event(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))
        self._writer.flush()

    def truncate_after(self, step: int) -> None:
        """Add a session start, at which TensorBoard discards later steps that it has read."""
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog

        start = SessionLog(status=SessionLog.START)
        self._writer.add_event(Event(wall_time=time.time(), step=step + 1, session_log=start))
        self._writer.flush()

    def close(self) -> None:
        """Flush and close the event file."""
        self._writer.close()


class WandbSink:
    """One Weights & Biases run."""

    def __init__(self, run_dir: Path, settings: Mapping[str, Any]) -> None:
        """Args: run_dir: where wandb keeps its files. settings: arguments of `wandb.init`."""
        try:
            import wandb
        except ImportError as error:
            raise ConfigError(
                "observe.wandb is enabled but the package wandb is not installed; "
                "install the extra (pip install 'megatron-daro[wandb]') or set observe.wandb.enabled=false"
            ) from error
        try:
            self._run = wandb.init(**_wandb_arguments(run_dir, settings))
        except Exception as error:
            raise ConfigError(
                f"observe.wandb: wandb.init({', '.join(sorted(settings))}) failed: {error}; "
                "check the settings and the login, or set WANDB_MODE=offline in the environment"
            ) from error
        (run_dir / _WANDB_ID_FILE).write_text(self._run.id)
        # The step is a metric of its own: wandb's internal step cannot go back, and a resumed run must.
        self._run.define_metric("*", step_metric="step")

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log one step."""
        self._run.log({"step": step, **metrics})

    def truncate_after(self, step: int) -> None:
        """Do nothing: repeated steps are logged again with the same `step`, and wandb draws the later value."""

    def close(self) -> None:
        """End the run."""
        self._run.finish()


def _wandb_arguments(run_dir: Path, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of `wandb.init`, with which a run directory that already has a wandb run continues it."""
    given = {key: value for key, value in settings.items() if value is not None}
    arguments = {"dir": str(run_dir), "name": run_dir.resolve().name} | given
    id_file = run_dir / _WANDB_ID_FILE
    if id_file.is_file() and "id" not in arguments:
        arguments |= {"id": id_file.read_text().strip(), "resume": "allow"}
    return arguments
