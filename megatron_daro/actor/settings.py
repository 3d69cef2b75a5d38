"""What the policy needs of the run beside its own sections; imports nothing heavy, so that a driver can make one."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class PolicySettings:
    """Plain values for `MegatronPolicy`.

    model_path: Hugging Face checkpoint. rollouts_per_prompt: K. max_response_tokens: dr_grpo's constant. temperature:
    of the sampling distribution that is trained. total_steps: optimizer steps of the run, where the decay of the
    learning rate ends. weights: Megatron checkpoint that training starts from; None: model_path.
    """

    model_path: Path
    rollouts_per_prompt: int
    max_response_tokens: int
    temperature: float
    total_steps: int
    weights: Path | None = None
