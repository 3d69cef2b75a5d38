"""Where a run starts: at step 0, or at the newest whole checkpoint if the restart audit allows it.

Place in the data flow: before any process. Writes RUN/config.yaml and RUN/restarts.txt. Refuses a configuration, a
model or data that the checkpoint does not belong to; then config.yaml stays as it was.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_daro import recovery
from megatron_daro.config import Config, to_yaml
from megatron_daro.observe.progress import Progress
from megatron_daro.rollout.protocol import Notices
from megatron_daro.runtime import restart_audit

CONFIG_FILE = "config.yaml"


@dataclass(frozen=True, slots=True)
class Start:
    """made_with: what the run is made of. checkpoint, state: what it goes on from; None and empty from the beginning.

    begins_again: an earlier start got to no checkpoint, so what it wrote is written again.
    """

    made_with: Mapping[str, Any]
    checkpoint: Path | None = None
    state: Mapping[str, Any] = field(default_factory=dict)
    begins_again: bool = False

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        return int(self.state.get("step", 0))


def begin(run_dir: Path, config: Config, *, resume: bool, progress: Progress) -> Start:
    """Find the place to start from and say what a restart changes.

    Args:
        run_dir: owned by this process. config: checked.
        resume: go on from the newest whole checkpoint, if there is one.
        progress: is told about refused checkpoints and shows the audit.

    Raises:
        CheckpointError: no checkpoint is whole, or the run is not the one of the checkpoint. Nothing was changed.
    """
    made_with = restart_audit.made_with(config)
    start = Start(made_with)
    found = recovery.find_latest_valid(run_dir, progress) if resume else None
    if found:
        audit = compared(found[0], made_with, progress)
        if audit:
            restart_audit.record(run_dir, audit.text())
            for line in audit.text(progress.width).splitlines():
                progress.notice(line)
            audit.raise_refused()
        recovery.set_newer_aside(found[0])
        start = Start(made_with, *found)
    elif resume:
        progress.notice(f"{run_dir} has no checkpoint yet: starting from step 0; what it recorded is written again")
        start = Start(made_with, begins_again=True)
    (run_dir / CONFIG_FILE).write_text(to_yaml(config))
    return start


def compared(checkpoint: Path, made_with: Mapping[str, Any], notices: Notices) -> restart_audit.Audit | None:
    """Return what differs between a checkpoint's run and this one; None, with a warning, where the checkpoint does
    not say."""
    saved = recovery.read_made_with(checkpoint)
    if saved is None:
        notices.warn(f"{checkpoint} does not say what its run was made of, so changes since then are not known")
        return None
    return restart_audit.audit(checkpoint, saved, made_with)
