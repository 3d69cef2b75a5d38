"""What an environment says becomes tokens: as plain text, or as a message of the model's chat template.

Observation -> ids behind those that the model sampled. Only what is new is rendered and encoded; nothing of the model's
is ever encoded again. It refuses templates that cannot go on after an answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from megatron_daro.errors import ConfigError, RolloutError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_USER = {"role": "user", "content": "x"}
_ANSWER = "What-the-model-said"
_SHOWN = 60


class Turns:
    """Writes turns for one tokenizer."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, chat: bool) -> None:
        """Try the template once. chat: whether prompts are written by it. Raises ConfigError."""
        self._tokenizer, self._chat = tokenizer, chat
        if chat:
            self._behind_answer("x", "user")

    def first(self, text: str) -> list[int]:
        """Return what stands between the prompt and the first answer. Raises RolloutError: of a chat, nothing."""
        if self._chat:
            raise RolloutError(
                f"environment.kind: reset returned the observation {text!r:.60} in a chat, where the prompt ends with "
                "the beginning of the model's answer; allowed: none; fix: put it into the problem"
            )
        return self._encoded(text)

    def observation(self, text: str, role: str, last_token: int) -> list[int]:
        """Return the ids of an observation behind an answer, up to where the model goes on.

        Args:
            last_token: the last that the model said. A stop token that the template would write is not written again.

        Raises:
            ConfigError: the template knows no such role.
        """
        if not self._chat:
            return self._encoded(text)
        ids = self._encoded(self._behind_answer(text, role))
        return ids[1:] if ids[:1] == [last_token] else ids

    def check(self, response: Sequence[int], history: Sequence[Mapping[str, str]]) -> None:
        """Compare what was trained with the chat template's own text of the whole history.

        Args:
            response: all ids behind the prompt. history: the same as messages.

        Raises:
            RolloutError: they differ: whoever serves the model with that template shows it something else.
        """
        trained = str(self._tokenizer.decode(list(response), skip_special_tokens=False))
        if self._chat:
            begin = self._rendered([_USER], generate=True)
            whole = self._rendered([_USER, *history], generate=False)
            rendered = whole.removeprefix(begin)
        else:
            rendered = "".join(message["content"] for message in history)
            trained = str(self._tokenizer.decode(list(response), skip_special_tokens=True))
        same = next((i for i, (a, b) in enumerate(zip(trained, rendered, strict=False)) if a != b), None)
        if same is None and (trained.startswith(rendered) or rendered.startswith(trained)):
            return
        at = min(len(trained), len(rendered)) if same is None else same
        raise RolloutError(
            f"environment.strict: the conversation differs from its rendered history at character {at}: trained "
            f"{trained[at : at + _SHOWN]!r}, rendered {rendered[at : at + _SHOWN]!r}; allowed: the same text; fix: a "
            "chat template that keeps earlier answers as they are (those of reasoning models cut them), or "
            "environment.strict=false: what is trained is always what the model saw"
        )

    def _behind_answer(self, text: str, role: str) -> str:
        messages = [_USER, {"role": "assistant", "content": _ANSWER}, {"role": role, "content": text}]
        whole = self._rendered(messages, generate=True)
        if _ANSWER not in whole or text not in whole:
            raise ConfigError(
                f"environment.kind: the chat template of {self._tokenizer.name_or_path} leaves out an answer, or a "
                f"message of role {role!r} behind it; allowed: a template that renders both; fix: use role 'user', or "
                "data.prompt_template=plain"
            )
        return whole[whole.index(_ANSWER) + len(_ANSWER) :]

    def _rendered(self, messages: Sequence[Mapping[str, str]], *, generate: bool) -> str:
        from jinja2 import TemplateError

        plain = [dict(message) for message in messages]
        try:
            return str(self._tokenizer.apply_chat_template(plain, tokenize=False, add_generation_prompt=generate))
        except TemplateError as error:
            roles = ", ".join(message["role"] for message in messages)
            raise ConfigError(
                f"environment.kind: the chat template of {self._tokenizer.name_or_path} refuses messages of the roles "
                f"{roles} ({error}); allowed: roles that it knows; fix: let Step.role be 'user'"
            ) from error

    def _encoded(self, text: str) -> list[int]:
        return [int(i) for i in self._tokenizer.encode(text, add_special_tokens=False)]
