"""Tokenizer: loads it from the model's directory and finds the tokens that end an answer.

Model directory -> tokenizer -> template (prompts to ids), engine (ids to text), stop ids.
Refuses directories without tokenizer files, torn files, tokenizers without a stop token, and, where the chat template
is asked for, those without one. Reads local files only; code that lies beside a model runs only where it was asked for.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

from megatron_daro.errors import ModelError

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
        found = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id")
    except (OSError, ValueError, AttributeError) as error:
        raise ModelError(f"{file}: cannot be read as JSON ({error}); repair or remove it") from error
    ids = found if isinstance(found, list) else [] if found is None else [found]
    if not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
        raise ModelError(f"{file}: eos_token_id is {found!r}; an integer or a list of integers is allowed")
    return set(ids)
