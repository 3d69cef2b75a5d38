"""Pass rates by asking a model: K answers to each problem of a file, kept as they come.

Place in the data flow: curate/sampled.py writes the problems; this asks them as an evaluation does (measuring.py) and
counts the right answers. A killed measurement goes on with the same command.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_daro.config import Config, detect, resolve_tree
from megatron_daro.curate.sampled import Asked
from megatron_daro.evaluate import answers
from megatron_daro.rollout.protocol import Notices
from megatron_daro.runtime import measured_model, measuring
from megatron_daro.runtime.measured_model import MeasuredModel
from megatron_daro.runtime.run_directory import owned
from megatron_daro.runtime.training_order import weights_digest
from megatron_daro.types import Prompt

_SERVED_AS_LOADED = ("default", "")
_LONGEST_PROMPT = 2048


@dataclass(frozen=True, slots=True)
class Sampling:
    """How each problem is asked. template: a name of evaluate/templates.py, or "data". overrides: A.B=C, as in
    training."""

    samples: int
    temperature: float
    top_p: float
    template: str
    verifier: str
    overrides: tuple[str, ...] = ()


def model_of(hf: Path | None, urls: Sequence[str]) -> MeasuredModel:
    """Return the model of a Hugging Face directory, or of servers that run. Raises ConfigError, EngineError."""
    return measured_model.of_directory(hf) if hf else measured_model.of_servers(urls, None)


def configuration(model: MeasuredModel, problems: Path, out: Path, sampling: Sampling) -> Config:
    """Return the configuration of the measurement. Raises ConfigError for overrides that are none.

    Args:
        model: who answers. problems: the file. out: where answers go. sampling: how it is asked.
    """
    one = {
        "name": "curate",
        "path": str(problems),
        "rollouts_per_prompt": sampling.samples,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "template": sampling.template,
        "drop_unusable": True,
    }
    tree = {
        "model": {"path": str(model.path)},
        "data": {"train": [str(problems)], "eval": [one], "max_prompt_tokens": _LONGEST_PROMPT},
        "engine": {
            "kind": "sglang" if model.urls or detect().kind == "gpu" else "embedded",
            "sglang": {"urls": list(model.urls)},
        },
        "actor": {"precision": model.dtype},
        "reward": {"verifier": sampling.verifier},
        "trainer": {"run_dir": str(out)},
    }
    return resolve_tree(tree, sampling.overrides, source="curate")


def measure_pass_rates(
    config: Config, model: MeasuredModel, notices: Notices
) -> tuple[list[tuple[Prompt, int]], Asked]:
    """Ask for what is missing, and count.

    Args:
        config: of `configuration`. model: who answers. notices: told how far it is.

    Returns:
        Every problem that was asked with its right answers; and how it was asked.

    Raises:
        DaroError: a directory with answers to other problems, an engine that failed. What was answered is kept.
    """
    plan = measuring.Plan(config, model.weights, ())
    with owned(plan.out, resume=True):
        _, questions = measuring.ask_all(plan, notices)
        right: Counter[int] = Counter()
        wanted = {question.group_id: question.samples for question in questions}
        for row in answers.rows(plan.out, ("correct",)):
            if row["index"] < wanted.get(row["group_id"], 0):
                right[row["group_id"]] += bool(row["correct"])
    return [(question.prompt, right[question.group_id]) for question in questions], _asked(config, model)


def _asked(config: Config, model: MeasuredModel) -> Asked:
    (one,) = config.data.eval
    served: Mapping[str, Any] = model.weights.get("served", {})
    as_loaded = served.get("weight_version", "") in _SERVED_AS_LOADED
    return Asked(
        samples=one.rollouts_per_prompt,
        model=model.path.resolve().name,
        weights=weights_digest(model.path) if as_loaded else "",
        sampling={
            "template": one.template,
            "temperature": one.temperature,
            "top_p": one.top_p,
            "max_response_tokens": config.rollout.max_response_tokens,
            "verifier": config.reward.verifier,
            "strict": config.reward.strict,
            "seed": config.engine.seed,
        },
    )
