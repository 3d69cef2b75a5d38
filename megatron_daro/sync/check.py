"""Whether a receiver has the weights that it was sent, or kept the ones before: by log-probs.

WeightSync asks SGLang servers (engine.sglang.verify) for their log-probs of a fixed text, the policy for its own, and
this file for a verdict. This file calls neither.

Two implementations of one model differ: in bf16 by more than two consecutive versions of the weights do, so closeness
to the policy cannot show whether a receiver kept its old weights. Instead, the change between two of a receiver's
answers, `moved_R` = s_new - s_old, is compared with the change of the policy's log-probs, `wanted_R` = p_new - p_old;
the constant difference of the two implementations cancels. A receiver that follows has moved_R near wanted_R, one that
kept its weights has moved_R near 0: |moved_R| / |moved_R - wanted_R| is large for the former and near 0 for the latter.
There is no verdict where the policy did not change, or changed too little.

Legend: R response tokens of the fixed probe.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from megatron_daro.sync.plan import Digest
from megatron_daro.types import Rollout

# How far two correct implementations may differ. fp32: the largest difference of a token, which only the order of
# summation causes (1e-5 measured). bf16: the mean difference, caused by rounding in every layer (0.1 measured with
# SmolLM2); single tokens, one in thousands, differ by nats (2.8 was seen for one of 16). These limits detect another
# model or temperature, not another step.
_LARGEST_FP32, _MEAN_ELSE = 1e-3, 0.5
# A receiver kept its weights if |moved_R| / |moved_R - wanted_R| is below this; it follows if above the inverse.
_KEPT = 0.5
# Over one sync this holds only if a step changes the policy's log-probs more than rounding does; in bf16 rounding may
# move the policy several times more than the receiver. So the limit is learned: this fraction of the smallest ratio
# among the first _LEARNED_FROM syncs. Before _LEARNED_ENOUGH of them, only a receiver that hardly moved at all
# (_UNLEARNED) is rejected.
_LEARNED_FROM, _LEARNED_ENOUGH, _LEARNED_PART = 8, 4, 0.25
_UNLEARNED = 0.02
# Over many syncs _KEPT holds once the policy has moved _FAR times as far as in any single one of the last _OF_LATE
# syncs, rounding included (rounding grows as a model sharpens). A single sync never counts as far: with SmolLM2 in bf16
# one sync of forty moved the policy by 0.43 (the others by 0.1), and correct receivers by 0.13, in another direction.
_FAR, _OF_LATE = 4.0, 8
# The part of the policy's log-probs that must have changed: a change of few tokens may be lost in the receiver's
# rounding.
_CHANGED_PART = 0.75


@dataclass(frozen=True, slots=True, eq=False)
class ProbeAnswer:
    """A receiver's answer to the probe.

    fixed: the given text, with the receiver's log-probs at temperature 1; the same tokens in every sync. sampled:
    tokens sampled after the beginning of that text, at `temperature`. dtype: in which the receiver computes, such as
    "bfloat16". verified: checksums have already shown that it has the weights that were sent. base_R: if the receiver
    gets adapters, its log-probs of the fixed text without them. fresh: this is the first sync of its process.
    """

    fixed: Rollout
    sampled: Rollout
    temperature: float
    dtype: str
    verified: bool = False
    base_R: np.ndarray | None = None
    fresh: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class _Report:
    """One sync: the log-probs of the fixed text by the receiver and by the policy, and the digests of what was sent."""

    receiver_R: np.ndarray
    policy_R: np.ndarray
    received: Mapping[str, str]


@dataclass(slots=True)
class _History:
    """Reports of one receiver. last: of the previous sync. settled: the last one that showed a move, so that moves too
    small to show in one sync add up. first: of its first sync: after a restart the receiver is near these weights, if
    the run began with those of model.path; for a receiver of adapters, its answer without them."""

    last: _Report | None = None
    settled: _Report | None = None
    first: _Report | None = None
    ratios: list[float] = field(default_factory=list)
    moves: deque[float] = field(default_factory=lambda: deque(maxlen=_OF_LATE))

    def references(self) -> list[_Report]:
        """Return the reports that a new one is compared with, without duplicates."""
        return list({id(a): a for a in (self.last, self.settled, self.first) if a is not None}.values())

    def limit(self) -> float:
        """Return the ratio below which a receiver kept its weights."""
        return min(_KEPT, _LEARNED_PART * min(self.ratios)) if len(self.ratios) >= _LEARNED_ENOUGH else _UNLEARNED

    def learn(self, ratio: float, move: float) -> None:
        """Take in one sync: the receiver's ratio (`_ratio`), and how far the policy moved."""
        self.moves.append(move)
        if len(self.ratios) < _LEARNED_FROM:
            self.ratios.append(ratio)

    def is_far(self, then: _Report, move: float) -> bool:
        """Whether the policy has moved so far since that report that rounding hardly matters."""
        return then is not self.last and len(self.moves) >= _LEARNED_ENOUGH and move >= _FAR * max(self.moves)


