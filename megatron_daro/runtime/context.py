"""What every part of one run shares: its configuration and directory, who is told, what is timed, how long to wait."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from megatron_daro.config import Config
from megatron_daro.config.base import filled
from megatron_daro.config.sections import EnvironmentSection
from megatron_daro.deadlines import Deadlines
from megatron_daro.observe import logs
from megatron_daro.observe.phases import Phases
from megatron_daro.rollout.batch_so_far import LOWEST_KEEP_RATE
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
        one, rollout, reward = config.engine.sglang, config.rollout, config.reward
        of_servers = {
            "server_start": one.start_timeout_s,
            "request": one.request_timeout_s,
            "update_call": one.sync_timeout_s,
        }
        size, environments = rollout.rollouts_per_prompt, [e for e in config.all_environments if e.has_turns]
        most_prompts = rollout.prompts_requested / LOWEST_KEEP_RATE  # of a round
        deadlines = Deadlines.of(
            config.trainer.deadline_scale,
            steps_per_turn=config.trainer.steps_per_batch * (rollout.batches_ahead + 1),
            **(of_servers if config.engine.kind == "sglang" else {}),
            conversation=max((_conversations_s(environment, size) for environment in environments), default=0.0),
            verdicts=math.ceil(most_prompts * size / reward.workers) * reward.timeout_s,
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


def _conversations_s(section: EnvironmentSection, size: int) -> float:
    """Return what `size` conversations may take that begin together, beside the answers of the model."""
    in_workers = section.kind == "agent" or section.of_verifiers
    rounds = math.ceil(size / section.workers) if in_workers else 1
    return rounds * (section.timeout_s + (section.max_turns + 1) * section.step_timeout_s)
