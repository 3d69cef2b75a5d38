"""Makes verifiers by name: those of this package, and a user's own (`reward.verifier: module:Class`).

This is the only file that knows all verifiers; it loads no algebra system. In a run the object of a user's class exists
in worker processes only, under their limits of time and memory, and what it returns is checked; other processes import
its class only to inspect it. Unknown names are rejected by VerifierSpec.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from megatron_daro.errors import RewardError
from megatron_daro.own_class import import_own_class, make_own
from megatron_daro.reward.base import OPTIONS, Job, ScreenLimits, Verifier, VerifierSpec, verdict_fault
from megatron_daro.reward.extraction import ExactVerifier, IntegerVerifier
from megatron_daro.reward.math import MathVerifier
from megatron_daro.types import Verdict

if TYPE_CHECKING:
    from megatron_daro.config.sections import RewardSection  # the workers do without pydantic


def own_verifier_class(name: str, options: Mapping[str, Any]) -> type[Verifier]:
    """Import the class that `reward.verifier` names. Raises ConfigError: it does not fit `Verifier`."""
    return import_own_class(
        "reward.verifier",
        name,
        builtin=", ".join(OPTIONS),
        protocol=Verifier,
        methods={"verify": 3},
        arguments=options,
        options="reward.options",
    )


class OwnVerifier:
    """The stages of a user's verifier: only what is not text is screened, the rest is judged in a worker."""

    def __init__(self, spec: VerifierSpec) -> None:
        """Do not make the user's object yet."""
        self._spec = spec
        self._verifier: Verifier | None = None

    def load(self) -> None:
        """Make the user's object, in a worker. Raises RewardError: its constructor raised; ConfigError."""
        own = own_verifier_class(self._spec.name, self._spec.options)
        self._verifier = make_own(
            "reward.verifier", self._spec.name, own, self._spec.options, options="reward.options", error=RewardError
        )

    def verify(self, answer_text: str, gold: str, statement: str = "") -> Verdict:
        """Judge in this process. Raises RewardError: the class returned no usable Verdict."""
        if self._verifier is None:
            self.load()
        assert self._verifier is not None
        verdict = self._verifier.verify(answer_text, gold, statement)
        if fault := verdict_fault(verdict):
            raise RewardError(
                f"reward.verifier: {self._spec.name}.verify returned {fault[0]}; allowed: {fault[1]}; fix: correct the "
                "class"
            )
        return Verdict(verdict.correct, float(verdict.reward), verdict.reason)

    def screen(self, answer_text: object, gold: object, statement: str = "") -> Verdict | Job:
        """Refuse what is not text, as every verifier does; the rest is a job."""
        if not isinstance(gold, str):
            return self._spec.verdict(False, "gold_not_text")
        if not isinstance(answer_text, str):
            return self._spec.verdict(False, "not_text")
        return Job(answer_text, gold, statement)

    def judge(self, job: Job) -> Verdict:
        """Judge in this process, a worker."""
        return self.verify(job.answer, job.gold, job.statement)

    def gold_problem(self, gold: object) -> str | None:
        """Return `gold_not_text`, or None: what else a gold may be is for the user's class to say."""
        return None if isinstance(gold, str) else "gold_not_text"

    def answer_of(self, answer_text: str) -> str | None:
        """Return the whole text: only the user's class knows what the final answer is."""
        return answer_text.strip() or None


Judge = MathVerifier | OwnVerifier
"""Verifiers in two stages: `screen` is linear in the text, so that most answers never need a worker process, and
`judge` runs in one."""
AnyVerifier = Judge | IntegerVerifier | ExactVerifier
"""`answer_of` returns what each reads as the final answer; in those without `judge`, `screen` decides everything."""
_CLASSES: dict[str, type[AnyVerifier]] = {"math": MathVerifier, "integer": IntegerVerifier, "exact": ExactVerifier}


def build_verifier(
    name: str,
    *,
    strict: bool = True,
    correct_reward: float = 1.0,
    incorrect_reward: float = 0.0,
    marker: str = "####",
    limits: ScreenLimits | None = None,
) -> AnyVerifier:
    """Return the verifier of that name.

    Args:
        name: `math`, `integer`, `exact`, or module:Class of a user's own without options.
        strict: accept only the agreed answer form.
        correct_reward, incorrect_reward: what the verdicts carry.
        marker: text before the answer, used by `exact` only.
        limits: what is refused unparsed, used by `math` only; None for the defaults.

    Returns: an object with `verify(answer_text, gold) -> Verdict`. `math` is unbounded in time when called directly
    on hostile text that passes the screen: use RewardPool for model answers.
    Raises: RewardError for an unknown name or an empty marker.
    """
    spec = VerifierSpec(name, strict, correct_reward, incorrect_reward, marker, limits or ScreenLimits())
    return verifier_of(spec)


def verifier_of(spec: VerifierSpec) -> AnyVerifier:
    """Return the verifier a spec describes."""
    return OwnVerifier(spec) if spec.is_own else _CLASSES[spec.name](spec)


def answer_reader(section: RewardSection) -> AnyVerifier:
    """Return the run's verifier, whose `answer_of` reads the final answer of a text that was judged."""
    return verifier_of(VerifierSpec.of_section(section))
