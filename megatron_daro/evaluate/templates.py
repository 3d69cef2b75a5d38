"""Prompt templates by name: the exact texts that papers evaluate with, what ends an answer, where the answer stands.

Place in the data flow: name -> how data/template.py writes a problem, which of an answer's text counts, and what is
handed to the verifier. docs/evaluate.md shows the texts with their sources; a test compares them. Refuses a template
whose special tokens the tokenizer does not have.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from megatron_daro.errors import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_BOXED = r"Please reason step by step, and put your final answer within \boxed{}."


@dataclass(frozen=True, slots=True)
class Template:
    """One way to ask. prompt_template, text: as data.prompt_template and data.template. special: tokens that the
    tokenizer must know as one. stop: texts that end an answer, kept in it. tagged: the answer stands between
    <answer> and </answer>."""

    prompt_template: Literal["chat", "plain"]
    text: str
    source: str
    special: tuple[str, ...] = ()
    stop: tuple[str, ...] = ()
    tagged: bool = False

    def verified_text(self, text: str) -> str:
        """Return what the verifier reads of an answer. With tags: the text behind the last <answer>, in a box where it
        holds none; nothing where the tags are not there."""
        if not self.tagged:
            return text
        inside = text.rpartition("<answer>")[2] if "<answer>" in text else ""
        inside, closed, _ = inside.partition("</answer>")
        if not closed:
            return ""
        return inside if "\\boxed" in inside or "\\fbox" in inside else f"\\boxed{{{inside.strip()}}}"


TEMPLATES: dict[str, Template] = {
    "chat": Template(
        "chat", "{prompt}\n\n" + _BOXED, "the user's message recommended for DeepSeek-R1 and Qwen2.5-Math"
    ),
    "qwen-math": Template(
        "plain",
        f"<|im_start|>system\n{_BOXED}<|im_end|>\n<|im_start|>user\n{{prompt}}<|im_end|>\n<|im_start|>assistant\n",
        "Qwen2.5-Math's own, as in Dr. GRPO (arXiv 2503.20783, template 2)",
        special=("<|im_start|>", "<|im_end|>"),
    ),
    "r1": Template(
        "plain",
        "A conversation between User and Assistant. The User asks a question, and the Assistant solves it. The "
        "Assistant first thinks about the reasoning process in the mind and then provides the User with the answer. "
        "The reasoning process is enclosed within <think> </think> and answer is enclosed within <answer> </answer> "
        "tags, respectively, i.e., <think> reasoning process here </think> <answer> answer here </answer>.\n"
        "User: {prompt}\nAssistant: <think>",
        "DeepSeek-R1-Zero (arXiv 2501.12948, table 1) as in Dr. GRPO (arXiv 2503.20783, template 1)",
        stop=("</answer>",),
        tagged=True,
    ),
    "none": Template("plain", "{prompt}", "the problem alone, as in Dr. GRPO (arXiv 2503.20783, template 3)"),
}
"""The choices of data.eval.*.template, beside "data"."""


def check_tokenizer(name: str, tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse a template that this tokenizer cannot write.

    Raises:
        ModelError: a chat template is needed and not there, or a special token is none of the tokenizer.
    """
    template = TEMPLATES[name]
    if template.prompt_template == "chat" and not tokenizer.chat_template:
        raise ModelError(
            f"--template {name}: the tokenizer of {tokenizer.name_or_path} has no chat template; use another template "
            f"({', '.join(other for other in TEMPLATES if other != name)}), or add chat_template.jinja to the model"
        )
    unknown = [text for text in template.special if len(tokenizer.encode(text, add_special_tokens=False)) != 1]
    if unknown:
        raise ModelError(
            f"--template {name}: {', '.join(unknown)} is no token of the tokenizer of {tokenizer.name_or_path}, so the "
            f"model never saw this template; use another one ({', '.join(o for o in TEMPLATES if o != name)})"
        )


def tokens_until_stop(
    tokens: Sequence[int], stop: Sequence[str], decode: Callable[[Sequence[int]], str]
) -> tuple[int, str] | None:
    """Return how many tokens an answer has up to the first stop text, and its text up to and with it.

    An engine that cannot stop at a text goes on behind it; what it adds does not count. The number is that of the
    shortest beginning whose text holds the stop text.

    Args:
        tokens: of the answer. stop: texts. decode: tokens -> text.

    Returns:
        None where no stop text stands in it.
    """
    text = decode(tokens)
    found = [place + len(one) for one in stop if (place := text.find(one)) >= 0]
    if not found:
        return None
    end = min(found)
    low, high = 1, len(tokens)
    while low < high:
        middle = (low + high) // 2
        if any(one in decode(tokens[:middle]) for one in stop):
            high = middle
        else:
            low = middle + 1
    return low, text[:end]
