"""What a chat template is given, and what it may do to a prompt: tool calls, a date, errors, problems left out."""

from __future__ import annotations

import datetime
import json

import pytest
from test_template import CHAT, chat_prompt, save_tokenizer, text_prompt

from megatron_daro.config.sections import EvalSet
from megatron_daro.data.containers import RowProblem
from megatron_daro.data.formats import parse_row
from megatron_daro.data.prompts import load_problems
from megatron_daro.data.stops import read_stops
from megatron_daro.data.templates import HeldOut
from megatron_daro.data.tokenizer import load_tokenizer, response_decoder, tokenize_prompts
from megatron_daro.errors import DataError

OPENS = CHAT.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")


def tokenizer_with(folder, chat):
    return load_tokenizer(save_tokenizer(folder, chat=chat), chat_template=True)


def text_of(prompt, tokenizer):
    return tokenizer.decode(prompt.tokens)


def test_a_template_reads_every_field_of_a_message(tmp_path):
    reads = CHAT.replace("{{ m['content'] }}", "{{ m['content'] }}{{ m.tool_calls }}{{ m.reasoning_content }}")
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": {"a": 0.5}}}
    chat = [
        {"role": "user", "content": "1+1?", "name": None},
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "I add"},
        {"role": "tool", "content": "2", "tool_call_id": "1"},
        {"role": "user", "content": "and 2+2?", "tool_calls": None},
    ]
    (tmp_path / "data.jsonl").write_text(json.dumps({"prompt": chat, "answer": "4"}))
    prompts, _ = load_problems([tmp_path / "data.jsonl"])
    tokenizer = tokenizer_with(tmp_path / "model", reads)
    kept, _ = tokenize_prompts(prompts, tokenizer)
    assert str([call]) in text_of(kept[0], tokenizer) and "I add" in text_of(kept[0], tokenizer)


@pytest.mark.parametrize(
    ("field", "offered"),
    [
        ("tools", [{"type": "function"}]),
        ("functions", [{"name": "add"}]),
        ("documents", [{"title": "a", "text": "b"}]),
        ("chat_template_kwargs", {"enable_thinking": False}),
    ],
)
def test_rows_that_offer_a_template_more_than_messages_are_dropped_by_name(field, offered):
    row = {"prompt": [{"role": "user", "content": "1+1?"}], "answer": "2"}
    problem = parse_row({**row, field: offered})
    assert isinstance(problem, RowProblem) and field in problem.reason
    for nothing in (None, "", type(offered)(), {"enable_thinking": None}):
        assert not isinstance(parse_row({**row, field: nothing}), RowProblem)


@pytest.mark.parametrize(
    "call",
    [
        "{{ strftime_now('%d %b %Y') }}",
        '{{ strftime_now( "%d %b %Y" ) }}',
        '{{ strftime_now ("%d %b %Y",) }}',
        '{{ strftime_now(format="%d %b %Y") }}',
        '{{ strftime_now("%d " ~ "%b %Y") }}',
        '{% set f = "%d %b %Y" %}{{ strftime_now(f) }}',
        '{% set now = strftime_now %}{{ now("%d %b %Y") }}',
        '{% macro today() %}{{ strftime_now("%d %b %Y") }}{% endmacro %}{{ today() }}',
    ],
)
def test_today_is_the_day_that_a_run_names(tmp_path, call):
    dated = f"{{% if strftime_now is defined %}}{call}{{% endif %}}" + CHAT
    folder = save_tokenizer(tmp_path, chat=dated)
    tokenizer = load_tokenizer(folder, chat_template=True, date=datetime.date(2024, 7, 26))
    kept, _ = tokenize_prompts([text_prompt("1+1?")], tokenizer)
    assert text_of(kept[0], tokenizer).startswith("26 Jul 2024")


def test_a_day_is_written_in_every_format_and_the_template_stays_as_it_is(tmp_path):
    day = datetime.date(2024, 7, 6)
    form = "%%d%%%d|%-d %e %H:%M %A %j %Q %"
    template = "\n  {% if true %}\n x\n  {% endif %}{{ strftime_now('" + form + "') }}" + CHAT
    tokenizer = load_tokenizer(save_tokenizer(tmp_path, chat=template), chat_template=True, date=day)
    kept, _ = tokenize_prompts([text_prompt("1+1?")], tokenizer)
    assert text_of(kept[0], tokenizer).startswith("\n x\n" + day.strftime(form) + "<|im_start|>user\n1+1?")


@pytest.mark.parametrize("in_files", [False, True])
def test_each_of_several_templates_takes_that_day_for_today(tmp_path, in_files):
    texts = {"default": "{{ strftime_now('%Y') }}" + CHAT, "tool_use": "{{ strftime_now('%m') }}" + CHAT}
    folder = save_tokenizer(tmp_path, chat=None if in_files else [{"name": n, "template": t} for n, t in texts.items()])
    if in_files:
        (folder / "chat_template.jinja").write_text(texts["default"])
        (folder / "additional_chat_templates").mkdir()
        (folder / "additional_chat_templates" / "tool_use.jinja").write_text(texts["tool_use"])
    tokenizer = load_tokenizer(folder, chat_template=True, date=datetime.date(2020, 1, 2))
    chat = [{"role": "user", "content": "1+1?"}]
    assert tokenizer.apply_chat_template(chat, tokenize=False).startswith("2020<")
    assert tokenizer.apply_chat_template(chat, tools=[{"type": "function"}], tokenize=False).startswith("01<")


