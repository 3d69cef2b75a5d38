"""What every rollout engine must do, whatever it runs on. Add an engine by adding a function to ENGINES.

It takes pytest's request and returns a factory, an async context manager: (checkpoint directory, seed, decoder) ->
started engine with the weights of that directory as version 0. The servers of the SGLang engine stay up from test to
test; each test has an engine of its own, which begins with a weight update.
One point cannot apply to SGLang: the tokens of a seed do not repeat, since they depend on what else is in its batch.
"""

from __future__ import annotations

import asyncio
import contextlib
from functools import partial

import numpy as np
import pytest
import torch
from local_server import LocalServer
from sglang_pool import (
    CPU_ARGUMENTS,
    VOCAB,
    engine_of,
    expected,
    give,
    named_weights,
    required_environment,
    save_policy,
)
from transformers import AutoModelForCausalLM

from megatron_daro.engine.embedded import EmbeddedEngine
from megatron_daro.engine.sglang.servers import LaunchOptions
from megatron_daro.errors import EngineError, ModelError, SyncError
from megatron_daro.sync.buckets import bucketize
from megatron_daro.types import GroupRequest, Prompt, SamplingParams

# The first test of servers waits for their start.
pytestmark = pytest.mark.timeout(900)

STOP, LIMIT_S = 3, 120


@contextlib.asynccontextmanager
async def embedded(directory, seed=0, decode=None):
    engine = EmbeddedEngine(directory, seed=seed, batch_size=8, threads=1, decode=decode)
    await engine.start()
    try:
        yield engine
    finally:
        await engine.close()


@contextlib.asynccontextmanager
async def sglang(servers, run_dir, directory, seed=0, decode=None):
    """An engine of servers that run already; the seed is that of the servers."""
    engine = engine_of(servers, run_dir, decode=decode, expect=expected(directory))
    await engine.start()
    try:
        await give(engine, AutoModelForCausalLM.from_pretrained(directory), 0)
        yield engine
    finally:
        await engine.close()


def starting_server(directory, log):
    """A server of the engine's own, for the one test whose server does not come up."""
    options = LaunchOptions(
        python=required_environment() / "bin" / "python", model_path=directory, tensor_parallel=1, seed=0,
        arguments=CPU_ARGUMENTS, env={}, log_path=log,
    )  # fmt: skip
    return LocalServer(options)


def embedded_factory(request):
    return embedded


def sglang_factory(request):
    directory = request.getfixturevalue("tmp_path")
    if "missing_checkpoint" in request.node.name:
        return partial(sglang, [starting_server(directory / "nowhere", directory / "server.log")], directory)
    return partial(sglang, [server.url for server in request.getfixturevalue("pool").up()], directory)


ENGINES = {"embedded": embedded_factory, "sglang": sglang_factory}
REPEATS = {"embedded"}


@pytest.fixture(params=sorted(ENGINES))
def start(request):
    return ENGINES[request.param](request)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    directories = [tmp_path_factory.mktemp(f"model{i}") for i in range(2)]
    return directories, [save_policy(directory, i) for i, directory in enumerate(directories)]


def group(number, *, count=4, attempt=0, length=3, **sampling):
    tokens = tuple(int(t) for t in np.random.default_rng(number).integers(0, VOCAB, length))
    prompt = Prompt(id=f"p{number}", answer="", source="test", tokens=tokens)
    sampling = {"max_new_tokens": 12, "stop_token_ids": (STOP,), **sampling}
    return GroupRequest(number, attempt, prompt, tuple(range(count)), SamplingParams(**sampling))


ENDLESS = {"max_new_tokens": 4000, "stop_token_ids": ()}


async def collect(engine, wanted):
    return {rollouts[0].group_id: rollouts async for rollouts in engine.generate(wanted)}


async def updated(engine, model, version, named=None):
    """A sync of a model's weights; of `named` instead, where a test breaks them."""
    if not isinstance(engine, EmbeddedEngine):
        return await give(engine, model, version, named=named)
    engine.open_update()
    for bucket in bucketize(named or named_weights(model), 4000):
        await engine.receive(bucket)
    return await engine.commit_update(version)


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, LIMIT_S))


def logprobs_of(model, rollout):
    with torch.no_grad():
        logits = model(torch.tensor(rollout.tokens, dtype=torch.int64)[None]).logits[0].float()
    chosen = torch.tensor(rollout.tokens[rollout.prompt_length :], dtype=torch.int64)
    at = torch.arange(rollout.prompt_length - 1, len(rollout.tokens) - 1)
    return torch.log_softmax(logits, dim=-1)[at, chosen].numpy()


