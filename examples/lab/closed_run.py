"""One run in the closed-form world: sample, verify, weigh, step, as `megatron-daro train` does, without processes.

Advantages, filter, coefficients, token losses and weights come from the product's own objects; here are only the
sampling, the optimizer and the sums over bins. Place in the data flow: (dials, arm, learning rate, seed) -> a list of
records, one for each evaluation, all plain numbers. A run that diverges is not refused: it stops there, and its result
says so.

Letters: N answers of a step, T tokens, [K+1] bins.
"""

from __future__ import annotations

import functools
import math
import zlib
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from arms import build, section_of
from closed_critic import Critic, CriticColumns
from closed_exact import expected_step, refusal
from closed_world import (
    MAX_TOKENS,
    STEPS,
    Answers,
    Dials,
    Policy,
    Problems,
    make_problems,
    mean_entropy,
    sample_answers,
    token_logprobs,
)
from lab_algorithms import LambdaGrpo
from torch import Tensor

from megatron_daro.algo.corrections import sample_sums
from megatron_daro.algo.difficulty import bin_sums, pass_rate_bins
from megatron_daro.algo.objective import token_objective
from megatron_daro.algo.weighting import Algorithm, Samples, StepStats, StepTotals
from megatron_daro.errors import ConfigError, DaroError, NonFiniteError

BANDS = (0.0, 0.1, 0.35, 0.65, 0.9, 1.0)
PASS_AT = (1, 2, 4, 8, 16, 32)


@dataclass(slots=True)
class Run:
    """What one run gave: `records`, one for each evaluation, and `ended`, empty or why it stopped before its end;
    `cpu_seconds` of other processes that it started."""

    records: list[dict[str, Any]] = field(default_factory=list)
    ended: str = ""
    cpu_seconds: float = 0.0


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """The trained answers of a batch and what the driver knows of them; old_T, values_T: the policy's log-probs and the
    critic's values when the batch began."""

    answers: Answers
    groups_N: Tensor
    bins_N: Tensor
    advantages_N: Tensor
    old_T: Tensor | None = None
    values_T: Tensor | None = None


