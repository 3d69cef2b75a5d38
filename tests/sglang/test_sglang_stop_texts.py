"""Stop texts with a real server: it ends answers itself, and what it misses is cut off behind the same token."""

from __future__ import annotations

import asyncio
import itertools
import json

import numpy as np
import pytest
import torch
from sglang_pool import VOCAB, engine_of, expected, give, save_policy, serving
from tokenizers import Tokenizer, decoders, models
from transformers import AutoModelForCausalLM

from megatron_daro.data import stops
from megatron_daro.data.tokenizer import load_tokenizer, response_decoder
from megatron_daro.types import GroupRequest, Prompt, SamplingParams

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(900)]
STOP = "bcab"


def save_tokenizer(directory):
    """Each token is some letters, so that a text has many spellings, and ends within a token as often as not."""
    words = ("".join(letters) for size in (1, 2, 3) for letters in itertools.product("abc", repeat=size))
    vocabulary = {word: i for i, word in enumerate(itertools.islice(words, VOCAB - 1))} | {"<end>": VOCAB - 1}
    tokenizer = Tokenizer(models.WordLevel(vocab=vocabulary, unk_token="<end>"))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(["<end>"])
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<end>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))


def requests(count, **sampling):
    options = {"max_new_tokens": 60, "stop_token_ids": (VOCAB - 1,), **sampling}
    return [
        GroupRequest(
            i, 0, Prompt(f"p{i}", "", "test", tokens=(1 + i, 2, 3)), tuple(range(8)), SamplingParams(**options)
        )
        for i in range(count)
    ]


def test_an_answer_ends_at_the_token_that_completes_a_stop_text(tmp_path, monkeypatch):
    model = save_policy(tmp_path / "model", 0)
    save_tokenizer(tmp_path / "model")
    decode = response_decoder(load_tokenizer(tmp_path / "model"))
    generated = []

    def recorded(rollout, stop, decode):
        ended = cut(rollout, stop, decode)
        generated.append((rollout.finish_reason, rollout.response_length, ended.response_length))
        return ended

    cut = stops.until_stop
    monkeypatch.setattr(stops, "until_stop", recorded)

    async def answers(url):
        engine = engine_of([url], tmp_path / "run", decode=decode, expect=expected(tmp_path / "model"))
        await engine.start()
        try:
            await give(engine, AutoModelForCausalLM.from_pretrained(tmp_path / "model"), 0)
            return [one async for group in engine.generate(requests(4, stop=(STOP,))) for one in group]
        finally:
            await engine.close()

    with serving(tmp_path, skip_tokenizer_init=False) as server:
        rollouts = asyncio.run(asyncio.wait_for(answers(server.url), 300))
    stopped = 0
    for one in rollouts:
        ids = one.tokens[one.prompt_length :].tolist()
        text = decode(ids)
        assert STOP not in decode(ids[:-1])
        if STOP in text:
            stopped += 1
            assert one.finish_reason == "stop" and one.text == text[: text.index(STOP) + len(STOP)]
        else:
            assert one.text == text and (ids[-1] == VOCAB - 1) == (one.finish_reason == "stop")
        with torch.no_grad():
            logits = model(torch.tensor(one.tokens, dtype=torch.int64)[None]).logits[0].float()
        at = torch.arange(one.prompt_length - 1, len(one.tokens) - 1)
        wanted = torch.log_softmax(logits, -1)[at, torch.tensor(ids)].numpy()
        np.testing.assert_allclose(one.logprobs, wanted, atol=1e-4)
    assert stopped >= 8
    saved = [before for reason, before, after in generated if before > after]
    # The server looks at as many tokens as its own spelling of the text has, and one more: most, not all, texts.
    assert len(saved) < stopped, generated
