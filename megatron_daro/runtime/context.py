"""What every part of one run shares: its configuration and directory, who is told, what is timed, how long to wait."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from megatron_daro.config import Config
from megatron_daro.config.base import filled
from megatron_daro.deadlines import Deadlines
from megatron_daro.observe import logs
from megatron_daro.observe.phases import Phases
from megatron_daro.rollout.protocol import Progress

_MARGIN_S = 600.0


@dataclass(frozen=True, slots=True)
class RunContext:
    """Handed to what the runtime starts; what the loop drives gets only the values that it needs."""

    config: Config
    progress: Progress
    phases: Phases
    deadlines: Deadlines

    @classmethod
    def of(cls, config: Config, progress: Progress, phases: Phases) -> RunContext:
        """The context of a run whose deadlines are those of the configuration: what waits for servers waits longer than
        the limits that a user set for one."""
        deadlines = Deadlines().scaled(config.trainer.deadline_scale)
        if config.engine.kind == "sglang":
            servers = config.engine.sglang
            deadlines = replace(
                deadlines,
                engine_start=max(deadlines.engine_start, servers.start_timeout_s + _MARGIN_S),
                next_group=max(deadlines.next_group, servers.request_timeout_s + _MARGIN_S),
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