@dataclass(frozen=True, slots=True)
class CheckResult:
    """Verdicts. rejected: receiver -> why. verified: receivers that were shown to have the new weights. About receivers
    in neither, nothing is known."""

    rejected: Mapping[str, str]
    verified: frozenset[str]


class UpdateCheck:
    """Judges the receivers of one policy, at each sync."""

    def __init__(self) -> None:
        self._histories: dict[str, _History] = {}

    def judge(
        self,
        answers: Mapping[str, ProbeAnswer],
        scores: Mapping[str, tuple[np.ndarray, np.ndarray]],
        digests: Mapping[str, Digest],
        base_R: np.ndarray | None = None,
    ) -> CheckResult:
        """Compare each receiver with the present policy and with the policy of earlier syncs.

        Args:
            answers: by receiver. scores: float32 log-probs of the policy for the answer's (fixed, sampled) tokens.
            digests: of some of what was sent (`is_hashed`); equal ones of an earlier sync are taken to say that nothing
                has changed since, so that no receiver is judged by noise.
            base_R: log-probs of the policy for the fixed text without adapters, if answers have `base_R`.

        Returns:
            The verdicts.
        """
        rejected, verified = {}, set()
        received = {name: digest.received for name, digest in digests.items()}
        for name, answer in answers.items():
            fixed_R, sampled_R = scores[name]
            reason = _too_far(answer, sampled_R)
            follows = False
            if not reason:
                now = _Report(answer.fixed.logprobs, fixed_R, received)
                history = self._histories.setdefault(name, _History())
                if answer.fresh:
                    history.last = history.settled = None
                if answer.base_R is not None and base_R is not None:
                    history.first = _Report(answer.base_R, base_R, {})
                follows, reason = self._followed(history, now)
            if reason:
                rejected[name] = reason
            elif follows or answer.verified:
                verified.add(name)
        return CheckResult(rejected, frozenset(verified))

    def _followed(self, history: _History, now: _Report) -> tuple[bool, str]:
        """Return (whether the receiver was shown to follow the policy, why it does not, empty unless shown)."""
        follows = False
        for then in history.references():
            ratio, move = _ratio(then, now), _rms(now.policy_R - then.policy_R)
            if ratio is None:
                continue
            limit = _KEPT if history.is_far(then, move) else history.limit()
            if ratio < limit:
                return False, _kept_text(then, now, limit)
            follows = follows or (ratio > 1 / _KEPT and then in (history.last, history.settled))
            if then is history.last:
                history.learn(ratio, move)
        history.last, history.first = now, history.first or now
        if follows or history.settled is None:
            history.settled = now
        return follows, ""


def _ratio(then: _Report, now: _Report) -> float | None:
    """Return |moved_R| / |moved_R - wanted_R|: near 0 if the receiver kept its weights, large if it follows. None if
    the policy did not change, or too few of its log-probs did."""
    wanted_R = now.policy_R - then.policy_R
    if (now.received and now.received == then.received) or np.mean(wanted_R != 0) < _CHANGED_PART:
        return None
    moved_R = now.receiver_R - then.receiver_R
    lacking = _rms(moved_R - wanted_R)
    return _rms(moved_R) / lacking if lacking else float("inf")


def _rms(values_R: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(values_R, dtype=np.float64))))


def _too_far(answer: ProbeAnswer, expected_R: np.ndarray) -> str:
    """Return why the sampled answer cannot be this model's at all; empty if it may be."""
    apart_R = np.abs(expected_R - answer.sampled.logprobs)
    worst, mean = float(np.max(apart_R)), float(np.mean(apart_R))
    exact = answer.dtype == "float32"
    if worst <= _LARGEST_FP32 if exact else mean <= _MEAN_ELSE:
        return ""
    allowed = f"{_LARGEST_FP32:g}" if exact else f"{_MEAN_ELSE:g} on the mean"
    return (
        f"log-probs of {len(expected_R)} sampled tokens differ from the policy's by up to {worst:.3g}, {mean:.3g} on "
        f"the mean; allowed: {allowed} ({answer.dtype or 'unknown dtype'}). Does it serve the model of model.path, at "
        "the temperature of the request?"
    )


def _kept_text(then: _Report, now: _Report, limit: float) -> str:
    wanted_R, moved_R = now.policy_R - then.policy_R, now.receiver_R - then.receiver_R
    return (
        f"it kept its weights: of {len(moved_R)} given tokens the policy's log-probs changed by {_rms(wanted_R):.3g} "
        f"nat, its own by {_rms(moved_R):.3g}, {_rms(moved_R - wanted_R):.3g} away from the policy's change; allowed: "
        f"at least {limit:.2g} of that"
    )
