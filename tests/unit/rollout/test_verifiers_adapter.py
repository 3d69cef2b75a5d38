"""The adapter of verifiers without the package: what it asks, counts, converts and refuses.

test_verifiers_hub.py has the same over the package itself, where it is installed.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import tempfile
from pathlib import Path

import chat_tokenizers
import numpy as np
import pytest
import talking
import verifiers_stand_in as stand_in
from transformers import AutoTokenizer

from megatron_daro.config import EnvironmentSection
from megatron_daro.data.prompts import load_problems
from megatron_daro.data.tokenizer import tokenize_prompts
from megatron_daro.errors import ConfigError, RolloutError
from megatron_daro.rollout import verifiers_hub
from megatron_daro.rollout.own_environment import make_environment
from megatron_daro.types import Prompt

ADD = stand_in.Tool(name="add", description="Return the sum.", parameters={"type": "object"})
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A folder with a tokenizer, and its template."""
    folder = tmp_path_factory.mktemp("model")
    chat_tokenizers.save(folder)
    (folder / "chat_template.jinja").write_text(chat_tokenizers.TOOLS)
    return folder


@pytest.fixture(scope="module")
def tokenizer(model):
    return AutoTokenizer.from_pretrained(model)


def user(text: str) -> dict:
    return {"role": "user", "content": text}


async def once(ask, row):
    """Ask once, and be content."""
    await ask(row["prompt"])


@pytest.fixture
def hub(monkeypatch, tokenizer):
    """Makes the adapter over an environment; returns both."""

    def make(talk=once, *, section=None, rows=None, **attributes):
        made = []

        def load_environment(name, **options):
            own = stand_in.Environment(rows or [{"prompt": [user("2+2?")], "answer": "4"}], talk, **attributes)
            own.asked_for = name, options
            made.append(own)
            return own

        monkeypatch.setitem(sys.modules, "verifiers", stand_in.module(load_environment))
        section = EnvironmentSection(kind="verifiers:sums", **(section or {}))
        return make_environment(section, tokenizer, chat=True, warn=print), made[0]

    return make


