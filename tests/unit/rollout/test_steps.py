"""Environments with `reset` and `step`, without processes: what goes to a worker, what it replies, how it ends."""

from __future__ import annotations

import asyncio
import math
from types import SimpleNamespace

import chat_tokenizers
import pytest
import toy_environment
import toy_steps
from talking import Model, hold
from test_stepping import Digits
from transformers import AutoTokenizer

from megatron_daro.config import EnvironmentSection
from megatron_daro.errors import ConfigError, RolloutError
from megatron_daro.rollout import step_worker
from megatron_daro.rollout.own_environment import environment_class, is_stepped, make_environment
from megatron_daro.rollout.rendering import Turns
from megatron_daro.rollout.stepping import (
    Step,
    StepFailedError,
    SteppedConversations,
    StepTimeoutError,
    checked,
    pool_of,
)
from megatron_daro.types import Prompt

FIELDS = {
    "id": "p", "answer": "4", "source": "s", "text": "2+2?", "messages": None, "category": "", "alternatives": ["5"],
}  # fmt: skip


class Pool:
    """Workers that do what a function of the request says; None: an object's own methods, in this process."""

    restarts = 3

    def __init__(self, step, notice="") -> None:
        self.step, self.notice, self.asked, self.started, self.closed = step, notice, [], 0, 0
        self.ready = False

    async def start(self) -> None:
        self.started += 1
        await asyncio.sleep(0)
        self.ready = True

    async def ask(self, request):
        assert self.ready, "nothing is asked before the workers run"
        if request["kind"] == "notice":
            return {"reason": "ok", "notice": self.notice}
        self.asked.append(request)
        said = self.step(request)
        if isinstance(said, dict):
            return said
        own = SimpleNamespace(reset=lambda prompt: said, step=lambda state, answer: said)
        request = request if request["kind"] == "step" else {**request, "prompt": FIELDS}
        return step_worker.answer("m:Own", own, request)

    async def close(self) -> None:
        self.closed += 1


def stepped(pool, *, tokenizer=None, chat=False, warn=print, **limits):
    section = EnvironmentSection(kind="m:Own", **limits)
    return SteppedConversations(section, Turns(tokenizer or Digits(), chat=chat), warn, pool)


def converse(pool, says=None, *, room=12, weights=None, **options):
    """One conversation; the model says the number of its turn. Returns its rollout."""
    model = Model(says or (lambda request: [3 + len(model.asked)]), decode=lambda ids: "".join(str(i - 3) for i in ids))
    environment = stepped(pool, **options)
    return hold(model, lambda c: environment.rollout(c._request.prompt, c), room=room, weights=weights)


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


def test_what_a_step_shows_at_the_end_is_not_shown():
    rollout = converse(steps(Step(), Step("555", done=True)))
    assert rollout.turns == ((0, 1),)


def test_an_observation_of_reset_stands_behind_a_plain_prompt():
    rollout = converse(steps(Step("77"), Step(done=True)))
    assert rollout.tokens.tolist() == [7, 8, 10, 10, 4] and rollout.loss_mask.tolist() == [0, 0, 1]


@pytest.mark.parametrize("most", [1, 3])
def test_a_conversation_has_no_more_answers_than_max_turns(most):
    pool = Pool(lambda request: Step("5"))
    rollout = converse(pool, max_turns=most, room=20)
    assert sum(made > 0 for _, made in rollout.turns) == most
    assert (rollout.verdict.reason, rollout.finish_reason) == ("max_turns", "stop")


def test_an_observation_that_does_not_fit_ends_it_as_cut():
    rollout = converse(Pool(lambda request: Step("555")), room=6)
    assert (rollout.verdict.reason, rollout.finish_reason) == ("context_overflow", "length")
    assert rollout.turns == ((3, 1),)


def test_no_room_for_an_answer_ends_it_as_cut():
    rollout = converse(steps(Step(), Step("555")), room=4)
    assert (rollout.verdict.reason, rollout.finish_reason) == ("max_tokens", "length")
    assert rollout.turns == ((0, 1), (3, 0))


