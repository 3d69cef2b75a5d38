"""Which ids an SGLang server writes beside its log-probs: those of given tokens but the last of its vocabulary, for
which it writes 0, and every id that it sampled.

The probe after each weight update and the teacher read given tokens; rollouts are sampled ones.
"""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from sglang_pool import VOCAB, engine_of, give, logprobs_of, save_policy, started
from stub_server import given_logprobs

from megatron_daro.config.algorithm import DistillSection
from megatron_daro.engine.sglang.client import SGLangClient
from megatron_daro.engine.sglang.teacher import Teacher
from megatron_daro.types import Rollout

# The first test of servers waits for their start.
pytestmark = pytest.mark.timeout(900)

EVERY_ID = [*range(VOCAB), 0]
TOLERANCE = 1e-4


def asked(url, body):
    async def ask():
        client = SGLangClient(url)
        try:
            return await client.post("/generate", {"return_logprob": True, **body}, timeout_s=120)
        finally:
            await client.close()

    return asyncio.run(ask())


def rollout_of(tokens):
    """All but the first token as an answer to it."""
    response = len(tokens) - 1
    zeros, ones = np.zeros(response, np.float32), np.ones(response, np.uint8)
    return Rollout("p", 0, 0, 0, np.array(tokens, np.int32), 1, ones, zeros, "stop", 0)


def test_the_last_id_of_the_vocabulary_is_written_as_0_where_it_was_given(pool, tmp_path):
    url = pool.up()[0].url
    model, rollout = save_policy(tmp_path, 0), rollout_of(EVERY_ID)

    async def update():
        async with started(engine_of([url], tmp_path)) as engine:
            return await give(engine, model, 0)

    assert asyncio.run(update())["engine/fenced"] == 0
    expected = logprobs_of(model, rollout)
    body = {"input_ids": EVERY_ID, "sampling_params": {"max_new_tokens": 1}, "logprob_start_len": 0}
    pairs = asked(url, body)["meta_info"]["input_token_logprobs"]
    assert [pair[1] for pair in pairs] == [*range(VOCAB - 1), 0, 0]
    assert pairs[0][0] is None
    assert [pair[0] for pair in pairs[1:]] == pytest.approx(expected.tolist(), abs=TOLERANCE)
    stub = given_logprobs(body, lambda i: pairs[i][0], VOCAB)
    assert stub == [list(pair) for pair in pairs], "tests/stub_server.py imitates another answer"

    async def read():
        teacher = Teacher(DistillSection(urls=(url,)))
        try:
            return await teacher.logprobs(rollout)
        finally:
            await teacher.close()

    np.testing.assert_allclose(asyncio.run(read()), expected, atol=TOLERANCE, rtol=0)


def test_every_id_is_written_as_itself_where_it_was_sampled(pool):
    url = pool.up()[0].url
    forced = [{"max_new_tokens": 1, "logit_bias": {str(token): 1e4}} for token in range(VOCAB)]
    answers = asked(url, {"input_ids": [[1, 2, 3]] * VOCAB, "sampling_params": forced})
    assert [answer["output_ids"] for answer in answers] == [[token] for token in range(VOCAB)]
    written = [[pair[1] for pair in answer["meta_info"]["output_token_logprobs"]] for answer in answers]
    assert written == [[token] for token in range(VOCAB)]
