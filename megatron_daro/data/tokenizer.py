"""The tokenizer of a model's directory, and how a prompt's text or messages become token ids.

Model directory -> tokenizer -> prompts to ids, the engine's ids to text. Refuses directories without tokenizer files,
torn files, tokenizers without a stop token, and, where the chat template is asked for, those without one. Reads local
files only; code in the directory runs only if that was asked for.

Prompts that are too long, empty or unfit for the template are dropped and reported; a prompt is never cut. A chat
template is tried with a marker in the problem's place, for each order of roles: one that leaves the marker out, or cuts
it, is unfit. Rejects a template without exactly one {prompt}, and a set of which nothing is left.
"""

from __future__ import annotations

import datetime
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from megatron_daro.config.model_shape import read_json
from megatron_daro.data.stops import special_tokens
from megatron_daro.errors import DataError, ModelError
from megatron_daro.thinking import is_thinking
from megatron_daro.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


_TODAY = "strftime_now"
_DATED = """\
{%%- macro strftime_now(format) -%%}
{%%- set known, this = %s, namespace(is_text=true) -%%}
{%%- for part in format.split("%%") -%%}
{%%- if this.is_text -%%}{{ part }}{%%- set this.is_text = false -%%}
{%%- elif part == "" and not loop.last -%%}{{ "%%" }}{%%- set this.is_text = true -%%}
{%%- elif part[:2] in known -%%}{{ known[part[:2]] ~ part[2:] }}
{%%- elif part[:1] in known -%%}{{ known[part[:1]] ~ part[1:] }}
{%%- else -%%}{{ "%%" ~ part }}
{%%- endif -%%}{%%- endfor -%%}
{%%- endmacro %%}
"""
"""strftime of one day, as a macro before the template, since transformers takes no function for a template."""
_JSON = ("config.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
"""Files that transformers reads too; its errors do not say which one is torn."""
_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")


def load_tokenizer(
    path: str | Path,
    trust_remote_code: bool = False,
    *,
    chat_template: bool = False,
    date: datetime.date | None = None,
    option: str = "model.path",
) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a model.

    Args:
        path: directory of the model, or of the tokenizer alone.
        trust_remote_code: runs Python files found in that directory.
        chat_template: whether a chat template is needed.
        date: what a chat template takes for today (`strftime_now`, as Llama 3.2's does); None: the actual day.
        option: what gave the path, for messages.

    Returns:
        A transformers tokenizer.

    Raises:
        ModelError: missing or torn files, no stop token, or no chat template.
    """
    directory = Path(path)
    if not directory.is_dir():
        raise ModelError(f"{option}: {directory} is not a directory; give the directory of a model in HF format")
    if not any((directory / name).is_file() for name in _FILES):
        raise ModelError(
            f"{option}: {directory} has no tokenizer files; one of {', '.join(_FILES)} is needed: copy them from the "
            "model the weights came from"
        )
    for name in _JSON:
        if (directory / name).is_file():
            read_json(directory / name)
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(directory, trust_remote_code=trust_remote_code, local_files_only=True)
    except Exception as error:
        # The tokenizers library raises a plain Exception for a torn file.
        raise ModelError(
            f"{option}: the tokenizer in {directory} cannot be loaded ({type(error).__name__}: {error}); fetch its "
            "files again, or set model.trust_remote_code if it needs code of its own and you trust it"
        ) from error
    if tokenizer.eos_token_id is None:
        raise ModelError(
            f"{option}: the tokenizer in {directory} has no stop token (eos_token), so no answer could end; set "
            "eos_token in its tokenizer_config.json"
        )
    if chat_template and not tokenizer.chat_template:
        raise ModelError(
            f"data.prompt_template is chat, but the tokenizer in {directory} has no chat template; add "
            "chat_template.jinja or, without agents, set data.prompt_template=plain"
        )
    if date is not None and tokenizer.chat_template:
        templates: str | dict[str, str] = tokenizer.chat_template
        tokenizer.chat_template = (
            _dated(templates, date)
            if isinstance(templates, str)
            else {name: _dated(template, date) for name, template in templates.items()}
        )
    return tokenizer


def _dated(template: str, date: datetime.date) -> str:
    """Return a chat template whose `strftime_now` always gives this day."""
    if _TODAY not in template:
        return template
    codes = [flag + letter for flag in ("", *"-_0^#EO") for letter in string.ascii_letters]
    return _DATED % {code: date.strftime(f"%{code}") for code in codes} + template


def response_decoder(tokenizer: PreTrainedTokenizerBase) -> Callable[[Sequence[int]], str]:
    """Return a function from token ids to the text that verifiers and people see, without `special_tokens`."""
    unseen = frozenset(special_tokens(tokenizer).values())
    return lambda ids: str(tokenizer.decode([i for i in ids if int(i) not in unseen], skip_special_tokens=False))


_PLACE = "{prompt}"
_PART = """\
The problem begins. This is "part" %d of it, after a first thought;

\tit is <think>a second one</think> & {x_%d}: 1/2 or 3? It ends"""
_MARKER = "\n".join(_PART % (number, number) for number in range(100))
"""Takes a problem's place: it has everything at which a template may cut a text, and is longer than what is left by one
that cuts at a length."""
_CHUNK = 1024


@dataclass(frozen=True, slots=True)
class TokenizeReport:
    """kept + the prompts in `dropped` = the prompts given. dropped: reason -> prompt ids. longest: tokens. largest_id:
    largest token id. opens_thinking: whether prompts end with a <think> that the model closes."""

    kept: int
    longest: int
    dropped: Mapping[str, Sequence[str]] = field(default_factory=dict)
    largest_id: int = 0
    opens_thinking: bool = False

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
    writer = _Writer(tokenizer, prompt_template, template)
    too_long = f"longer than max_prompt_tokens = {max_prompt_tokens}"
    most_chars = max_prompt_tokens * max((len(token) for token in tokenizer.get_vocab()), default=1)
    dropped: dict[str, list[str]] = {}
    kept: list[Prompt] = []
    for start in range(0, len(prompts), _CHUNK):
        chunk = []
        for prompt in prompts[start : start + _CHUNK]:
            try:
                text = writer.text(prompt)
            except _UnfitPromptError as unfit:
                dropped.setdefault(str(unfit), []).append(prompt.id)
                continue
            if len(text) > most_chars:  # spares the tokenizer texts of megabytes
                dropped.setdefault(too_long, []).append(prompt.id)
            else:
                chunk.append((prompt, text))
        for (prompt, _), ids in zip(chunk, _encoded([t for _, t in chunk], tokenizer, prompt_template), strict=True):
            if not ids:
                dropped.setdefault("no tokens", []).append(prompt.id)
            elif len(ids) > max_prompt_tokens:
                dropped.setdefault(too_long, []).append(prompt.id)
            else:
                kept.append(replace(prompt, tokens=tuple(ids)))
    if not kept:
        reasons = "; ".join(f"{len(ids)} {reason}" for reason, ids in dropped.items()) or "there were none"
        fix = "raise data.max_prompt_tokens" if too_long in dropped else "use another template (data.prompt_template)"
        raise DataError(f"no prompt is left after the template ({reasons}); {fix}")
    longest, largest_id = max(len(p.tokens) for p in kept), max(max(p.tokens) for p in kept)
    return kept, TokenizeReport(len(kept), longest, dropped, largest_id, writer.opens_thinking)


class _UnfitPromptError(Exception):
    """Why a prompt does not fit the template; never leaves this module."""


class _Writer:
    """Writes the text of prompts. opens_thinking: whether they end with a <think> (of each order of roles
    the first is looked at, and the last look counts)."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, prompt_template: str, template: str) -> None:
        self._tokenizer, self._template, self._chat = tokenizer, template, prompt_template == "chat"
        self._unfit: dict[tuple[str, ...], str] = {}
        self.opens_thinking = is_thinking(template.partition(_PLACE)[2]) and not self._chat

    def text(self, prompt: Prompt) -> str:
        """Return the text to encode."""
        if self._chat:
            return self._of_chat(prompt)
        if prompt.messages is not None and len(prompt.messages) != 1:
            raise _UnfitPromptError("chat of several messages under the plain template")
        return self._around(prompt.messages[0]["content"] if prompt.messages else prompt.text or "")

    def _around(self, problem: str) -> str:
        # str.replace and not str.format: problems and templates are full of braces.
        return self._template.replace(_PLACE, problem)

    def _of_chat(self, prompt: Prompt) -> str:
        messages = [dict(m) for m in prompt.messages or ({"role": "user", "content": prompt.text or ""},)]
        roles = tuple(str(message["role"]) for message in messages)
        if roles not in self._unfit:
            marked = [*messages[:-1], {**messages[-1], "content": _MARKER}]
            _, found, behind = self._rendered(marked).rpartition(_MARKER)
            whose = f"the chat template of {self._tokenizer.name_or_path}"
            self._unfit[roles] = "" if found else f"{whose} leaves out or cuts a problem of the role {roles[-1]!r}"
            self.opens_thinking = is_thinking(behind)
        if self._unfit[roles]:
            raise _UnfitPromptError(self._unfit[roles])
        messages[-1]["content"] = self._around(messages[-1]["content"])
        return self._rendered(messages)

    def _rendered(self, messages: list[dict[str, Any]]) -> str:
        try:
            return str(self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
        except Exception as error:  # The model's template is a program: whatever it raises costs this prompt only.
            raise _UnfitPromptError(f"the chat template refuses it ({error})") from error


def _encoded(texts: list[str], tokenizer: PreTrainedTokenizerBase, prompt_template: str) -> list[list[int]]:
    """Encode texts; a chat template writes its special tokens itself, so the tokenizer must not add them again."""
    if not texts:
        return []
    return tokenizer(texts, add_special_tokens=prompt_template == "plain")["input_ids"]
