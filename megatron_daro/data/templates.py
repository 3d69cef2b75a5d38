"""Named templates: the exact texts that papers train and evaluate with, what ends a response, and where the answer is
in it.

data.prompt_template and data.eval.*.template name them; docs/evaluate.md shows their texts with sources, and a test
compares them. Rejects a template whose special tokens the tokenizer does not have.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from megatron_daro.config.sections import DataSection, EvalSet
from megatron_daro.data.stops import Stops
from megatron_daro.errors import ModelError
from megatron_daro.thinking import THINK
from megatron_daro.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_OPENING = "</think> <answer>"
_BOXED = r"Please reason step by step, and put your final answer within \boxed{}."


@dataclass(frozen=True, slots=True)
class Template:
    """One way to ask. form: plain, or within the tokenizer's chat template. text: with {prompt} in it. special: texts
    that must each be one token of the tokenizer. stop: texts that end an answer, and are part of it. tagged: the answer
    stands between <answer> and </answer>."""

    form: Literal["chat", "plain"]
    text: str
    special: tuple[str, ...] = ()
    stop: tuple[str, ...] = ()
    tagged: bool = False

    def tagged_answer(self, text: str) -> str:
        """Return the text after the last <answer>, in a box unless it holds one; empty if the response lacks the form
        `</think> <answer>`, later `</answer>`.

        Source: `answer_tag_reward_fn` of understand_r1_zero/math_grader.py, Dr. GRPO's authors' code.
        """
        inside = text.rpartition("<answer>")[2] if _OPENING in text else ""
        inside, closed, _ = inside.partition("</answer>")
        if not closed:
            return ""
        return inside if "\\boxed" in inside or "\\fbox" in inside else f"\\boxed{{{inside.strip()}}}"


TEMPLATES: dict[str, Template] = {
    # the user's message recommended for DeepSeek-R1 and Qwen2.5-Math
    "chat": Template("chat", "{prompt}\n\n" + _BOXED),
    # Qwen2.5-Math's own, as in Dr. GRPO (arXiv 2503.20783, template 2)
    "qwen-math": Template(
        "plain",
        f"<|im_start|>system\n{_BOXED}<|im_end|>\n<|im_start|>user\n{{prompt}}<|im_end|>\n<|im_start|>assistant\n",
        special=("<|im_start|>", "<|im_end|>"),
    ),
    # DeepSeek-R1-Zero (arXiv 2501.12948, table 1) as in Dr. GRPO (arXiv 2503.20783, template 1)
    "r1": Template(
        "plain",
        "A conversation between User and Assistant. The User asks a question, and the Assistant solves it. The "
        "Assistant first thinks about the reasoning process in the mind and then provides the User with the answer. "
        "The reasoning process is enclosed within <think> </think> and answer is enclosed within <answer> </answer> "
        "tags, respectively, i.e., <think> reasoning process here </think> <answer> answer here </answer>.\n"
        "User: {prompt}\nAssistant: <think>",
        stop=("</answer>",),
        tagged=True,
    ),
    # the problem alone, as in Dr. GRPO (arXiv 2503.20783, template 3)
    "none": Template("plain", "{prompt}"),
}
"""The choices of data.eval.*.template besides "data"; and, except chat, those of data.prompt_template besides chat and
plain. For data.prompt_template, chat means the tokenizer's template around data.template."""


def verified_text(text: str, template: Template | None, *, opens_thinking: bool) -> str:
    """Return what a verifier reads of a response: with a tagged template what the tags hold, else all of it, after the
    <think> that its prompt ended with. opens_thinking: whether the prompt ended with one."""
    if template and template.tagged:
        return template.tagged_answer(text)
    return f"{THINK}{text}" if opens_thinking else text


def trained_with(section: DataSection) -> Template | None:
    """Return the named template of the training data; None where data.template is its text."""
    return None if section.prompt_template in ("chat", "plain") else TEMPLATES[section.prompt_template]


def check_tokenizer(name: str, tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse a template that this tokenizer cannot write.

    Raises:
        ModelError: a chat template is needed but missing, or a special text is not one token of the tokenizer.
    """
    template = TEMPLATES[name]
    if template.form == "chat" and not tokenizer.chat_template:
        raise ModelError(
            f"template {name}: the tokenizer of {tokenizer.name_or_path} has no chat template; use another template "
            f"({', '.join(other for other in TEMPLATES if other != name)}), or add chat_template.jinja to the model"
        )
    unknown = [text for text in template.special if len(tokenizer.encode(text, add_special_tokens=False)) != 1]
    if unknown:
        raise ModelError(
            f"template {name}: {', '.join(unknown)} is no token of the tokenizer of {tokenizer.name_or_path}, so the "
            f"model never saw this template; use another one ({', '.join(o for o in TEMPLATES if o != name)})"
        )


@dataclass(frozen=True, slots=True)
class HeldOut:
    """One evaluation set with its prompts, tokens included. trained_with: the named template of the training data.
    opens_thinking: whether its prompts end with a <think>."""

    section: EvalSet
    prompts: tuple[Prompt, ...]
    trained_with: Template | None = None
    opens_thinking: bool = False

    @property
    def template(self) -> Template | None:
        """The named template of the set; None where data.template is its text."""
        return TEMPLATES.get(self.section.template, self.trained_with)

    def stops(self, stops: Stops) -> Stops:
        """Return what ends its answers. Args: stops: what ends every answer of the run."""
        return stops.with_texts(self.template.stop) if self.template else stops

    def verified_text(self, text: str) -> str:
        """Return what the verifier reads of an answer."""
        return verified_text(text, self.template, opens_thinking=self.opens_thinking)