def test_an_answer_may_have_a_limit_of_its_own():
    rollout = converse(steps(Step(), Step(done=True)), lambda request: [4] * 9, max_turn_tokens=2)
    assert rollout.turns == ((0, 2),)


def test_what_steps_report_is_that_of_their_answers():
    first = Step("5", reward=0.5, tool_calls=1, tool_errors=2, rewards={"a": 2.0})
    pool = steps(Step(reward=0.25, tool_calls=7), first, Step(done=True, reward=-1.0))
    rollout = converse(pool, weights={"a": 10.0})
    assert [(one.reward, one.tool_calls, one.tool_errors) for one in rollout.reports] == [(20.75, 8, 2), (-1.0, 0, 0)]
    assert rollout.verdict.reward == 19.75 and rollout.verdict.rewards == (("a", 2.0),)


def test_seconds_of_a_worker_are_those_of_the_answer():
    reply = {"reason": "ok", "step": {"done": True}, "seconds": 30.0}
    assert 30.0 <= converse(steps(Step(), reply)).reports[0].seconds < 31.0


def test_waiting_for_a_worker_is_not_the_environments_time(monkeypatch):
    now = [1.0]
    monkeypatch.setattr("megatron_daro.rollout.environment.time.monotonic", lambda: now[0])

    def step(request):
        now[0] += 60.0
        return {"reason": "ok", "step": {"done": request["kind"] == "step"}, "seconds": 0.0}

    assert converse(Pool(step)).reports[0].seconds == 0.0


@pytest.mark.parametrize(
    ("reply", "error", "words"),
    [
        ({"reason": "timeout"}, StepTimeoutError, r"^took more than environment\.step_timeout_s=30 s for one reset$"),
        ({"reason": "memory"}, StepFailedError, r"^reset: more than environment\.memory_mib=1024 MiB$"),
        ({"reason": "crash"}, StepFailedError, "^reset: crash$"),
        ({"reason": "failed", "error": "ValueError: x"}, StepFailedError, "^reset: ValueError: x$"),
    ],
)
def test_a_step_that_was_not_done_says_why(reply, error, words):
    with pytest.raises(error, match=words):
        converse(steps(reply))


def test_workers_start_once_and_what_they_have_to_say_is_said_once():
    said = []
    pool = Pool(lambda request: Step(done=request["kind"] == "step"), notice="weak isolation")
    environment = stepped(pool, warn=said.append)

    async def two():
        conversations = [SimpleNamespace(), SimpleNamespace()]
        await asyncio.gather(*(environment._start() for _ in conversations))

    asyncio.run(two())
    assert pool.started == 1 and said == ["environment.kind: m:Own: weak isolation"]
    asyncio.run(environment.close())
    assert pool.closed == 1 and environment.pool_restarts == 3
    quiet = []
    converse(Pool(pool.step), warn=quiet.append)
    assert quiet == []


