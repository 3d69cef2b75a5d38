"""A small taskset of the package verifiers (0.4) with a harness of its own: a digit is to be repeated, and a wrong
answer is asked for once more.
"""

from __future__ import annotations

import verifiers.v1 as vf
from verifiers.v1.runtimes import ProgramResult


class DigitsData(vf.TaskData):
    """digit: what is to be repeated."""

    digit: str


class DigitsTask(vf.Task[DigitsData]):
    """Two rewards and a metric."""

    @vf.reward(weight=1.0)
    async def repeats(self, trace: vf.Trace) -> float:
        """Whether the last answer ends with the digit."""
        return float(trace.last_reply[-1:] == self.data.digit)

    @vf.reward(weight=0.0)
    async def turns(self, trace: vf.Trace) -> float:
        """One for each answer."""
        return float(trace.num_turns)


class DigitsConfig(vf.TasksetConfig):
    """endless: says that there are ever more."""

    endless: bool = False


class DigitsTaskset(vf.Taskset[DigitsTask, DigitsConfig]):
    """Ten digits."""

    @property
    def bounded(self) -> bool:
        """Whether they end."""
        return not self.config.endless

    def load(self):
        return [DigitsTask(DigitsData(prompt=str(i), digit=str(i)), self.config.task) for i in range(10)]


class DigitsHarness(vf.Harness[vf.HarnessConfig]):
    """A chat in this process."""

    EXECUTES_CODE = NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data, tool_interception_url=None):
        import httpx

        if data.digit == "7":
            raise RuntimeError("no seven")
        messages = [{"role": "user", "content": data.prompt}]
        async with httpx.AsyncClient(headers={"Authorization": f"Bearer {secret}"}, timeout=60) as client:
            for _ in range(2):
                body = {"model": ctx.model, "messages": messages, "max_tokens": 4}
                reply = await client.post(f"{endpoint}/chat/completions", json=body)
                reply.raise_for_status()
                said = reply.json()["choices"][0]["message"]
                messages += [
                    {"role": "assistant", "content": said["content"]},
                    {"role": "user", "content": data.prompt},
                ]
                if said["content"][-1:] == data.digit:
                    break
        return ProgramResult(exit_code=0, stdout="", stderr="")


__all__ = ["DigitsHarness", "DigitsTaskset"]
