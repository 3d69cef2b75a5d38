"""What ends an answer: token ids, texts that may span several tokens or end within one, and repeating itself.

Tokenizer and rollout.stop -> `Stops` -> SamplingParams -> engine. An answer ends with the first token after which its
text holds a stop text. Its tokens stay whole, since the model sampled them and is trained on them, and they are never
encoded again; its text is cut after the stop text. Engines look at the last tokens while they generate; what counts is
`until_end`, which every engine applies to the whole answer, so that all of them end at the same token however a stop
text was spelled in tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from megatron_daro.config.model_shape import read_json
from megatron_daro.errors import ModelError
from megatron_daro.thinking import THINKING_TAGS
from megatron_daro.types import GroupRequest, Rollout

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Decode = Callable[[Sequence[int]], str]
"""Token ids -> text without special tokens."""


@dataclass(frozen=True, slots=True)
class Stops:
    """token_ids: ascending, at least one. texts: that end an answer; often none. repetition: as in SamplingParams."""

    token_ids: tuple[int, ...]
    texts: tuple[str, ...] = ()
    repetition: tuple[int, int] | None = None

    def with_texts(self, texts: Sequence[str]) -> Stops:
        """Return the same with further texts."""
        return replace(self, texts=tuple(dict.fromkeys((*self.texts, *texts))))


def read_stops(
    tokenizer: PreTrainedTokenizerBase,
    *,
    stop: Sequence[str] = (),
    extra_ids: Sequence[int] = (),
    model_path: str | Path | None = None,
) -> Stops:
    """Return what ends an answer: the tokenizer's end token, those that the model's files name, and what is asked for.

    A special token ends an answer by its id; it has no text. Any other string ends it as text.

    Args:
        tokenizer: from `load_tokenizer`.
        stop: strings, not empty.
        extra_ids: token ids.
        model_path: directory whose config.json and generation_config.json may name further ids (instruct models often
            have two); engines stop at all of them.

    Raises:
        ModelError: a string with a special token inside, an id outside the vocabulary, or a torn file.
    """
    ids, texts = {int(tokenizer.eos_token_id)}, []
    sources = {"rollout.stop_token_ids": {int(i) for i in extra_ids}}
    for name in ("config.json", "generation_config.json") if model_path is not None else ():
        file = Path(model_path or "") / name
        sources[f"{file}: eos_token_id"] = _end_tokens(file)
    special = special_tokens(tokenizer)
    for text in stop:
        if text in special:
            ids.add(special[text])
            continue
        inside = sorted(token for token in special if token in text)
        if inside:
            raise ModelError(
                f"rollout.stop: {text!r} has the special token {inside[0]} inside, which is no part of an answer's "
                f"text; allowed: a special token alone, or text without one; fix: set rollout.stop to {inside[0]!r}"
            )
        texts.append(text)
        encoded = tokenizer.encode(text, add_special_tokens=False)
        if len(encoded) == 1 and tokenizer.decode(encoded) == text:
            ids.add(int(encoded[0]))  # an engine without a tokenizer can stop there too
    for source, named in sources.items():
        if wrong := sorted(i for i in named if not 0 <= i < len(tokenizer)):
            raise ModelError(
                f"{source}: got {wrong}, outside this tokenizer's vocabulary; allowed: ids from 0 to "
                f"{len(tokenizer) - 1}; fix: correct it, or take the tokenizer that belongs to the model"
            )
        ids |= named
    return Stops(tuple(sorted(ids)), tuple(dict.fromkeys(texts)))


def special_tokens(tokenizer: PreTrainedTokenizerBase) -> dict[str, int]:
    """Return text -> id of the tokens that are left out of a response's text: special ones, except those that make up
    tags of thinking, by which verifiers recognise it."""
    added = {str(token): int(i) for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    named = zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True)
    special = added | {str(token): int(i) for token, i in named}
    tags = (*THINKING_TAGS, *THINKING_TAGS.values())
    return {text: i for text, i in special.items() if not any(text in tag for tag in tags)}


def until_end(rollout: Rollout, request: GroupRequest, decode: Decode) -> Rollout:
    """Return an answer up to its first stop text, or to where it repeats itself. One at its limit in the request has
    the finish reason "segment".

    Args:
        rollout: as the engine generated it, with the text of all of its tokens. decode: tokens -> text.
    """
    sampling = request.sampling
    rollout = until_repeated(until_stop(rollout, sampling.stop, decode), sampling.repetition, decode)
    at_limit = rollout.finish_reason == "length" and rollout.response_length == request.limits.get(rollout.index)
    return replace(rollout, finish_reason="segment") if at_limit else rollout


def tokens_until_stop(tokens: Sequence[int], stop: Sequence[str], decode: Decode) -> tuple[int, str] | None:
    """Return how many tokens an answer has up to the first stop text, and its text up to and including it.

    That many tokens are the shortest beginning whose text holds a stop text.

    Args:
        tokens: of the answer. stop: texts. decode: tokens -> text.

    Returns:
        The number and the text; None where the answer holds no stop text.
    """
    if not any(one in decode(tokens) for one in stop):
        return None
    low, high = 1, len(tokens)
    while low < high:
        middle = (low + high) // 2
        if any(one in decode(tokens[:middle]) for one in stop):
            high = middle
        else:
            low = middle + 1
    text = decode(tokens[:low])
    return low, text[: min(place + len(one) for one in stop if (place := text.find(one)) >= 0)]


def until_stop(rollout: Rollout, stop: Sequence[str], decode: Decode) -> Rollout:
    """Return an answer up to its first stop text; unchanged where it holds none.

    Args:
        rollout: as the engine generated it, with the text of all of its tokens. stop: texts that end it.
        decode: tokens -> text.
    """
    if not any(one in rollout.text for one in stop):
        return rollout
    length = tokens_until_stop(rollout.tokens[rollout.prompt_length :].tolist(), stop, decode)
    return rollout if length is None else rollout.cut(*length)


def repeated_at(tokens_T: np.ndarray, span: int, period: int) -> int | None:
    """Return the length of the shortest beginning of an answer whose last `span` tokens are one block over and over;
    None if there is none.

    Args:
        tokens_T: of the answer, integers. span: tokens. period: most tokens of the block, at most span / 2.
    """
    found = None
    for length in range(1, period + 1):
        equal_T = tokens_T[length:] == tokens_T[:-length]
        number_T = np.arange(len(equal_T))
        run_T = number_T - np.maximum.accumulate(np.where(equal_T, -1, number_T))
        ends = np.flatnonzero(run_T >= span - length)
        if len(ends):
            count = int(ends[0]) + length + 1
            found = count if found is None else min(found, count)
    return found


def until_repeated(rollout: Rollout, repetition: tuple[int, int] | None, decode: Decode) -> Rollout:
    """Return an answer up to the token at which it first repeats itself; unchanged where it does not.

    Args:
        rollout: all that was generated. repetition: tokens and period (see `repeated_at`); None: not looked for.
        decode: tokens -> text.
    """
    response_R = rollout.tokens[rollout.prompt_length :]
    if repetition is None or len(response_R) < repetition[0]:
        return rollout
    count = repeated_at(response_R, *repetition)
    return rollout if count is None else rollout.cut(count, decode(response_R[:count].tolist()), "repetition")


def window_of(stop: Sequence[str]) -> int:
    """Return how many of the last tokens must be decoded to see whether a stop text has ended: each token has at least
    one byte, and the first of them may decode differently than in its context (a space, half a character)."""
    return 1 + max(len(one.encode()) for one in stop)


def _end_tokens(file: Path) -> set[int]:
    """Return the end tokens that a file of the model names; none if there is no such file."""
    if not file.is_file():
        return set()
    eos_ids = read_json(file).get("eos_token_id")
    ids = eos_ids if isinstance(eos_ids, list) else [] if eos_ids is None else [eos_ids]
    if not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
        raise ModelError(f"{file}: eos_token_id is {eos_ids!r}; an integer or a list of integers is allowed")
    return set(ids)
