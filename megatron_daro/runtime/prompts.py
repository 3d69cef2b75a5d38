"""The prompts of a run: files to problems to token ids, with everything that was dropped said aloud.

Place in the data flow: data/ does the work; this puts its parts together for a configuration. Refuses an evaluation
set of which something would be missing, unless that was asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from megatron_daro.config import Config
from megatron_daro.config.sections import DataSection, EvalSet
from megatron_daro.data.prompts import load_problems
from megatron_daro.data.template import tokenize_prompts
from megatron_daro.errors import DataError
from megatron_daro.evaluate.questions import HeldOut
from megatron_daro.evaluate.templates import TEMPLATES, check_tokenizer
from megatron_daro.rollout.protocol import Notices, PromptSource
from megatron_daro.runtime.training_order import prompt_source
from megatron_daro.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def held_out_sets(section: DataSection, tokenizer: PreTrainedTokenizerBase, notices: Notices) -> list[HeldOut]:
    """Every evaluation set, tokenised; repeats stay, since the size of a set is part of its score.

    Raises:
        DataError: a file cannot be used, or a set would lose rows (see data.eval.*.drop_unusable).
    """
    return [
        HeldOut(one, tuple(_held_out(section, f"data.eval.{index}", one, tokenizer, notices)))
        for index, one in enumerate(section.eval)
    ]


def training_prompts(
    config: Config,
    tokenizer: PreTrainedTokenizerBase,
    held_out: Sequence[HeldOut],
    *,
    notices: Notices,
    ends: int | None = None,
) -> PromptSource:
    """Return the endless stream of training prompts. Problems that stand in a held-out set are reported.

    Args:
        ends: only so many first and last rows of each file, for a quick look.
    """
    section = config.data
    problems, report = load_problems(
        section.train,
        section.format,
        section.problem_field,
        section.answer_field,
        ends=ends,
        held_out={one.section.name: one.prompts for one in held_out},
    )
    _say(notices, "training data", report.summary())
    prompts, summary = _tokenised(section, problems, tokenizer)
    _say(notices, "training data", summary)
    return prompt_source(config, prompts, report.pass_rates, notices)


def _held_out(
    section: DataSection, field: str, one: EvalSet, tokenizer: PreTrainedTokenizerBase, notices: Notices
) -> list[Prompt]:
    problems, report = load_problems([one.path], one.format, one.problem_field, one.answer_field, repeats="keep")
    _say(notices, f"evaluation set {one.name}", report.summary())
    if one.rows is not None and report.rows != one.rows:
        raise DataError(
            f"{field} ({one.name}): {one.path} has {report.rows} rows; allowed: {one.rows}, since its accuracy would "
            f"be that of another set; fetch the file again, or set {field}.rows to the number that you mean"
        )
    problems = problems[: one.max_prompts]
    prompts, summary = _tokenised(_with_template(section, one, tokenizer), problems, tokenizer)
    _say(notices, f"evaluation set {one.name}", summary)
    lost = report.num_dropped + len(problems) - len(prompts)
    if lost and not one.drop_unusable:
        why = "; ".join(line for line in (*report.summary().splitlines(), *summary.splitlines()) if "dropped" in line)
        raise DataError(
            f"{field} ({one.name}): {lost} of {report.rows} rows of {one.path} cannot be used, so its accuracy would "
            f"be that of another set: {why}; repair the rows, or set {field}.drop_unusable=true to score the rest"
        )
    return prompts


def _with_template(section: DataSection, one: EvalSet, tokenizer: PreTrainedTokenizerBase) -> DataSection:
    """Return the section with the template of this set."""
    if one.template == "data":
        return section
    check_tokenizer(one.template, tokenizer)
    template = TEMPLATES[one.template]
    return section.model_copy(update={"prompt_template": template.prompt_template, "template": template.text})


def _tokenised(
    section: DataSection, problems: Sequence[Prompt], tokenizer: PreTrainedTokenizerBase
) -> tuple[list[Prompt], str]:
    prompts, report = tokenize_prompts(
        problems,
        tokenizer,
        prompt_template=section.prompt_template,
        template=section.template,
        max_prompt_tokens=section.max_prompt_tokens,
    )
    return prompts, report.summary()


def _say(notices: Notices, what: str, summary: str) -> None:
    for line in summary.splitlines():
        notices.notice(f"{what}: {line}")
