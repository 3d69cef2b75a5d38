"""Environments with `reset` and `step`, without processes: what goes to a worker, what it replies, how it ends."""

from __future__ import annotations

import asyncio
from dataclasses import asdict

import chat_tokenizers
import pytest
from talking import PROMPT, Model, hold
from test_stepping import Digits
from transformers import AutoTokenizer

from megatron_daro.config import EnvironmentSection
from megatron_daro.environments import Step
from megatron_daro.environments.environment import OutOfRoomError
from megatron_daro.environments.rendering import Turns
from megatron_daro.environments.stepping import SteppedConversations, checked
from megatron_daro.errors import RolloutError


class Pool:
    """Workers that reply with what a function of the request says."""

    restarts = 0

    def __init__(self, step) -> None:
        self.step, self.asked, self.started = step, [], 0

    async def start(self) -> None:
        self.started += 1
        await asyncio.sleep(0)

    async def ask(self, request):
        assert self.started, "nothing is asked before the workers run"
        if request["kind"] == "notice":
            return {"reason": "ok", "notice": ""}
        self.asked.append(request)
        return {"reason": "ok", "step": asdict(self.step(request)), "seconds": 0.0}


def stepped(pool, *, tokenizer=None, chat=False, **limits):
    section = EnvironmentSection(kind="m:Own", **limits)
    return SteppedConversations(section, Turns(tokenizer or Digits(), chat=chat), print, pool)


def converse(pool, says=None, *, room=12, weights=None, **options):
    """One conversation; the model says the number of its turn. Returns its rollout."""
    model = Model(says or (lambda request: [3 + len(model.asked)]), decode=lambda ids: "".join(str(i - 3) for i in ids))
    environment = stepped(pool, **options)
    return hold(model, lambda c: environment.rollout(PROMPT, c), room=room, weights=weights)


def steps(*made):
    """A pool that replies with these in turn."""
    left = iter(made)
    return Pool(lambda request: next(left))


def test_a_worker_gets_the_prompt_without_tokens_and_then_state_and_answer():
    pool = steps(Step(state=[1]), Step("5", [2]), Step(done=True, correct=True))
    rollout = converse(pool)
    reset, first, second = pool.asked
    assert reset["kind"] == "reset" and "tokens" not in reset["prompt"]
    assert (reset["prompt"]["id"], reset["prompt"]["text"], reset["prompt"]["answer"]) == ("p", "2+2?", "4")
    assert first == {"kind": "step", "state": [1], "answer": "1"}
    assert second == {"kind": "step", "state": [2], "answer": "2"}
    assert rollout.tokens.tolist() == [7, 8, 4, 8, 5] and rollout.turns == ((0, 1), (1, 1))
    assert pool.started == 1


@pytest.mark.parametrize(
    ("last", "correct", "reason"),
    [
        (Step(done=True, correct=True), True, "match"),
        (Step(done=True), False, "no_match"),
        (Step(done=True, correct=True, reason="won"), True, "won"),
        (Step(done=True, reason="lost"), False, "lost"),
    ],
)
def test_the_last_step_decides_and_may_say_why(last, correct, reason):
    verdict = converse(steps(Step(reason="begun"), last)).verdict
    assert (verdict.correct, verdict.reason, verdict.reward) == (correct, reason, 1.0 if correct else -1.0)


def test_a_step_that_is_right_but_not_the_last_is_not_right():
    assert converse(steps(Step(correct=True), Step(correct=True)), max_turns=1).verdict.correct is False


def test_an_observation_of_reset_stands_behind_a_plain_prompt():
    rollout = converse(steps(Step("77"), Step(done=True)))
    assert rollout.tokens.tolist() == [7, 8, 10, 10, 4] and rollout.loss_mask.tolist() == [0, 0, 1]


def test_an_observation_that_does_not_fit_ends_it_as_cut():
    rollout = converse(Pool(lambda request: Step("555")), room=6)
    assert (rollout.verdict.reason, rollout.finish_reason) == ("context_overflow", "length")
    assert rollout.turns == ((3, 1),)


@pytest.mark.parametrize("room", [2, 3])
def test_an_observation_of_reset_that_leaves_no_room_fails_the_conversation_and_not_the_run(room):
    with pytest.raises(OutOfRoomError):
        converse(Pool(lambda request: Step("555")), room=room)


def test_what_steps_report_is_that_of_their_answers():
    first = Step("5", reward=0.5, tool_calls=1, tool_errors=2, rewards={"a": 2.0})
    pool = steps(Step(reward=0.25, tool_calls=7), first, Step(done=True, reward=-1.0))
    rollout = converse(pool, weights={"a": 10.0})
    assert [(one.reward, one.tool_calls, one.tool_errors) for one in rollout.reports] == [(20.75, 8, 2), (-1.0, 0, 0)]
    assert rollout.verdict.reward == 19.75 and rollout.verdict.rewards == (("a", 2.0),)


@pytest.fixture(scope="module")
def chat(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    chat_tokenizers.save(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = chat_tokenizers.CHATML
    return tokenizer


def chatting(chat, says, *made, pool=None, **options):
    ids = chat.encode(says + "<|im_end|>", add_special_tokens=False)
    pool = pool or steps(*made)
    model = Model(lambda request: ids, decode=lambda ids: chat.decode(ids, skip_special_tokens=True))
    environment = stepped(pool, tokenizer=chat, chat=True, **options)
    rollout = hold(model, lambda c: environment.rollout(PROMPT, c), room=500, vocabulary=len(chat))
    return chat.decode(rollout.tokens[2:].tolist(), skip_special_tokens=False)


@pytest.mark.parametrize("strict", [False, True])
def test_an_observation_is_a_message_of_its_role(chat, strict):
    text = chatting(chat, "hm", Step(), Step("no", role="tool"), Step(done=True), strict=strict)
    assert text == "hm<|im_end|>\n<|im_start|>tool\nno<|im_end|>\n<|im_start|>assistant\nhm<|im_end|>"


def test_a_step_reads_an_answer_with_the_tag_that_began_its_thinking(chat, monkeypatch):
    thinks = chat_tokenizers.CHATML.replace("assistant\n", "assistant\n<think>\n")
    monkeypatch.setattr(chat, "chat_template", thinks)
    pool = steps(Step(), Step("no"), Step(done=True))
    chatting(chat, "hm", pool=pool)
    assert [request["answer"] for request in pool.asked[1:]] == ["hm", "<think>hm"]


def test_strictness_compares_what_was_trained_with_the_whole_history(chat, monkeypatch):
    forgets = chat_tokenizers.CHATML.replace("m['content']", "m['content'].replace('hm', '')")
    monkeypatch.setattr(chat, "chat_template", forgets)
    made = Step(), Step("no"), Step(done=True)
    chatting(chat, "hm", *made)
    with pytest.raises(RolloutError, match=r"environment\.strict"):
        chatting(chat, "hm", *made, strict=True)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("observation", 1), ("done", 1), ("correct", "yes"), ("tool_calls", 1.5), ("reward", True), ("rewards", [1.0]),
        ("rewards", {"a": "1"}), ("reason", "x" * 41),
    ],
)  # fmt: skip
def test_a_step_with_something_else_in_a_field_is_refused(field, value):
    with pytest.raises(RolloutError, match=rf"environment\.kind.*m:Own.*{field}"):
        checked("m:Own", "step", Step(**{field: value}))
