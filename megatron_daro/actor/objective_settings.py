"""The configuration in terms of the loss: `ObjectiveSettings`. Does not import Megatron-core, since the driver tries it
before the run starts."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from megatron_daro.algo.objective import KIMI_TAU, ObjectiveSettings
from megatron_daro.algo.weighting import Algorithm
from megatron_daro.config.algorithm import AlgorithmSection
from megatron_daro.errors import AlgorithmError


def objective_settings(section: AlgorithmSection, algorithm: Algorithm) -> ObjectiveSettings:
    """Return the token objective that the section describes, with what the algorithm itself sets instead.

    Raises:
        AlgorithmError: options do not fit each other, or the algorithm sets one that does not exist.
    """
    options: dict[str, Any] = {
        "clip_low": section.clip_low,
        "clip_high": section.clip_high,
        "dual_clip": section.dual_clip,
        "kl_coefficient": section.kl.coefficient if section.kl.place == "loss" else 0.0,
        "kl_mean": section.kl.mean,
        "reward_kl_coefficient": section.kl.coefficient if section.kl.in_reward else 0.0,
        "reward_kl_per_token": section.kl.place == "token_reward",
        "kl_estimator": section.kl.estimator,
        "entropy_coefficient": section.entropy_coefficient,
        "correction": section.correction.kind,
        "correction_cap": section.correction.cap,
        "correction_low": section.correction.low,
        "correction_high": section.correction.high,
        "correction_level": section.correction.level,
        "trust_region": section.trust_region,
        "sapo_positive": section.sapo.positive,
        "sapo_negative": section.sapo.negative,
        "mirror_tau": KIMI_TAU,  # used only by an algorithm with a "mirror" of its own
        "old_is_rollout": section.old_logprobs == "rollout",
    }
    options |= algorithm.own_objective
    names = {field.name for field in fields(ObjectiveSettings)}
    if strange := sorted(options.keys() - names):
        raise AlgorithmError(f"own_objective: got {', '.join(strange)}, allowed are {', '.join(sorted(names))}")
    forgotten = sorted(names - options.keys())
    assert not forgotten, f"{forgotten} of ObjectiveSettings would have their defaults, whatever the configuration says"
    return ObjectiveSettings(**options)
