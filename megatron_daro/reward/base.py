"""What a verifier is, and how one is named.

Rollout text and gold answer -> Verdict. Model answers are data here: algebra and verifiers of one's own run in limited
worker processes only, and what is linear in the text in the calling one. Refuses unknown verifier names and empty
markers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from megatron_daro.errors import ConfigError, RewardError
from megatron_daro.options import Option, unknown_option, wrong_option
from megatron_daro.thinking import behind_thinking
from megatron_daro.types import Verdict

if TYPE_CHECKING:
    from megatron_daro.config.sections import RewardSection  # the workers do without pydantic

_COMMON = {
    "strict": Option(
        bool,
        True,
        "accept only the expected form (box, Answer line, marker); off: also a trailing number (integer: or the last "
        "box; exact: all the text).",
    ),
    "after_thinking": Option(
        bool,
        True,
        "only what follows the last </think>, or other models' tag for it, counts as the answer, and nothing where "
        "thinking did not end; off: the whole response is read.",
    ),
}
OPTIONS: Mapping[str, Mapping[str, Option]] = {
    "math": _COMMON,
    "integer": _COMMON,
    "exact": _COMMON | {"marker": Option(str, "####", "the text before the answer, not empty.")},
}
"""What `reward.options` may hold, by verifier; fields of VerifierSpec."""


MOST_REASON = 40
"""Most characters of a verdict's reason."""


def verdict_fault(verdict: object) -> tuple[str, str] | None:
    """Return what is wrong with the verdict of a user's code: what was got, and what is allowed. None: it is usable."""
    if not isinstance(verdict, Verdict):
        return f"a {type(verdict).__name__}", "megatron_daro.types.Verdict"
    if not isinstance(verdict.correct, bool):
        return f"correct {verdict.correct!r:.80}", "True or False"
    number = isinstance(verdict.reward, int | float) and not isinstance(verdict.reward, bool)
    if not number or not math.isfinite(verdict.reward):
        return f"reward {verdict.reward!r:.80}", "a finite number"
    if not isinstance(verdict.reason, str) or not 1 <= len(verdict.reason) <= MOST_REASON:
        return f"reason {verdict.reason!r:.80}", f"a word of 1 to {MOST_REASON} characters"
    return None


class Verifier(Protocol):
    """What the class of `reward.verifier: module:Class` must offer.

    Its constructor takes the keyword arguments of `reward.options`. One object is made in each worker process, on every
    node. Verdicts must depend on the arguments alone: equal answers of a group are verified once.
    """

    def verify(self, answer_text: str, gold: str, statement: str, /) -> Verdict:
        """Judge one answer. What it raises costs this one verdict (`verifier_failed`; RecursionError: `too_complex`;
        MemoryError: `memory`), but a RewardError ends the run.

        Args:
            answer_text: the response, with the <think> that its prompt ended with; with a tagged template what the tags
                hold, in a box. gold: one right answer. statement: the problem's own text.

        Returns: `correct` decides the pass rate; `reward`, any finite number, the advantage; `reason` a short word.
        """
        ...


@dataclass(frozen=True, slots=True)
class Job:
    """The part of a comparison that may be slow: the extracted answer and the gold, both as they were written, and the
    problem's own text where the verifier reads it."""

    answer: str
    gold: str
    statement: str = ""


@dataclass(frozen=True, slots=True)
class ScreenLimits:
    """What an extracted answer may contain before it is refused unparsed.

    max_chars: length of the extracted answer. max_nesting: braces of all kinds. max_round_nesting: round and square
    brackets (the grammar's time doubles with each). max_exponent: value of a numeric exponent. max_factorial:
    argument of n! and of binomials. max_digits: of one number. max_tower: how deep powers stand in exponents,
    2 in x^{y^{z^{2}}}.
    """

    max_chars: int = 1000
    max_nesting: int = 24
    max_round_nesting: int = 8
    max_exponent: int = 10_000
    max_factorial: int = 2_000
    max_digits: int = 300
    max_tower: int = 2


@dataclass(frozen=True, slots=True)
class VerifierSpec:
    """Everything that decides a verdict; plain data, so that it can be sent to a worker process.

    name: a key of OPTIONS, or module:Class. strict: accept only the agreed answer form (math: `\\boxed`; integer:
    `Answer:` line; exact: the marker). marker: what stands before the answer, `exact` only. limits: `math` only.
    after_thinking: only what follows the thinking is an answer. options: keyword arguments of the constructor,
    module:Class only (`reward.options` of the others are fields here).
    """

    name: str = "math"
    strict: bool = True
    correct_reward: float = 1.0
    incorrect_reward: float = 0.0
    marker: str = "####"
    limits: ScreenLimits = field(default_factory=ScreenLimits)
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)
    after_thinking: bool = True

    @classmethod
    def of_section(cls, section: RewardSection) -> VerifierSpec:
        """Return the verifier of the configuration. Raises ConfigError: an option that it does not take."""
        rewards: dict[str, Any] = {
            "correct_reward": section.correct_reward,
            "incorrect_reward": section.incorrect_reward,
        }
        if section.is_own:
            return cls(section.verifier, **rewards, options=section.options)
        known = OPTIONS[section.verifier]
        unknown = [unknown_option(name, known) for name in section.options if name not in known]
        wrong = unknown[0] if unknown else wrong_option(known, section.options)
        if wrong:
            raise ConfigError(f"reward.options.{wrong}; fix: correct or remove it")
        return cls(section.verifier, **rewards, **section.options)

    @property
    def is_own(self) -> bool:
        """Whether `name` is module:Class."""
        return ":" in self.name

    def __post_init__(self) -> None:
        if self.name not in OPTIONS and not self.is_own:
            raise RewardError(
                f"reward.verifier: got {self.name!r}, allowed {', '.join(OPTIONS)}, or module:Class of your own; "
                "write one of these"
            )
        if not self.marker:
            raise RewardError(
                "reward.options.marker: got an empty string, allowed any non-empty text such as '####'; fix: set one"
            )

    def answer_part(self, text: str) -> str:
        """Return the part of a response that may hold its answer.

        With `after_thinking` that is what follows the last `</think>` (or other tag of THINKING_TAGS), nothing if
        thinking was begun and did not end, and all of a response without these tags.
        """
        return behind_thinking(text) if self.after_thinking else text

    def verdict(self, correct: bool, reason: str) -> Verdict:
        """Return the verdict of that outcome with this spec's rewards."""
        return Verdict(correct, self.correct_reward if correct else self.incorrect_reward, reason)


def check_text(spec: VerifierSpec, answer_text: object, gold: object) -> Verdict | None:
    """Refuse what is not text, before any verifier looks at it.

    Returns: a verdict with reason `not_text`, `gold_not_text` or `gold_empty`; None when both are usable text.
    """
    if not isinstance(gold, str):
        return spec.verdict(False, "gold_not_text")
    if not gold.strip():
        return spec.verdict(False, "gold_empty")
    if not isinstance(answer_text, str):
        return spec.verdict(False, "not_text")
    return None