class ClosedRun:
    """The state of a run: problems, policy, optimizer, algorithm, and the stream of random numbers."""

    def __init__(self, dials: Dials, arm: str, learning_rate: float, seed: int) -> None:
        self.dials = dials
        self.problems, self.held_out = _world(dials.problems, dials.held_out, dials.spectrum, seed)
        self.policy = Policy(dials.problems, dials.wrong_length)
        self.noise = torch.Generator().manual_seed(zlib.crc32(f"answers {seed}".encode()))
        self.order = torch.Generator().manual_seed(zlib.crc32(f"order {seed}".encode()))
        longest = MAX_TOKENS + STEPS * (dials.step_tokens - 1)
        self.algorithm, self.settings = build(arm, rollouts=dials.rollouts, max_tokens=longest)
        if dials.gradients == "exact" and (why := refusal(self.algorithm)):
            raise ConfigError(f"gradients: got 'exact' with arm {arm}, allowed is 'sampled': {why}")
        self.optimizer = torch.optim.AdamW(self.policy.parameters, lr=learning_rate, weight_decay=0.0)
        self.critic: Critic | None = None
        if "values" in (self.algorithm.token_columns or ()):
            self.critic = Critic(self.problems, section_of(arm).critic, learning_rate, dials.critic_bias)
        self.steps = 0
        self.waiting = torch.empty(0, dtype=torch.int64)
        self.answered = self.generated = 0

    def go(self, every: int) -> Run:
        """Take all steps, with an evaluation before the first, every `every` steps, and after the last."""
        run, step = Run(), 0
        run.records.append(self.evaluate(0))
        while step < self.dials.steps:
            try:
                taken = self.one_batch()
            except NonFiniteError as error:
                run.ended = f"diverged after step {step}: {error}"
                break
            step += taken
            if step % every < taken or step >= self.dials.steps:
                run.records.append(self.evaluate(step))
        return run

    def one_batch(self) -> int:
        """Sample a batch, take its optimizer steps, and return their number."""
        if self.dials.gradients == "exact":
            self.expected_step()
            return 1
        batch = self.sample()
        updates = self.dials.updates
        if batch is None:
            return updates
        with torch.no_grad():
            values_T = self.critic.values(batch.answers) if self.critic else None
            old_T = token_logprobs(self.policy, self.problems, batch.answers) if updates > 1 else None
        if updates == 1:
            self.step(replace(batch, values_T=values_T))
            return updates
        sample_T = batch.answers.sample_T
        for part in batch.groups_N.unique().tensor_split(updates):
            rows = torch.isin(batch.groups_N, part).nonzero()[:, 0]
            if len(rows):
                mine_T = torch.isin(sample_T, rows)
                chosen = (batch.groups_N[rows], batch.bins_N[rows], batch.advantages_N[rows])
                columns = (None if column_T is None else column_T[mine_T] for column_T in (old_T, values_T))
                self.step(Batch(batch.answers.select(rows), *chosen, *columns))
        return updates

    def sample(self) -> Batch | None:
        """Return the trained groups of a batch: those that the algorithm keeps, with up to `dials.refills` refills."""
        dials, kept, found, first = self.dials, [], 0, 0
        for _ in range(dials.refills + 1):
            prompts = self._next_prompts(dials.groups - found)
            problem_N = prompts.repeat_interleave(dials.rollouts)
            answers = sample_answers(self.policy, self.problems, problem_N, self.noise, dials.step_tokens)
            correct_N = self.judge(answers)
            groups_N = torch.arange(len(prompts)).repeat_interleave(dials.rollouts) + first
            bins_N = pass_rate_bins(correct_N, groups_N, dials.rollouts)
            keep = self.algorithm.keep(bins_N).nonzero()[:, 0]
            kept.append((answers.select(keep), groups_N[keep], bins_N[keep], correct_N[keep]))
            self.answered += len(problem_N)
            self.generated += int(answers.lengths_N.sum())
            first, found = first + len(prompts), found + len(keep) // dials.rollouts
            if found >= dials.groups:
                break
        if not found:
            return None
        columns = zip(*kept, strict=True)
        parts = next(columns)
        answers = Answers(*(torch.cat([getattr(part, n) for part in parts]) for n in Answers.__dataclass_fields__))
        groups_N, bins_N, correct_N = map(torch.cat, columns)
        return Batch(answers, groups_N, bins_N, self.algorithm.advantages(correct_N.double(), groups_N))

    def judge(self, answers: Answers) -> Tensor:
        """Return the verifier's verdicts, with its mistakes; bool [N]."""
        dials = self.dials
        if not (dials.false_wrong or dials.false_right):
            return answers.right_N
        mistake_N = torch.where(answers.right_N, dials.false_wrong, dials.false_right).double()
        flipped_N = torch.rand(len(mistake_N), generator=self.noise, dtype=torch.float64) < mistake_N
        return answers.right_N ^ flipped_N

    def step(self, batch: Batch) -> None:
        """Take one optimizer step of the policy, then the algorithm's own.

        Raises:
            NonFiniteError: a loss or gradient is not finite.
        """
        answers, sample_T = batch.answers, batch.answers.sample_T
        of_critic = self._of_critic(batch)
        samples, totals = samples_of(self.algorithm, batch.bins_N, answers.lengths_N, batch.advantages_N)
        coefficients_N = self.algorithm.coefficients(samples, totals)
        entropy = mean_entropy(self.policy, self.problems, answers)
        logprobs_T = token_logprobs(self.policy, self.problems, answers)
        all_T = torch.ones_like(sample_T, dtype=torch.bool)
        objective = token_objective(
            logprobs_T,
            None,
            old_logprobs_T=batch.old_T,
            rollout_logprobs_T=None,
            ref_logprobs_T=None,
            advantages_T=batch.advantages_N[sample_T] if of_critic is None else of_critic.advantages_T,
            mask_T=all_T,
            sample_T=sample_T,
            num_samples=len(batch.bins_N),
            settings=self.settings,
        )
        self.steps += 1
        if self.critic is not None and of_critic is not None:
            self.critic.learn(answers, of_critic)
            if self.steps <= self.critic.pretrain_steps:
                return
        (slopes_T,) = torch.autograd.grad(objective.loss_T.sum(), logprobs_T, retain_graph=True)
        self._descend((coefficients_N * objective.sample_losses_M).sum())
        sums_N = {"loss_sums": objective.sample_losses_M.detach(), **objective.sample_sums_M}
        sums_N["gradient_squares"] = sample_sums(slopes_T.square(), all_T, sample_T, len(batch.bins_N))
        self.algorithm.learn(evidence_of(self.algorithm, samples, totals, sums_N, entropy))

    def _of_critic(self, batch: Batch) -> CriticColumns | None:
        """Return what the critic makes of a step; None without a critic. With one, the batch's advantages are the
        answers' rewards (see `WithCritic.advantages`)."""
        if self.critic is None or batch.values_T is None:
            return None
        samples = (batch.advantages_N, batch.bins_N, batch.groups_N)
        return self.critic.columns(self.algorithm, batch.answers, batch.values_T, samples)

    def expected_step(self) -> None:
        """Take one optimizer step along the expected gradient of the next prompts, then the algorithm's own.

        Raises:
            NonFiniteError: as `step`.
        """
        prompts_G = self._next_prompts(self.dials.groups)
        self.answered += self.dials.groups * self.dials.rollouts
        world = (self.policy, self.problems, prompts_G, self.dials)
        loss, step_stats = expected_step(*world, self.algorithm, self.settings)
        self._descend(loss)
        self.algorithm.learn(step_stats)

    def _descend(self, loss: Tensor) -> None:
        self.optimizer.zero_grad()
        loss.backward()
        norm = math.sqrt(sum(float(p.grad.square().sum()) for p in self.policy.parameters if p.grad is not None))
        if not math.isfinite(norm):
            raise NonFiniteError("the gradient is not finite")
        self.optimizer.step()
        if not all(bool(torch.isfinite(p).all()) for p in self.policy.parameters):
            raise NonFiniteError("the policy is not finite")

    def evaluate(self, step: int) -> dict[str, Any]:
        """Return the exact accuracy on problems never trained on, over all and by the first policy's pass rate."""
        with torch.no_grad():
            rates_P = self.policy.pass_rates(self.held_out, held_out=True)
            trained = float(self.policy.pass_rates(self.problems, held_out=False).mean())
        bands = torch.bucketize(self.held_out.first_P, torch.tensor(BANDS[1:-1], dtype=torch.float64))
        record: dict[str, Any] = {"step": step, "answers": self.answered, "accuracy": float(rates_P.mean())}
        if self.dials.gradients != "exact":  # which generate nothing
            record["tokens"] = self.generated
        record["trained_accuracy"] = trained
        record["bands"] = [_mean(rates_P[bands == band]) for band in range(len(BANDS) - 1)]
        record["pass_at"] = [float((1 - (1 - rates_P) ** k).mean()) for k in PASS_AT]
        record["extra_wrong"], record["extra_right"] = self.policy.mean_lengths()
        weights = self.algorithm.weights
        record["weights"] = [] if weights is None else weights.tolist()
        record["clamped"] = self.algorithm.clamped
        return record

    def _next_prompts(self, count: int) -> Tensor:
        """Return the next prompts of an endless stream that goes through all problems in a new order each time."""
        while len(self.waiting) < count:
            order = torch.randperm(self.dials.problems, generator=self.order)
            self.waiting = torch.cat([self.waiting, order])
        prompts, self.waiting = self.waiting[:count], self.waiting[count:]
        return prompts


