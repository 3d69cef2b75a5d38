"""The tags between which models think before they answer, and the text behind them."""

from __future__ import annotations

from collections.abc import Mapping

THINK = "<think>"
THINKING_TAGS: Mapping[str, str] = {
    THINK: "</think>",  # Qwen3, DeepSeek-R1 and most others
    "<thinking>": "</thinking>",
    "<thought>": "</thought>",  # EXAONE Deep
    "<seed:think>": "</seed:think>",  # Seed-OSS
    "<mm:think>": "</mm:think>",  # MiniMax-M3
    "[THINK]": "[/THINK]",  # Magistral
    "\u25c1think\u25b7": "\u25c1/think\u25b7",  # Kimi-VL
    "<|begin_of_thought|>": "<|end_of_thought|>",  # OpenThinker, Sky-T1
    "<|START_THINKING|>": "<|END_THINKING|>",  # Command A Reasoning
    "<|inner_prefix|>": "<|inner_suffix|>",  # Apertus
    "<|channel|>analysis<|message|>": "<|channel|>final<|message|>",  # gpt-oss
}
"""Tags around what a model thinks before it answers: opening tag -> closing tag."""


def is_thinking(text: str) -> bool:
    """Whether a text begins thinking without ending it: its last tag, of any pair, is an opening one."""
    return max(map(text.rfind, THINKING_TAGS)) > max(map(text.rfind, THINKING_TAGS.values()))


def opens_thinking(text: str) -> bool:
    """Whether a text ends with an opening tag."""
    return text.rstrip().endswith(tuple(THINKING_TAGS))


def behind_thinking(text: str) -> str:
    """Return the text after the last closing tag; empty if thinking has begun and not ended."""
    if is_thinking(text):
        return ""
    return text[max((text.rfind(tag) + len(tag) for tag in THINKING_TAGS.values() if tag in text), default=0) :]
