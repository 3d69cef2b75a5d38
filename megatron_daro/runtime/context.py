"""What every part of one run shares: its configuration and directory, who is told, what is timed, how long to wait."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from megatron_daro.config import Config
from megatron_daro.config.base import filled
from megatron_daro.deadlines import Deadlines
from megatron_daro.observe import logs
from megatron_daro.observe.phases import Phases
from megatron_daro.rollout.protocol import Progress


@dataclass(frozen=True, slots=True)
class RunContext:
    """Handed to what the runtime starts; what the loop drives gets only the values that it needs."""

    config: Config
    progress: Progress
    phases: Phases
    deadlines: Deadlines

    @classmethod
    def of(cls, config: Config, progress: Progress, phases: Phases) -> RunContext:
        """The context of a run whose deadlines are those of the configuration."""
        deadlines = Deadlines().scaled(config.trainer.deadline_scale)
        if config.engine.kind == "sglang":
            one = config.engine.sglang
            deadlines = deadlines.with_servers(
                start_s=one.start_timeout_s, request_s=one.request_timeout_s, sync_s=one.sync_timeout_s
            )
        return cls(config, progress, phases, deadlines)

    @property
    def run_dir(self) -> Path:
        """Where the run is."""
        return filled(self.config.trainer.run_dir)

    @property
    def log_dir(self) -> Path:
        """Where every process of the run has its log; absolute."""
        return self.run_dir.absolute() / logs.FOLDER
