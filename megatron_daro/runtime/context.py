"""What all parts of one run share: configuration, run directory, progress, phase timers and deadlines."""

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
    """For what the runtime starts; what the loop drives gets only the values that it needs."""

    config: Config
    progress: Progress
    phases: Phases
    deadlines: Deadlines

    @classmethod
    def of(cls, config: Config, progress: Progress, phases: Phases) -> RunContext:
        """Return the context of a run, with the deadlines that follow from its configuration."""
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
            **(of_servers if config.engine.kind == "sglang" else {}),
            conversation=max((_conversations_s(environment, size) for environment in environments), default=0.0),
            verdicts=math.ceil(most_prompts * size / reward.workers) * reward.timeout_s,
        )
        return cls(config, progress, phases, deadlines)

    @property
    def run_dir(self) -> Path:
        """The run directory."""
        return filled(self.config.trainer.run_dir)

    @property
    def log_dir(self) -> Path:
        """The directory of all processes' logs; absolute."""
        return self.run_dir.absolute() / logs.FOLDER


def _conversations_s(section: EnvironmentSection, size: int) -> float:
    """Return how long `size` conversations that begin together may take, without the model's answers."""
    in_workers = section.kind == "agent" or section.of_verifiers
    rounds = math.ceil(size / section.workers)  # that share the worker processes, whole or step by step
    steps_s = rounds * (section.max_turns + 1) * section.step_timeout_s
    return (rounds if in_workers else 1) * section.timeout_s + steps_s
