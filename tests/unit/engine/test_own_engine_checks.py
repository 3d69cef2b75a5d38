"""What an engine of one's own answers is checked, and no answer crosses a weight update."""

import asyncio

import pytest

from megatron_daro.engine.own import Answer, OwnEngine
from megatron_daro.errors import EngineError
from megatron_daro.types import GroupRequest, Prompt, SamplingParams

GOOD = Answer([5, 3], [-0.5, -0.1], "stop")


class Canned:
    """Gives the same answer each time, once `ready` is set."""

    def __init__(self, *, seed, answer):
        self.canned, self.ready, self.calls = answer, asyncio.Event(), 0
        self.ready.set()

    async def start(self): ...

    async def answer(self, prompt_tokens, sampling, seed):
        self.calls += 1
        await self.ready.wait()
        return self.canned

    async def load_weights(self, directory, version): ...

    async def close(self): ...


def engine_of(tmp_path, answer=GOOD):
    arguments = {"seed": 1, "answer": answer}
    return OwnEngine(f"{__name__}:Canned", arguments, vocabulary=9, sync_dir=tmp_path / "files", decode=str)


async def rollouts_of(engine, *stop):
    prompt = Prompt(id="p", answer="", source="test", tokens=(1, 2))
    request = GroupRequest(7, 0, prompt, (0, 1), SamplingParams(max_new_tokens=3, stop_token_ids=(3,), stop=stop))
    return [item async for item in engine.generate([request])]


def test_answers_become_rollouts(tmp_path):
    ((first, second),) = asyncio.run(rollouts_of(engine_of(tmp_path)))
    assert (first.index, second.index, first.tokens.tolist(), first.prompt_length) == (0, 1, [1, 2, 5, 3], 2)
    assert (first.loss_mask.tolist(), first.finish_reason, first.text) == ([1, 1], "stop", "[5, 3]")


@pytest.mark.parametrize("said", [Answer([5, 4], [-1.0] * 2, "stop"), Answer([5, 4, 6], [-1.0] * 3, "length")])
def test_an_answer_ends_at_a_stop_text(tmp_path, said):
    ((first, _),) = asyncio.run(rollouts_of(engine_of(tmp_path, said), "5, 4"))
    assert (first.tokens.tolist(), first.finish_reason, first.text) == ([1, 2, 5, 4], "stop", "[5, 4")


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (([5, 3], [-0.5, -0.1]), "got a tuple"),
        (Answer([], [], "length"), "got 0 tokens"),
        (Answer([5] * 4, [-1.0] * 4, "length"), "got 4 tokens; allowed: 1 to 3"),
        (Answer([5, 3], [-0.5], "stop"), "got 1 log-probs for 2 tokens"),
        (Answer([9, 3], [-0.5, -0.1], "stop"), "got token 9"),
        (Answer([5, 3], [-0.5, float("nan")], "stop"), "got log-prob nan"),
        (Answer([5, 3], [-0.5, 0.1], "stop"), "got log-prob 0.1"),
        (Answer([5, 3], [-0.5, -0.1], "length"), "finish reason 'length'"),
        (Answer([5, 4], [-0.5, -0.1], "length"), "finish reason 'length' after 2 tokens"),
    ],
)
def test_an_answer_that_cannot_be_right_is_refused_by_name(tmp_path, answer, words):
    with pytest.raises(EngineError, match=r"Canned\.answer: ") as caught:
        asyncio.run(rollouts_of(engine_of(tmp_path, answer)))
    assert words in str(caught.value)


def test_an_update_waits_for_answers_on_their_way_and_holds_new_ones_back(tmp_path):
    async def scenario():
        engine = engine_of(tmp_path)
        api = engine._api
        api.ready.clear()
        before = asyncio.create_task(rollouts_of(engine))
        while api.calls < 2:
            await asyncio.sleep(0)
        update = engine.update(4)
        prepared = asyncio.create_task(update.prepare())
        await asyncio.sleep(0.01)
        after = asyncio.create_task(rollouts_of(engine))
        await asyncio.sleep(0.01)
        assert not prepared.done() and api.calls == 2
        api.ready.set()
        await prepared
        await asyncio.sleep(0.01)
        assert api.calls == 2
        await update.install(None)
        await update.accept()
        return (await before)[0][0].weight_version, (await after)[0][0].weight_version

    assert asyncio.run(asyncio.wait_for(scenario(), 10)) == (0, 4)


def test_answers_that_nobody_waits_for_any_more_are_cancelled(tmp_path):
    async def scenario():
        engine = engine_of(tmp_path)
        engine._api.ready.clear()
        asked = asyncio.create_task(rollouts_of(engine))
        while engine._api.calls < 2:
            await asyncio.sleep(0)
        asked.cancel()
        await asyncio.wait({asked}, timeout=5)
        return asked.done() and asked.cancelled(), asyncio.all_tasks() - {asyncio.current_task()}

    assert asyncio.run(scenario()) == (True, set())