@pytest.fixture(scope="module")
def chat(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    chat_tokenizers.save(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = chat_tokenizers.CHATML
    return tokenizer


def chatting(chat, says, *made, **options):
    ids = chat.encode(says + "<|im_end|>", add_special_tokens=False)
    pool = steps(*made)
    model = Model(lambda request: ids, decode=lambda ids: chat.decode(ids, skip_special_tokens=True))
    environment = stepped(pool, tokenizer=chat, chat=True, **options)
    rollout = hold(model, lambda c: environment.rollout(c._request.prompt, c), room=500, vocabulary=len(chat))
    return chat.decode(rollout.tokens[2:].tolist(), skip_special_tokens=False)


@pytest.mark.parametrize("strict", [False, True])
def test_an_observation_is_a_message_of_its_role(chat, strict):
    text = chatting(chat, "hm", Step(), Step("no", role="tool"), Step(done=True), strict=strict)
    assert text == "hm<|im_end|>\n<|im_start|>tool\nno<|im_end|>\n<|im_start|>assistant\nhm<|im_end|>"


def test_strictness_compares_what_was_trained_with_the_whole_history(chat, monkeypatch):
    forgets = chat_tokenizers.CHATML.replace("m['content']", "m['content'].replace('hm', '')")
    monkeypatch.setattr(chat, "chat_template", forgets)
    made = Step(), Step("no"), Step(done=True)
    chatting(chat, "hm", *made)
    with pytest.raises(RolloutError, match=r"environment\.strict: the conversation differs .* at character 0"):
        chatting(chat, "hm", *made, strict=True)


class Own:
    """Replies with what it is made with."""

    notice = "weak"

    def __init__(self, made) -> None:
        self.made, self.seen = made, []

    def reset(self, prompt):
        self.seen.append(prompt)
        return self.step(None, "")

    def step(self, state, answer):
        self.seen.append((state, answer))
        if isinstance(self.made, BaseException):
            raise self.made
        return self.made


def replied(made, request=None):
    return step_worker.answer("m:Own", Own(made), request or {"kind": "step", "state": {"a": [1]}, "answer": "x"})


def test_a_worker_replies_with_the_step_and_its_seconds():
    own = Own(Step("o", {"a": 1}, rewards={"r": 2}))
    reply = step_worker.answer("m:Own", own, {"kind": "step", "state": [3], "answer": "x"})
    assert own.seen == [([3], "x")] and reply["reason"] == "ok" and 0 <= reply["seconds"] < 1
    assert reply["step"]["rewards"] == {"r": 2} and Step(**reply["step"]) == own.made
    step_worker.answer("m:Own", own, {"kind": "reset", "prompt": FIELDS})
    assert own.seen[1] == Prompt("p", "4", "s", text="2+2?", alternatives=("5",))


def test_a_prompt_of_messages_comes_back():
    prompt = step_worker.prompt_of({**FIELDS, "text": None, "messages": [{"role": "user", "content": "x"}]})
    assert prompt == Prompt("p", "4", "s", messages=({"role": "user", "content": "x"},), alternatives=("5",))


@pytest.mark.parametrize(("own", "notice"), [(Own(None), "weak"), (object(), "")])
def test_a_worker_says_what_its_environment_has_to_say(own, notice):
    assert step_worker.answer("m:Own", own, {"kind": "notice"}) == {"reason": "ok", "notice": notice}


@pytest.mark.parametrize(
    ("made", "reply"),
    [
        (ValueError("no such move"), {"reason": "failed", "error": "ValueError: no such move"}),
        (Step(state={1, 2}), "step returned a state or reward that is no JSON .*; allowed: what json.dumps takes"),
        (Step(reward=math.nan), "step returned a state or reward that is no JSON"),
        ({}, "step returned a dict; allowed: megatron_daro.rollout.stepping.Step"),
    ],
)
def test_a_worker_says_what_went_wrong(made, reply):
    got = replied(made)
    if isinstance(reply, dict):
        assert got == reply
        return
    assert got["reason"] == "refused"
    with pytest.raises(AssertionError, match=f"environment.kind: m:Own: {reply}.*; fix: correct the class"):
        raise AssertionError(got["error"])


def test_memory_that_is_used_up_ends_the_worker():
    with pytest.raises(MemoryError):
        replied(MemoryError())


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("observation", 1, "observation 1; allowed: str"),
        ("reason", None, "reason None; allowed: str"),
        ("role", 1, "role 1; allowed: str"),
        ("done", 1, "done 1; allowed: bool"),
        ("correct", "yes", "correct 'yes'; allowed: bool"),
        ("tool_calls", True, "tool_calls True; allowed: int"),
        ("tool_calls", 1.5, "tool_calls 1.5; allowed: int"),
        ("tool_errors", None, "tool_errors None; allowed: int"),
        ("reward", "1", r"reward '1'; allowed: float \| None"),
        ("reward", True, r"reward True; allowed: float \| None"),
        ("rewards", [1.0], r"rewards \[1\.0\]; allowed: a number for each name"),
        ("rewards", {"a": True}, "rewards .*; allowed: a number for each name"),
        ("rewards", {"a": "1"}, "rewards .*; allowed: a number for each name"),
        ("reason", "x" * 41, "reason 'x.*; allowed: a word of at most 40 characters"),
    ],
)
def test_a_step_with_something_else_in_a_field_is_refused(field, value, words):
    with pytest.raises(RolloutError, match=f"environment.kind: m:Own: step returned {words}; fix: correct the class"):
        checked("m:Own", "step", Step(**{field: value}))


