"""Pass rates of the kept rows: which problems are asked, the answers of a model, and which rows stay for it.

The remaining rows become a file of problems; K answers to each are sampled as an evaluation samples them
(workshop/evaluate/measuring.py) and kept as they come, so that a killed measurement continues with the same command.
The counts of correct answers give Decisions and the pass-rate fields of the curated set.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_daro.config import Config, EvalSet
from megatron_daro.config.sections import EvalTemplate
from megatron_daro.data import formats
from megatron_daro.errors import ConfigError
from megatron_daro.rollout.protocol import Notices
from megatron_daro.runtime.inputs import weights_digest
from megatron_daro.runtime.run_directory import owned
from megatron_daro.types import Prompt
from megatron_daro.workshop.curate.rows import Decisions, Row
from megatron_daro.workshop.evaluate import answers, measuring, models
from megatron_daro.workshop.evaluate.models import MeasuredModel

Key = tuple[str, str, tuple[str, ...]]
"""What tells two kept problems apart, also after they were read from a file: text, chat, golds."""


@dataclass(frozen=True, slots=True)
class Asked:
    """How the answers were made. model: its name; weights: a digest of its weights; sampling: template, temperature,
    top_p, lengths, verifier, as plain values."""

    samples: int
    model: str
    weights: str
    sampling: Mapping[str, Any]


def key_of(prompt: Prompt) -> Key:
    """Return what a problem is found by."""
    messages = "" if prompt.messages is None else json.dumps([dict(message) for message in prompt.messages])
    return prompt.text or "", messages, prompt.answers


def write_problems(path: Path, rows: Sequence[Row], decisions: Decisions) -> int:
    """Write the rows that are left as a file of problems; the same rows give the same bytes. Returns how many."""
    kept = decisions.kept()
    lines = []
    for index in kept:
        prompt = rows[index].prompt
        problem: object = prompt.text if prompt.messages is None else [dict(message) for message in prompt.messages]
        name = "problem" if prompt.messages is None else "messages"
        lines.append(json.dumps({name: problem, "answer": list(prompt.answers)}, ensure_ascii=False) + "\n")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(lines), encoding="utf-8")
    return len(kept)


def apply(
    rows: Sequence[Row],
    decisions: Decisions,
    measured: Iterable[tuple[Prompt, int]],
    settings: Asked,
    keep: tuple[float, float] | None = None,
) -> dict[int, dict[str, Any]]:
    """Give each row its pass rate; drop those without one, and those outside the range.

    Args:
        rows: every row that was read. decisions: what was dropped so far; written to.
        measured: the problems that were answered, as read from the file, with their right answers of
            `settings.samples`.
        settings: how they were asked.
        keep: lowest and highest pass rate that stays, both included; None: all stay.

    Returns:
        Row -> the pass-rate fields of the curated set.
    """
    right = {key_of(prompt): correct for prompt, correct in measured}
    sampling = json.dumps(dict(settings.sampling), sort_keys=True)
    fields: dict[int, dict[str, Any]] = {}
    for index in decisions.kept():
        correct = right.get(key_of(rows[index].prompt))
        if correct is None:
            decisions.drop(index, "unsampled", "the prompt is too long, or does not fit the template")
            continue
        rate = correct / settings.samples
        if keep is not None and not keep[0] <= rate <= keep[1]:
            decisions.drop(index, "pass_rate", f"{correct} of {settings.samples} answers were right")
            continue
        fields[index] = {
            formats.FIELD: rate,
            formats.SAMPLES: settings.samples,
            formats.MODEL: settings.model,
            formats.WEIGHTS: settings.weights,
            "pass_rate_sampling": sampling,
        }
    return fields


def summary_of(measured: Iterable[tuple[Prompt, int]], settings: Asked) -> dict[str, Any]:
    """Return the statistics of all that were asked, also of those that are dropped for their pass rate."""
    counts = [0] * (settings.samples + 1)
    for _, correct in measured:
        counts[correct] += 1
    total = sum(counts)
    return {
        "model": settings.model,
        "weights": settings.weights,
        "samples": settings.samples,
        "sampling": dict(settings.sampling),
        "problems": total,
        "mean": sum(k * count for k, count in enumerate(counts)) / (settings.samples * total) if total else None,
        "problems_by_right_answers": {f"{k}/{settings.samples}": count for k, count in enumerate(counts)},
    }


def read_range(text: str) -> tuple[float, float] | None:
    """Return the range that `LOW:HIGH` says; None for an empty text. Raises ConfigError for another form."""
    if not text:
        return None
    low, colon, high = text.partition(":")
    try:
        bounds = float(low or 0), float(high or 1)
    except ValueError:
        bounds = (1.0, 0.0)
    if not colon or not 0 <= bounds[0] <= bounds[1] <= 1:
        raise ConfigError(
            f"--pass-rate: got {text!r}; allowed: LOW:HIGH, both from 0 to 1; fix: --pass-rate 0.1:0.9, or 0.05: for "
            "all that were solved once in twenty"
        )
    return bounds


_SERVED_AS_LOADED = ("default", "")


@dataclass(frozen=True, slots=True)
class Sampling:
    """How each problem is asked. template: a name of data/tokenizer.py, or "data". overrides: A.B=C, as in
    training."""

    samples: int
    temperature: float
    top_p: float
    template: EvalTemplate
    verifier: str
    overrides: tuple[str, ...] = ()


def model_of(hf: Path | None, urls: Sequence[str]) -> MeasuredModel:
    """Return the model of a Hugging Face directory, or of servers that run. Raises ConfigError, EngineError."""
    return models.of_directory(hf) if hf else models.of_servers(urls, None)


def configuration(model: MeasuredModel, problems: Path, out: Path, sampling: Sampling) -> Config:
    """Return the configuration of the measurement. Raises ConfigError for overrides that are none.

    Args:
        model: who answers. problems: the file. out: where answers go. sampling: how it is asked.
    """
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


_GUESS = "{prompt}\n\nGive only the final answer, within \\boxed{}, without any reasoning."
_GUESS_TOKENS = 64


def guessing(model: MeasuredModel, problems: Path, out: Path, sampling: Sampling, tries: int) -> Config:
    """Return the configuration of a measurement in which the model answers at once, and any number counts.

    Args:
        model, problems, out, sampling: as `configuration`; a model that is asked by its chat template guesses in it.
        tries: guesses at each problem.
    """
    chat = sampling.template == "chat"
    text = _GUESS if chat else f"{_GUESS}\nAnswer:"
    base = {
        "reward": {"verifier": sampling.verifier, "strict": False},
        "data": {
            "train": [str(problems)],
            "prompt_template": "chat" if chat else "plain",
            "template": text,
            "max_prompt_tokens": measuring.LONGEST_PROMPT,
        },
    }
    one = EvalSet(
        name="guess",
        path=problems,
        rollouts_per_prompt=tries,
        temperature=sampling.temperature or 1.0,
        top_p=sampling.top_p,
        drop_unusable=True,
    )
    kept = [text for text in sampling.overrides if not text.startswith(("data.", "rollout.max_response_tokens="))]
    overrides = [*kept, f"rollout.max_response_tokens={_GUESS_TOKENS}"]
    return measuring.configuration(model, [one], out, base=base, overrides=overrides, source="curate")


def drop_guessed(rows: Sequence[Row], decisions: Decisions, measured: Iterable[tuple[Prompt, int]], tries: int) -> None:
    """Drop rows whose answer the model guesses.

    Args:
        rows: every row that was read. decisions: what was dropped so far; written to.
        measured: the problems that were asked, with their right guesses of `tries`.
    """
    right = {key_of(prompt): correct for prompt, correct in measured}
    for index in decisions.kept():
        correct = right.get(key_of(rows[index].prompt), 0)
        if correct:
            decisions.drop(index, "guessed", f"{correct} of {tries} guesses were right")


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
