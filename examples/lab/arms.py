"""The arms of the comparison: names for `algorithm` sections, the same in all worlds.

Every algorithm of the registry is an arm under its own name, so a new row of `megatron_daro.algo` takes part at once;
`PRESETS` adds options of DARO and trust regions. Place in the data flow: arm -> AlgorithmSection -> the product's
algorithm object and objective, or the options of `megatron-daro train`. Refuses names that are in neither the registry
nor `PRESETS`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from megatron_daro.actor.objective_settings import objective_settings
from megatron_daro.algo.objective import ObjectiveSettings
from megatron_daro.algo.weighting import ALGORITHMS, WITH_CRITIC, Algorithm, make_algorithm
from megatron_daro.config import AlgorithmSection
from megatron_daro.errors import ConfigError

Options = Mapping[str, Any]

PRESETS: Mapping[str, Options] = {
    "daro_token": {"name": "daro", "daro": {"magnitude": "token"}},
    "daro_signed": {"name": "daro", "daro": {"magnitude": "signed"}},
    "daro_batch": {"name": "daro", "daro": {"normalizer": "batch"}},
    "daro_gradient": {"name": "lab_algorithms:DaroCells", "options": {"magnitude": "gradient"}},
    "daro_kernels": {"name": "lab_algorithms:DaroCells", "options": {"kernels": 3}},
    "daro_half_life": {"name": "daro", "daro": {"half_life": 10.0}},
    "daro_unfiltered": {"name": "daro", "filter": "none"},
    "daro_shared": {"name": "daro", "daro": {"normalizer": "shared"}},
    "daro_shared_half_life": {"name": "daro", "daro": {"normalizer": "shared", "half_life": 10.0}},
    "daro_frozen": {"name": "daro", "daro": {"clamp": [1.0, 1.0]}},
    "daro_batch_free": {"name": "daro", "daro": {"normalizer": "batch", "half_life": 10.0, "clamp": [1e-6, 1e6]}},
    "daro_shared_free": {"name": "daro", "daro": {"normalizer": "shared", "half_life": 10.0, "clamp": [1e-6, 1e6]}},
    "fade": {"name": "lab_algorithms:Fade"},
    "lambda_grpo": {"name": "lab_algorithms:LambdaGrpo"},
    "sqrt_n": {"name": "lab_algorithms:CountWeights", "options": {"kind": "sqrt"}},
    "ucb": {"name": "lab_algorithms:CountWeights", "options": {"kind": "ucb"}},
    "cispo": {"name": "grpo", "trust_region": "cispo"},
    "sapo": {"name": "grpo", "trust_region": "sapo"},
    "gspo": {"name": "grpo", "trust_region": "gspo", "clip_low": 3e-4, "clip_high": 4e-4},
    "ppo_decay": {"name": "ppo", "options": {"gae_lambda": 0.5}},
    "ppo_decay_pretrained": {"name": "ppo", "options": {"gae_lambda": 0.5}, "critic": {"pretrain_steps": 30}},
    "vc_ppo": {"name": "ppo", "options": {"gae_lambda": 0.5, "critic_lambda": 1.0}, "critic": {"pretrain_steps": 30}},
    "vapo": {"name": "ppo", "options": {"length_factor": 0.5, "critic_lambda": 1.0}, "critic": {"pretrain_steps": 30}},
    "gspo_wide": {"name": "grpo", "trust_region": "gspo", "clip_low": 0.02, "clip_high": 0.03},
    "ladder_grpo": {"name": "grpo_sequence", "clip_high": 0.2},
    "ladder_filter": {"name": "grpo_sequence", "clip_high": 0.2, "overlong": {"kind": "filter"}},
    "ladder_clip_higher": {"name": "grpo_sequence", "overlong": {"kind": "filter"}},
    "ladder_punishment": {"name": "grpo_sequence", "overlong": {"kind": "both"}},
    "ladder_token": {"name": "grpo", "overlong": {"kind": "both"}},
    "ladder_dapo": {"name": "dapo", "overlong": {"kind": "both"}},
}
"""Arm -> options of the section `algorithm`."""

LADDER = tuple(arm for arm in PRESETS if arm.startswith("ladder_"))
"""DAPO's (arXiv 2503.14476, table 1), each rung with one technique more."""

BASELINE = "grpo"
"""The arm whose final accuracy is the mark to which the others are timed."""


def arm_names() -> list[str]:
    """Return all arms: the registry in its order, then the presets."""
    return [*ALGORITHMS, *WITH_CRITIC, *PRESETS]


def options_of(arm: str) -> Options:
    """Return options of the section `algorithm` for an arm; a control's are those of the arm before its @.

    Raises:
        ConfigError: there is no such arm.
    """
    arm = arm.partition("@")[0]
    if arm in PRESETS:
        return PRESETS[arm]
    if arm in {**ALGORITHMS, **WITH_CRITIC}:
        return {"name": arm}
    raise ConfigError(f"arm: got {arm!r}, allowed are {', '.join(arm_names())}")


def control(rate: float) -> str:
    """Return the name of the baseline at another learning rate, which shows what a rate alone does to speed."""
    return f"{BASELINE}@{rate:g}"


def is_control(arm: str) -> bool:
    """Return whether an arm is a control."""
    return "@" in arm


def section_of(arm: str) -> AlgorithmSection:
    """Return the checked section `algorithm` of an arm."""
    return AlgorithmSection.model_validate(options_of(arm))


def build(arm: str, *, rollouts: int, max_tokens: int) -> tuple[Algorithm, ObjectiveSettings]:
    """Return the product's algorithm and objective for an arm, as the driver and every rank make them."""
    section = section_of(arm)
    sizes: dict[str, Any] = {"rollouts_per_prompt": rollouts, "max_response_tokens": max_tokens}
    algorithm = make_algorithm(**section.arguments(**sizes))
    return algorithm, objective_settings(section, algorithm)


def command_line(arm: str) -> list[str]:
    """Return the arm as options of `megatron-daro train`: `algorithm.a.b=value`."""
    return list(_flat("algorithm", options_of(arm)))


def is_daro(arm: str) -> bool:
    """Return whether an arm is a variant of DARO: an algorithm that learns weights of pass-rate bins."""
    return str(options_of(arm)["name"]).rpartition(":")[2].lower().startswith("daro")


def needs_several_updates(arm: str) -> bool:
    """Return whether an arm differs from the baseline only by its trust region, so only where the ratio is not 1."""
    sizes: dict[str, Any] = {"rollouts_per_prompt": 8, "max_response_tokens": 8}
    own, base = section_of(arm), section_of(BASELINE)
    return arm != BASELINE and own.arguments(**sizes) == base.arguments(**sizes) and own.overlong == base.overlong


def needs_a_limit(arm: str) -> bool:
    """Return whether an arm treats truncated answers in its own way; in the closed-form worlds there are none."""
    return section_of(arm).overlong.kind != "none"


def _flat(prefix: str, values: Options) -> list[str]:
    lines: list[str] = []
    for name, value in values.items():
        key = f"{prefix}.{name}"
        lines += _flat(key, value) if isinstance(value, Mapping) else [f"{key}={json.dumps(value).strip(chr(34))}"]
    return lines
