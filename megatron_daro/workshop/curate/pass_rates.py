"""Measures pass rates of the rows that are left, as an evaluation does, and drops rows by their pass rate.

The rows become a file of problems; K answers to each are generated (workshop/evaluate/measuring.py) and stored as they
come, so that the same command continues a killed measurement. Counts of right answers give the pass-rate fields of the
curated set.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_daro.config import Config, EvalSet
from megatron_daro.config.sections import EvalTemplate
from megatron_daro.data import formats
from megatron_daro.errors import ConfigError
from megatron_daro.reward.base import VerifierSpec
from megatron_daro.rollout.protocol import Notices
from megatron_daro.runtime.inputs import weights_digest
from megatron_daro.runtime.run_directory import owned
from megatron_daro.types import Prompt
from megatron_daro.workshop.curate.decisions import Decisions
from megatron_daro.workshop.curate.rows import Row
from megatron_daro.workshop.evaluate import answers, measuring, models
from megatron_daro.workshop.evaluate.models import MeasuredModel

_SERVED_AS_LOADED = ("default", "")
"""Weight versions of a server that still has the weights it loaded."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How each problem is asked. template: a name of data/templates.py, or "data". overrides: A.B=C, as in
    training."""

    samples: int
    temperature: float
    top_p: float
    template: EvalTemplate
    verifier: str
    overrides: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Measured:
    """right: each problem that was asked, and how many of its `samples` answers were right. model: its name; weights: a
    digest of its weights, "" where they are not known; settings: of the sampling, as plain values."""

    right: Sequence[tuple[Prompt, int]]
    samples: int
    model: str
    weights: str
    settings: Mapping[str, Any]

    def statistics(self) -> dict[str, Any]:
        """Return counts of all problems that were asked, including those dropped for their pass rate."""
        problems = Counter(right for _, right in self.right)
        total = len(self.right)
        return {
            "model": self.model,
            "weights": self.weights,
            "samples": self.samples,
            "sampling": dict(self.settings),
            "problems": total,
            "mean": sum(right for _, right in self.right) / (self.samples * total) if total else None,
            "problems_by_right_answers": {f"{k}/{self.samples}": problems[k] for k in range(self.samples + 1)},
        }


def read_range(text: str) -> tuple[float, float]:
    """Return the range of `LOW:HIGH`; an empty text is 0 to 1. Raises ConfigError for another form."""
    low, colon, high = text.partition(":")
    try:
        bounds = float(low or 0), float(high or 1)
    except ValueError:
        bounds = (1.0, 0.0)
    if not (colon or not text) or not 0 <= bounds[0] <= bounds[1] <= 1:
        raise ConfigError(
            f"--pass-rate: got {text!r}; allowed: LOW:HIGH, both from 0 to 1; fix: --pass-rate 0.1:0.9, or 0.05: for "
            "all that were solved once in twenty"
        )
    return bounds


def model_of(hf: Path | None, urls: Sequence[str]) -> MeasuredModel:
    """Return the model of a Hugging Face directory, or of servers that run. Raises ConfigError, EngineError."""
    return models.of_directory(hf) if hf else models.of_servers(urls, None)


def measure(rows: Sequence[Row], model: MeasuredModel, sampling: Sampling, folder: Path, notices: Notices) -> Measured:
    """Ask for the answers that are missing, and count the right ones.

    Args:
        rows: to be asked. model: gives the answers. sampling: how to ask. notices: told of the progress.
        folder: keeps problems and answers.

    Raises:
        ConfigError: an override is not a valid option. DaroError: the directory has answers to other problems, or the
            engine failed. Answers that came are kept.
    """
    problems = folder / "problems.jsonl"
    _write_problems(problems, rows)
    config = _configuration(model, problems, folder, sampling)
    plan = measuring.Plan(config, model.weights, ())
    with owned(plan.out, resume=True, option="--out"):
        _, questions = measuring.ask_all(plan, notices)
        wanted = {question.group_id: question.samples for question in questions}
        right: Counter[int] = Counter()
        for answer in answers.rows(plan.out, ("correct",)):
            if answer["index"] < wanted.get(answer["group_id"], 0):
                right[answer["group_id"]] += bool(answer["correct"])
    counted = [(question.prompt, right[question.group_id]) for question in questions]
    as_loaded = model.weights.get("served", {}).get("weight_version", "") in _SERVED_AS_LOADED
    return Measured(
        right=counted,
        samples=sampling.samples,
        model=model.path.resolve().name,
        weights=weights_digest(model.path) if as_loaded else "",
        settings={
            "template": sampling.template,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "max_response_tokens": config.rollout.max_response_tokens,
            "verifier": config.reward.verifier,
            "strict": VerifierSpec.of_section(config.reward).strict,
            "seed": config.engine.seed,
        },
    )


def _write_problems(path: Path, rows: Sequence[Row]) -> None:
    """Write the rows as a file of problems; the same rows give the same bytes."""
    lines = []
    for prompt in (row.prompt for row in rows):
        chat = prompt.messages
        problem = {"problem": prompt.text} if chat is None else {"messages": [dict(message) for message in chat]}
        lines.append(json.dumps({**problem, "answer": list(prompt.answers)}, ensure_ascii=False) + "\n")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(lines), encoding="utf-8")


def _configuration(model: MeasuredModel, problems: Path, out: Path, sampling: Sampling) -> Config:
    one = EvalSet(
        name="curate",
        path=problems,
        rollouts_per_prompt=sampling.samples,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        template=sampling.template,
        drop_unusable=True,
    )
    base = {"reward": {"verifier": sampling.verifier}}
    return measuring.configuration(model, [one], out, base=base, overrides=sampling.overrides, source="curate")


def apply(
    rows: Sequence[Row], decisions: Decisions, measured: Measured, keep: tuple[float, float]
) -> dict[int, dict[str, Any]]:
    """Give each row its pass rate; drop those without one, and those outside the range.

    Args:
        rows: every row that was read. decisions: what was dropped so far; written to.
        keep: lowest and highest pass rate to keep, both included.

    Returns:
        Row -> the pass-rate fields of the curated set.
    """
    right_by_problem = {_key_of(prompt): right for prompt, right in measured.right}
    settings = json.dumps(dict(measured.settings), sort_keys=True)
    fields: dict[int, dict[str, Any]] = {}
    for index in decisions.kept():
        right = right_by_problem.get(_key_of(rows[index].prompt))
        if right is None:
            decisions.drop(index, "unsampled", "the prompt is too long, or does not fit the template")
        elif not keep[0] <= (rate := right / measured.samples) <= keep[1]:
            decisions.drop(index, "pass_rate", f"{right} of {measured.samples} answers were right")
        else:
            fields[index] = {
                formats.FIELD: rate,
                formats.SAMPLES: measured.samples,
                formats.MODEL: measured.model,
                formats.WEIGHTS: measured.weights,
                "pass_rate_sampling": settings,
            }
    return fields


def _key_of(prompt: Prompt) -> tuple[str, str, tuple[str, ...]]:
    """Return what identifies a kept problem, even after it was read from a file: text, chat, golds."""
    chat = "" if prompt.messages is None else json.dumps([dict(message) for message in prompt.messages])
    return prompt.text or "", chat, prompt.answers
