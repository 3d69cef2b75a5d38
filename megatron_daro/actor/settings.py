"""What a rank takes from the rest of the run, as plain values.

Does not import Megatron-core, so that the driver, which makes these values and sends them to the ranks, loads neither
it nor a CUDA context.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from megatron_daro.config.lora import LoraSection


@dataclass(frozen=True, slots=True)
class PolicySettings:
    """Plain values for a rank, all for `MegatronPolicy` except expandable_segments.

    model_path: Hugging Face checkpoint. rollouts_per_prompt: K. max_response_tokens: dr_grpo's constant. temperature:
    of the sampling distribution that is trained. total_steps: optimizer steps of the run, at the end of which the decay
    of the learning rate ends. weights: Megatron checkpoint that training starts from; None: model_path.
    expandable_segments: for `parallel.configure_process`. lora: with a rank above 0, adapters alone are trained. seed:
    of their initial values. environments: their names, if there are several.
    """

    model_path: Path
    rollouts_per_prompt: int
    max_response_tokens: int
    temperature: float
    total_steps: int
    weights: Path | None = None
    expandable_segments: bool = False
    lora: LoraSection = field(default_factory=LoraSection)
    seed: int = 0
    environments: tuple[str, ...] = ()
