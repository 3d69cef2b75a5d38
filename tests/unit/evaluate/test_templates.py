"""Templates write what docs/evaluate.md says, stop where they say, and refuse tokenizers that cannot write them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_daro.data.templates import TEMPLATES, check_tokenizer, verified_text
from megatron_daro.errors import ModelError

DOCS = Path(__file__).resolve().parents[3] / "docs" / "evaluate.md"


def tokenizer(*, chat: bool, known: tuple[str, ...] = ()) -> SimpleNamespace:
    """What a tokenizer is asked for here."""
    return SimpleNamespace(
        chat_template="x" if chat else None,
        name_or_path="some/model",
        encode=lambda text, add_special_tokens: [1] if text in known else list(text.encode()),
    )


def test_the_documentation_shows_every_template_word_for_word():
    text = DOCS.read_text(encoding="utf-8")
    for name, template in TEMPLATES.items():
        assert f"`{name}`" in text
        for line in template.text.splitlines():
            assert line in text, (name, line)


def test_a_template_that_the_tokenizer_cannot_write_is_refused():
    check_tokenizer("chat", tokenizer(chat=True))
    with pytest.raises(ModelError, match=r"chat.*some/model"):
        check_tokenizer("chat", tokenizer(chat=False))
    check_tokenizer("qwen-math", tokenizer(chat=False, known=("<|im_start|>", "<|im_end|>")))
    with pytest.raises(ModelError, match=r"<\|im_end\|>.*some/model"):
        check_tokenizer("qwen-math", tokenizer(chat=True, known=("<|im_start|>",)))
    for name in ("r1", "none"):
        check_tokenizer(name, tokenizer(chat=False))


@pytest.mark.parametrize(
    ("text", "verified"),
    [
        ("so </think> <answer> 42 </answer>", "\\boxed{42}"),
        ("so </think> <answer> it is \\boxed{42} </answer>", " it is \\boxed{42} "),
        ("so </think> <answer> 1 </answer> no, <answer> 2 </answer>", "\\boxed{2}"),
        ("no thoughts <answer> 42 </answer>", ""),
        ("so </think><answer> 42 </answer>", ""),
        ("so </think> <answer> 4 <answer> 2", ""),
        ("\\boxed{42} without tags", ""),
        ("<answer> 42 cut off", ""),
        ("42 </answer>", ""),
    ],
)
def test_r1_reads_the_last_answer_tag_of_an_answer_that_keeps_the_form(text, verified):
    assert verified_text(text, TEMPLATES["r1"], opens_thinking=True) == verified


def test_other_templates_read_the_whole_answer():
    for name, template in TEMPLATES.items():
        assert name == "r1" or verified_text("a <answer>", template, opens_thinking=False) == "a <answer>"
