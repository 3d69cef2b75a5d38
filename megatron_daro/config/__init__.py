"""Configuration: typed sections, loading, cross-section checks.

Place in the data flow: the first thing that runs. Imports no torch, ray, megatron or transformers, so that a mistake is
reported in a fraction of a second and before anything starts.
"""

from megatron_daro.config.actor import ActorSection, OptimizerSection
from megatron_daro.config.algorithm import (
    AlgorithmSection,
    CorrectionSection,
    DaroSection,
    KlSection,
    OverlongSection,
)
from megatron_daro.config.checks import CheckReport, check
from megatron_daro.config.hardware import Hardware, detect
from megatron_daro.config.loading import resolve, resolve_and_check, resolve_tree, to_yaml
from megatron_daro.config.problems import Problem, check_passthrough
from megatron_daro.config.sections import (
    Config,
    DataSection,
    EmbeddedSection,
    EngineSection,
    EnvironmentSection,
    EvalSet,
    ModelSection,
    ObserveSection,
    RewardSection,
    RolloutSection,
    TrainerSection,
    WandbSection,
)

__all__ = [
    "ActorSection",
    "AlgorithmSection",
    "CheckReport",
    "Config",
    "CorrectionSection",
    "DaroSection",
    "DataSection",
    "EmbeddedSection",
    "EngineSection",
    "EnvironmentSection",
    "EvalSet",
    "Hardware",
    "KlSection",
    "ModelSection",
    "ObserveSection",
    "OptimizerSection",
    "OverlongSection",
    "Problem",
    "RewardSection",
    "RolloutSection",
    "TrainerSection",
    "WandbSection",
    "check",
    "check_passthrough",
    "detect",
    "resolve",
    "resolve_and_check",
    "resolve_tree",
    "to_yaml",
]