def test_a_step_at_the_limits_is_taken():
    step = Step("o", None, True, True, 1, "x" * 40, "tool", 1, 2, {"a": 1, "b": 0.5})
    assert checked("m:Own", "step", step) is step
    assert checked("m:Own", "step", Step(reward=0.5)).reward == 0.5


def test_a_worker_makes_the_users_object_with_its_options():
    reply = step_worker.load({"kind": "toy_steps:Steps", "options": {"notice": "hm"}})({"kind": "notice"})
    assert reply["notice"] == "hm"
    with pytest.raises(ConfigError, match=r"cannot be made \(RuntimeError: no such game\); fix: .* environment\.o"):
        step_worker.load({"kind": "toy_steps:Steps", "options": {"wrong": "constructor"}})
    with pytest.raises(ConfigError, match=r"unexpected keyword argument 'mode'.*or environment\.options"):
        step_worker.load({"kind": "toy_steps:Steps", "options": {"mode": 1}})


def test_workers_run_what_the_configuration_says():
    section = EnvironmentSection(kind="m:Own", options={"a": 1}, step_timeout_s=7.0, memory_mib=99)
    pool = pool_of(section, 5)
    assert (pool._workers, pool._timeout_s, pool._memory_mib) == (5, 7.0, 99)
    assert pool._program.settings == {"kind": "m:Own", "options": {"a": 1}}
    assert (pool._program.module, pool._program.error) == ("megatron_daro.rollout.step_worker", RolloutError)
    assert pool._program.section == "environment" and "needs about 60" in pool._program.needs


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("toy_steps:Steps", True),
        ("toy_environment:SecondTry", False),
        ("toy_steps:Nothing", False),
        ("no_such:X", False),
    ],
)
def test_what_has_step_and_no_rollout_is_stepped(kind, expected):
    assert is_stepped(kind) is expected


def test_a_class_with_both_is_held_here(monkeypatch):
    monkeypatch.setattr(toy_environment.SecondTry, "step", lambda self: None, raising=False)
    assert not is_stepped("toy_environment:SecondTry")


def test_the_class_of_the_configuration_is_made(monkeypatch):
    section = EnvironmentSection(kind="toy_environment:SecondTry", options={"late": 0.25})
    assert environment_class(section) is toy_environment.SecondTry
    own = make_environment(section, "tokenizer", chat=False, warn=print)
    assert isinstance(own, toy_environment.SecondTry) and (own._tokenizer, own._late) == ("tokenizer", 0.25)
    broken = EnvironmentSection(kind="toy_environment:SecondTry", options={"wrong": "constructor"})
    with pytest.raises(ConfigError, match=r"cannot be made \(RuntimeError: no such game\); .*or environment\.options"):
        make_environment(broken, "tokenizer", chat=False, warn=print)
    with pytest.raises(ConfigError, match=r"allowed are single_turn, or module:Class of your own"):
        environment_class(EnvironmentSection(kind="no_such:X"))


def test_workers_of_all_nodes_are_asked_where_there_are_some():
    section = EnvironmentSection(kind="toy_steps:Steps")
    pool = steps()
    own = make_environment(section, Digits(), chat=False, warn=print, pools=lambda: pool)
    assert own.pool_restarts == 3
    here = make_environment(section, Digits(), chat=False, warn=print)
    assert environment_class(section) is toy_steps.Steps and here.pool_restarts == 0


def test_a_chat_goes_on_by_its_template(chat):
    section = EnvironmentSection(kind="toy_steps:Steps")
    own = make_environment(section, chat, chat=True, warn=print, pools=steps)
    with pytest.raises(RolloutError, match="in a chat"):
        own._turns.first("x")
