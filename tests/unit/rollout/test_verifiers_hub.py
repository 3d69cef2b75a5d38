"""Environments of the package verifiers, its own code: exact tokens, rewards, tools, and what is refused by name.

Skipped without the package: bash tests/verifiers_hub.sh
"""

from __future__ import annotations

import asyncio

import chat_tokenizers
import numpy as np
import pytest
from loop_fakes import FakeProgress
from test_conversations import collected
from transformers import AutoTokenizer

from megatron_daro.config import EnvironmentSection, RewardSection
from megatron_daro.data.prompts import load_problems
from megatron_daro.data.tokenizer import tokenize_prompts
from megatron_daro.errors import RolloutError
from megatron_daro.rollout import verifiers_hub
from megatron_daro.rollout.conversations import Conversations
from megatron_daro.rollout.own_environment import make_environment
from megatron_daro.types import GroupRequest, Rollout, SamplingParams

pytest.importorskip("verifiers", reason="the package verifiers is not here: bash tests/verifiers_hub.sh installs it")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A folder with a tokenizer, and its template."""
    folder = tmp_path_factory.mktemp("model")
    chat_tokenizers.save(folder)
    (folder / "chat_template.jinja").write_text(chat_tokenizers.TOOLS)
    return folder


class Speaker:
    """An engine that says what a function of (text so far, index) returns."""

    def __init__(self, tokenizer, says) -> None:
        self.tokenizer, self.says = tokenizer, says

    async def generate(self, requests):
        for request in requests:
            await asyncio.sleep(0)
            yield tuple(self._answer(request, index) for index in request.indices)

    def _answer(self, request, index):
        so_far = self.tokenizer.decode(list(request.prompt.tokens), skip_special_tokens=False)
        ids = self.tokenizer.encode(self.says(so_far, index) + "<|im_end|>", add_special_tokens=False)
        reason = "stop" if len(ids) <= request.sampling.max_new_tokens else "length"
        ids = ids[: request.sampling.max_new_tokens]
        tokens = np.array([*request.prompt.tokens, *ids], np.int32)
        ones, text = np.ones(len(ids), np.uint8), self.tokenizer.decode(ids, skip_special_tokens=True)
        place = request.prompt.id, request.group_id, request.attempt, index
        return Rollout(*place, tokens, len(tokens) - len(ids), ones, -ones.astype(np.float32), reason, 1, text)

    async def abort(self, group_ids=None) -> None: ...


def held(model, says, tmp_path, *, progress=None, room=400, limits=None, template="{prompt}", **options):
    """Conversations of two rollouts on each of the environment's problems, and their prompts."""
    section = EnvironmentSection(kind="verifiers:hub_digits", options=options, **(limits or {}))
    tokenizer = AutoTokenizer.from_pretrained(model)
    progress = progress or FakeProgress()
    environment = make_environment(section, tokenizer, chat=True, warn=progress.warn)
    path = tmp_path / "train.jsonl"
    path.write_text("\n".join(map(verifiers_hub.json.dumps, environment.problems("train"))))
    prompts, _ = load_problems([path], repeats="keep")
    prompts, _ = tokenize_prompts(prompts, tokenizer, template=template)
    sampling = SamplingParams(max_new_tokens=room)
    asked = [GroupRequest(g, 0, prompt, (0, 1), sampling) for g, prompt in enumerate(prompts)]
    rollouter = Conversations(
        section,
        environment,
        Speaker(tokenizer, says),
        None,
        reward=RewardSection(),
        decode=lambda ids: tokenizer.decode(ids, skip_special_tokens=False),
        vocabulary=len(tokenizer),
        together=False,
        notices=progress,
    )
    rollouts = asyncio.run(collected(rollouter, asked))
    return sorted(rollouts, key=lambda one: (one.group_id, one.index)), prompts, rollouter


def shown_last(so_far):
    """What the user said last."""
    return so_far.rpartition("<|im_start|>user\n")[2].partition("<|im_end|>")[0]


def second_try(so_far, index):
    """Right at once, or after it was asked again."""
    return shown_last(so_far) if index == 0 or so_far.count("<|im_start|>user") == 2 else "x"


def test_its_conversations_are_those_of_the_template_to_the_token(model, tmp_path):
    rollouts, prompts, _ = held(model, second_try, tmp_path)
    assert len(rollouts) == 20 and {one.finish_reason for one in rollouts} == {"stop"}
    tokenizer = AutoTokenizer.from_pretrained(model)
    for one in rollouts:
        digit = prompts[one.group_id].answer
        said = [digit] if one.index == 0 else ["x", digit]
        chat = [{"role": "user", "content": digit}]
        for text in said:
            chat += [{"role": "assistant", "content": text}, {"role": "user", "content": digit}]
        whole = tokenizer.apply_chat_template(chat[:-1], tokenize=False)
        assert tokenizer.decode(one.tokens.tolist(), skip_special_tokens=False) == whole.removesuffix("\n")
        mask = np.concatenate([np.repeat([0, 1], turn) for turn in one.turns])
        assert one.loss_mask.tolist() == mask.tolist() and len(one.turns) == len(said) == len(one.reports)
        assert one.verdict.correct and one.verdict.reward == 1.0 and one.verdict.reason == "has_final_env_response"
        metrics = dict(one.verdict.rewards)
        assert (metrics["repeats"], metrics["brief"], metrics["num_turns"]) == (1.0, len(said), len(said))
        assert sum(report.reward for report in one.reports) == 1.0