@functools.lru_cache(maxsize=32)
def _world(problems: int, held_out: int, spectrum: tuple[float, float], seed: int) -> tuple[Problems, Problems]:
    """Return problems to train and held-out ones, from dials and seed only, so all arms of a seed see the same ones."""
    noise = torch.Generator().manual_seed(zlib.crc32(f"world {seed}".encode()))
    return make_problems(problems, spectrum, noise), make_problems(held_out, spectrum, noise)


def samples_of(
    algorithm: Algorithm, bins_N: Tensor, lengths_N: Tensor, advantages_N: Tensor
) -> tuple[Samples, StepTotals]:
    """Return what the driver tells the algorithm about a whole step, whose groups follow one another."""
    size = algorithm.rollouts_per_prompt
    lengths_NK = lengths_N.reshape(-1, size).repeat_interleave(size, dim=0)
    samples = Samples(bins_N, lengths_N, advantages_N, lengths_NK)
    classes_N, num_classes = algorithm.classes_of(samples), len(algorithm.classes[1])
    return samples, StepTotals.of_classes(bins_N, lengths_N, classes_N, size, num_classes)


def evidence_of(
    algorithm: Algorithm,
    samples: Samples,
    totals: StepTotals,
    sums_N: dict[str, Tensor],
    entropy: float,
) -> StepStats:
    """Return what the algorithm learns from: the sums per bin and class that the actor makes over all ranks, and sums
    that only algorithms of the lab read."""
    classes_N = algorithm.classes_of(samples)
    size, classes = algorithm.rollouts_per_prompt, range(len(algorithm.classes[1]))
    cells = {
        name: torch.stack([bin_sums(values_N * (classes_N == c), samples.bins_N, size) for c in classes], dim=1)
        for name, values_N in sums_N.items()
    }
    if isinstance(algorithm, LambdaGrpo):
        cells["lambda_slope"] = algorithm.coefficient_slopes(samples, totals)[None] @ sums_N["loss_sums"]
    return StepStats(totals, cells, entropy)


def run_arm(dials: Dials, arm: str, learning_rate: float, seed: int, every: int = 10) -> Run:
    """Do one run, in this thread alone: the same arguments give the same numbers, bit for bit.

    Args:
        dials, arm, learning_rate, seed: what is run. every: optimizer steps between evaluations.
    """
    torch.set_num_threads(1)
    try:
        return ClosedRun(dials, arm, learning_rate, seed).go(every)
    except DaroError as error:
        raise type(error)(f"arm {arm}: {error}") from error


def _mean(values: Tensor) -> float:
    return float(values.mean()) if len(values) else math.nan
