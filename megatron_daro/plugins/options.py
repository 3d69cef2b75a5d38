"""Options of the adapters: one section, read from one environment variable, the same in every process of a host.

MEGATRON_DARO_OPTIONS -> PluginSection -> the algorithm of every rank. What a host already has
(clip range, rollouts per prompt) is taken from the host, not from here.

    MEGATRON_DARO_OPTIONS="daro.learning_rate=0.02 daro.magnitude=token correct_above=0.5"
"""

from __future__ import annotations

import os
import shlex
from typing import Literal

from pydantic import ValidationError
from torch import Tensor

from megatron_daro.algo.weighting import Algorithm, make_algorithm
from megatron_daro.config.algorithm import AlgorithmSection, DaroSection
from megatron_daro.config.base import Section
from megatron_daro.config.problems import Problem, config_error, show
from megatron_daro.config.yaml_text import apply_overrides
from megatron_daro.errors import AlgorithmError

VARIABLE = "MEGATRON_DARO_OPTIONS"


class PluginSection(Section):
    """Options of DARO inside another framework."""

    daro: DaroSection = DaroSection()
    """DARO's weights."""
    std: Literal["auto", "population", "sample", "batch", "none"] = "auto"
    """What the advantage is divided by: see algorithm.std of docs/configuration.md."""
    correct_above: float | None = None
    """An answer is right if its reward is above this. Unset: rewards must be 0 and 1, or -1 and 1."""
    start_fresh: bool = False
    """Whether a checkpoint without DARO's state may be resumed, with weights of 1."""
    allow_host_options: tuple[str, ...] = ()
    """Options of the host, unknown to DARO, that may be set all the same: they change neither loss nor batch."""

    def algorithm(self, rollouts_per_prompt: int) -> Algorithm:
        """Return DARO with these options.

        Args:
            rollouts_per_prompt: K, from the host's own options.

        Raises:
            AlgorithmError: K is below 2, or an option needs more than a host passes on.
        """
        if self.daro.magnitude == "advantage":
            raise AlgorithmError(
                "daro.magnitude: got 'advantage', allowed inside another framework are abs, signed and token: a host "
                "hands on sums of losses per pass rate only"
            )
        if self.daro.weights_by != "pass_rate":
            raise AlgorithmError(
                f"daro.weights_by: got {self.daro.weights_by!r}, allowed inside another framework is pass_rate: a host "
                "does not say which environment a rollout is of"
            )
        section = AlgorithmSection(name="daro", std=self.std, filter="auto", daro=self.daro)
        # Only dr_grpo's constant denominator reads max_response_tokens; DARO does not.
        return make_algorithm(**section.arguments(rollouts_per_prompt=rollouts_per_prompt, max_response_tokens=1))

    def verdicts(self, rewards_N: Tensor) -> Tensor:
        """Return whether each answer is right, bool [N], from the host's rewards [N].

        Raises:
            AlgorithmError: the rewards are neither 0/1 nor -1/1 and no threshold is set: they were shaped.
        """
        if self.correct_above is not None:
            return rewards_N > self.correct_above
        if bool(((rewards_N == 0) | (rewards_N == 1)).all()) or bool((rewards_N.abs() == 1).all()):
            return rewards_N == 1
        strange = rewards_N[(rewards_N != 0) & (rewards_N.abs() != 1)]
        got = f"{float(strange[0]):g}" if strange.numel() else "0 beside -1"
        raise AlgorithmError(
            f"rewards: got {got}, allowed are verdicts (0 and 1, or -1 and 1): a shaped reward does not say whether an "
            f"answer is right; set correct_above in {VARIABLE}, such as {VARIABLE}='correct_above=0'"
        )


def read_options(text: str | None = None, *, source: str = VARIABLE) -> PluginSection:
    """Return the options.

    Args:
        text: `key=value` words, separated by blanks; those of MEGATRON_DARO_OPTIONS if not given.
        source: where they come from, for messages.

    Raises:
        ConfigError: lists every wrong word.
    """
    words = shlex.split(os.environ.get(VARIABLE, "") if text is None else text)
    tree, problems = apply_overrides({}, words)
    try:
        section = PluginSection.model_validate(tree)
    except ValidationError as error:
        problems += [
            Problem(".".join(map(str, e["loc"])), show(e.get("input")), e["msg"], f"change or remove it in {source}")
            for e in error.errors()
        ]
    if problems:
        raise config_error(source, problems)
    return section
