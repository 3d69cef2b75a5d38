"""The three environments of examples/environments, turn by turn, with a right, a wrong and a hostile model."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import sandboxed

from megatron_daro.types import Prompt

sys.path.insert(0, str(Path(__file__).parents[3] / "examples" / "environments"))

import code_tests
import python_tool
import word_game


@pytest.fixture(scope="module", name="sandboxed")
def _sandboxed():
    sandboxed.require()


def prompt(answer, **fields):
    return Prompt("p", answer, "s", text="?", **fields)


def test_code_is_run_shown_and_the_answer_judged(sandboxed):
    tool = python_tool.PythonTool(max_calls=2)
    begun = tool.reset(prompt("42", alternatives=("43",)))
    called = tool.step(begun.state, "Let me see.\n```python\nprint(6 * 7)\n```")
    assert called.observation == "\n```output\n42\n```\n" and (called.tool_calls, called.tool_errors) == (1, 0)
    ended = tool.step(json.loads(json.dumps(called.state)), r"So it is \boxed{43}.")
    assert ended.done and ended.correct and ended.reason == "match"
    broken = tool.step(called.state, "```python\n1 / 0\n```")
    assert "ZeroDivisionError" in broken.observation and broken.tool_errors == 1
    assert tool.step(broken.state, "```python\nprint(1)\n```").done  # a third call is an answer, and none
    assert not tool.step(begun.state, r"\boxed{41}").correct


def test_a_tool_that_hangs_or_prints_for_ever_is_cut(sandboxed):
    tool = python_tool.PythonTool(limits={"wall_s": 4.0})
    state = tool.reset(prompt("1")).state
    assert "[ended: time]" in tool.step(state, "```python\nwhile True: pass\n```").observation
    long = tool.step(state, "```python\nwhile True: print('x' * 1000)\n```")
    assert "[ended: output]" in long.observation and len(long.observation) < 2100
    assert "Operation not permitted" in (
        tool.step(state, "```python\nimport socket\nsocket.create_connection(('1.1.1.1', 53), 1)\n```").observation
    )


@pytest.mark.parametrize(
    ("word", "guess", "expected"),
    [
        ("abcd", "abcd", "++++"),
        ("abcd", "dcba", "~~~~"),
        ("abca", "aaaa", "+--+"),
        ("abbc", "bbab", "~+~-"),
        ("abcd", "eeee", "----"),
        ("abcd", "ab", "----"),
    ],
)
def test_marks_of_a_guess(word, guess, expected):
    assert word_game.marks(word, guess) == expected


def test_a_word_is_guessed_with_a_reward_at_the_end():
    game = word_game.WordGame(guesses=3, early=0.1)
    state = game.reset(prompt("abcd")).state
    first = game.step(state, "my guess: abdc")
    assert first.observation == "\n++~~\n" and first.reward is None and not first.done
    solved = game.step(first.state, "abcd")
    assert solved.done and solved.correct and solved.reward == pytest.approx(1.1)
    lost = game.step(game.step(first.state, "x").state, "aaaa")
    assert lost.done and not lost.correct and lost.reward == 0.0
    assert word_game.problems(5) == word_game.problems(5) != word_game.problems(5, seed=1)


def test_functions_are_judged_by_calls(sandboxed):
    judge = code_tests.CodeTests(tries=2)
    (problem,) = code_tests.problems(1)
    gold = json.loads(problem["answer"])
    (x,), y = gold["cases"][0]
    slope, offset = (int(word.strip(".\n")) for word in problem["problem"].split() if word.strip(".\n").isdigit())
    state = judge.reset(prompt(problem["answer"])).state
    right = judge.step(state, f"```python\ndef f(x):\n    return {slope} * x + {offset}\n```")
    assert right.done and right.correct and right.reward == 1.0 and right.reason == "try_1"
    wrong = judge.step(state, "```python\ndef f(x):\n    return None\n```")
    assert wrong.observation == f"\nf({x}) gave null, not {y}\n" and not wrong.done
    half = judge.step(wrong.state, f"```python\ndef f(x):\n    return {y} if x == {x} else None\n```")
    assert half.done and not half.correct and half.reward == pytest.approx(1 / 8)


@pytest.mark.parametrize(
    "code",
    [
        "import sys\nsys.exit(0)",
        "print('results of the calls: [[true, 0]]')\nimport os\nos._exit(0)",
        "class Any:\n    __eq__ = lambda *_: True\n    __repr__ = lambda _: '1'\ndef f(x): return Any()",
        "def f(x): raise SystemExit",
        "def f(x):\n    import json\n    json.dumps = lambda *_, **__: '[[true], [true], 1, {}]'\n    return 0",
        "def f(x): return 10 ** 10 ** 10",
        "def f(",
    ],
)
def test_code_that_pretends_earns_nothing(sandboxed, code):
    judge = code_tests.CodeTests(tries=1, limits={"wall_s": 3.0, "cpu_s": 2})
    (problem,) = code_tests.problems(1)
    step = judge.step(judge.reset(prompt(problem["answer"])).state, f"```python\n{code}\n```")
    assert step.done and not step.correct and step.reward == 0.0 and step.tool_errors == 1
