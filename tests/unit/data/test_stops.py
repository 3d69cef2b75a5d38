"""An answer ends with the first token after which its text holds a stop text, in every engine alike."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_template import SHARED, save_tokenizer

from megatron_daro.config import EvalSet
from megatron_daro.data.stops import Stops, read_stops, tokens_until_stop, until_stop, window_of
from megatron_daro.data.templates import TEMPLATES, HeldOut
from megatron_daro.data.tokenizer import load_tokenizer, response_decoder
from megatron_daro.errors import ModelError
from megatron_daro.routed_experts import Part, StoredExperts
from megatron_daro.types import Rollout

PIECES = ["<", "/", "answer", ">", "</", "</answer>", ">\n", "</answer>\n\n", "7", "", "an", "swer"]
"""A vocabulary in which one text has many spellings, also as a part of a token, and one token has no text."""
STOP = ("</answer>",)


def spelled(ids):
    return "".join(PIECES[i] for i in ids)


def rollout(ids, *, prompt=(1, 2), text=None, **changes):
    one = Rollout(
        prompt_id="p", group_id=0, attempt=0, index=0, tokens=np.array([*prompt, *ids], np.int32),
        prompt_length=len(prompt), loss_mask=np.ones(len(ids), np.uint8),
        logprobs=-np.arange(1, len(ids) + 1, dtype=np.float32), finish_reason="length", weight_version=3,
        text=spelled(ids) if text is None else text,
    )  # fmt: skip
    return replace(one, **changes)


@pytest.mark.parametrize(
    ("pieces", "count", "text"),
    [
        (["7", "</answer>"], 2, "7</answer>"),
        (["7", "<", "/", "an", "swer", ">", "7"], 6, "7</answer>"),
        (["7", "</", "answer", ">\n", "7"], 4, "7</answer>"),  # it ends within a token
        (["7", "</answer>\n\n"], 2, "7</answer>"),
        (["<", "", "/", "answer", "", ">", "7"], 6, "</answer>"),
    ],
)
def test_its_tokens_stay_whole_and_its_text_ends_with_the_stop_text(pieces, count, text):
    ids = [PIECES.index(piece) for piece in pieces]
    assert tokens_until_stop(ids, STOP, spelled) == (count, text)
    ended = until_stop(rollout(ids), STOP, spelled)
    assert (ended.response_length, ended.text, ended.finish_reason) == (count, text, "stop")
    assert len(ended.logprobs) == len(ended.loss_mask) == count and ended.tokens.tolist() == [1, 2, *ids[:count]]


def test_an_answer_without_a_stop_text_is_left_alone():
    one = rollout([PIECES.index("answer"), PIECES.index(">")])
    assert until_stop(one, STOP, spelled) is one and until_stop(one, (), spelled) is one


def test_the_first_of_several_stop_texts_counts():
    ids = [PIECES.index(piece) for piece in ("7", ">\n", "</answer>")]
    assert tokens_until_stop(ids, ("</answer>", "\n"), spelled) == (2, "7>\n")


@given(st.lists(st.integers(0, len(PIECES) - 1), min_size=1, max_size=30))
def test_the_last_tokens_show_where_a_text_ends(ids):
    found = tokens_until_stop(ids, STOP, spelled)
    window = window_of(STOP)
    with_text = [i for i in ids if PIECES[i]]  # a token without text is what a window may be too short for
    seen = next(
        (n for n in range(1, len(with_text) + 1) if STOP[0] in spelled(with_text[max(0, n - window) : n])), None
    )
    assert (found is None) == (seen is None)
    if found:
        assert [i for i in ids[: found[0]] if PIECES[i]] == with_text[:seen]
        assert STOP[0] not in spelled(ids[: found[0] - 1])


def test_versions_and_experts_of_what_is_cut_off_go_too():
    ids = [PIECES.index(piece) for piece in ("7", "</answer>", "7")]
    experts = StoredExperts((Part("somewhere", 0, 4),), (5, 2, 1))
    one = rollout(ids, version_spans=((3, 1), (4, 2)), routed_experts=experts)
    ended = until_stop(one, STOP, spelled)
    assert ended.version_spans == ((3, 1), (4, 1))
    assert ended.routed_experts == StoredExperts((Part("somewhere", 0, 3),), (4, 2, 1))
    assert until_stop(replace(one, version_spans=((3, 2), (4, 1))), STOP, spelled).version_spans == ((3, 2),)
    newer = until_stop(replace(one, version_spans=((4, 3),)), STOP, spelled)
    assert (newer.weight_version, newer.version_spans) == (3, ((4, 2),))  # its prompt may have been read by the older


def test_stops_from_all_sources(tmp_path):
    tokenizer = load_tokenizer(save_tokenizer(tmp_path))
    eos, start, newline = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|im_start|>", "Ċ"])
    assert read_stops(tokenizer) == Stops((eos,))
    assert read_stops(tokenizer, stop=["\n"], extra_ids=[eos, 5]) == Stops(tuple(sorted({5, newline, eos})), ("\n",))
    assert read_stops(tokenizer, stop=["<|im_start|>", "ab", "ab"]) == Stops(tuple(sorted((start, eos))), ("ab",))
    assert read_stops(tokenizer, model_path=tmp_path) == Stops((eos,))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [start, eos]}))
    assert read_stops(tokenizer, model_path=tmp_path) == Stops(tuple(sorted((start, eos))))


@pytest.mark.parametrize("named", [5, [2, 5]])
def test_every_end_token_of_the_models_files_counts(tmp_path, named):
    tokenizer = load_tokenizer(save_tokenizer(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": named}))
    eos, ids = tokenizer.eos_token_id, named if isinstance(named, list) else [named]
    assert read_stops(tokenizer, model_path=tmp_path).token_ids == tuple(sorted({eos, *ids}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 7}))
    assert read_stops(tokenizer, model_path=tmp_path).token_ids == tuple(sorted({eos, 7, *ids}))


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_a_bad_end_token_is_told_with_its_file(tmp_path, name):
    tokenizer = load_tokenizer(save_tokenizer(tmp_path))
    (tmp_path / name).write_text(json.dumps({"eos_token_id": 9999}))
    with pytest.raises(ModelError, match=f"/{name}: eos_token_id.*9999"):
        read_stops(tokenizer, model_path=tmp_path)


def test_stops_that_are_refused(tmp_path):
    tokenizer = load_tokenizer(save_tokenizer(tmp_path))
    with pytest.raises(ModelError, match=r"rollout\.stop: 'a<s>'"):
        read_stops(tokenizer, stop=["a<s>"])
    with pytest.raises(ModelError, match=r"rollout\.stop_token_ids: got \[-1, 9999\]"):
        read_stops(tokenizer, extra_ids=[9999, -1])
    for text in ('{"eos_token_id": "x"}', "{torn", "[]", "[" * 100_000, "[" * 100_000 + "]" * 100_000):
        for name in ("generation_config.json", "config.json"):
            (tmp_path / name).write_text(text)
            with pytest.raises(ModelError, match=f"/{name}"):
                read_stops(tokenizer, model_path=tmp_path)
            (tmp_path / name).unlink()


def test_a_set_ends_at_the_texts_of_its_own_template_or_of_the_training_data():
    stops = Stops((1,), ("END",))
    r1 = HeldOut(EvalSet(name="a", path=Path("x"), template="r1"), ())
    none = HeldOut(EvalSet(name="a", path=Path("x"), template="none"), (), TEMPLATES["r1"])
    data = HeldOut(EvalSet(name="a", path=Path("x")), (), TEMPLATES["r1"])
    assert r1.stops(stops) == data.stops(stops) == Stops((1,), ("END", "</answer>"))
    assert none.stops(stops) == HeldOut(EvalSet(name="a", path=Path("x")), ()).stops(stops) == stops
    answer = "so </think> <answer> 42 </answer>"
    assert r1.verified_text(answer) == data.verified_text(answer) == r"\boxed{42}"
    assert none.verified_text(answer) == HeldOut(EvalSet(name="a", path=Path("x")), ()).verified_text(answer) == answer


@pytest.mark.shared
def test_with_qwens_tokenizer_a_stop_text_has_many_spellings(tmp_path):
    source = SHARED / "tokenizer.qwen2.5.json"
    if not source.is_file():
        pytest.skip(f"{source} is not there")
    (tmp_path / "tokenizer.json").write_bytes(source.read_bytes())
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = load_tokenizer(tmp_path)
    decode = response_decoder(tokenizer)
    assert read_stops(tokenizer, stop=STOP).texts == STOP
    by_letters = [i for letter in "7</answer>" for i in tokenizer.encode(letter)]
    for tail in ("", "\n\n", "\n\nUser: é"):
        for ids in (tokenizer.encode("7</answer>" + tail), [*by_letters, *tokenizer.encode(tail)]):
            count, text = tokens_until_stop(ids, STOP, decode)
            assert text == "7</answer>" and STOP[0] not in decode(ids[: count - 1])
            assert STOP[0] in decode(ids[max(0, count - window_of(STOP)) : count])