def test_tools_are_called_and_their_results_shown(model, tmp_path):
    def says(so_far, index):
        if "<tool_response>" in so_far:
            return so_far.rpartition("<tool_response>\n")[2].partition("\n")[0]
        number = shown_last(so_far)[0]
        arguments = f'{{"a": {number}, "b": {9 if index else number}}}'
        call = f'<tool_call>\n{{"name": "add", "arguments": {arguments}}}\n</tool_call>'
        return f"So:\n{call}" + ("\n<tool_call>\n{broken\n</tool_call>" if index else "")

    rollouts, prompts, rollouter = held(model, says, tmp_path, kind="tool")
    tokenizer = AutoTokenizer.from_pretrained(model)
    assert "# Tools" in tokenizer.decode(prompts[0].tokens) and len(rollouts) == 6
    assert {(one.index, one.verdict.correct) for one in rollouts} == {(0, True), (1, False)}
    for one in rollouts:
        text = tokenizer.decode(one.tokens.tolist(), skip_special_tokens=False)
        shown = "too large" if one.index else prompts[one.group_id].answer
        assert f"<|im_end|>\n<|im_start|>user\n<tool_response>\n{shown}\n</tool_response><|im_end|>\n" in text
        assert [report.tool_calls for report in one.reports] == [1, 0]
        assert [report.tool_errors for report in one.reports] == [one.index, 0]
        assert dict(one.verdict.rewards)["add_calls"] == 1.0
    assert rollouter.counters()["environment/tool_calls"] == 6


def test_an_answer_that_fills_the_room_ends_the_conversation_as_truncated(model, tmp_path):
    rollouts, _, _ = held(model, lambda so_far, index: "x" * (20 if index else 2), tmp_path, room=12)
    assert {(one.index, one.finish_reason, one.verdict.reason) for one in rollouts} == {
        *((0, "length", "prompt_too_long"), (1, "length", "prompt_too_long"))
    }
    short, _, _ = held(model, lambda so_far, index: "x" * 20, tmp_path, limits={"max_turn_tokens": 5})
    assert {turn[1] for one in short for turn in one.turns} == {5}


def test_what_fails_costs_its_conversation(model, tmp_path):
    progress = FakeProgress()
    rollouts, _, rollouter = held(model, lambda so_far, index: "x", tmp_path, progress=progress, wrong="raises")
    assert [(one.group_id, one.index) for one in rollouts if one.finish_reason == "abort"] == [(2, 0), (2, 1)]
    assert rollouter.counters()["environment/failed"] == 2
    assert any("no such place" in message for message in progress.messages)
    rollouts, _, rollouter = held(model, lambda so_far, index: "x", tmp_path, wrong="hangs", limits={"timeout_s": 1.0})
    assert sum(one.finish_reason == "abort" for one in rollouts) == rollouter.counters()["environment/timeouts"] == 2


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ("rewrites", "answer"),
        ("edits", "answer"),
        ("sampling", "temperature"),
        ("twice", "generate"),
        ("image", "image_url"),
        ("system", "system"),
        ("step_reward", "trajectory"),
    ],
)
def test_what_would_be_trained_as_something_else_ends_the_run_by_name(model, tmp_path, wrong, words):
    with pytest.raises(RolloutError, match=rf"environment\.kind.*verifiers:hub_digits.*{words}"):
        held(model, lambda so_far, index: "x", tmp_path, wrong=wrong)


def test_a_prompt_that_is_not_the_environments_is_refused(model, tmp_path):
    with pytest.raises(RolloutError, match="prompt"):
        held(model, second_try, tmp_path, template="Say {prompt}")


def test_its_problems_are_written_by_a_command(model, capsys):
    for split, count, source in (("train", 10, "verifiers:hub_digits"), ("eval", 3, "verifiers:hub_digits:eval")):
        assert verifiers_hub.main(["hub_digits", "--model", str(model), "--split", split]) == 0
        lines = [verifiers_hub.json.loads(line) for line in capsys.readouterr().out.splitlines()]
        assert len(lines) == count and lines[2]["messages"] == [{"role": "user", "content": "2"}]
        assert {line["data_source"] for line in lines} == {source}
    assert verifiers_hub.main(["hub_digits", "--model", str(model), "--options", '{"kind": "group"}']) == 2
    assert "group" in capsys.readouterr().err
