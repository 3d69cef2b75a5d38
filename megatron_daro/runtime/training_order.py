"""The order in which a run takes its problems, and whose pass rates it goes by.

Place in the data flow: tokenised prompts and the pass rates of their files -> the prompt source of the sampler. Says at
the start when the pass rates were measured with another model than the one that is trained.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from megatron_daro.config import Config
from megatron_daro.data.cursor import PromptSource
from megatron_daro.data.orders import Curriculum, Prioritised
from megatron_daro.data.pass_rates import PassRate
from megatron_daro.rollout import protocol
from megatron_daro.rollout.protocol import Notices
from megatron_daro.runtime import restart_audit
from megatron_daro.types import Prompt


def prompt_source(
    config: Config, prompts: Sequence[Prompt], known: Mapping[str, PassRate], notices: Notices
) -> protocol.PromptSource:
    """Return the endless stream of training prompts in the order of the configuration.

    Args:
        config: checked. prompts: tokenised. known: pass rates of the files, by prompt id.
        notices: told whose pass rates they are.

    Raises:
        DataError: the order needs pass rates that the files do not have.
    """
    data, seed = config.data, config.trainer.seed
    if known:
        _say_whose(config, prompts, known, notices)
    rates = {prompt_id: one.rate for prompt_id, one in known.items()}
    if data.order == "curriculum":
        return Curriculum(prompts, rates, data.curriculum, seed=seed, ramp=planned_prompts(config) // 2)
    if data.order == "prioritised":
        return Prioritised(prompts, rates, data.prioritised, seed=seed)
    return PromptSource(prompts, seed=seed, shuffle=data.shuffle)


def planned_prompts(config: Config) -> int:
    """Return how many prompts the steps of the run take, without those that a filter sends back."""
    return math.ceil(config.trainer.steps / config.trainer.updates_per_batch) * config.rollout.prompts_per_step


def weights_digest(model: Path) -> str:
    """Return what tells the weights of a Hugging Face directory from others; empty where there are none."""
    files = sorted(restart_audit.weight_files(model).items())
    return hashlib.sha256(repr(files).encode()).hexdigest()[:16] if files else ""


def _say_whose(config: Config, prompts: Sequence[Prompt], known: Mapping[str, PassRate], notices: Notices) -> None:
    """One notice for each model whose pass rates are there, and one where some problems have none."""
    model = config.model
    own = ("", model.megatron_weights.name) if model.megatron_weights else (weights_digest(model.path), model.path.name)
    counts: dict[tuple[str, str], int] = {}
    for prompt in prompts:
        one = known.get(prompt.id)
        if one is not None:
            counts[one.weights, one.model] = counts.get((one.weights, one.model), 0) + 1
    for (weights, name), count in counts.items():
        if weights and weights == own[0]:
            notices.notice(f"training data: pass rates of {count} problems were measured with this model ({name})")
            continue
        measured = f"{name or 'a model that the file does not name'} (weights {weights or 'not named'})"
        notices.notice(
            f"training data: pass rates of {count} problems were measured with another model: {measured}; this run "
            f"starts from {own[1]} (weights {own[0] or 'in Megatron form'})"
        )
    missing = len(prompts) - sum(counts.values())
    if missing:
        notices.notice(f"training data: {missing} of {len(prompts)} problems have no pass rate in their file")