def problems(adapter, tokenizer, split="train"):
    """Its problems, through the file that a run reads them from."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "problems.jsonl"
        path.write_text("\n".join(map(json.dumps, adapter.problems(split))))
        prompts, _ = load_problems([path], repeats="keep")
    return tokenize_prompts(prompts, tokenizer)[0]


def held(adapter, tokenizer, says="4<|im_end|>", *, room=400, prompt=None, weights=None):
    """One conversation on the first problem. says: a text, or a function of the number of the turn."""
    if prompt is None:
        prompt = problems(adapter, tokenizer)[0]
    turns = []

    def answer(request):
        turns.append(request)
        text = says if isinstance(says, str) else says(len(turns))
        return tokenizer.encode(text, add_special_tokens=False)

    model = talking.Model(answer, decode=lambda ids: tokenizer.decode(ids, skip_special_tokens=True))
    one = talking.conversation(model, prompt=prompt, room=room, weights=weights, vocabulary=len(tokenizer))
    return asyncio.run(one.hold(adapter)), turns


def text_of(rollout, tokenizer):
    return tokenizer.decode(rollout.tokens.tolist(), skip_special_tokens=False)


def test_the_reward_and_its_parts_are_the_rubrics(hub, tokenizer):
    async def talk(ask, row):
        await ask(row["prompt"])
        long = "x" * 70
        return {"reward": 0.75, "metrics": {"a b/c.d-e": 2, long: 1}, "stop_condition": "s" * 50}

    rollout, _ = held(hub(talk)[0], tokenizer)
    assert rollout.verdict.rewards == (("a_b_c.d-e", 2.0), ("x" * 64, 1.0))
    assert rollout.verdict.correct is True and rollout.verdict.reward == 0.75 and rollout.verdict.reason == "s" * 40
    assert [report.reward for report in rollout.reports] == [0.75]


@pytest.mark.parametrize(("reward", "correct"), [(0.49, False), (0.5, True), (0.51, True)])
def test_an_answer_is_right_from_the_threshold_on(hub, tokenizer, reward, correct):
    async def talk(ask, row):
        await ask(row["prompt"])
        return {"reward": reward}

    verdict = held(hub(talk)[0], tokenizer)[0].verdict
    assert verdict.correct is correct and verdict.reason == "done"


def test_weights_of_the_configuration_replace_the_rubrics(hub, tokenizer):
    async def talk(ask, row):
        await ask(row["prompt"])
        return {"reward": 9.0, "metrics": {"a": 2.0, "b": 1.0}}

    weights = {"a": 0.5, "b": -3.0}
    rollout, _ = held(hub(talk, section={"reward_weights": weights})[0], tokenizer, weights=weights)
    assert (rollout.verdict.reward, rollout.verdict.correct, rollout.verdict.reason) == (-2.0, True, "done")
    assert rollout.verdict.rewards == (("a", 2.0), ("b", 1.0))


def test_an_error_of_the_environment_costs_the_conversation(hub, tokenizer):
    async def talk(ask, row):
        await ask(row["prompt"])
        return {"error": {"error": "InfraError", "message": "no such place"}}

    with pytest.raises(RuntimeError, match="InfraError: no such place"):
        held(hub(talk)[0], tokenizer)


def test_a_reward_of_one_step_is_refused(hub, tokenizer):
    async def talk(ask, row):
        await ask(row["prompt"], state={"trajectory": [{"reward": None}, {"reward": 0.0}]})

    with pytest.raises(RolloutError, match="trajectory"):
        held(hub(talk)[0], tokenizer)


def test_a_problem_of_another_file_is_named_with_the_command_that_writes_its_own(hub, tokenizer):
    stranger = Prompt("other", "4", "unit", tokens=(1, 2))
    with pytest.raises(RolloutError, match=r"problem other.*data\.train.*verifiers_hub sums --model"):
        held(hub()[0], tokenizer, prompt=stranger)


def test_its_problems_are_rows_of_a_training_file(hub):
    rows = [
        {"prompt": [user("a")], "answer": " 4 "},
        {"prompt": [user("b")], "answer": {"x": 1}},
        {"prompt": [user("c")], "answer": "  "},
        {"prompt": [user("d")]},
    ]
    adapter, _ = hub(rows=rows, evaluation=rows[:1])
    written = list(adapter.problems("train"))
    assert [row["answer"] for row in written] == ["4", '{"x": 1}', "-", "null"]
    assert [row["messages"] for row in written] == [row["prompt"] for row in rows]
    assert {row["data_source"] for row in written} == {"verifiers:sums"}
    assert [row["data_source"] for row in adapter.problems("eval")] == ["verifiers:sums:eval"]


def test_equal_problems_stay_apart_and_those_of_evaluation_are_known_too(hub, tokenizer):
    answers = []

    async def talk(ask, row):
        answers.append(row["answer"])
        await ask(row["prompt"])

    rows = [{"prompt": [user("a")], "answer": "1"}, {"prompt": [user("a")], "answer": "2"}]
    adapter, _ = hub(talk, rows=rows, evaluation=[{"prompt": [user("e")], "answer": "3"}])
    first, second = problems(adapter, tokenizer)
    assert second.id == f"{first.id}-2" and second.answer == "2"
    for prompt in (first, second, *problems(adapter, tokenizer, "eval")):
        held(adapter, tokenizer, prompt=prompt)
    assert answers == ["1", "2", "3"]


@pytest.mark.parametrize("info", [{"tool_defs": [ADD.model_dump()]}, json.dumps({"tool_defs": [ADD.model_dump()]})])
def test_tools_of_a_problem_are_written_into_its_prompt(hub, info):
    adapter, _ = hub(rows=[{"prompt": [user("a")], "answer": "1", "info": info}])
    (row,) = adapter.problems("train")
    assert row["messages"][0]["role"] == "system"
    function = {"name": "add", "description": "Return the sum.", "parameters": {"type": "object"}}
    assert json.dumps({"type": "function", "function": function}) in row["messages"][0]["content"]


def test_tools_need_a_template_that_writes_calls_as_they_are_read(hub, tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizer, "chat_template", chat_tokenizers.TOOLS.replace("<tool_call>", "<call>"))
    with pytest.raises(ConfigError, match="<tool_call>"):
        hub(tools=[ADD])
    hub()


def test_a_model_without_a_chat_template_is_refused(hub, tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizer, "chat_template", None)
    with pytest.raises(ConfigError, match="chat template"):
        hub()


@pytest.mark.parametrize(
    ("attributes", "named"),
    [
        ({"requires_group_rollouts": True}, "group"),
        ({"provides_advantages": True}, "advantages"),
        ({"message_type": "completion"}, "completion"),
        ({"rows": [{"prompt": ["2+2?"], "answer": "4"}]}, "prompt"),
    ],
)
def test_what_is_not_served_is_refused_before_anything_starts(hub, attributes, named):
    with pytest.raises(ConfigError, match=rf"environment\.kind.*verifiers:sums.*{named}"):
        hub(**attributes)


def test_a_package_that_cannot_load_it_is_named(monkeypatch):
    def load_environment(name, **options):
        raise ValueError("no such environment")

    monkeypatch.setitem(sys.modules, "verifiers", stand_in.module(load_environment))
    section = EnvironmentSection(kind="verifiers:sums")
    with pytest.raises(ConfigError, match=r"sums.*no such environment"):
        verifiers_hub.load(section)
    new = stand_in.module(load_environment)
    del new.load_environment
    new.__version__ = "0.4.0"
    monkeypatch.setitem(sys.modules, "verifiers", new)
    with pytest.raises(ConfigError, match=r"0\.4\.0"):
        verifiers_hub.load(section)


def test_loading_leaves_the_runs_signal_handlers(hub):
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.getsignal(number) for number in numbers]
    try:
        hub()
        assert [signal.getsignal(number) for number in numbers] == before
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def test_a_conversation_goes_on_behind_the_answer(hub, tokenizer):
    seen = []

    async def talk(ask, row):
        first = await ask(row["prompt"])
        seen.append(first)
        seen.append(await ask([*row["prompt"], first.message, user("Sure?")]))

    rollout, turns = held(hub(talk)[0], tokenizer, lambda turn: f"a{turn}<|im_end|>")
    begin = "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n"
    end = "a1<|im_end|>\n<|im_start|>user\nSure?<|im_end|>\n<|im_start|>assistant\na2<|im_end|>"
    assert text_of(rollout, tokenizer) == begin + end
    mask = np.concatenate([np.repeat([0, 1], turn) for turn in rollout.turns])
    assert rollout.loss_mask.tolist() == mask.tolist() and [made for _, made in rollout.turns] == [3, 3]
    first, second = seen
    assert (first.id, second.id, first.message.content, second.message.content) == ("turn_1", "turn_3", "a1", "a2")
    assert (first.message.role, first.message.finish_reason, first.message.is_truncated) == ("assistant", "stop", False)
    assert first.message.tool_calls is None and (first.created, first.model) == (0, "policy")
    prompt = len(turns[0].prompt.tokens)
    assert first.usage.model_dump() == {
        "prompt_tokens": prompt, "reasoning_tokens": 0, "completion_tokens": 3, "total_tokens": prompt + 3,
    }  # fmt: skip
    assert second.usage.prompt_tokens == len(turns[1].prompt.tokens)


def test_tools_are_called_and_counted_and_their_results_shown(hub, tokenizer):
    seen = []

    async def talk(ask, row):
        first = (await ask(row["prompt"])).message
        seen.append(first)
        results = [{"role": "tool", "content": "2", "tool_call_id": first.tool_calls[0].id}]
        seen.append((await ask([*row["prompt"], first, *results])).message)

    rows = [{"prompt": [{"role": "system", "content": "Be brief."}, user("1+1?")], "answer": "2"}]
    adapter, _ = hub(talk, rows=rows, tools=[ADD])
    says = {1: f"So: \n{CALL}{CALL}<tool_call>[]</tool_call><|im_end|>", 2: "2<|im_end|>"}
    rollout, _ = held(adapter, tokenizer, says.get)
    first, second = seen
    assert [(call.id, call.name, call.arguments) for call in first.tool_calls] == [
        ("call_2_0", "add", '{"a": 1}'), ("call_2_1", "add", '{"a": 1}'),
    ]  # fmt: skip
    assert (first.content, first.finish_reason, second.content, second.tool_calls) == ("So:", "tool_calls", "2", None)
    assert [(one.tool_calls, one.tool_errors) for one in rollout.reports] == [(2, 1), (0, 0)]
    assert "<|im_start|>user\n<tool_response>\n2\n</tool_response><|im_end|>" in text_of(rollout, tokenizer)


def test_an_answer_that_is_cut_says_so(hub, tokenizer):
    seen = []

    async def talk(ask, row):
        seen.append((await ask(row["prompt"])).message)

    held(hub(talk, section={"max_turn_tokens": 5})[0], tokenizer, "x" * 20)
    assert (seen[0].content, seen[0].finish_reason, seen[0].is_truncated) == ("x" * 5, "length", True)


def test_no_room_is_what_the_package_calls_an_overlong_prompt(hub, tokenizer):
    async def talk(ask, row):
        first = (await ask(row["prompt"])).message
        with pytest.raises(stand_in.OverlongPromptError, match="25"):
            await ask([*row["prompt"], first, user("Sure?")])

    rollout, _ = held(hub(talk)[0], tokenizer, "x<|im_end|>", room=10)
    assert rollout.finish_reason == "length"


@pytest.mark.parametrize(
    ("sampling", "section", "limit"),
    [
        ({"max_tokens": 7}, {}, 7),
        ({"max_completion_tokens": 6, "max_tokens": 7}, {}, 6),
        ({"max_tokens": 7}, {"max_turn_tokens": 5}, 5),
        ({"max_tokens": None, "temperature": None, "n": 1, "extra_body": {}}, {}, 400),
    ],
)
def test_limits_of_a_request_are_kept(hub, tokenizer, sampling, section, limit):
    async def talk(ask, row):
        await ask(row["prompt"], sampling=sampling)

    _, turns = held(hub(talk, section=section)[0], tokenizer)
    assert turns[0].sampling.max_new_tokens == limit


@pytest.mark.parametrize("sampling", [{"n": 2}, {"temperature": 0.5}, {"extra_body": {"min_p": 0.1}}])
def test_other_sampling_than_the_runs_is_refused(hub, tokenizer, sampling):
    async def talk(ask, row):
        await ask(row["prompt"], sampling=sampling)

    with pytest.raises(RolloutError, match=next(iter(sampling))):
        held(hub(talk)[0], tokenizer)


def asked_again(change):
    """An environment that asks once more with what `change(messages, first answer)` makes of the chat."""

    async def talk(ask, row):
        first = (await ask(row["prompt"])).message
        await ask(*change(row["prompt"], first))

    return talk


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda chat, said: [[user("?"), said, user("!")]], "answer"),
        (lambda chat, said: [[*chat, said]], "answer"),
        (lambda chat, said: [[*chat, said, {"role": "system", "content": "s"}]], "system"),
        (lambda chat, said: [[*chat, said, user([{"type": "image_url"}])]], "image_url"),
    ],
)
def test_a_history_that_is_not_continued_is_refused(hub, tokenizer, change, named):
    with pytest.raises(RolloutError, match=named):
        held(hub(asked_again(change))[0], tokenizer)


def test_other_tools_than_before_are_refused(hub, tokenizer):
    async def talk(ask, row):
        first = (await ask(row["prompt"])).message
        await ask([*row["prompt"], first, user("!")], tools=[ADD])

    with pytest.raises(RolloutError, match="tools"):
        held(hub(talk)[0], tokenizer)


def test_another_prompt_than_the_problems_is_refused(hub, tokenizer):
    async def talk(ask, row):
        await ask([user("another")])

    with pytest.raises(RolloutError, match=r"data\.train"):
        held(hub(talk)[0], tokenizer)


def test_parts_of_a_text_are_one_text(hub, tokenizer):
    parts = [{"type": "text", "text": "a"}, stand_in.Record(type="text", text="b")]
    talk = asked_again(lambda chat, said: [[*chat, said, user(parts)]])
    assert "user\nab<|im_end|>" in text_of(held(hub(talk)[0], tokenizer)[0], tokenizer)


@pytest.mark.parametrize(("split", "source"), [(None, "verifiers:sums"), ("eval", "verifiers:sums:eval")])
def test_a_command_writes_its_problems(hub, model, capsys, split, source):
    hub(evaluation=[{"prompt": [user("e")], "answer": "1"}])
    given = [] if split is None else ["--split", split]
    assert verifiers_hub.main(["sums", "--model", str(model), *given]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    asked = "e" if split else "2+2?"
    assert json.loads(line) == {
        "messages": [user(asked)], "answer": "1" if split else "4", "data_source": source,
    }  # fmt: skip


def test_the_command_refuses_in_one_line_and_knows_two_splits(hub, model, capsys):
    hub()
    sys.modules["verifiers"].load_environment = lambda name, **options: stand_in.Environment([], once, **options)
    options = ["--options", '{"message_type": "completion"}']
    assert verifiers_hub.main(["sums", "--model", str(model), *options]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and "completion" in printed.err
    for wrong in (["sums"], ["sums", "--model", str(model), "--split", "test"]):
        with pytest.raises(SystemExit):
            verifiers_hub.main(wrong)
    assert "verifiers_hub" in capsys.readouterr().err
