"""Conversations: aligned columns, random numbers of each turn, failures counted, what is broken refused by name."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

import numpy as np
import pytest
import toy_environment
from group_forms import plain_group, through_parquet
from loop_fakes import FakeProgress, digest

from megatron_daro.config import EnvironmentSection, RewardSection
from megatron_daro.environments.conversations import Conversations
from megatron_daro.errors import EngineError, RewardError, RolloutError
from megatron_daro.reward.pool import RewardPool
from megatron_daro.rollout.group_columns import RecordedGroup
from megatron_daro.routed_experts import Part, StoredExperts
from megatron_daro.types import Group, GroupRequest, Prompt, Rollout, SamplingParams

SAMPLING = SamplingParams(max_new_tokens=12)
LAYERS = 2


class Engine:
    """Answers of 1 to 3 digits that depend on (group, attempt, index); routed experts in a file of each answer."""

    def __init__(self) -> None:
        self.calls: list[list[GroupRequest]] = []
        self.versions: dict[int, int] = {}  # turn -> weight version
        self.cut: set[tuple[int, int, int]] = set()
        self.left_out: set[tuple[int, int, int]] = set()
        self.raises: Exception | None = None
        self.wrong = ""
        self.gate: asyncio.Event | None = None
        self.aborted: list = []

    async def generate(self, requests):
        self.calls.append(list(requests))
        if self.raises:
            raise self.raises
        if self.gate:
            await self.gate.wait()
        for request in requests:
            await asyncio.sleep(0)
            answers = [self.answer(request, index) for index in request.indices]
            yield tuple(one for one in answers if (one.group_id, request.draw, one.index) not in self.left_out)

    def answer(self, request: GroupRequest, index: int) -> Rollout:
        key = request.group_id, request.draw, index
        made = min(1 + digest(key) % 3, request.sampling.max_new_tokens)
        prompt = request.prompt.tokens
        tokens = np.array([*prompt, *(3 + digest(key, i) % 10 for i in range(made))], np.int32)
        version = self.versions.get(request.turn, 5)
        return Rollout(
            request.prompt.id,
            request.group_id,
            request.attempt,
            index + 50 * (self.wrong == "index"),
            tokens,
            len(prompt) - (self.wrong == "prompt"),
            np.ones(made, np.uint8),
            -np.arange(1, made + 1, dtype=np.float32) - request.turn,
            "abort" if key in self.cut else "stop",
            version,
            "".join(str(t - 3) for t in tokens[len(prompt) :]),
            routed_experts=StoredExperts((Part(f"{key}", 0, len(tokens)),), (len(tokens), LAYERS, 1)),
        )

    async def abort(self, group_ids=None) -> None:
        self.aborted.append(group_ids)


class Tokenizer:
    def encode(self, text, add_special_tokens):
        return [3 + int(text[0]), 13]


class Pool:
    failed_starts = 0

    def __init__(self, error=None) -> None:
        self.error = error

    async def score_async(self, pairs):
        if self.error:
            raise self.error
        with RewardPool("exact", workers=0) as pool:
            return await pool.score_async([(f"#### {text[-1:]}", gold, said) for text, gold, said in pairs])


def requests(groups=3, size=4):
    """The gold answer of each is what the model says last in the first turn of rollout 0."""
    prompts = []
    for g in range(groups):
        last = digest((g, 0, 0)) % 3
        prompts.append(Prompt(f"p{g}", str(digest((g, 0, 0), last) % 10), "s", text=f"{g}=", tokens=(1, 3 + g, 13)))
    return [GroupRequest(g, 0, prompt, tuple(range(size)), SAMPLING) for g, prompt in enumerate(prompts)]


def talks(
    engine,
    *,
    together=True,
    timeout_s=60.0,
    pool=None,
    progress=None,
    environment=toy_environment.SecondTry,
    **options,
):
    section = EnvironmentSection(kind="toy_environment:SecondTry", options=options, timeout_s=timeout_s)
    return Conversations(
        section,
        environment(tokenizer=Tokenizer(), **options),
        engine,
        pool or Pool(),
        reward=RewardSection(incorrect_reward=-1.0),
        decode=lambda ids: " ".join(map(str, ids)),
        vocabulary=20,
        together=together,
        notices=progress or FakeProgress(),
    )


async def collected(rollouter, asked):
    try:
        return [one async for some in rollouter.generate(asked) for one in some]
    finally:
        await rollouter.close()


def held(engine, asked=None, **options):
    return asyncio.run(collected(talks(engine, **options), asked or requests()))


def test_columns_hold_every_turn():
    engine = Engine()
    engine.versions = {0: 7, 1: 6}
    rollouts = held(engine)
    assert len(rollouts) == 12 and {len(r.turns) for r in rollouts} == {1, 2}
    for one in rollouts:
        prompt = requests()[one.group_id].prompt.tokens
        turns = [
            engine.answer(
                GroupRequest(
                    one.group_id,
                    0,
                    Prompt("", "", "", tokens=(1,)),
                    (0,),
                    replace(SAMPLING, max_new_tokens=3),
                    turn=t,
                ),
                one.index,
            )
            for t in range(len(one.turns))
        ]
        said = [turn.tokens[1:].tolist() for turn in turns]
        shown = [[], [3 + one.group_id, 13]][: len(turns)]
        assert one.tokens.tolist() == [
            *prompt,
            *(t for pair in zip(shown, said, strict=True) for part in pair for t in part),
        ]
        assert one.turns == tuple((len(a), len(b)) for a, b in zip(shown, said, strict=True))
        mask = [m for a, b in one.turns for m in [0] * a + [1] * b]
        assert one.loss_mask.tolist() == mask and one.loss_mask.dtype == np.uint8
        logprobs = [x for a, turn in zip(shown, turns, strict=True) for x in [0.0] * len(a) + turn.logprobs.tolist()]
        assert one.logprobs.tolist() == logprobs and one.logprobs.dtype == np.float32
        first, *later = [a + b for a, b in one.turns]
        assert one.version_spans == ((7, first), *((6, count) for count in later))
        assert (one.weight_version, one.attempt) == (6 if later else 7, 0)
        assert len(one.routed_experts) == len(one.tokens)
        rows = [part.first + i for part in one.routed_experts.parts for i in range(part.rows)]
        assert rows == list(range(len(one.tokens)))
        assert one.generated_length == sum(mask) and one.text == " ".join(map(str, one.tokens[one.prompt_length :]))
        assert one.verdict.correct == (str(said[-1][-1] - 3) == requests()[one.group_id].prompt.answer)


def test_one_call_of_the_engine_serves_a_turn_of_all():
    engine = Engine()
    first = held(engine)
    assert len(engine.calls) == 2
    assert [request.indices for request in engine.calls[0]] == [(0, 1, 2, 3)] * 3  # equal prompts are read once
    assert {(request.attempt, request.turn) for request in engine.calls[1]} == {(0, 1)}
    eager = held(Engine(), together=False)
    one_by_one = {(o.group_id, o.index): o.tokens.tolist() for o in eager}
    assert {(o.group_id, o.index): o.tokens.tolist() for o in first} == one_by_one


def test_a_record_gives_the_turns_back():
    rollouts = sorted(held(Engine()), key=lambda one: (one.group_id, one.index))[:4]
    verdicts = tuple(replace(one.verdict, rewards=(("form", 0.5), ("right", 1.0))) for one in rollouts)
    group = Group(0, requests()[0].prompt, tuple(rollouts), verdicts)
    assert all(len(one.reports) == sum(made > 0 for _, made in one.turns) for one in rollouts)
    (back,) = through_parquet([RecordedGroup(group, "trained")])
    without = replace(group, rollouts=tuple(replace(one, verdict=None) for one in rollouts))
    assert plain_group(back.group) == plain_group(without) and {len(r.turns) for r in rollouts} == {1, 2}


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ("type", "float"),
        ("reward", "reward.*nan"),
        ("nothing_said", "rollout"),
        ("vocabulary", "observe.*1000000"),
        ("two_at_once", "generate"),
    ],
)
def test_what_cannot_be_trained_on_ends_the_run_by_name(wrong, words):
    with pytest.raises(RolloutError, match=f"environment.kind.*toy_environment:SecondTry.*{words}"):
        held(Engine(), wrong=wrong)


def test_no_room_ends_a_conversation_as_truncated():
    rollouts = held(Engine(), wrong="room")
    assert {(r.finish_reason, r.verdict.reason, r.verdict.reward) for r in rollouts} == {
        ("length", "out_of_room", -1.0)
    }
    caught = held(Engine(), wrong="caught_room")
    assert {(r.finish_reason, r.verdict.reason) for r in caught} == {("length", "gave_up")}


@pytest.mark.parametrize(
    ("wrong", "timeout_s", "counter", "words"),
    [
        ("sometimes", 60.0, "environment/failed", "ValueError: no such move"),
        ("hangs_sometimes", 3.0, "environment/timeouts", "a conversation took more than timeout_s=3"),
    ],
)
def test_a_failed_conversation_comes_back_as_abort_and_is_counted(wrong, timeout_s, counter, words):
    progress = FakeProgress()
    rollouter = talks(Engine(), wrong=wrong, timeout_s=timeout_s, progress=progress)
    rollouts = asyncio.run(collected(rollouter, requests()))
    failed = [one for one in rollouts if one.finish_reason == "abort"]
    assert len(rollouts) == 12 and len(failed) == 2
    assert rollouter.counters()[counter] == rollouter.counters()["environment/restarted"] == 2
    assert any(words in message for message in progress.messages)
    counters = rollouter.counters()
    other = talks(Engine(), wrong=wrong, timeout_s=timeout_s)
    other.load_counters(counters | {"rollout/batches_empty": 3})
    evaluated = asyncio.run(collected(other, [replace(one, group_id=-1 - one.group_id) for one in requests()]))
    assert "abort" in {one.finish_reason for one in evaluated}
    assert other.counters() == counters, "an evaluation's conversations are not in the counts of training"


class Skipping(asyncio.SelectorEventLoop):
    """Its clock can be put forward."""

    skipped_s = 0.0

    def time(self):
        return super().time() + self.skipped_s


@pytest.mark.parametrize(("wrong", "words"), [("raises", "no such move"), ("exits", "SystemExit")])
def test_an_environment_that_never_works_for_a_minute_is_refused(wrong, words):
    async def run():
        rollouter = talks(Engine(), wrong=wrong)
        asked = requests(groups=10, size=8)
        outcomes = {one.finish_reason async for some in rollouter.generate(asked) for one in some}
        asyncio.get_running_loop().skipped_s += 61
        with pytest.raises(RolloutError, match=words):
            await collected(rollouter, asked)
        return outcomes

    with asyncio.Runner(loop_factory=Skipping) as runner:
        assert runner.run(run()) == {"abort"}, "a moment in which all fail ends no run"


@pytest.mark.parametrize("aborted", [False, True])
def test_while_all_fail_a_conversation_is_begun_again_after_a_pause_unless_it_is_aborted(aborted):
    class Service(toy_environment.SecondTry):
        down, asked = True, 0

        async def rollout(self, prompt, conversation):
            Service.asked += 1
            if Service.down:
                raise ConnectionRefusedError
            return await super().rollout(prompt, conversation)

    async def run():
        rollouter = talks(Engine(), environment=Service)
        assert {one.finish_reason async for some in rollouter.generate(requests()) for one in some} == {"abort"}
        Service.down = False
        again = asyncio.create_task(collected(rollouter, [replace(one, attempt=1) for one in requests()]))
        await asyncio.sleep(0.2)
        assert Service.asked == 12
        if aborted:
            await rollouter.abort()
        else:
            asyncio.get_running_loop().skipped_s += 20
        async with asyncio.timeout(10):
            return {one.finish_reason for one in await again}

    with asyncio.Runner(loop_factory=Skipping) as runner:
        assert runner.run(run()) == ({"abort"} if aborted else {"stop"})
    assert Service.asked == (12 if aborted else 24)


class Quick(asyncio.SelectorEventLoop):
    """What waits for a time waits for a tenth of it."""

    def call_later(self, delay, callback, *arguments, context=None):
        return super().call_later(delay / 10, callback, *arguments, context=context)


@pytest.mark.parametrize("wrong", ["blocks", "ignores_cancel"])
def test_an_environment_that_does_not_end_is_left_behind(wrong, monkeypatch):
    monkeypatch.setattr(time, "sleep", lambda seconds, sleep=time.sleep: sleep(min(seconds, 4)))
    started = time.monotonic()
    rollouter = talks(Engine(), wrong=wrong, timeout_s=0.2)
    with pytest.raises(RolloutError, match="toy_environment:SecondTry"), asyncio.Runner(loop_factory=Quick) as runner:
        runner.run(collected(rollouter, requests(groups=1, size=2)))
    assert time.monotonic() - started < 4


def test_time_in_the_engine_is_not_the_environments():
    engine = Engine()

    async def run():
        engine.gate = asyncio.Event()
        asyncio.get_running_loop().call_later(1.0, engine.gate.set)
        return await collected(talks(engine, timeout_s=0.4), requests(groups=1))

    assert {one.finish_reason for one in asyncio.run(run())} == {"stop"}


def test_what_the_engine_is_asked_ends_with_the_conversations():
    class Waiting(Engine):
        async def generate(self, requests):
            asked.set()
            try:
                await asyncio.Event().wait()
            finally:
                ended.append(len(requests))
            yield ()

    async def run():
        nonlocal asked
        asked = asyncio.Event()
        talking = asyncio.create_task(collected(talks(Waiting()), requests()))
        await asyncio.wait_for(asked.wait(), 20)
        talking.cancel()
        await asyncio.wait([talking], timeout=20)
        return talking.cancelled(), list(ended)

    asked, ended = None, []
    assert asyncio.run(run()) == (True, [3])


def test_a_slow_environment_holds_no_slot_of_a_server():
    """One slot; the conversations of group 0 go on only once all others have ended, with all of their turns."""

    class OneSlot(Engine):
        async def generate(self, requests):
            for request in requests:
                async with slot:
                    async for some in super().generate([request]):
                        yield some

    class Slow(toy_environment.SecondTry):
        others = 8

        async def rollout(self, prompt, conversation):
            if prompt.id == "p0":
                await conversation.generate(max_tokens=1)
                while self.others:
                    await asyncio.sleep(0.01)
                return conversation.verdict(False, "slow")
            verdict = await super().rollout(prompt, conversation)
            self.others -= 1
            return verdict

    async def run():
        nonlocal slot
        slot = asyncio.Semaphore(1)
        async with asyncio.timeout(60):
            return await collected(talks(OneSlot(), together=False, environment=Slow), requests())

    slot = None
    rollouts = asyncio.run(run())
    assert {one.finish_reason for one in rollouts} == {"stop"} and len(rollouts) == 12
    assert {one.verdict.reason for one in rollouts if one.group_id == 0} == {"slow"}
    assert max(len(one.turns) for one in rollouts if one.group_id) == 2


def test_an_answer_cut_or_left_out_by_the_engine_begins_again():
    engine = Engine()
    engine.cut, engine.left_out = {(0, 0, 1)}, {(1, 0, 2)}
    rollouter = talks(engine)
    rollouts = asyncio.run(collected(rollouter, requests()))
    assert {(r.group_id, r.index) for r in rollouts if r.finish_reason == "abort"} == {(0, 1), (1, 2)}
    assert rollouter.counters() == {
        "environment/restarted": 2,
        "environment/failed": 0,
        "environment/timeouts": 0,
        "environment/tool_calls": 0,
        "environment/tool_errors": 0,
        "environment/pool_restarts": 0,
    }


def test_an_abort_ends_the_conversations_of_its_groups():
    engine = Engine()

    async def run():
        rollouter = talks(engine, together=False)
        engine.gate = asyncio.Event()
        task = asyncio.ensure_future(collected(rollouter, requests()))
        while sum(map(len, engine.calls)) < 12:
            await asyncio.sleep(0.01)
        await rollouter.abort([1])
        engine.gate.set()
        return await task

    rollouts = asyncio.run(run())
    assert {r.group_id for r in rollouts if r.finish_reason == "abort"} == {1} and engine.aborted == [[1]]
    assert len(rollouts) == 12


def test_what_engine_and_verifiers_raise_ends_the_run():
    engine = Engine()
    engine.raises = EngineError("server is gone")
    with pytest.raises(EngineError, match="server is gone"):
        held(engine)
    with pytest.raises(RewardError, match="pool is gone"):
        held(Engine(), pool=Pool(RewardError("pool is gone")))
    for wrong, named in (("prompt", "prompt"), ("index", "50")):
        engine = Engine()
        engine.wrong = wrong
        with pytest.raises(EngineError, match=named):
            held(engine)


async def until(condition) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.001)


class Waits(toy_environment.SecondTry):
    """Waits for ever; `begun` is how many."""

    begun = 0

    async def rollout(self, prompt, conversation):
        type(self).begun += 1
        await asyncio.sleep(3600)


def test_conversations_that_wait_end_when_all_groups_are_aborted():
    engine = Engine()

    async def run():
        Waits.begun = 0
        rollouter = talks(engine, environment=Waits)
        task = asyncio.ensure_future(collected(rollouter, requests()))
        await until(lambda: Waits.begun == 12)
        await rollouter.abort()
        async with asyncio.timeout(20):
            return await task, rollouter

    rollouts, rollouter = asyncio.run(run())
    assert {one.finish_reason for one in rollouts} == {"abort"} and len(rollouts) == 12
    assert engine.aborted == [None] and rollouter.counters()["environment/restarted"] == 12


def test_groups_that_are_given_up_before_they_begin_come_back_as_aborted():
    async def run():
        rollouter = talks(Engine())
        found = []
        generated = rollouter.generate(requests())
        first = asyncio.ensure_future(anext(generated))
        await asyncio.sleep(0)
        await rollouter.abort([2])
        async with asyncio.timeout(20):
            found += await first
            async for some in generated:
                found += some
        await rollouter.close()
        await rollouter.close()
        return found, rollouter

    rollouts, rollouter = asyncio.run(run())
    assert {one.group_id for one in rollouts if one.finish_reason == "abort"} == {2} and len(rollouts) == 12
    assert {(one.index, one.attempt) for one in rollouts if one.group_id == 2} == {(i, 0) for i in range(4)}
    assert rollouter.counters()["environment/restarted"] == 0, "they had not begun"


def test_a_conversation_that_is_aborted_before_it_began_leaves_no_timer():
    class Timers(asyncio.SelectorEventLoop):
        def call_later(self, delay, callback, *arguments, context=None):
            timer = super().call_later(delay, callback, *arguments, context=context)
            if delay == 61.0:
                timers.append(timer)
            return timer

    async def run():
        Waits.begun = 0
        rollouter = talks(Engine(), environment=Waits, timeout_s=61.0)
        task = asyncio.ensure_future(collected(rollouter, requests()))
        while len(timers) < 12:
            await asyncio.sleep(0)
        await rollouter.abort()
        async with asyncio.timeout(20):
            await task

    timers: list[asyncio.TimerHandle] = []
    with asyncio.Runner(loop_factory=Timers) as runner:
        runner.run(run())
    assert Waits.begun < 12 and len(timers) == 12 and all(timer.cancelled() for timer in timers)


def test_conversations_end_with_the_call_that_holds_them():
    async def run():
        Waits.begun = 0
        rollouter = talks(Engine(), environment=Waits)
        task = asyncio.ensure_future(collected(rollouter, requests()))
        await until(lambda: Waits.begun == 12)
        task.cancel()
        async with asyncio.timeout(20):
            await asyncio.wait([task])
        assert task.cancelled()
        left = asyncio.all_tasks() - {asyncio.current_task()}
        assert not left

    asyncio.run(run())
