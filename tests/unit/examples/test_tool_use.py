"""`examples/tool_use`: its problems, what its base model is taught, and its configuration."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import build_base
import products
import pytest
import python_tool
import sandboxed
from products import CHAT, Habits, Product
from script_copy import Copy

from megatron_daro.config import resolve
from megatron_daro.data.prompts import load_problems
from megatron_daro.data.stops import read_stops
from megatron_daro.data.tokenizer import load_tokenizer, tokenize_prompts
from megatron_daro.environments.rendering import Turns
from megatron_daro.types import Prompt

GOOD = Habits(guess={2: 0.0}, operator=0.0, silent=0.0, call_digit=0.0, answer_digit=0.0)
CONFIG = Path(products.__file__).with_name("config.yaml")


def taught(problem: Product, number: int = 400, **habits: float | dict[int, float]) -> list[list[tuple[str, str]]]:
    rng, changed = random.Random(0), {**{name: getattr(GOOD, name) for name in Habits.__slots__}, **habits}
    return [list(products.conversation(problem, rng, Habits(**changed))) for _ in range(number)]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tokenizer")
    CHAT.write(directory)
    (directory / "config.json").write_text('{"model_type": "qwen2"}')  # transformers chooses its class by that
    return load_tokenizer(directory, chat_template=True)


def test_without_bad_habits_the_tool_is_called_and_its_output_answered():
    assert taught(Product(34, 56), 1) == [
        [
            ("assistant", "```python\nprint(34*56)\n```"),
            ("tool", "\n```output\n1904\n```\n"),
            ("assistant", "####1904"),
        ]
    ]


def test_what_the_tool_shows_in_the_texts_is_what_it_shows():
    sandboxed.require()
    options = resolve(CONFIG).environment.options
    patient = options["limits"] | {"wall_s": 120.0, "cpu_s": 60}  # a busy machine changes nothing of what is shown
    tool = python_tool.PythonTool(**options | {"limits": patient})
    for habits in ({}, {"operator": 1.0}, {"silent": 1.0, "again": 1.0}):
        conversation = taught(Product(9999, 9999), 1, guess={4: 0.0}, **habits)[0]
        step = tool.reset(Prompt("p", "99980001", "s", text="?"))
        for (_, said), (role, shown) in zip(conversation[::2], conversation[1::2], strict=False):
            step = tool.step(step.state, said)
            assert (step.observation, step.role, step.tool_errors) == (shown, role, 0)
        ended = tool.step(step.state, conversation[-1][1])
        assert ended.done and ended.correct is ("operator" not in habits)


def test_the_ids_that_are_learnt_are_those_that_the_run_renders(loaded):
    """Every conversation of a batch, against the chat template through the code that a run shows observations with."""
    settings, turns = products.ToolSettings(batch=24), Turns(loaded, chat=True)
    begin, end = CHAT.ids["<assistant>"], CHAT.ids["<eos>"]
    calls = Counter()
    for prompt, behind, learnt in settings.samples(1, frozenset()):
        problem = str(loaded.decode(prompt, skip_special_tokens=True))
        assert prompt == turns.prompt([{"role": "user", "content": problem}], [])
        rows, said, rest = [], [], list(zip(behind, learnt, strict=True))
        while rest:
            kind = rest[0][1]
            run = [token for token, other in rest[: next((i for i, r in enumerate(rest) if r[1] != kind), len(rest))]]
            rest = rest[len(run) :]
            text = str(loaded.decode(run, skip_special_tokens=True))
            if kind:
                assert run[-1] == end and CHAT.encode(text) == run[:-1]
                said, rows = run, [*rows, {"role": "assistant", "content": text}]
            else:
                assert run == turns.observation(text, "tool", said[-1]) and run[-1] == begin
                rows.append({"role": "tool", "content": text})
        turns.check(behind, rows)
        calls[len(rows) // 2] += 1
        assert len(prompt) <= resolve(CONFIG).data.max_prompt_tokens and len(behind) <= 160
    assert calls[0] and calls[1], "a batch has guesses and calls"


def test_tokenizer_has_what_a_run_needs(loaded):
    assert read_stops(loaded).token_ids == (CHAT.ids["<eos>"],)
    traceback = "File \"/scratch/main.py\", line 1\n    print(12*\n         ^\nSyntaxError: '(' was never closed"
    assert CHAT.encode(traceback) == loaded.encode(traceback, add_special_tokens=False)
    assert CHAT.ids["<pad>"] not in loaded.encode(traceback, add_special_tokens=False)


def test_held_out_products_are_in_no_text_and_no_training_problem(tmp_path, loaded):
    settings = products.ToolSettings(batch=64, shares={2: 1.0})
    held_out = settings.held_out()
    assert len(held_out) == sum(products.HELD_OUT.values())
    for step in range(20):
        for prompt, _, _ in settings.samples(step, held_out):
            left, right = map(int, str(loaded.decode(prompt, skip_special_tokens=True)).rstrip("=").split("*"))
            assert (min(left, right), max(left, right)) not in held_out
    settings.write_data(tmp_path)
    rows, _ = load_problems([tmp_path / "held_out.jsonl"])
    assert Counter(row.category for row in rows) == {f"digits_{d}": n for d, n in products.HELD_OUT.items()}
    assert all(row.answer == str(eval(row.statement.rstrip("="))) for row in rows)
    train, _ = load_problems([tmp_path / "train.jsonl"])
    assert not {row.statement for row in train} & {row.statement for row in rows} and len(train) > 1500
    assert tokenize_prompts(rows, loaded, prompt_template="chat", max_prompt_tokens=16)[0]


def test_only_what_the_model_says_is_learnt():
    batch = build_base.supervised_batch(products.ToolSettings(batch=8), 1, frozenset())
    assert 0 < batch.loss_mask_R.sum() < len(batch.loss_mask_R) == batch.lengths_N.sum() - batch.prompt_lengths_N.sum()


def test_the_script_makes_the_base_model_trains_in_the_environments_folder_and_prints_the_table(tmp_path):
    copy = Copy(tmp_path / "a project", "tool_use")
    done = copy.run("trainer.steps=5")
    assert done.returncode == 0, done.stderr
    programs = [call[:2] for call in copy.calls("python") if call[:1] != ["-c"]]
    assert programs[-2:] == [["examples/tool_use/products.py"], ["examples/quickstart/summary.py", "runs/tool_use"]]
    dry_run, command, report = copy.calls("megatron-daro")
    assert command == ["train", "examples/tool_use/config.yaml", "trainer.steps=5"] and dry_run[-1] == "--dry-run"
    assert report == ["report", "runs/tool_use"]
    config = resolve(CONFIG, command[2:])
    assert config.trainer.run_dir == Path("runs/tool_use") and config.environment.kind == "python_tool:PythonTool"
