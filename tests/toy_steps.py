"""Environments with `reset` and `step`, for the tests of worker processes. `wrong` breaks one thing."""

from __future__ import annotations

import os
import signal
import time

from megatron_daro.environments import Step
from megatron_daro.sandbox import Limits, Sandbox


class Steps:
    """The model must say the gold digit; after each wrong answer it is shown the prompt again, `tries` times."""

    def __init__(self, *, tries=3, wrong="", when="2", notice="", named=False, step_s=0.0) -> None:
        self.notice, self._step_s = notice, step_s
        if wrong == "constructor":
            raise RuntimeError("no such game")
        self._tries, self._wrong, self._when, self._leak, self._named = tries, wrong, when, [], named

    def reset(self, prompt):
        if self._wrong == "first":
            return Step(observation=prompt.text, state=[prompt.answer, 0])
        return Step(state=[prompt.answer, prompt.text, 0])

    def step(self, state, answer):
        gold, text, tries = state
        time.sleep(self._step_s)
        if self._wrong and self._when in answer:
            odd = self._break()
            if odd is not None:
                return odd
        if self._named:
            rewards = {"right": float(answer[-1:] == gold), "length": len(answer)}
            done = answer[-1:] == gold or tries + 1 == self._tries
            return Step(text, [gold, text, tries + 1], done=done, correct=answer[-1:] == gold, rewards=rewards)
        if answer[-1:] == gold:
            return Step(done=True, correct=True, reason=f"try_{tries + 1}", tool_calls=1)
        done = tries + 1 == self._tries
        return Step(text, [gold, text, tries + 1], done=done, reward=-0.25, tool_calls=1, tool_errors=1)

    def _break(self):
        if self._wrong == "raises":
            raise ValueError("no such move")
        if self._wrong == "hangs":
            time.sleep(100)
        if self._wrong == "leaks":
            self._leak.append(b"x" * (400 << 20))
        if self._wrong == "leaks_below" and os.fork() == 0:
            held = b"x" * (400 << 20)
            time.sleep(100)
            os._exit(len(held))
        if self._wrong == "leaks_below":
            time.sleep(5)
        if self._wrong == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        if self._wrong == "exits":
            os._exit(3)
        if self._wrong == "forks":
            os.fork()
        if self._wrong == "leaves_a_process" and os.fork() == 0:
            os.setsid()
            time.sleep(100)
            os._exit(0)
        if self._wrong == "prints":
            print('{"reason": "ok"}' * 1000, flush=True)
        if self._wrong == "type":
            return {"observation": "x"}
        if self._wrong == "state":
            return Step("x", state=object())
        if self._wrong == "reward":
            return Step("x", reward=float("nan"))
        if self._wrong == "rewards":
            return Step("x", rewards={"right": "much"})
        if self._wrong == "reward_name":
            return Step("x", [*"9x", 0], rewards={"right/wrong": 1.0})
        if self._wrong == "reason":
            return Step("x", done=True, reason="y" * 41)
        return None


class NoReset:
    """It cannot begin."""

    def step(self, state, answer): ...


class SlowTool:
    """Its only step runs code in a sandbox that takes a second; right is an answer after which it printed 42."""

    def __init__(self) -> None:
        self._sandbox = Sandbox(Limits(wall_s=20.0))

    def reset(self, prompt):
        return Step()

    def step(self, state, answer):
        outcome = self._sandbox.run("import time\ntime.sleep(1)\nprint(6 * 7)")
        return Step(done=True, correct=outcome.output == "42\n", reason=outcome.reason)