def test_every_request_is_answered_once_with_whole_records(start, models):
    wanted = [group(i, length=1 + i % 5, count=1 + i % 4) for i in range(9)]

    async def scenario():
        async with start(models[0][0], decode=lambda ids: "|".join(map(str, ids))) as engine:
            return [item async for item in engine.generate(wanted)]

    answered = run(scenario())
    assert sorted(rollouts[0].group_id for rollouts in answered) == list(range(9))
    for rollouts in answered:
        asked = wanted[rollouts[0].group_id]
        assert tuple(r.index for r in rollouts) == asked.indices
        for r in rollouts:
            assert (r.group_id, r.attempt, r.prompt_id) == (asked.group_id, 0, asked.prompt.id)
            assert tuple(r.tokens[: r.prompt_length]) == asked.prompt.tokens
            assert len(r.logprobs) == len(r.loss_mask) == r.response_length > 0
            assert r.finish_reason in ("stop", "length")
            assert (r.tokens[-1] == STOP) == (r.finish_reason == "stop")
            assert r.finish_reason == "stop" or r.response_length == 12
            assert r.text == "|".join(map(str, r.tokens[r.prompt_length :]))
            np.testing.assert_allclose(r.logprobs, logprobs_of(models[1][0], r), atol=1e-4)


def test_a_group_is_yielded_before_the_others_are_done(start, models):
    wanted = [
        group(0, max_new_tokens=1),
        *(group(i, count=8, length=9, max_new_tokens=300, stop_token_ids=()) for i in range(1, 6)),
    ]

    async def scenario():
        async with start(models[0][0]) as engine:
            stream = engine.generate(wanted)
            first = await anext(stream)
            await stream.aclose()
            return first

    assert run(scenario())[0].group_id == 0


def test_samples_of_a_group_differ(start, models):
    async def scenario():
        async with start(models[0][0]) as engine:
            return await collect(engine, [group(0, count=8, stop_token_ids=())])

    assert len({tuple(r.tokens) for r in run(scenario())[0]}) > 1


@pytest.mark.parametrize("start", sorted(REPEATS), indirect=True)
def test_seeded_rollouts_repeat_and_differ(start, models):
    async def scenario(seed, wanted):
        async with start(models[0][0], seed=seed) as engine:
            answered = await collect(engine, wanted)
            return {g: [r.tokens.tolist() for r in rollouts] for g, rollouts in answered.items()}

    wanted = [group(i, stop_token_ids=()) for i in range(3)]
    base = run(scenario(0, wanted))
    assert base == run(scenario(0, wanted))
    assert base != run(scenario(1, wanted))
    assert len({tuple(tokens) for tokens in base[0]}) > 1


def test_abort_of_one_group_ends_it_early_and_no_other(start, models):
    wanted = [group(0, **{**ENDLESS, "max_new_tokens": 100}), group(1, **ENDLESS)]

    async def scenario():
        async with start(models[0][0]) as engine:
            task = asyncio.create_task(collect(engine, wanted))
            await asyncio.sleep(0.05)
            await engine.abort({1})
            return await task

    answered = run(scenario())
    assert {r.finish_reason for r in answered[0]} == {"length"}
    for r in answered.get(1, ()):
        assert r.finish_reason == "abort" and r.response_length < 4000
        if r.response_length:
            np.testing.assert_allclose(r.logprobs, logprobs_of(models[1][0], r), atol=1e-4)


def test_abort_of_all_ends_everything_and_the_engine_goes_on(start, models):
    async def scenario():
        async with start(models[0][0]) as engine:
            task = asyncio.create_task(collect(engine, [group(i, count=8, **ENDLESS) for i in range(6)]))
            await asyncio.sleep(0.05)
            await engine.abort()
            return await task, await collect(engine, [group(7)])

    aborted, later = run(scenario())
    assert {r.finish_reason for rollouts in aborted.values() for r in rollouts} <= {"abort"}
    assert {r.finish_reason for r in later[7]} <= {"stop", "length"}


def test_two_submissions_at_once_both_finish(start, models):
    async def scenario():
        async with start(models[0][0]) as engine:
            return await asyncio.gather(*(collect(engine, [group(i), group(i + 10)]) for i in range(3)))

    assert [sorted(answered) for answered in run(scenario())] == [[0, 10], [1, 11], [2, 12]]


def test_updated_weights_are_used_and_stamped(start, models):
    async def scenario():
        async with start(models[0][0]) as engine:
            before = await collect(engine, [group(0)])
            await updated(engine, models[1][1], 5)
            return before, await collect(engine, [group(0)])

    before, after = run(scenario())
    for r in before[0]:
        assert r.weight_version == 0
        np.testing.assert_allclose(r.logprobs, logprobs_of(models[1][0], r), atol=1e-4)
    for r in after[0]:
        assert r.weight_version == 5
        np.testing.assert_allclose(r.logprobs, logprobs_of(models[1][1], r), atol=1e-4)