@pytest.mark.parametrize(
    "fault", ["1 + 'a'", "1 // 0", "range(10 ** 9)", "'x'.foo()", "raise_exception('no system role')"]
)
def test_a_prompt_at_which_the_template_fails_is_dropped_and_counted(tmp_path, fault):
    faulty = f"{{% if messages[0]['role'] == 'system' %}}{{{{ {fault} }}}}{{% endif %}}" + CHAT
    tokenizer = tokenizer_with(tmp_path, faulty)
    kept, report = tokenize_prompts([text_prompt("1+1?"), chat_prompt("Be short.", "2+2?")], tokenizer)
    assert [prompt.text for prompt in kept] == ["1+1?"] and list(report.dropped.values()) == [["chat"]]


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{% for part in m['content'] %}{{ part.text }}{% endfor %}{% endfor %}Answer:",
        "{% for m in messages if m['role'] == 'human' %}{{ m['content'] }}{% endfor %}Answer:",
        *(
            CHAT.replace("m['content']", f"m['content']{cut}")
            for cut in (
                *(f".split({at!r})[{part}]" for at in (" ", "\n", "\n\n", ". ", "</think>") for part in (0, -1)),
                *("[:24]", "[24:]", "[-24:]", "[:2000]", "|truncate(40)", "|e", "|lower", "|replace('\n', ' ')"),
            )
        ),
    ],
)
def test_a_template_that_leaves_the_problem_or_some_of_it_out_is_refused(tmp_path, template):
    with pytest.raises(DataError, match="prompt_template") as refused:
        tokenize_prompts([text_prompt("1+1?")], tokenizer_with(tmp_path, template))
    assert "max_prompt_tokens" not in str(refused.value) and str(tmp_path) in str(refused.value)


@pytest.mark.parametrize("trimmed", ["m['content']|trim", "m['content'].strip()", "m['content'].rstrip() ~ '\n'"])
def test_a_template_may_trim_white_space_around_a_problem(tmp_path, trimmed):
    tokenizer = tokenizer_with(tmp_path, CHAT.replace("m['content']", trimmed))
    assert tokenize_prompts([text_prompt("1+1?")], tokenizer)[1].kept == 1


def test_a_prompt_of_megabytes_is_not_tokenized(tmp_path, monkeypatch):
    tokenizer = tokenizer_with(tmp_path, CHAT)
    longest = max(len(token) for token in tokenizer.get_vocab()) * 64
    seen = []
    monkeypatch.setattr(
        type(tokenizer),
        "__call__",
        lambda self, texts, **options: seen.extend(texts) or {"input_ids": [[1]] * len(texts)},
    )
    kept, report = tokenize_prompts([text_prompt("1+1?"), text_prompt("x" * longest)], tokenizer, max_prompt_tokens=64)
    assert len(kept) == len(seen) == 1 and len(next(iter(report.dropped.values()))) == 1


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (r"\boxed{1} then \boxed{2", None),
        (r"\boxed{1}, so \boxed 42.", "42"),
        (r"\boxed{1}, \fbox {\frac{a}{b}}", r"\frac{a}{b}"),
        (r"\boxed{\{1\}}", r"\{1\}"),
        ("\\boxed{" * 100_000, None),
        ("} \\boxed{" * 100_000 + "5}", "5"),
    ],
    ids=["cut off", "without braces", "nested", "escaped", "never closed", "closed once"],
)
def test_the_gold_of_a_solution_is_its_last_box(text, content):
    row = parse_row({"problem": "1+1?", "solution": text})
    assert "no answer" in row.reason if content is None else row.answers == (content,)


@pytest.mark.parametrize(("text", "content"), [("42", "42"), (r"so \boxed{7}", "7")])
def test_a_solution_that_was_named_may_be_the_plain_answer(text, content):
    row = parse_row({"problem": "1+1?", "answer": "1", "solution": text}, answer_field="solution")
    assert row.answers == (content,)


@pytest.mark.parametrize(("template", "opens"), [(CHAT, False), (OPENS, True)])
def test_a_response_of_a_prompt_that_opens_thinking_is_read_with_it(tmp_path, template, opens):
    kept, report = tokenize_prompts([text_prompt("1+1?")], tokenizer_with(tmp_path, template))
    held_out = HeldOut(EvalSet(name="a", path=tmp_path), tuple(kept), opens_thinking=report.opens_thinking)
    assert report.opens_thinking is opens
    assert held_out.verified_text(r"so \boxed{2}") == ("<think>" if opens else "") + r"so \boxed{2}"


def test_special_tokens_that_are_tags_of_thinking_stay_in_the_text(tmp_path):
    tokenizer = tokenizer_with(tmp_path, CHAT)
    end = tokenizer.all_special_ids[0]
    tokenizer.add_special_tokens({"additional_special_tokens": ["[THINK]", "[/THINK]"]})
    ids = [*tokenizer.encode("[THINK]so[/THINK]5", add_special_tokens=False), end]
    assert "".join(response_decoder(tokenizer)(ids).split()) == "[THINK]so[/THINK]5"
    assert read_stops(tokenizer, stop=["[/THINK] b"]).texts == ("[/THINK] b",)
