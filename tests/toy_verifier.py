"""A verifier of one's own, as docs/rewards.md says: a near miss earns half. `wrong` breaks one thing."""

from __future__ import annotations

import os
import time

from megatron_daro.types import Verdict


class LastDigit:
    """Right: the answer ends with the gold; half a reward: with its successor."""

    def __init__(self, *, near=0.5, wrong="") -> None:
        if wrong == "constructor":
            raise RuntimeError("no such table")
        self._near, self._wrong = near, wrong

    def verify(self, answer_text, gold, statement) -> Verdict:
        assert statement == f"{gold}="
        if self._wrong == "type":
            return self._near
        if self._wrong == "reward":
            return Verdict(True, float("nan"), "match")
        if self._wrong == "raises":
            raise ValueError("cannot judge")
        if self._wrong == "hangs":
            time.sleep(3600)
        if self._wrong == "exits":
            os._exit(1)
        if answer_text.endswith(gold):
            return Verdict(True, 1.0, "match")
        near = answer_text.endswith(str((int(gold) + 1) % 10))
        return Verdict(False, self._near if near else 0.0, "near" if near else "no_match")


class OtherSignature:
    """Its `verify` takes one argument too few."""

    def verify(self, answer_text, gold) -> Verdict: ...


class Asynchronous:
    """Its `verify` is a coroutine."""

    async def verify(self, answer_text, gold, statement) -> Verdict: ...
