"""The tokenizer of a model's directory, and the templates by which a prompt's text or messages become token ids.

Model directory -> tokenizer -> prompts to ids, the engine's ids to text, stop ids. Refuses directories without
tokenizer files, torn files, tokenizers without a stop token, and, where the chat template is asked for, those without
one. Reads local files only; code that lies beside a model runs only where it was asked for.

Named templates are the exact texts that papers evaluate with, together with what ends an answer and where the answer
stands; docs/evaluate.md shows them with their sources, and a test compares them. Prompts that are too long, empty or
unfit for the template are dropped and reported; a prompt is never cut. Rejects a template without exactly one
{prompt}, one whose special tokens the tokenizer does not have, and a set of which nothing is left.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

from megatron_daro.errors import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

from jinja2 import TemplateError

from megatron_daro.config.sections import EvalSet
from megatron_daro.errors import DataError
from megatron_daro.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")


def load_tokenizer(
    path: str | Path, trust_remote_code: bool = False, *, chat_template: bool = False
) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a model.

    Args:
        path: directory of the model, or of the tokenizer alone.
        trust_remote_code: runs Python files found in that directory.
        chat_template: whether a chat template is needed.

    Returns:
        A transformers tokenizer.

    Raises:
        ModelError: missing or torn files, no stop token, or no chat template.
    """
    directory = Path(path)
    if not directory.is_dir():
        raise ModelError(f"model.path: {directory} is not a directory; give the directory of a model in HF format")
    if not any((directory / name).is_file() for name in _FILES):
        raise ModelError(
            f"model.path: {directory} has no tokenizer files; one of {', '.join(_FILES)} is needed: copy them from the "
            "model the weights came from"
        )
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(directory, trust_remote_code=trust_remote_code, local_files_only=True)
    except Exception as error:
        # The tokenizers library raises a plain Exception for a torn file.
        raise ModelError(
            f"model.path: the tokenizer in {directory} cannot be loaded ({type(error).__name__}: {error}); fetch its "
            "files again, or set model.trust_remote_code if it needs code of its own and you trust it"
        ) from error
    if tokenizer.eos_token_id is None:
        raise ModelError(
            f"model.path: the tokenizer in {directory} has no stop token (eos_token), so no answer could end; set "
            "eos_token in its tokenizer_config.json"
        )
    if chat_template and not tokenizer.chat_template:
        raise ModelError(
            f"data.prompt_template is chat, but the tokenizer in {directory} has no chat template; set "
            "data.prompt_template=plain, or add chat_template.jinja"
        )
    return tokenizer


def response_decoder(tokenizer: PreTrainedTokenizerBase) -> Callable[[Sequence[int]], str]:
    """Return a function from token ids to the text that verifiers and people see, without special tokens."""
    return lambda ids: str(tokenizer.decode(cast("list[int]", ids), skip_special_tokens=True))


def stop_token_ids(
    tokenizer: PreTrainedTokenizerBase,
    *,
    stop: Sequence[str] = (),
    extra_ids: Sequence[int] = (),
    model_path: str | Path | None = None,
) -> tuple[int, ...]:
    """Return the ids that end an answer: the tokenizer's own, the model's generation config's, and those asked for.

    Args:
        tokenizer: from `load_tokenizer`.
        stop: strings, each one token of the tokenizer.
        extra_ids: token ids.
        model_path: directory whose generation_config.json may name further ids (instruct models often have two).

    Returns:
        Ascending, without repeats, at least one.

    Raises:
        ModelError: a string that is not one token, an id outside the vocabulary, or a torn generation_config.json.
    """
    ids = {int(tokenizer.eos_token_id)}
    if model_path is not None:
        ids |= _generation_config_ids(Path(model_path))
    for text in stop:
        encoded = tokenizer.encode(text, add_special_tokens=False)
        if len(encoded) != 1:
            raise ModelError(
                f"rollout.stop: {text!r} is {len(encoded)} tokens of this tokenizer; each stop string must be one token"
            )
        ids.add(int(encoded[0]))
    ids |= {int(i) for i in extra_ids}
    wrong = sorted(i for i in ids if not 0 <= i < len(tokenizer))
    if wrong:
        raise ModelError(
            f"rollout.stop_token_ids: {wrong} are outside this tokenizer's vocabulary; ids from 0 to "
            f"{len(tokenizer) - 1} are allowed"
        )
    return tuple(sorted(ids))


def _generation_config_ids(directory: Path) -> set[int]:
    file = directory / "generation_config.json"
    if not file.is_file():
        return set()
    try:
        eos_ids = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id")
    except (OSError, ValueError, AttributeError) as error:
        raise ModelError(f"{file}: cannot be read as JSON ({error}); repair or remove it") from error
    ids = eos_ids if isinstance(eos_ids, list) else [] if eos_ids is None else [eos_ids]
    if not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
        raise ModelError(f"{file}: eos_token_id is {eos_ids!r}; an integer or a list of integers is allowed")
    return set(ids)


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
    ends = [place + len(one) for one in stop if (place := text.find(one)) >= 0]
    if not ends:
        return None
    end = min(ends)
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
