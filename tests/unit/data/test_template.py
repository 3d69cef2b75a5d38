"""Tokenizer loading and templates, on small real tokenizers that are built here, and on Qwen's own."""

import json
import shutil
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from megatron_daro.data.tokenizer import load_tokenizer, tokenize_prompts
from megatron_daro.errors import DataError, ModelError
from megatron_daro.types import Prompt

SHARED = Path(__file__).parents[4] / "shared" / "data" / "tokenizer"
CHAT = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIALS = ["<|im_start|>", "<|im_end|>", "<s>"]


def save_tokenizer(
    directory: Path, *, eos: str | None = "<|im_end|>", chat: str | None = CHAT, bos: bool = False
) -> Path:
    """A byte-level tokenizer without merges, in the files an HF model has."""
    directory.mkdir(exist_ok=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIALS)
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
        )
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": eos, "chat_template": chat}
    kept = {key: value for key, value in config.items() if value is not None}
    (directory / "tokenizer_config.json").write_text(json.dumps(kept))
    return directory


def text_prompt(text: str, name: str = "p") -> Prompt:
    return Prompt(id=name, answer="1", source="test", text=text)


def chat_prompt(*contents: str) -> Prompt:
    roles = ["system", "user"] if len(contents) == 2 else ["user"]
    messages = tuple({"role": r, "content": c} for r, c in zip(roles, contents, strict=True))
    return Prompt(id="chat", answer="1", source="test", messages=messages)


def test_a_chat_that_the_template_refuses_is_dropped_and_counted(tmp_path):
    refusing = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + CHAT
    tokenizer = load_tokenizer(save_tokenizer(tmp_path, chat=refusing), chat_template=True)
    kept, report = tokenize_prompts([text_prompt("1+1?"), chat_prompt("Be short.", "2+2?")], tokenizer)
    assert [p.text for p in kept] == ["1+1?"]
    assert list(report.dropped.values()) == [["chat"]]
    with pytest.raises(DataError, match="no system role"):
        tokenize_prompts([chat_prompt("Be short.", "2+2?")], tokenizer)


def test_chat_template_by_hand(tmp_path):
    tokenizer = load_tokenizer(save_tokenizer(tmp_path, bos=True), chat_template=True)
    kept, report = tokenize_prompts([text_prompt("1+1?"), chat_prompt("Be short.", r"\frac{1}{2}?")], tokenizer)
    assert tokenizer.decode(kept[0].tokens) == "<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(kept[1].tokens) == (
        "<|im_start|>system\nBe short.<|im_end|>\n<|im_start|>user\n\\frac{1}{2}?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert kept[0].tokens.count(tokenizer.convert_tokens_to_ids("<|im_start|>")) == 2
    assert report.kept == 2 and not report.dropped and report.longest == max(len(p.tokens) for p in kept)
    direct = tokenizer.apply_chat_template(
        [{"role": "user", "content": "1+1?"}], add_generation_prompt=True, tokenize=True, return_dict=False
    )
    assert list(kept[0].tokens) == direct


def test_text_around_the_problem(tmp_path):
    tokenizer = load_tokenizer(save_tokenizer(tmp_path))
    kept, _ = tokenize_prompts(
        [text_prompt("{x}"), chat_prompt("S", "q")], tokenizer, template="Solve {prompt} in {y}."
    )
    assert "user\nSolve {x} in {y}.<|im_end|>" in tokenizer.decode(kept[0].tokens)
    assert "system\nS<|im_end|>\n<|im_start|>user\nSolve q in {y}.<|im_end|>" in tokenizer.decode(kept[1].tokens)
    plain, _ = tokenize_prompts([text_prompt("{x}")], tokenizer, prompt_template="plain", template="Q: {prompt}\nA:")
    assert tokenizer.decode(plain[0].tokens) == "Q: {x}\nA:"


def test_plain_keeps_the_tokenizers_first_token(tmp_path):
    tokenizer = load_tokenizer(save_tokenizer(tmp_path, bos=True, chat=None))
    kept, _ = tokenize_prompts([text_prompt("a")], tokenizer, prompt_template="plain")
    assert tokenizer.convert_ids_to_tokens(list(kept[0].tokens)) == ["<s>", "a"]


