"""The prompts of a run: files to problems to token ids, with everything that was dropped said aloud.

Place in the data flow: data/ does the work; this puts its parts together for a configuration.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron_daro.config.sections import DataSection, EvalSet
from megatron_daro.data.cursor import PromptSource
from megatron_daro.data.prompts import load_problems
from megatron_daro.data.template import tokenize_prompts
from megatron_daro.rollout.protocol import Notices
from megatron_daro.runtime.evaluation import HeldOut
from megatron_daro.types import Prompt


def held_out_sets(section: DataSection, tokenizer: Any, notices: Notices) -> list[HeldOut]:
    """Every evaluation set, tokenised; repeats stay, since the size of a set is part of its score."""
    return [HeldOut(one, tuple(_held_out(section, one, tokenizer, notices))) for one in section.eval]


def training_prompts(
    section: DataSection, tokenizer: Any, held_out: Sequence[HeldOut], *, seed: int, notices: Notices
) -> PromptSource:
    """The endless stream of training prompts. Problems that stand in a held-out set are reported."""
    problems, report = load_problems(
        section.train,
        section.format,
        section.problem_field,
        section.answer_field,
        held_out={one.section.name: one.prompts for one in held_out},
    )
    _say(notices, "training data", report.summary())
    prompts = _tokenised(section, problems, tokenizer, "training data", notices)
    return PromptSource(prompts, seed=seed, shuffle=section.shuffle)


def _held_out(section: DataSection, one: EvalSet, tokenizer: Any, notices: Notices) -> list[Prompt]:
    problems, report = load_problems([one.path], one.format, one.problem_field, one.answer_field, repeats="keep")
    _say(notices, f"evaluation set {one.name}", report.summary())
    return _tokenised(section, problems[: one.max_prompts], tokenizer, f"evaluation set {one.name}", notices)


def _tokenised(
    section: DataSection, problems: Sequence[Prompt], tokenizer: Any, what: str, notices: Notices
) -> list[Prompt]:
    prompts, report = tokenize_prompts(
        problems,
        tokenizer,
        prompt_template=section.prompt_template,
        template=section.template,
        max_prompt_tokens=section.max_prompt_tokens,
    )
    _say(notices, what, report.summary())
    return prompts


def _say(notices: Notices, what: str, summary: str) -> None:
    for line in summary.splitlines():
        notices.notice(f"{what}: {line}")
