"""A second try after a hint, held by `Conversations`. `wrong` breaks one thing.

For tests/tiny_task.py: the prompt is "d=", the right answer "####d". After a wrong first answer the model is shown "d="
once more; only the last answer counts.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from pathlib import Path

from megatron_daro.environments.environment import OutOfRoomError
from megatron_daro.types import Verdict


class SecondTry:
    """Right at the first try: reward 1; at the second: `late`."""

    failure_reasons, pool_restarts = (), 0

    def __init__(self, *, tokenizer, late=0.5, tries=2, wrong="", kill="") -> None:
        if wrong == "constructor":
            raise RuntimeError("no such game")
        self._tokenizer, self._late, self._tries, self._wrong = tokenizer, late, tries, wrong
        self._calls, self._kill = 0, Path(kill) if kill else None

    async def rollout(self, prompt, conversation):
        self._calls += 1
        if self._wrong and (odd := await self._broken(conversation)) is not None:
            return odd[0]
        hint = self._tokenizer.encode(prompt.text, add_special_tokens=False)
        for attempt in range(self._tries):
            answer = await conversation.generate(max_tokens=3)
            verdict = await conversation.verify(answer.text)
            if verdict.correct:
                return conversation.verdict(True, f"try_{attempt + 1}", self._late**attempt)
            if attempt + 1 < self._tries:
                if self._kill and self._calls > 30 and not self._kill.exists():  # once, after the first step
                    self._kill.touch()
                    os.kill(os.getpid(), signal.SIGKILL)
                conversation.observe(hint)
        return conversation.verdict(False, "no_match")

    async def close(self) -> None: ...

    async def _broken(self, conversation):
        """What is returned instead, in a list; None to go on."""
        wrong = self._wrong
        if wrong == "type":
            return [0.5]
        if wrong == "reward":
            return [Verdict(True, float("nan"), "match")]
        if wrong == "nothing_said":
            return [conversation.verdict(True, "match")]
        if wrong == "text":
            conversation.observe("d=")
        if wrong == "vocabulary":
            with contextlib.suppress(Exception):  # the run ends all the same
                conversation.observe([10**6])
        if wrong == "two_at_once":
            await asyncio.gather(conversation.generate(), conversation.generate(), return_exceptions=True)
        if wrong == "room":
            await conversation.generate(max_tokens=1)
            conversation.observe([3] * (conversation.room + 1))
        if wrong == "caught_room":
            await conversation.generate(max_tokens=1)
            try:
                conversation.observe([3] * (conversation.room + 1))
            except OutOfRoomError:
                return [conversation.verdict(False, "gave_up", -1.0)]
        if wrong == "raises" or (wrong == "sometimes" and self._calls % 5 == 0):
            await conversation.generate(max_tokens=1)
            raise ValueError("no such move")
        if wrong == "exits":
            raise SystemExit(3)
        if wrong == "hangs" or (wrong == "hangs_sometimes" and self._calls % 5 == 0):
            await asyncio.sleep(3600)
        if wrong == "blocks":
            time.sleep(20)
        if wrong == "ignores_cancel":
            while True:
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.sleep(3600)
        return None