def test_long_and_unfit_prompts_are_dropped_and_counted(tmp_path):
    tokenizer = load_tokenizer(save_tokenizer(tmp_path))
    rows = [text_prompt("a" * 8, "fits"), text_prompt("a" * 9, "long"), text_prompt("", "void"), chat_prompt("s", "u")]
    kept, report = tokenize_prompts(rows, tokenizer, prompt_template="plain", max_prompt_tokens=8)
    assert [p.id for p in kept] == ["fits"]
    assert sorted(report.dropped.values()) == [["chat"], ["long"], ["void"]]
    assert all(name in report.summary() for name in ("chat", "long", "void"))
    assert kept[0].answer == "1" and kept[0].text == "a" * 8


def test_more_prompts_than_one_chunk_stay_in_order(tmp_path):
    tokenizer = load_tokenizer(save_tokenizer(tmp_path))
    rows = [text_prompt(str(i), f"p{i}") for i in range(2500)]
    kept, _ = tokenize_prompts(rows, tokenizer, prompt_template="plain")
    assert [tokenizer.decode(p.tokens) for p in kept] == [p.text for p in rows]


def test_nothing_left_is_an_error(tmp_path):
    tokenizer = load_tokenizer(save_tokenizer(tmp_path))
    with pytest.raises(DataError, match=r"max_prompt_tokens = 1"):
        tokenize_prompts([text_prompt("abc")], tokenizer, max_prompt_tokens=1)
    with pytest.raises(DataError, match=r"\{prompt\}"):
        tokenize_prompts([text_prompt("abc")], tokenizer, template="Solve it")


def test_missing_files(tmp_path):
    with pytest.raises(ModelError, match="gone"):
        load_tokenizer(tmp_path / "gone")
    with pytest.raises(ModelError, match=str(tmp_path)):
        load_tokenizer(tmp_path)


def test_torn_file(tmp_path):
    save_tokenizer(tmp_path)
    whole = (tmp_path / "tokenizer.json").read_text()
    (tmp_path / "tokenizer.json").write_text(whole[: len(whole) // 2])
    with pytest.raises(ModelError, match=str(tmp_path)):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("content", ["[" * 100_000, "{torn", "[]"])
@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json", "special_tokens_map.json"])
def test_a_torn_file_beside_the_tokenizer_is_named(tmp_path, name, content):
    save_tokenizer(tmp_path)
    (tmp_path / name).write_text(content)
    with pytest.raises(ModelError, match=f"{tmp_path}/{name}"):
        load_tokenizer(tmp_path)


def test_tokenizer_without_the_stop_token(tmp_path):
    with pytest.raises(ModelError, match="stop"):
        load_tokenizer(save_tokenizer(tmp_path, eos=None))


def test_no_chat_template_while_it_is_asked_for(tmp_path):
    save_tokenizer(tmp_path, chat=None)
    with pytest.raises(ModelError, match="chat template"):
        load_tokenizer(tmp_path, chat_template=True)
    assert load_tokenizer(tmp_path).eos_token == "<|im_end|>"


def test_remote_code_stays_off_unless_asked_for(tmp_path, monkeypatch):
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    save_tokenizer(tmp_path)
    marker = tmp_path / "ran"
    (tmp_path / "own.py").write_text(f"open({str(marker)!r}, 'w').close()\nraise RuntimeError('ran')\n")
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    config |= {"tokenizer_class": "OwnTokenizer", "auto_map": {"AutoTokenizer": [None, "own.OwnTokenizer"]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    try:
        load_tokenizer(tmp_path)
    except ModelError as error:
        assert "trust_remote_code" in str(error)
    assert not marker.exists()
    with pytest.raises(ModelError, match="RuntimeError: ran"):
        load_tokenizer(tmp_path, trust_remote_code=True)
    assert marker.exists()


@pytest.mark.shared
def test_qwens_own_tokenizer(tmp_path):
    source = SHARED / "tokenizer.qwen2.5.json"
    if not source.is_file():
        pytest.skip(f"{source} is not there")
    shutil.copy(source, tmp_path / "tokenizer.json")
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "chat_template": CHAT}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = load_tokenizer(tmp_path, chat_template=True)
    kept, _ = tokenize_prompts([text_prompt("What is $1+1$?")], tokenizer)
    expected = ["<|im_start|>", "user", "Ċ", "What", "Ġis", "Ġ$", "1", "+", "1", "$", "?", "<|im_end|>", "Ċ"]
    expected += ["<|im_start|>", "assistant", "Ċ"]
    assert tokenizer.convert_ids_to_tokens(list(kept[0].tokens)) == expected
