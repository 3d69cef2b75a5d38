"""What an engine of one's own answers is checked, and no answer crosses a weight update."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from megatron_daro.engine import own
from megatron_daro.engine.own import Answer, OwnEngine
from megatron_daro.errors import ConfigError, EngineError, SyncError
from megatron_daro.sync.plan import SendReport
from megatron_daro.types import GroupRequest, Prompt, SamplingParams

GOOD = Answer([5, 3], [-0.5, -0.1], "stop")
made = []


class Canned:
    """Gives the same answer each time, once `ready` is set."""

    def __init__(self, *, seed, answer):
        self.canned, self.ready, self.calls = answer, asyncio.Event(), 0
        self.told, self.broken = [], {}
        self.ready.set()
        made.append(self)

    def note(self, *call):
        self.told.append(call)
        if call[0] in self.broken:
            raise self.broken[call[0]]

    async def start(self):
        self.note("start")

    async def answer(self, prompt_tokens, sampling, seed):
        self.calls += 1
        self.note("answer", prompt_tokens, sampling.max_new_tokens, seed)
        await self.ready.wait()
        return self.canned

    async def load_weights(self, directory, version):
        self.note("load_weights", directory, version)

    async def close(self):
        self.note("close")


def made_of(tmp_path, answer=GOOD, seed=1):
    """An engine, and the user's object in it."""
    arguments = {"seed": seed, "answer": answer}
    engine = OwnEngine(f"{__name__}:Canned", arguments, vocabulary=9, sync_dir=tmp_path / "files", decode=str)
    return engine, made.pop()


def engine_of(tmp_path, answer=GOOD):
    return made_of(tmp_path, answer)[0]


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
        (([5, 3], [-0.5, -0.1]), "tuple"),
        (Answer([], [], "length"), "0"),
        (Answer([5] * 4, [-1.0] * 4, "length"), "4"),
        (Answer([5, 3], [-0.5], "stop"), "1"),
        (Answer([9, 3], [-0.5, -0.1], "stop"), "9"),
        (Answer([-1, 3], [-0.5, -0.1], "stop"), "-1"),
        (Answer([5.0, 3], [-0.5, -0.1], "stop"), "5.0"),
        (Answer([5, 3], [-0.5, "-1"], "stop"), "'-1'"),
        (Answer([5, 3], [-0.5, float("nan")], "stop"), "nan"),
        (Answer([5, 3], [-0.5, 0.1], "stop"), "0.1"),
        (Answer([5, 4, 6], [-1.0] * 3, "stop"), "'stop'"),
        (Answer([5, 3, 6], [-1.0] * 3, "length"), "after a stop token"),
        (Answer([5, 3], [-0.5, -0.1], "length"), "'length'"),
    ],
)
def test_an_answer_that_cannot_be_right_is_refused_by_name(tmp_path, answer, words):
    with pytest.raises(EngineError, match=r"Canned\.answer: ") as caught:
        asyncio.run(rollouts_of(engine_of(tmp_path, answer)))
    assert words in str(caught.value)


def test_an_answer_with_a_stop_token_before_its_stop_text_is_refused(tmp_path):
    with pytest.raises(EngineError, match="after a stop token"):
        asyncio.run(rollouts_of(engine_of(tmp_path, Answer([3, 5, 4], [-1.0] * 3, "stop")), "5, 4"))


def test_an_update_waits_for_answers_on_their_way_and_holds_new_ones_back(tmp_path):
    async def scenario():
        engine, api = made_of(tmp_path)
        api.ready.clear()
        before = asyncio.create_task(rollouts_of(engine))
        while api.calls < 2:
            await asyncio.sleep(0)
        update = engine.begin_update(4)
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


async def asked_of(engine, api, *, calls):
    """Ask, and go on when the engine has been called so often; it does not answer yet."""
    api.ready.clear()
    asked = asyncio.create_task(rollouts_of(engine))
    while api.calls < calls:
        await asyncio.sleep(0)
    return asked


def test_answers_that_nobody_waits_for_any_more_are_cancelled(tmp_path):
    async def scenario():
        engine, api = made_of(tmp_path)
        asked = await asked_of(engine, api, calls=2)
        asked.cancel()
        await asyncio.wait({asked}, timeout=5)
        return asked.done() and asked.cancelled(), asyncio.all_tasks() - {asyncio.current_task()}

    assert asyncio.run(scenario()) == (True, set())


@pytest.mark.parametrize(
    "answer",
    [
        Answer([0, 8, 3], [0.0, 0.0009, -1], "stop"),
        Answer(np.array([0, 8, 5]), np.array([0.0, -0.5, -700.0], np.float32), "length"),
        Answer([3], [-0.5], "stop"),
    ],
    ids=["rounded", "NumPy", "short"],
)
def test_answers_at_the_edge_of_what_is_allowed_are_taken(tmp_path, answer):
    ((first, _),) = asyncio.run(rollouts_of(engine_of(tmp_path, answer)))
    assert first.tokens.tolist() == [1, 2, *answer.tokens] and first.tokens.dtype == np.int32
    assert first.logprobs.tolist() == pytest.approx(list(answer.logprobs)) and first.logprobs.dtype == np.float32
    assert (first.prompt_id, first.group_id, first.attempt, first.weight_version) == ("p", 7, 0, 0)
    assert first.finish_reason == answer.finish_reason