def test_an_update_during_generation_never_mixes_versions_within_a_span(start, models):
    wanted = [group(i, max_new_tokens=400, stop_token_ids=()) for i in range(4)]

    async def scenario():
        async with start(models[0][0]) as engine:
            task = asyncio.create_task(collect(engine, wanted))
            await asyncio.sleep(0.2)  # after the first tokens, long before the last
            await updated(engine, models[1][1], 1)
            return await task

    answered = run(scenario())
    rollouts = [r for group_rollouts in answered.values() for r in group_rollouts]
    assert {version for r in rollouts for version, _ in r.version_spans} == {0, 1}
    for r in rollouts:
        assert sum(length for _, length in r.version_spans) == r.response_length
        assert r.weight_version == min(version for version, _ in r.version_spans)
        begin = 0
        for version, length in r.version_spans:
            span = slice(begin, begin + length)
            np.testing.assert_allclose(r.logprobs[span], logprobs_of(models[1][version], r)[span], atol=1e-4)
            begin += length


def test_a_failed_update_leaves_the_old_version_or_a_refusal_never_a_mixture(start, models):
    def torn():
        yield from named_weights(models[1][1])[:3]
        raise SyncError("the sender died")

    async def scenario(named, error):
        async with start(models[0][0]) as engine:
            with pytest.raises(error):
                await updated(engine, models[1][1], 5, named)
            try:
                return await collect(engine, [group(0)])
            except (EngineError, SyncError):
                return {}

    lacking = named_weights(models[1][1])[1:]
    for named, error in ((lacking, (EngineError, SyncError)), (torn(), SyncError)):
        for r in run(scenario(named, error)).get(0, ()):
            assert r.weight_version == 0
            np.testing.assert_allclose(r.logprobs, logprobs_of(models[1][0], r), atol=1e-4)


def test_a_bad_request_is_an_error_and_the_engine_goes_on(start, models):
    async def scenario():
        async with start(models[0][0]) as engine:
            with pytest.raises(EngineError, match="p1"):
                await collect(engine, [group(0), group(1, top_p=7.0)])
            return await collect(engine, [group(0)])

    assert set(run(scenario())) == {0}


def test_a_failure_while_generating_reaches_the_consumer_and_the_engine_goes_on(start, models):
    failures = [ValueError("no such token")]

    def decode(ids):
        if failures:
            raise failures.pop()
        return "text"

    async def scenario():
        async with start(models[0][0], decode=decode) as engine:
            with pytest.raises((EngineError, ValueError), match="no such token"):
                await collect(engine, [group(0)])
            return await collect(engine, [group(0)])

    assert {r.text for r in run(scenario())[0]} == {"text"}


def test_closing_the_stream_early_frees_the_engine(start, models):
    async def scenario():
        async with start(models[0][0]) as engine:
            stream = engine.generate([group(0, max_new_tokens=1), *(group(i, count=8, **ENDLESS) for i in range(1, 9))])
            await anext(stream)
            await stream.aclose()
            return await collect(engine, [group(0)])

    assert set(run(scenario())) == {0}


def test_a_cancelled_consumer_does_not_leave_work_behind(start, models):
    async def scenario():
        async with start(models[0][0]) as engine:
            task = asyncio.create_task(collect(engine, [group(i, count=8, **ENDLESS) for i in range(9)]))
            await asyncio.sleep(0.05)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            return await collect(engine, [group(0)])

    assert set(run(scenario())) == {0}


def test_generation_does_not_block_the_event_loop(start, models):
    async def scenario():
        async with start(models[0][0]) as engine:
            wanted = [group(i, count=8, max_new_tokens=800, stop_token_ids=()) for i in range(4)]
            task = asyncio.create_task(collect(engine, wanted))
            turns = 0
            while not task.done() and turns <= 20:
                await asyncio.sleep(0.005)
                turns += 1
            await task
            return turns

    assert run(scenario()) > 20  # a blocking engine allows one turn per batch; the others take seconds


def test_close_ends_running_generation_with_an_error_or_aborts_and_may_be_repeated(start, models):
    async def scenario():
        async with start(models[0][0]) as engine:
            task = asyncio.create_task(collect(engine, [group(i, count=8, **ENDLESS) for i in range(9)]))
            await asyncio.sleep(0.05)
            await engine.close()
            with contextlib.suppress(EngineError):
                answered = await task
                assert {r.finish_reason for rollouts in answered.values() for r in rollouts} <= {"abort"}
            await engine.close()
            with pytest.raises(EngineError):
                await collect(engine, [group(0)])

    run(scenario())


def test_a_missing_checkpoint_is_an_error_of_start(start, tmp_path):
    async def scenario():
        async with start(tmp_path / "nowhere"):
            pass

    with pytest.raises((ModelError, EngineError)):
        run(scenario())
