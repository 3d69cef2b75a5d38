"""Functions that the model writes, judged by calls in a sandbox; what went wrong is shown, and it may try again.

    python examples/environments/code_tests.py 1000 > functions.jsonl

Results of calls are compared here, outside the sandbox: code that does not know a right answer cannot fake one.
"""

from __future__ import annotations

import json
import random
import sys
from typing import Any

from megatron_daro.environments import Step
from megatron_daro.sandbox import Isolation, Limits, Sandbox
from megatron_daro.types import Prompt

_MARK = "results of the calls: "
_CALLS = f"""
import json, sys
scope = {{"__name__": "solution"}}
exec(compile(open("solution.py").read(), "solution.py", "exec"), scope)
function, found = scope[sys.argv[1]], []
for arguments in json.loads(sys.argv[2]):
    try:
        found.append([True, function(*arguments)])
    except Exception as error:
        found.append([False, f"{{type(error).__name__}}: {{error}}"])
print({_MARK!r} + json.dumps(found, default=repr), flush=True)
"""


class CodeTests:
    """environment.kind: code_tests:CodeTests. The gold answer is JSON: `function`; `cases` of [arguments, result]."""

    def __init__(
        self,
        *,
        tries: int = 2,
        begin: str = "```python\n",
        end: str = "```",
        shown: str = "\n{wrong}\n",
        limits: dict[str, Any] | None = None,
        isolation: Isolation = "namespaces",
    ) -> None:
        """
        Args:
            tries: answers that are judged. begin, end: text around code. shown: text around what went wrong.
            limits: of `megatron_daro.sandbox.Limits`.

        Raises:
            SandboxError: this machine does not give the isolation.
        """
        self._tries, self._begin, self._end, self._shown = tries, begin, end, shown
        self._sandbox = Sandbox(Limits(**(limits or {})), isolation)
        self._sandbox.check()
        weak = "the code of the model can read and write the files of this machine (isolation limits)"
        self.notice = weak if isolation == "limits" else ""

    def reset(self, prompt: Prompt) -> Step:
        """Begin; the state is the cases and the tries so far."""
        return Step(state={**json.loads(prompt.answer), "tried": 0})

    def step(self, state: dict[str, Any], answer: str) -> Step:
        """Judge one try. A right one earns 1; the last one, if wrong, half its share of right calls."""
        wrong, share = self._judged(state, answer.rpartition(self._begin)[2].partition(self._end)[0])
        tried = state["tried"] + 1
        if not wrong:
            return Step(done=True, correct=True, reward=1.0, reason=f"try_{tried}", tool_calls=1)
        if tried == self._tries:
            return Step(done=True, reward=share / 2, reason="wrong", tool_calls=1, tool_errors=1)
        return Step(self._shown.format(wrong=wrong), {**state, "tried": tried}, tool_calls=1, tool_errors=1)

    def _judged(self, state: dict[str, Any], code: str) -> tuple[str, float]:
        """Return what went wrong first, empty if nothing did, and the share of right calls."""
        cases = state["cases"]
        arguments = [state["function"], json.dumps([case[0] for case in cases])]
        outcome = self._sandbox.run(_CALLS, files={"solution.py": code}, arguments=arguments)
        last = outcome.output.rstrip("\n").rpartition("\n")[2]
        try:
            found = json.loads(last.removeprefix(_MARK)) if last.startswith(_MARK) else []
            whole = [tuple(one) for one in found if len(one) == 2]
        except (ValueError, TypeError):
            whole = []
        if outcome.reason != "ok" or len(whole) != len(cases):
            said = last[-200:] if outcome.reason in ("ok", "error") else f"ended: {outcome.reason}"
            return said or "it ended before its results", 0.0
        right = [worked and result == case[1] for (worked, result), case in zip(whole, cases, strict=True)]
        if all(right):
            return "", 1.0
        first = right.index(False)
        call = f"{state['function']}({', '.join(map(json.dumps, cases[first][0]))})"
        said = f"{call} gave {json.dumps(whole[first][1])[:100]}, not {json.dumps(cases[first][1])}"
        return said, sum(right) / len(right)


def problems(count: int, seed: int = 0) -> list[dict[str, str]]:
    """Return functions of one number with four cases each, the same for a seed."""
    rng = random.Random(seed)
    made = []
    for i in range(count):
        factor, offset = rng.randint(2, 9), rng.randint(0, 9)
        cases = [[[x], factor * x + offset] for x in rng.sample(range(-20, 20), 4)]
        asked = f"Write a Python function f(x) that returns {factor} times x plus {offset}.\n"
        answer = json.dumps({"function": "f", "cases": cases})
        made.append({"id": f"code-{seed}-{i}", "problem": asked, "answer": answer})
    return made


if __name__ == "__main__":
    for problem in problems(int(sys.argv[1])):
        print(json.dumps(problem))