def test_each_answer_has_a_seed_of_its_own_that_follows_from_the_request(tmp_path):
    def told(seed=1):
        engine, api = made_of(tmp_path, seed=seed)
        asyncio.run(rollouts_of(engine))
        return api.told

    first, second = told()
    assert first[:3] == second[:3] == ("answer", (1, 2), 3) and first[3] != second[3]
    assert told() == [first, second] and not {first[3], second[3]} & {call[3] for call in told(seed=2)}
    assert all(0 <= call[3] < 2**32 for call in (first, second))


def test_a_class_that_does_not_fit_is_refused_before_anything_starts(tmp_path):
    with pytest.raises(ConfigError, match=r"engine\.kind"):
        own.own_engine_class("nowhere:Class", {})
    with pytest.raises(ConfigError, match=r"engine\.options"):
        OwnEngine(f"{__name__}:Canned", {"seed": 1}, vocabulary=9, sync_dir=tmp_path, decode=str)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OSError("no route"), r"Canned\.start.*OSError.*no route"),
        (EngineError("said well"), r"Canned\.start.*said well"),
    ],
)
def test_what_the_class_raises_is_told_with_its_name(tmp_path, error, words):
    async def scenario():
        engine, api = made_of(tmp_path)
        api.broken["start"] = error
        await engine.start()

    with pytest.raises(EngineError, match=words) as caught:
        asyncio.run(scenario())
    assert caught.value.__cause__ is error


def test_start_and_close_are_those_of_the_class_and_files_go(tmp_path):
    async def scenario():
        engine, api = made_of(tmp_path)
        await engine.start()
        engine.sync_dir.mkdir()
        asked = await asked_of(engine, api, calls=2)
        await engine.close()
        assert await asked == [] and not engine.sync_dir.exists()
        api.broken["close"] = ValueError("twice")
        engine.sync_dir.mkdir()
        with pytest.raises(EngineError, match=r"ValueError.*twice"):
            await engine.close()
        assert not engine.sync_dir.exists()
        return [call[0] for call in api.told]

    assert asyncio.run(scenario()) == ["start", "answer", "answer", "close", "close"]


def test_only_the_groups_that_are_named_are_stopped(tmp_path):
    async def scenario():
        engine, api = made_of(tmp_path)
        asked = await asked_of(engine, api, calls=2)
        await engine.abort({6})
        api.ready.set()
        assert len(await asked) == 1
        asked = await asked_of(engine, api, calls=4)
        await engine.abort({6, 7})
        return await asked

    assert asyncio.run(scenario()) == []


def test_a_failed_answer_ends_the_others_of_its_group(tmp_path):
    async def scenario():
        engine, api = made_of(tmp_path)
        api.ready.clear()
        api.broken["answer"] = ValueError("lost")
        before = asyncio.all_tasks()
        with pytest.raises(EngineError, match=r"ValueError.*lost"):
            await rollouts_of(engine)
        return asyncio.all_tasks() - before

    assert asyncio.run(scenario()) == set()


def test_an_update_is_written_loaded_and_cleared_away(tmp_path):
    async def scenario():
        engine, api = made_of(tmp_path)
        assert engine.begin_update(4, only="one server") is None
        update = engine.begin_update(4)
        files = await update.prepare()
        assert files.directory.parent == engine.sync_dir and "trainer.run_dir" in files.remedy
        files.directory.mkdir(parents=True)
        await update.install(None)
        assert engine.version == 4 and api.told == [("load_weights", files.directory, 4)]
        assert await update.accept() == {}
        assert not files.directory.exists()
        assert (await engine.begin_update(5).prepare()).directory != files.directory

    asyncio.run(scenario())


def test_an_update_that_fails_lets_every_answer_fail(tmp_path):
    async def scenario():
        engine, api = made_of(tmp_path)
        update = engine.begin_update(4)
        await update.prepare()
        waiting = asyncio.create_task(rollouts_of(engine))
        with pytest.raises(SyncError, match="no space"):
            await update.blame(SendReport(failures={"engine": "no space"}))
        api.broken["load_weights"] = OSError("gone")
        with pytest.raises(SyncError, match=r"OSError.*gone"):
            await update.install(None)
        assert engine.version == 0
        update.abandon(SyncError("it broke"))
        for asked in (waiting, rollouts_of(engine)):
            with pytest.raises(EngineError, match="it broke"):
                await asked
        assert api.calls == 0
        engine.let_go()
        return len(await rollouts_of(engine))

    assert asyncio.run(scenario()) == 1


def test_an_answer_that_repeats_itself_is_cut(tmp_path):
    async def scenario():
        engine = engine_of(tmp_path, Answer([5] * 8, [-1.0] * 8, "length"))
        prompt = Prompt(id="p", answer="", source="test", tokens=(1, 2))
        request = GroupRequest(7, 0, prompt, (0,), SamplingParams(max_new_tokens=8, stop_token_ids=(3,)))
        request = replace(request, sampling=replace(request.sampling, repetition=(4, 2)))
        return [one async for group in engine.generate([request]) for one in group]

    (one,) = asyncio.run(scenario())
    assert one.finish_reason == "repetition" and one.response_length < 8
