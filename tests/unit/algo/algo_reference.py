"""The losses again, in plain Python loops over plain numbers: slow, independent of torch and of the package.

A step is a list of samples; a sample knows its group, verdict, reward and, per trained token, the current and old
log-probs. `step_loss` returns the loss and its derivative by every current log-prob.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field


@dataclass
class Sample:
    """One rollout: group id, verdict 0/1, reward, and (logprob, old logprob) of its trained tokens."""

    group: int
    correct: int
    reward: float
    tokens: list[tuple[float, float]] = field(default_factory=list)


def random_step(seed: int, *, num_groups: int, k: int, longest: int = 6, spread: float = 0.4) -> list[Sample]:
    """Samples in a shuffled order; some without trained tokens, some groups all wrong or all right."""
    rng = random.Random(seed)
    samples = []
    for group in rng.sample(range(-50, 50), num_groups):
        num_right = rng.randint(0, k)
        for i in range(k):
            tokens = [(-rng.random() * 3, 0.0) for _ in range(rng.randint(0, longest))]
            tokens = [(logprob, logprob + rng.uniform(-spread, spread)) for logprob, _ in tokens]
            samples.append(Sample(group, int(i < num_right), float(i < num_right), tokens))
    rng.shuffle(samples)
    return samples


def bins(samples: list[Sample]) -> list[int]:
    """Number of correct rollouts in each sample's group."""
    return [sum(other.correct for other in samples if other.group == s.group) for s in samples]


def advantages(samples: list[Sample], std: str, eps: float = 1e-6) -> list[float]:
    """Textbook formula, one sample at a time."""
    everything = [s.reward for s in samples]
    batch_mean = sum(everything) / len(everything)
    batch_std = math.sqrt(sum((r - batch_mean) ** 2 for r in everything) / len(everything))
    result = []
    for s in samples:
        rewards = [other.reward for other in samples if other.group == s.group]
        mean = sum(rewards) / len(rewards)
        squares = sum((r - mean) ** 2 for r in rewards)
        if std == "none":
            divisor = 1.0
        elif std == "batch":
            divisor = batch_std + eps
        elif std == "sample":
            divisor = math.sqrt(squares / (len(rewards) - 1)) + eps
        elif std == "leave_one_out":
            result.append(s.reward - (sum(rewards) - s.reward) / (len(rewards) - 1))
            continue
        else:
            divisor = math.sqrt(squares / len(rewards)) + eps
        result.append((s.reward - mean) / divisor)
    return result


def token_loss(
    logprob: float, old: float, advantage: float, low: float = 0.2, high: float = 0.28
) -> tuple[float, float]:
    """(loss, derivative by logprob) by cases: which term of the minimum is active."""
    ratio = math.exp(logprob - old)
    if advantage >= 0 and ratio > 1 + high:
        return -(1 + high) * advantage, 0.0
    if advantage < 0 and ratio < 1 - low:
        return -(1 - low) * advantage, 0.0
    return -ratio * advantage, -ratio * advantage


def sample_factor(algorithm: str, samples: list[Sample], i: int, k: int, longest: int, weights: list[float]) -> float:
    """v_i / D of the family table, straight from its rows."""
    step_bins = bins(samples)
    length = len(samples[i].tokens)
    if length == 0:
        return 0.0
    everything = sum(len(s.tokens) for s in samples)
    mixed = 0 < step_bins[i] < k
    if algorithm in ("grpo", "lite_ppo", "rloo"):
        return 1 / everything
    if algorithm == "grpo_sequence":
        return 1 / (length * len(samples))
    if algorithm == "kimi":
        return 1 / len(samples)
    if algorithm == "dr_grpo":
        return 1 / (len(samples) * longest)
    kept = sum(len(s.tokens) for s, b in zip(samples, step_bins, strict=True) if 0 < b < k)
    if algorithm == "dapo":
        return 1 / kept if mixed else 0.0
    if algorithm == "dgpo":
        return dgpo_factor(samples, step_bins, i, k) / kept if mixed else 0.0
    if algorithm in FACTORS:
        return FACTORS[algorithm](step_bins[i] / k, samples[i].correct) / everything
    if algorithm == "lambda_grpo":
        return lambda_factor(samples, i, k)[0] / everything
    assert algorithm == "daro"
    own = sum(len(s.tokens) for s, b in zip(samples, step_bins, strict=True) if b == step_bins[i])
    return weights[step_bins[i]] / own if mixed else 0.0


ANCHOR, ALPHA, DELTA, LAMBDA = 0.3, 2.5, 0.6, -1.7
"""States in which HA-DW, FADE and lambda-GRPO are compared: pass rate expected, exponents, wrong answers' scale."""

