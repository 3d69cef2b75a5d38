"""What an evaluation refuses before anything starts, and what it keeps of the day on which it began."""

from __future__ import annotations

import datetime
import json
from types import SimpleNamespace

import pytest
from weightless import save_tiny_model

from megatron_daro import cli
from megatron_daro.config.sections import SGLangSection
from megatron_daro.errors import ConfigError, EngineError
from megatron_daro.workshop.evaluate import identity, measuring
from megatron_daro.workshop.evaluate.measuring import ask_all


def test_servers_that_wait_for_blocks_are_refused():
    """They would be left with random weights: an evaluation sends none."""
    engine = SimpleNamespace(sglang=SGLangSection(fp8_blocks=True))
    plan = SimpleNamespace(config=SimpleNamespace(engine=engine))
    with pytest.raises(ConfigError, match=r"engine\.sglang\.fp8_blocks: got true"):
        ask_all(plan, notices=None)


def test_an_evaluation_that_goes_on_after_midnight_asks_as_on_its_first_day(tmp_path, monkeypatch, capsys):
    model, problems, out = save_tiny_model(tmp_path / "base"), tmp_path / "mine.jsonl", tmp_path / "out"
    problems.write_text('{"problem": "1=", "answer": "1"}\n')
    options = {"chat_template": "{{ strftime_now('%d') }}{% for m in messages %}{{ m['content'] }}{% endfor %}"}
    settings = model / "tokenizer_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | options))
    asked = []

    def no_cluster(*given, **options):
        raise EngineError("no engine today")

    def questions_of(sets, **options):
        asked.append([prompt.tokens for one in sets for prompt in one.prompts])
        return real(sets, **options)

    real = measuring.questions_of
    monkeypatch.setattr(measuring, "cluster", no_cluster)
    monkeypatch.setattr(measuring, "questions_of", questions_of)
    command = ["eval", "--hf", str(model), "--set", f"mine={problems}", "--template", "chat", "--out", str(out)]
    for day in (26, 27):
        today = type("Day", (datetime.date,), {"today": classmethod(lambda cls, day=day: cls(2024, 7, day))})
        monkeypatch.setattr(identity, "datetime", SimpleNamespace(date=today))
        assert cli.main(command) == cli.EXIT_ERROR and "no engine today" in capsys.readouterr().err
    assert cli.main([*command[:-1], str(tmp_path / "another")]) == cli.EXIT_ERROR
    first, second, of_another = asked
    assert first == second != of_another
    assert cli.main([*command, "data.template_date=2024-07-27"]) == cli.EXIT_ERROR
    assert "template_date was" in capsys.readouterr().err


def test_answers_that_repeat_themselves_end_as_the_configuration_says(tmp_path, monkeypatch, capsys):
    model, problems = save_tiny_model(tmp_path / "base"), tmp_path / "mine.jsonl"
    problems.write_text('{"problem": "1=", "answer": "1"}\n')
    asked = []

    def ask(plan, tokenizer, questions, notices):
        asked.extend(question.sampling.repetition for question in questions)
        raise EngineError("no engine today")

    monkeypatch.setattr(measuring, "_ask_until_whole", ask)
    command = ["eval", "--hf", str(model), "--set", f"mine={problems}", "--template", "none"]
    command += ["--out", str(tmp_path / "out")]
    assert cli.main([*command, "rollout.repetition.tokens=16"]) == cli.EXIT_ERROR and asked == [(16, 8)]
    assert cli.main(command) == cli.EXIT_ERROR
    assert "repetition was [16, 8], is null" in capsys.readouterr().err and len(asked) == 1
