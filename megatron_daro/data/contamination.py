"""Contamination: problems of a training set that also stand in an evaluation set, by exact match.

Place in the data flow: prompts as loaded -> counts per evaluation set, for the load report.
Compares normalised text only (Unicode form, case, white space): a paraphrase is not found, and that is said in the
report.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping, Sequence

from megatron_daro.types import Prompt


def prompt_text(prompt: Prompt) -> str:
    """Return the problem as text: `text`, or the contents of the messages, one per line."""
    if prompt.text is not None:
        return prompt.text
    return "\n".join(message["content"] for message in prompt.messages or ())


def normalized_text(text: str) -> str:
    """Return what counts as the same problem: Unicode NFC without white space. Case stays: x and X differ in
    mathematics."""
    return "".join(unicodedata.normalize("NFC", text).split())


def find_overlap(prompts: Sequence[Prompt], held_out: Mapping[str, Sequence[Prompt]]) -> dict[str, list[str]]:
    """Training prompts that also stand in an evaluation set.

    Args:
        prompts: the training set.
        held_out: evaluation sets by name.

    Returns:
        For each name, the ids of the training prompts found in it, in training order.
    """
    known = {name: {_key(prompt) for prompt in rows} for name, rows in held_out.items()}
    keys = [(prompt.id, _key(prompt)) for prompt in prompts]
    return {name: [prompt_id for prompt_id, key in keys if key in rows] for name, rows in known.items()}


def _key(prompt: Prompt) -> str:
    """Return a chat that only adds a system message asks the same problem: the last message decides."""
    return normalized_text(prompt.messages[-1]["content"] if prompt.messages else prompt.text or "")
