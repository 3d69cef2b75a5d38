"""What a class with `reset` and `step` offers, and the `Step` that both return.

Imports nothing but Python's own at run time: the program of every worker imports it with the package.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from megatron_daro.types import Prompt


@dataclass(frozen=True, slots=True)
class Step:
    """What an environment says after an answer of the model.

    observation: text that the model is shown; that of `reset` follows the prompt, where a chat template leaves no place
    for one. state: a JSON value, which the next `step` gets back. done: whether the conversation ends here. correct:
    with `done`, whether the task is solved; decides the pass rate. reward: of this step; those of all steps add up; if
    there are none, `correct` decides. rewards: further ones by name, each times its factor of
    environment.reward_weights. reason: a short word, for the last step. role: of the observation in a chat template.
    tool_calls, tool_errors: how many tools the answer called, and how many calls failed; they become metrics.
    """

    observation: str = ""
    state: object = None
    done: bool = False
    correct: bool = False
    reward: float | None = None
    reason: str = ""
    role: str = "user"
    tool_calls: int = 0
    tool_errors: int = 0
    rewards: Mapping[str, float] = field(default_factory=dict)


class StepEnvironment(Protocol):
    """What the class must offer. Its constructor takes the keyword arguments of `environment.options`.

    An attribute `notice` that is a text is shown to the person who started the run, once. One object is made in each
    worker process. It must keep nothing that matters between two calls: the next one may go to another object, and the
    same call may come again after a crash.
    """

    def reset(self, prompt: Prompt, /) -> Step:
        """Begin a conversation. The `Step` has its state; the model is shown the prompt in any case."""
        ...

    def step(self, state: object, answer: str, /) -> Step:
        """Go on after an answer. What it raises costs the conversation.

        The answer's text is without special tokens, and begins with the <think> that the model read before it, if there
        was one.
        """
        ...
