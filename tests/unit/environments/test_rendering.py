"""Observations behind answers: the same ids as the template writes for the whole history, and only the new ones."""

from __future__ import annotations

import chat_tokenizers
import pytest
from chat_tokenizers import CHATML, TOOLS
from transformers import AutoTokenizer

from megatron_daro.environments.rendering import Turns
from megatron_daro.errors import ConfigError, RolloutError

FORGETS = CHATML.replace("m['content']", "(m['content'].split('</think>')[-1] if not loop.last else m['content'])")
NO_TOOL = "{% if messages[-1]['role'] == 'tool' %}{{ raise_exception('no tools') }}{% endif %}" + CHATML
ONLY_LAST = CHATML.replace("in messages", "in messages[-1:]")


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """A tokenizer of bytes and three special tokens."""
    folder = tmp_path_factory.mktemp("tokenizer")
    chat_tokenizers.save(folder)
    return folder


def turns(plain, template=CHATML):
    tokenizer = AutoTokenizer.from_pretrained(plain)
    tokenizer.chat_template = template
    return tokenizer, Turns(tokenizer, chat=True)


def test_a_message_that_the_template_escapes_goes_on(plain):
    written = CHATML.replace("m['content']", "(m['content'] | tojson if m['role'] == 'tool' else m['content'])")
    tokenizer, made = turns(plain, written)
    shown = made.observation('{"a": "<1>"}', "tool", tokenizer.eos_token_id)
    assert r'"{\"a\": \"<1>\"}"' in tokenizer.decode(shown)


@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize("role", ["user", "tool"])
def test_what_is_new_joins_what_was_sampled_to_the_rendered_history(plain, cut, role):
    tokenizer, made = turns(plain)
    said = tokenizer.encode("4 is\n<2>" + ("" if cut else "<|im_end|>"), add_special_tokens=False)
    begin = tokenizer.encode("<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n", add_special_tokens=False)
    shown = made.observation("no {{ }}", role, said[-1])
    messages = [
        {"role": "user", "content": "2+2?"},
        {"role": "assistant", "content": "4 is\n<2>"},
        {"role": role, "content": "no {{ }}"},
    ]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert begin + said + shown == tokenizer.encode(text, add_special_tokens=False)


def test_plain_text_is_itself(plain):
    tokenizer, _ = turns(plain)
    made = Turns(tokenizer, chat=False)
    assert made.observation("a b", "user", 0) == made.first("a b") == tokenizer.encode("a b", add_special_tokens=False)


def test_templates_that_cannot_go_on_are_refused(plain):
    with pytest.raises(ConfigError, match="template"):
        turns(plain, ONLY_LAST)
    _, made = turns(plain, NO_TOOL)
    with pytest.raises(ConfigError, match=r"tool.*no tools"):
        made.observation("x", "tool", 0)
    with pytest.raises(RolloutError, match="prompt"):
        made.first("x")


def test_a_template_that_forgets_is_drift(plain):
    history = [
        {"role": "assistant", "content": "<think>h</think>5"},
        {"role": "user", "content": "no"},
        {"role": "assistant", "content": "4"},
    ]

    def response(tokenizer, made):
        said = tokenizer.encode("<think>h</think>5<|im_end|>", add_special_tokens=False)
        shown = made.observation("no", "user", said[-1])
        return said + shown + tokenizer.encode("4<|im_end|>", add_special_tokens=False)

    tokenizer, made = turns(plain)
    made.check(response(tokenizer, made), history)
    tokenizer, made = turns(plain, FORGETS)
    with pytest.raises(RolloutError, match=r"<think>h</think>5"):
        made.check(response(tokenizer, made), history)


def test_results_of_several_tools_are_one_turn(plain):
    tokenizer, made = turns(plain, TOOLS)
    said = tokenizer.encode("x<|im_end|>", add_special_tokens=False)
    results = [{"role": "tool", "content": text, "tool_call_id": text} for text in ("1", "2")]
    text = tokenizer.decode(made.messages(results, said[-1]), skip_special_tokens=False)
    one = "<tool_response>\n{}\n</tool_response>".format
    assert text == f"\n<|im_start|>user\n{one(1)}\n{one(2)}<|im_end|>\n<|im_start|>assistant\n"


def test_plain_text_is_compared_with_its_history_too(plain):
    tokenizer, _ = turns(plain)
    made = Turns(tokenizer, chat=False)
    said = tokenizer.encode("a<|im_end|>b" + "c" * 70, add_special_tokens=False)
    history = [{"role": "assistant", "content": "a"}, {"role": "user", "content": "b" + "c" * 70}]
    made.check(said, history)
    made.check(said[:-1], history)
    made.check(said, [*history, {"role": "assistant", "content": "more"}])
    with pytest.raises(RolloutError, match=r"environment\.strict"):
        made.check(said, [history[0], {"role": "user", "content": "x" + "c" * 70}])


def test_a_stop_token_that_was_sampled_is_not_written_again(plain):
    tokenizer, made = turns(plain)
    stop, text = tokenizer.convert_tokens_to_ids("<|im_end|>"), [{"role": "user", "content": "no"}]
    with_stop, without = made.messages(text, 3), made.messages(text, stop)
    assert with_stop == [stop, *without] and {type(token) for token in without} == {int}