FACTORS = {
    "maxrl": lambda mu, _right: 1 / mu if mu > 0 else 0.0,
    "f_grpo": lambda mu, _right: 1 - mu,
    "mgpo": lambda mu, _right: math.exp(-sum(p * math.log(p / 0.5) for p in (mu, 1 - mu) if p > 0)),
    # An advantage is above 0 for a right answer; where it is 0 the factor does not matter.
    "ha_dw": lambda mu, right: 1.3 * math.exp((-1 if right else 1) * (mu - ANCHOR)) if 0 < mu < 1 else 1.3,
    "fade": lambda mu, right: (1 - mu) ** (ALPHA - 1) * (1 if right or mu == 0 else 1 / DELTA),
}
"""What a group's advantage is multiplied by, as (pass rate, right answer) -> factor, with the options' defaults."""


def dgpo_factor(samples: list[Sample], step_bins: list[int], i: int, k: int) -> float:
    """V exp(-mu/2) / sum over the V mixed questions, over the mean absolute deviation of the group's verdicts."""
    questions = {s.group: b for s, b in zip(samples, step_bins, strict=True) if 0 < b < k}
    score = {group: math.exp(-(b / k) / 2.0) for group, b in questions.items()}
    weight = len(questions) * score[samples[i].group] / sum(score.values())
    verdicts = [s.correct for s in samples if s.group == samples[i].group]
    mean = sum(verdicts) / k
    return weight / (sum(abs(v - mean) for v in verdicts) / k)


def lambda_factor(samples: list[Sample], i: int, k: int, exponent: float = LAMBDA) -> tuple[float, float]:
    """K softmax(h^lambda) of one answer within its group, h = 1 + z/9; its derivative by lambda, by a difference."""

    def factor(power: float) -> float:
        lengths = [len(s.tokens) for s in samples if s.group == samples[i].group]
        mean = sum(lengths) / k
        std = math.sqrt(sum((n - mean) ** 2 for n in lengths) / k)
        scores = [math.exp((1 + ((n - mean) / std if std else 0.0) / 9) ** power) for n in lengths]
        own = math.exp((1 + ((len(samples[i].tokens) - mean) / std if std else 0.0) / 9) ** power)
        return k * own / sum(scores)

    return factor(exponent), (factor(exponent + 1e-5) - factor(exponent - 1e-5)) / 2e-5


ADVANTAGE_STD = {
    "grpo": "population",
    "grpo_sequence": "population",
    "dapo": "population",
    "lite_ppo": "batch",
    "dr_grpo": "none",
    "rloo": "leave_one_out",
    "kimi": "none",
    "daro": "population",
    "maxrl": "none",
    "f_grpo": "population",
    "mgpo": "population",
    "dgpo": "none",
    "ha_dw": "population",
    "fade": "none",
    "lambda_grpo": "population",
}


def step_loss(
    algorithm: str, samples: list[Sample], k: int, longest: int, weights: list[float]
) -> tuple[float, list[list[float]], list[float]]:
    """(policy loss, derivative per sample and token, unweighted loss sums per bin)."""
    step_bins = bins(samples)
    loss, gradients, sums = 0.0, [], [0.0] * (k + 1)
    for i, advantage in enumerate(advantages(samples, ADVANTAGE_STD[algorithm])):
        factor = sample_factor(algorithm, samples, i, k, longest, weights)
        row = []
        for logprob, old in samples[i].tokens:
            value, slope = token_loss(logprob, old, advantage)
            loss += factor * value
            sums[step_bins[i]] += value
            row.append(factor * slope)
        gradients.append(row)
    return loss, gradients, sums


class AdamWeight:
    """Adam on one number, written out; `s` is ln w or w."""

    def __init__(self, *, parameter: str = "log", learning_rate: float = 0.01, clamp=(0.1, 10.0)) -> None:
        self.parameter, self.learning_rate, self.clamp = parameter, learning_rate, clamp
        self.w, self.first, self.second, self.steps = 1.0, 0.0, 0.0, 0

    def update(self, magnitude: float) -> None:
        """One step with the measured m_k."""
        gradient = self.w * magnitude - 1 if self.parameter == "log" else magnitude - 1 / self.w
        self.steps += 1
        self.first = 0.9 * self.first + 0.1 * gradient
        self.second = 0.999 * self.second + 0.001 * gradient * gradient
        first = self.first / (1 - 0.9**self.steps)
        second = self.second / (1 - 0.999**self.steps)
        move = self.learning_rate * first / (math.sqrt(second) + 1e-8)
        moved = math.exp(math.log(self.w) - move) if self.parameter == "log" else self.w - move
        self.w = min(max(moved, self.clamp[0]), self.clamp[1])
