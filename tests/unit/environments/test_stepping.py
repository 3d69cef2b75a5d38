"""Environments in worker processes: what hangs, leaks, forks, dies or raises costs its conversation, and is counted."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import sandboxed
from loop_fakes import FakeProgress
from test_conversations import Engine, Pool, collected, requests
from worker_processes import workers

from megatron_daro.config import EnvironmentSection, RewardSection
from megatron_daro.environments.conversations import Conversations
from megatron_daro.environments.own import make_environment, try_environment
from megatron_daro.environments.step_worker import answer
from megatron_daro.errors import ConfigError, RolloutError

pytestmark = pytest.mark.slow


class Digits:
    """Ids 3 to 12 are digits, 13 is "=", as test_conversations.Engine says them."""

    chat_template = None

    def encode(self, text, add_special_tokens):
        return [13 if c == "=" else 3 + int(c) for c in text]

    def decode(self, ids, skip_special_tokens):
        return "".join("=" if i == 13 else str(i - 3) for i in ids)


def talks(engine, *, progress=None, tokenizer=None, chat=False, kind="toy_steps:Steps", limits=None, **options):
    limits = {"workers": 2, "step_timeout_s": 2.0, "memory_mib": 300} | (limits or {})
    section = EnvironmentSection(kind=kind, options=options, **limits)
    progress = progress or FakeProgress()
    return Conversations(
        section,
        make_environment(section, tokenizer or Digits(), chat=chat, warn=progress.warn),
        engine,
        Pool(),
        reward=RewardSection(incorrect_reward=-1.0),
        decode=lambda ids: " ".join(map(str, ids)),
        vocabulary=20,
        together=False,
        notices=progress,
    )


def held(engine, **options):
    rollouter = talks(engine, **options)

    async def within_a_deadline():
        async with asyncio.timeout(120):  # what waits for ever is an error, not a test that was killed
            return await collected(rollouter, requests())

    return asyncio.run(within_a_deadline()), rollouter


def workers_left():
    """Those that are still there a while after their end was ordered: on a busy machine that takes a moment."""
    psutil.wait_procs(workers(), timeout=20)
    return workers()


def test_conversations_are_held_in_workers_and_add_up():
    rollouts, rollouter = held(Engine())
    assert len(rollouts) == 12 and workers_left() == []
    assert {len(one.turns) for one in rollouts} == {1, 2, 3}
    for one in rollouts:
        prompt = requests()[one.group_id].prompt
        assert all(seen == (0 if turn == 0 else 2) for turn, (seen, _) in enumerate(one.turns))
        ids, end = one.tokens[one.prompt_length :].tolist(), 0
        answers = [ids[(end := end + seen) : (end := end + made)] for seen, made in one.turns]
        right = [str(ids[-1] - 3) == prompt.answer for ids in answers]
        assert right.index(True) + 1 == len(right) if one.verdict.correct else not any(right)
        wrong = len(right) - one.verdict.correct
        assert one.verdict.reward == (-0.25 * wrong if wrong else 1.0)
        assert one.verdict.reason == (f"try_{len(right)}" if one.verdict.correct else "no_match")
    turns = sum(len(one.turns) for one in rollouts)
    wrong = turns - sum(one.verdict.correct for one in rollouts)
    counters = rollouter.counters()
    assert (counters["environment/tool_calls"], counters["environment/tool_errors"]) == (turns, wrong)
    other = talks(Engine())
    other.load_counters(counters)
    assert other.counters() == counters


def test_named_rewards_add_up_over_the_turns_with_their_weights():
    weights = {"right": 2.0, "length": -0.125}
    rollouts, _ = held(Engine(), named=True, limits={"reward_weights": weights})
    plain, _ = held(Engine(), named=True)
    assert {one.verdict.correct for one in rollouts} == {True, False}
    for one, other in zip(*(sorted(x, key=lambda r: (r.group_id, r.index)) for x in (rollouts, plain)), strict=True):
        lengths = [generated for _, generated in one.turns]
        assert dict(one.verdict.rewards) == {"right": float(one.verdict.correct), "length": sum(lengths)}
        by_turn = [
            -0.125 * length + 2.0 * (one.verdict.correct and i + 1 == len(lengths)) for i, length in enumerate(lengths)
        ]
        assert [report.reward for report in one.reports] == by_turn and one.verdict.reward == sum(by_turn)
        assert other.verdict.reward == sum(dict(other.verdict.rewards).values())
        assert all(report.seconds > 0 for report in one.reports)


def test_a_reward_without_a_weight_is_refused_where_there_are_weights():
    with pytest.raises(RolloutError, match=r"reward length"):
        held(Engine(), named=True, limits={"reward_weights": {"right": 1.0}})


@pytest.mark.parametrize(
    ("wrong", "counter", "words"),
    [
        ("raises", "environment/failed", "ValueError: no such move"),
        ("hangs", "environment/timeouts", "took more than step_timeout_s=2"),
        ("leaks", "environment/failed", "more than memory_mib=300"),
        ("dies", "environment/failed", "crash"),
    ],
)
def test_what_goes_wrong_costs_one_conversation(wrong, counter, words):
    progress = FakeProgress()
    limits = {"step_timeout_s": 2.0 if wrong == "hangs" else 20.0}  # 400 MiB may take a loaded machine seconds
    rollouts, rollouter = held(Engine(), wrong=wrong, when="36", progress=progress, limits=limits)
    cut = [one for one in rollouts if one.finish_reason == "abort"]
    assert 1 <= len(cut) < len(rollouts) == 12
    assert rollouter.counters()[counter] == rollouter.counters()["environment/restarted"] == len(cut)
    assert any(words in message for message in progress.messages), progress.messages
    assert workers_left() == []


@pytest.mark.parametrize("whose", ["sandbox", "code", "worker"])
def test_a_tool_that_is_killed_from_outside_says_the_same(whose):
    sandboxed.require()

    async def run():
        rollouter = talks(Engine(), kind="toy_steps:SlowTool", limits={"step_timeout_s": 60.0, "memory_mib": 600})
        working = asyncio.ensure_future(collected(rollouter, requests(groups=1)))
        async with asyncio.timeout(120):
            while not (
                lines := [(one.pid, line) for one in workers() if len(line := sandboxed.processes(one.pid)) == 3]
            ):
                await asyncio.sleep(0.01)
            worker, (helper, _, code) = lines[0]
            os.kill({"sandbox": helper, "code": code, "worker": worker}[whose], signal.SIGKILL)
            return await working, rollouter

    rollouts, rollouter = asyncio.run(run())
    assert [(one.finish_reason, one.verdict.correct, one.verdict.reason) for one in rollouts] == [
        ("stop", True, "ok")
    ] * 4
    assert rollouter.counters()["environment/restarted"] == 0 and workers_left() == []


@pytest.mark.parametrize("wrong", ["leaves_a_process", "prints"])
def test_what_a_step_leaves_behind_ends_with_its_worker(wrong):
    rollouts, rollouter = held(Engine(), wrong=wrong, when="2")
    assert {one.finish_reason for one in rollouts} == {"stop"}
    assert rollouter.counters()["environment/restarted"] == 0
    same, _ = held(Engine())
    assert sorted((o.group_id, o.index, *o.tokens) for o in rollouts) == sorted(
        (o.group_id, o.index, *o.tokens) for o in same
    )
    assert workers_left() == []


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ("type", "dict"),
        ("state", "JSON"),
        ("reward_name", "right/wrong"),
        ("constructor", "no such game"),
    ],
)
def test_what_cannot_be_used_ends_the_run_by_name(wrong, words):
    with pytest.raises(RolloutError, match=words):
        held(Engine(), wrong=wrong, when="")


def test_a_class_that_does_not_fit_is_refused():
    with pytest.raises(ConfigError, match=r"NoReset\.reset"):
        try_environment(EnvironmentSection(kind="toy_steps:NoReset"))
    with pytest.raises(ConfigError, match="mode"):
        try_environment(EnvironmentSection(kind="toy_steps:Steps", options={"mode": 1}))
    with pytest.raises(ConfigError, match="coroutine and max_turns and strict"):
        try_environment(EnvironmentSection(kind="asyncio:wait_for", max_turns=3, strict=True))


@pytest.mark.parametrize(
    ("limits", "reason", "finish"),
    [
        ({"max_turns": 2}, "max_turns", "stop"),
        ({"max_turn_tokens": 1}, "max_tokens", "length"),
    ],
)
def test_limits_of_turns_and_tokens_are_reasons(limits, reason, finish):
    rollouts, _ = held(Engine(), tries=50, limits=limits)
    wrong = {(one.verdict.reason, one.finish_reason) for one in rollouts if not one.verdict.correct}
    assert (reason, finish) in wrong and all(one.response_length <= 12 for one in rollouts)
    if "max_turn_tokens" in limits:
        assert {made for one in rollouts for _, made in one.turns} == {0, 1}  # 0: shown, and no room for an answer


def test_what_an_environment_says_of_itself_is_shown_once():
    progress = FakeProgress()
    held(Engine(), progress=progress, notice="weak isolation")
    assert [message for message in progress.messages if "weak" in message] == [
        "warning: environment.kind: toy_steps:Steps: weak isolation"
    ]
    assert answer("toy_steps:Steps", SimpleNamespace(notice=None), {"kind": "notice"})["notice"] == ""


def test_the_example_of_the_page_works():
    text = (Path(__file__).parents[3] / "docs" / "environments.md").read_text()
    scope: dict = {}
    exec(text.partition("```python\n# second_try.py\n")[2].partition("```")[0], scope)
    environment = scope["SecondTry"](late=0.25)
    begun = environment.reset(requests()[0].prompt)
    wrong = environment.step(begun.state, r"\boxed{no}")
    right = environment.step(wrong.state, rf"\boxed{{{begun.state['gold']}}}")
    assert not wrong.done and wrong.observation and (right.done, right.correct, right.reward) == (True, True, 0.25)
    assert environment.step(wrong.state, "?").done


def test_cancelled_conversations_leave_the_workers_alone():
    async def run():
        rollouter = talks(Engine(), wrong="hangs", when="", limits={"step_timeout_s": 60.0})
        task = asyncio.ensure_future(collected(rollouter, requests()))
        while not workers():
            await asyncio.sleep(0.05)
        await asyncio.sleep(1.0)
        await rollouter.abort()
        return await asyncio.wait_for(task, 20)

    assert {one.finish_reason for one in asyncio.run(run())} == {"abort"}
    assert workers_left() == []
