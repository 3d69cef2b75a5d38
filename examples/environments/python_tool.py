"""Problems solved with a Python tool: code that the model writes is run in a sandbox, and it is shown what was printed.

An answer with a block of code is a call; one without is the final answer, which a verifier judges.
"""

from __future__ import annotations

from typing import Any

from megatron_daro.environments import Step
from megatron_daro.reward import build_verifier
from megatron_daro.sandbox import Isolation, Limits, Sandbox
from megatron_daro.types import Prompt


class PythonTool:
    """environment.kind: python_tool:PythonTool."""

    def __init__(
        self,
        *,
        verifier: str = "math",
        max_calls: int = 4,
        begin: str = "```python\n",
        end: str = "```",
        shown: str = "\n```output\n{output}\n```\n",
        role: str = "user",
        limits: dict[str, Any] | None = None,
        isolation: Isolation = "namespaces",
    ) -> None:
        """
        Args:
            verifier: of the final answer. max_calls: a later call is a final answer. begin, end: text around code.
            shown: text around what was printed. role: its role in a chat. limits: of `megatron_daro.sandbox.Limits`.
            isolation: "limits" lets the model's code read and write every file that you can.

        Raises:
            SandboxError: this machine does not give the isolation.
        """
        self._verifier, self._max_calls, self._role = build_verifier(verifier), max_calls, role
        self._begin, self._end, self._shown = begin, end, shown
        self._sandbox = Sandbox(Limits(**{"output_bytes": 2000, **(limits or {})}), isolation)
        self._sandbox.check()
        weak = "the code of the model can read and write the files of this machine (isolation limits)"
        self.notice = weak if isolation == "limits" else ""

    def reset(self, prompt: Prompt) -> Step:
        """Begin; the state is the right answers and the calls so far."""
        return Step(state={"golds": prompt.answers, "calls": 0})

    def step(self, state: dict[str, Any], answer: str) -> Step:
        """Run the code, or judge the answer."""
        code = self._code(answer)
        if code is not None and state["calls"] < self._max_calls:
            outcome = self._sandbox.run(code)
            ended = "" if outcome.reason in ("ok", "error") else f"\n[ended: {outcome.reason}]"
            text = self._shown.format(output=outcome.output.rstrip("\n") + ended)
            state = {**state, "calls": state["calls"] + 1}
            return Step(text, state, role=self._role, tool_calls=1, tool_errors=int(outcome.reason != "ok"))
        verdicts = [self._verifier.verify(answer, gold) for gold in state["golds"]]
        best = next((one for one in verdicts if one.correct), verdicts[0])
        return Step(done=True, correct=best.correct, reason=best.reason)

    def _code(self, answer: str) -> str | None:
        _, begun, rest = answer.rpartition(self._begin)
        code, closed, _ = rest.partition(self._end)
        return code if begun and closed else None
