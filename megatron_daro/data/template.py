"""Templates: a prompt's text or messages become the token ids that the engine receives.

Named templates are the exact texts that papers evaluate with, together with what ends an answer and where the answer
stands; docs/evaluate.md shows them with their sources, and a test compares them. Prompts that are too long, empty or
unfit for the template are dropped and reported; a prompt is never cut. Rejects a template without exactly one
{prompt}, one whose special tokens the tokenizer does not have, and a set of which nothing is left.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

from jinja2 import TemplateError

from megatron_daro.config.sections import EvalSet
from megatron_daro.errors import DataError, ModelError
from megatron_daro.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


_PLACE = "{prompt}"
_CHUNK = 1024


@dataclass(frozen=True, slots=True)
class TokenizeReport:
    """kept + the prompts in `dropped` = the prompts given. dropped: reason -> prompt ids. longest: tokens."""

    kept: int
    longest: int
    dropped: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def summary(self) -> str:
        """Return a few lines for the terminal and the log."""
        lines = [f"{self.kept} prompts of up to {self.longest} tokens"]
        lines += [f"dropped {len(ids)}: {reason} (first: {ids[0]})" for reason, ids in self.dropped.items()]
        return "\n".join(lines)


def tokenize_prompts(
    prompts: Sequence[Prompt],
    tokenizer: PreTrainedTokenizerBase,
    *,
    prompt_template: Literal["chat", "plain"] = "chat",
    template: str = _PLACE,
    max_prompt_tokens: int = 1024,
) -> tuple[list[Prompt], TokenizeReport]:
    """Apply the template and the tokenizer.

    Args:
        prompts: as loaded.
        tokenizer: a transformers tokenizer.
        prompt_template: "chat" puts the text into the tokenizer's chat template, up to where the assistant answers;
            "plain" takes the text alone (with the tokenizer's own first token, if it has one).
        template: text around the problem, which replaces {prompt}; for chat messages it goes around the last one.
        max_prompt_tokens: longer prompts are dropped.

    Returns:
        The prompts that are left, with tokens, in order; and the report.

    Raises:
        DataError: template without {prompt}, or with several, or no prompt left.
    """
    if template.count(_PLACE) != 1:
        raise DataError(f"data.template: got {template!r}; it must contain {_PLACE} once, where the problem goes")
    dropped: dict[str, list[str]] = {}
    kept: list[Prompt] = []
    for start in range(0, len(prompts), _CHUNK):
        chunk = []
        for prompt in prompts[start : start + _CHUNK]:
            try:
                chunk.append((prompt, _rendered(prompt, tokenizer, prompt_template, template)))
            except _UnfitPromptError as unfit:
                dropped.setdefault(str(unfit), []).append(prompt.id)
        for (prompt, _), ids in zip(chunk, _encoded([t for _, t in chunk], tokenizer, prompt_template), strict=True):
            if not ids:
                dropped.setdefault("no tokens", []).append(prompt.id)
            elif len(ids) > max_prompt_tokens:
                dropped.setdefault(f"longer than max_prompt_tokens = {max_prompt_tokens}", []).append(prompt.id)
            else:
                kept.append(replace(prompt, tokens=tuple(ids)))
    if not kept:
        reasons = "; ".join(f"{len(ids)} {reason}" for reason, ids in dropped.items()) or "there were none"
        raise DataError(f"no prompt is left after the template ({reasons}); raise data.max_prompt_tokens")
    return kept, TokenizeReport(kept=len(kept), longest=max(len(p.tokens) for p in kept), dropped=dropped)


class _UnfitPromptError(Exception):
    """Why a prompt does not fit the template; never leaves this module."""


def _rendered(prompt: Prompt, tokenizer: PreTrainedTokenizerBase, prompt_template: str, template: str) -> str:
    """Return the text to encode."""
    # str.replace and not str.format: problems and templates are full of braces.
    if prompt_template == "plain":
        if prompt.messages is not None and len(prompt.messages) != 1:
            raise _UnfitPromptError("chat of several messages under the plain template")
        text = prompt.messages[0]["content"] if prompt.messages else prompt.text or ""
        return template.replace(_PLACE, text)
    messages = [dict(m) for m in prompt.messages or ({"role": "user", "content": prompt.text or ""},)]
    messages[-1]["content"] = template.replace(_PLACE, messages[-1]["content"])
    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
    except TemplateError as error:  # templates refuse roles that the model has not learnt, such as system
        raise _UnfitPromptError(f"the chat template refuses it ({error})") from error


def _encoded(texts: list[str], tokenizer: PreTrainedTokenizerBase, prompt_template: str) -> list[list[int]]:
    """Encode texts; a chat template writes its special tokens itself, so the tokenizer must not add them again."""
    if not texts:
        return []
    return tokenizer(texts, add_special_tokens=prompt_template == "plain")["input_ids"]


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


@dataclass(frozen=True, slots=True)
class HeldOut:
    """One evaluation set with its prompts, tokens included."""

    section: EvalSet
    prompts: tuple[Prompt, ...]

    @property
    def template(self) -> Template | None:
        """The template of the set; None where it is that of the training data."""
        return TEMPLATES.get(self.section.template)

    def verified_text(self, text: str) -> str:
        """Return what the verifier reads of an answer."""
        return self.template.verified_text(text) if self.template else text
