"""On-policy distillation: a teacher's log-probs of the policy's tokens, and what becomes of answers that do not fit."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest
from aiohttp import web
from stub_server import StubServer, answering, given_logprobs, never

from megatron_daro.algo.weighting import make_algorithm
from megatron_daro.config.algorithm import DistillSection
from megatron_daro.data.batch import build_step_batch
from megatron_daro.engine.sglang.teacher import Teacher
from megatron_daro.errors import DataError, EngineError
from megatron_daro.types import Group, Prompt, Rollout, Verdict


def rollout(index=0, tokens=(3, 4, 5, 6), mask=(1, 0, 1), **changes):
    """One token of prompt, three of response, the second of which the environment showed."""
    mask_R = np.array(mask, np.uint8)
    columns = np.array(tokens, np.int32), 1, mask_R, -0.25 * mask_R.astype(np.float32), "stop", 1
    return replace(Rollout("p", 0, 0, index, *columns, "x"), **changes)


VOCABULARY = 31


def said(body, change=lambda pairs: pairs):
    """What a server answers."""
    pairs = given_logprobs(body, lambda i: -0.5 * i, VOCABULARY)
    return {"output_ids": [1], "meta_info": {"input_token_logprobs": change(pairs)}}


def asked(answers, *rollouts, **options):
    """What the teacher says of the rollouts, where the stub answers so, and how often it was asked."""

    async def run():
        async with StubServer() as stub:
            stub.answers["/generate"] = answers
            made = Teacher(DistillSection(urls=(stub.url,), **options))
            try:
                found = await asyncio.gather(*map(made.logprobs, rollouts))
            finally:
                await made.close()
            return found, stub.said["/generate"]

    return asyncio.run(asyncio.wait_for(run(), 60))


async def answers(request, body):
    return web.json_response(said(body))


def test_it_says_log_probs_of_the_response_and_none_of_what_is_not_trained():
    (found,), bodies = asked(answers, rollout())
    assert found.dtype == np.float32 and found.tolist() == [-0.5, 0.0, -1.5]
    assert bodies == [
        {
            "input_ids": [3, 4, 5, 6],
            "sampling_params": {"max_new_tokens": 1, "temperature": 1.0},
            "return_logprob": True,
            "logprob_start_len": 0,
        }
    ]


def test_the_last_id_of_the_vocabulary_which_servers_tell_as_0_is_known_again():
    last = VOCABULARY - 1
    (found,), _ = asked(answers, rollout(tokens=(3, last, 5, last)))
    assert found.tolist() == [-0.5, 0.0, -1.5]

    async def other(request, body):
        return web.json_response(said(body | {"input_ids": [3, last, last, 6]}))

    with pytest.raises(EngineError, match=r"algorithm\.distill\.urls"):
        asked(other, rollout())


def test_a_failed_request_is_repeated():
    fails = iter([500, 500])

    async def at_the_third_try(request, body):
        status = next(fails, 200)
        return web.json_response(said(body) if status == 200 else {}, status=status)

    (found,), bodies = asked(at_the_third_try, rollout())
    assert len(bodies) == 3 and found.tolist() == [-0.5, 0.0, -1.5]

    async def never(request, body):
        return web.json_response({}, status=503)

    with pytest.raises(EngineError, match=r"algorithm\.distill\.urls.*503"):
        asked(never, rollout())


def test_a_try_that_failed_is_made_at_the_next_server():
    async def run():
        async with StubServer() as broken, StubServer() as well:
            broken.answers["/generate"], well.answers["/generate"] = answering(500), answers
            made = Teacher(DistillSection(urls=(broken.url, well.url)))
            found = await made.logprobs(rollout())
            await made.close()
            return found.tolist(), broken.calls["/generate"], well.calls["/generate"]

    assert asyncio.run(run()) == ([-0.5, 0.0, -1.5], 1, 1)


def test_a_slow_server_has_its_own_limit_of_requests_and_takes_none_of_the_others():
    async def run():
        async with StubServer() as slow, StubServer() as well:
            slow.answers["/generate"], well.answers["/generate"] = never, answers
            made = Teacher(DistillSection(urls=(slow.url, well.url)))
            reading = [asyncio.create_task(made.logprobs(rollout())) for _ in range(80)]
            while sum(task.done() for task in reading) < 40 or slow.calls["/generate"] < 32:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.1)
            for task in reading:
                task.cancel()
            await asyncio.gather(*reading, return_exceptions=True)
            await made.close()
            return slow.calls["/generate"]

    assert asyncio.run(asyncio.wait_for(run(), 60)) == 32


@pytest.mark.parametrize(
    "answer",
    [
        lambda body: web.json_response(said(body, lambda pairs: pairs[:-1])),
        lambda body: web.json_response({"meta_info": {}}),
        lambda body: web.json_response(said(body, lambda pairs: [*pairs[:2], [None, 5, None], pairs[3]])),
        lambda body: web.json_response(said(body, lambda pairs: [*pairs[:2], [-1e300, 5, None], pairs[3]])),
        lambda body: web.json_response({"error": {"message": "token 151643 is out of vocabulary"}}, status=400),
    ],
)
def test_an_answer_that_does_not_fit_ends_the_run_by_name(answer):
    async def once(request, body):
        return answer(body)

    with pytest.raises(EngineError, match=r"algorithm\.distill\.urls"):
        asked(once, rollout())


def test_answers_come_back_in_order_with_what_it_said_and_those_without_a_response_unread():
    async def run():
        async with StubServer() as stub:
            stub.answers["/generate"] = answers
            made = Teacher(DistillSection(urls=(stub.url,)))
            found = await made.read([rollout(index=1), rollout(index=2, tokens=(3,), mask=())])
            await made.close()
            return found

    first, empty = asyncio.run(run())
    assert (first.index, first.teacher_logprobs.tolist()) == (1, [-0.5, 0.0, -1.5])
    assert (empty.index, empty.teacher_logprobs) == (2, None)


def batch(*, teacher, right=(True, False), **changes):
    rollouts = tuple(rollout(i, teacher_logprobs=np.array([-0.5, 0, -0.125], np.float32), **changes) for i in range(2))
    verdicts = tuple(Verdict(correct, float(correct), "x") for correct in right)
    group = Group(0, Prompt("p", "1", "s", tokens=(3,)), rollouts, verdicts)
    algorithm = make_algorithm("grpo", rollouts_per_prompt=2, max_response_tokens=4)
    return build_step_batch([group], algorithm, teacher=teacher)


def test_advantages_are_the_teachers_less_the_policys_log_probs_by_hand():
    alone = batch(teacher=(1.0, 0.0)).token_advantages_R
    assert alone.dtype == np.float32 and alone.tolist() == [-0.25, 0.0, 0.125] * 2
    both = batch(teacher=(2.0, 0.5))
    half = 0.5 * both.advantages_N
    expected = [*(-0.5 + half[0], 0.0, 0.25 + half[0]), *(-0.5 + half[1], 0.0, 0.25 + half[1])]
    np.testing.assert_allclose(both.token_advantages_R, expected, rtol=1e-6)
    assert batch(teacher=None).token_advantages_R is None


def test_a_rollout_that_no_teacher_read_is_refused():
    read = batch(teacher=(1.0, 0.0))
    assert read is not None
    group = Group(7, Prompt("p", "1", "s", tokens=(3,)), (rollout(0), rollout(1)), (Verdict(True, 1.0, "x"),) * 2)
    algorithm = make_algorithm("grpo", rollouts_per_prompt=2, max_response_tokens=4)
    with pytest.raises(DataError, match="group 0 rollout 0"):
        build_step_batch([group], algorithm, teacher=(1.0, 0.0))
