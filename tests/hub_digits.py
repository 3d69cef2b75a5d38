"""A small environment of the package verifiers: a digit is to be repeated, and a wrong answer is asked for once more.

`kind` chooses what tests want to see: several turns, a tool, or something that is not served.
"""

from __future__ import annotations

import asyncio

import verifiers as vf


class Digits(vf.MultiTurnEnv):
    """After a wrong answer the digit is shown again."""

    def __init__(self, *, wrong: str = "", **options) -> None:
        super().__init__(**options)
        self._wrong = wrong

    async def env_response(self, messages, state, **_):
        if self._wrong == "raises" and state["answer"] == "2":
            raise vf.InfraError("no such place")
        if self._wrong == "hangs" and state["answer"] == "2":
            await asyncio.sleep(3600)
        if self._wrong == "image":
            return [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]
        if self._wrong == "system":
            return [vf.SystemMessage(content="go on")]
        if messages[-1].content[-1:] == state["answer"]:
            state["final_env_response"] = []
            return []
        return [vf.UserMessage(content=state["answer"])]

    async def get_prompt_messages(self, state):
        messages = await super().get_prompt_messages(state)
        if self._wrong == "edits" and len(messages) > 2:
            return [vf.UserMessage(content="another"), *messages[1:]]
        return messages[2:] if self._wrong == "rewrites" and len(messages) > 2 else messages

    async def get_model_response(self, state, prompt, **options):
        if self._wrong == "sampling":
            options["sampling_args"] = {"temperature": 0.5}
        if self._wrong == "twice":
            await asyncio.gather(*(super(Digits, self).get_model_response(state, prompt) for _ in range(2)))
        return await super().get_model_response(state, prompt, **options)

    async def add_trajectory_step(self, state, trajectory_step):
        if self._wrong == "step_reward":
            trajectory_step["reward"] = 1.0
        await super().add_trajectory_step(state, trajectory_step)


def repeats(completion, answer) -> float:
    """Whether the last answer ends with the digit."""
    said = [message.content for message in completion if message.role == "assistant"]
    return float(said[-1][-1:] == answer)


def brief(completion) -> float:
    """One for each answer; has no weight."""
    return float(sum(message.role == "assistant" for message in completion))


def of_all(completions, answers) -> list[float]:
    """Rewards of a whole group."""
    return [0.0 for _ in completions]


async def add(a: int, b: int) -> int:
    """Return the sum.

    Args:
        a: one number.
        b: another.
    """
    if b > 8:
        raise ValueError("too large")
    return a + b


def load_environment(kind: str = "turns", wrong: str = "", problems: int = 10, **options):
    """What verifiers calls."""
    from datasets import Dataset

    rows = [{"question": str(d % 10), "answer": str(d % 10)} for d in range(problems)]
    made = {"dataset": Dataset.from_list(rows), "eval_dataset": Dataset.from_list(rows[:3]), **options}
    if kind == "tool":
        rows = [{"question": f"{d}+{d}", "answer": str(2 * d)} for d in range(1, 4)]
        rubric = vf.Rubric(funcs=[repeats, brief], weights=[1.0, 0.0])
        return vf.ToolEnv(tools=[add], dataset=Dataset.from_list(rows), rubric=rubric, max_turns=3)
    if kind == "group":
        return vf.SingleTurnEnv(rubric=vf.Rubric(funcs=[of_all]), **made)
    rubric = vf.Rubric(funcs=[repeats, brief], weights=[1.0, 0.0])
    if kind == "single":
        return vf.SingleTurnEnv(rubric=rubric, **made)
    return Digits(rubric=rubric, max_turns=3, wrong=wrong, **made)
