"""Tokenizers of bytes with three special tokens and a chat template, for tests of what conversations are made of."""

from __future__ import annotations

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# As Qwen2.5's template has them: tools in the system message, calls behind the answer's text, results in a user's turn.
TOOLS = (
    "{% if tools %}"
    "{{ '<|im_start|>system\n' + (messages[0]['content'] if messages[0]['role'] == 'system' else 'Help.') }}"
    "{{ '\n\n# Tools\n<tools>' }}{% for t in tools %}{{ '\n' + (t | tojson) }}{% endfor %}"
    "{{ '\n</tools><|im_end|>\n' }}"
    "{% elif messages[0]['role'] == 'system' %}{{ '<|im_start|>system\n' + messages[0]['content'] + '<|im_end|>\n' }}"
    "{% endif %}{% for m in messages %}{% if m['role'] == 'system' %}{% elif m['role'] == 'tool' %}"
    "{% if messages[loop.index0 - 1]['role'] != 'tool' %}{{ '<|im_start|>user' }}{% endif %}"
    "{{ '\n<tool_response>\n' + m['content'] + '\n</tool_response>' }}"
    "{% if loop.last or messages[loop.index0 + 1]['role'] != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}"
    "{% else %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] }}{% for c in m['tool_calls'] or [] %}"
    "{{ '\n<tool_call>\n{\"name\": \"' + c['function']['name'] + '\", \"arguments\": ' }}"
    "{{ (c['function']['arguments'] | tojson) + '}\n</tool_call>' }}"
    "{% endfor %}{{ '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def save(folder) -> None:
    """Write one without a template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = pre_tokenizers.ByteLevel.alphabet()
    bytes_ = Tokenizer(models.BPE({letter: i for i, letter in enumerate(sorted(letters))}, []))
    bytes_.pre_tokenizer, bytes_.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    special = ["<|im_start|>", "<|im_end|>"]
    PreTrainedTokenizerFast(
        tokenizer_object=bytes_, eos_token="<|im_end|>", additional_special_tokens=special
    ).save_pretrained(folder)
