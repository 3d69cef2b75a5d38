"""What a group of each pass rate is worth, and what each algorithm pays for it.

At a policy on GRPO's way, in the closed-form world: x_k is what a group with k right answers of K adds to the update,
with GRPO's advantages and coefficient 1, in the optimizer's own units (divided by the square root of Adam's second
moment). Its gain is x_k along the gradient of the exact held-out accuracy, its noise the mean square of x_k around
nothing. Coefficients c_k give an expected gain of sum n_k c_k gain_k and a noise of sum n_k c_k^2 noise_k, so the best
ones are c_k = gain_k / noise_k, and how near others come is
    efficiency = (sum n_k c_k gain_k)^2 / (sum n_k c_k^2 noise_k) / (sum n_k gain_k^2 / noise_k), from 0 to 1.
An efficiency of 0.5 says: twice the groups for the same progress.

    python examples/lab/oracle.py [world] [step,step,...]

Place in the data flow: dials -> a GRPO run -> tables on the terminal, for docs/lab.md. Coefficients come
from the product's algorithm objects; those of DARO after its weights have come to rest on the same sums.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from arms import BASELINE, arm_names, build, needs_several_updates, section_of
from closed_run import ClosedRun, evidence_of, samples_of
from closed_world import MAX_TOKENS, Dials, sample_answers, token_logprobs
from findings import markdown
from torch import Tensor
from worlds import WORLDS

from megatron_daro.algo.difficulty import bin_sums, pass_rate_bins

PARTS = 8
_REST = 3000


@dataclass(frozen=True, slots=True, eq=False)
class Measured:
    """Of one policy, per bin 1..K-1 as float64 [K+1]: groups_k in the sample, gain_k and noise_k of a group; and the
    sample: bins_N, lengths_N, correct_N, groups_N."""

    groups_k: Tensor
    gain_k: Tensor
    noise_k: Tensor
    bins_N: Tensor
    lengths_N: Tensor
    correct_N: Tensor
    groups_N: Tensor

    @property
    def best_k(self) -> Tensor:
        """The best coefficients, up to a factor; 0 in bins without groups."""
        return torch.where(self.noise_k > 0, self.gain_k / self.noise_k.clamp(min=1e-300), 0.0)

    def efficiency(self, paid_k: Tensor) -> float:
        """How near coefficients come to the best ones, from 0 to 1 (0 also where they lead downhill)."""
        gain = float((self.groups_k * paid_k * self.gain_k).sum())
        noise = float((self.groups_k * paid_k.square() * self.noise_k).sum())
        best = float((self.groups_k * self.gain_k * self.best_k).sum())
        return max(gain, 0.0) * gain / noise / best if noise and best else 0.0


def measure(run: ClosedRun, repeats: int = 2) -> Measured:
    """Gain and noise of groups of each pass rate under the run's policy, from `repeats` groups of every problem."""
    size, noise = run.dials.rollouts, torch.Generator().manual_seed(0)
    problem_N = torch.arange(run.dials.problems).repeat(repeats).repeat_interleave(size)
    answers = sample_answers(run.policy, run.problems, problem_N, noise, run.dials.step_tokens)
    groups_N = torch.arange(len(problem_N) // size).repeat_interleave(size)
    correct_N = run.judge(answers)
    bins_N = pass_rate_bins(correct_N, groups_N, size)
    baseline, _ = build(BASELINE, rollouts=size, max_tokens=MAX_TOKENS)
    advantages_N = baseline.advantages(correct_N.double(), groups_N)
    uphill = _accuracy_gradient(run)
    gain, noise_of, groups = (torch.zeros(size + 1, dtype=torch.float64) for _ in range(3))
    for k in range(1, size):
        members = groups_N[(bins_N == k).nonzero()[::size, 0]]
        groups[k] = len(members)
        if len(members) < 2 * PARTS:
            groups[k] = 0
            continue
        parts = members[torch.randperm(len(members), generator=noise)].tensor_split(PARTS)
        summed = [_update(run, answers, advantages_N, torch.isin(groups_N, part)) for part in parts]
        counts = torch.tensor([len(part) for part in parts], dtype=torch.float64)
        each = torch.stack(summed) / counts[:, None]
        mean = torch.stack(summed).sum(0) / counts.sum()
        gain[k] = mean @ uphill
        # The variance between means of n groups is that of one group over n.
        noise_of[k] = ((each - mean).square().sum(1) * counts).sum() / (PARTS - 1) + mean.square().sum()
    return Measured(groups, gain, noise_of, bins_N, answers.lengths_N, correct_N, groups_N)


def paid(arm: str, found: Measured) -> Tensor:
    """What an arm multiplies a group of each bin by, relative to GRPO's advantage; float64 [K+1], 0 where unseen.

    Weights that are learnt are taken at rest: after so many updates on this sample's own sums.
    """
    size = len(found.groups_k) - 1
    algorithm, _ = build(arm, rollouts=size, max_tokens=MAX_TOKENS)
    baseline, _ = build(BASELINE, rollouts=size, max_tokens=MAX_TOKENS)
    rewards_N = found.correct_N.double()
    advantages_N, plain_N = (a.advantages(rewards_N, found.groups_N) for a in (algorithm, baseline))
    samples, totals = samples_of(algorithm, found.bins_N, found.lengths_N, advantages_N)
    losses_N = -advantages_N * found.lengths_N
    # On-policy a token's loss is -A times the ratio, so the derivative by its log-prob is -A.
    sums_N = {"loss_sums": losses_N, "abs_loss_sums": losses_N.abs(), "advantage_sums": losses_N.abs()}
    sums_N["gradient_squares"] = advantages_N.square() * found.lengths_N
    for _ in range(_REST if algorithm.weights is not None else 0):
        slopes_PN = algorithm.coefficient_slopes(samples, totals)
        algorithm.learn(evidence_of(algorithm, samples, totals, sums_N, slopes_PN, 0.0))
    given_N = algorithm.coefficients(samples, totals) * advantages_N.abs()
    over = bin_sums(plain_N.abs(), found.bins_N, size)
    return torch.where(found.groups_k > 0, bin_sums(given_N, found.bins_N, size) / over.clamp(min=1e-12), 0.0)


def rows(world: str, steps: Sequence[int], arms: Sequence[str], learning_rate: float = 0.04) -> list[list[str]]:
    """One row for the best coefficients and each arm: efficiency, and what is paid per bin relative to the middle."""
    dials = _closed(world)
    run, table, done = ClosedRun(dials, BASELINE, learning_rate, 0), [], 0
    for step in steps:
        while done < step:
            done += run.one_batch()
        found = measure(run)
        share = found.groups_k / len(found.groups_N) * dials.rollouts
        table.append([str(step), "share of groups", "", *(f"{s:.2f}" for s in share[1:-1].tolist())])
        table.append([str(step), "worth", "1.00", *_relative(found.best_k)])
        for arm in arms:
            given = paid(arm, found)
            table.append([str(step), arm, f"{found.efficiency(given):.2f}", *_relative(given)])
    return table


def _closed(world: str) -> Dials:
    dials = WORLDS[world].dials
    if not isinstance(dials, Dials):
        raise SystemExit(f"{world}: got a world that has no closed form; the oracle measures closed-form worlds only")
    return dials


def _relative(values_k: Tensor) -> list[str]:
    middle = float(values_k[len(values_k) // 2])
    return [f"{v / middle:.2f}" if v and middle else "-" for v in values_k[1:-1].tolist()]


def _update(run: ClosedRun, answers, advantages_N: Tensor, chosen_N: Tensor) -> Tensor:
    """The shared parameters' part of an update with coefficient 1, in the optimizer's units."""
    rows_N = chosen_N.nonzero()[:, 0]
    some = answers.select(rows_N)
    run.optimizer.zero_grad()
    (token_logprobs(run.policy, run.problems, some) * advantages_N[rows_N][some.segment_T]).sum().backward()
    return _scaled(run, _gradients(run))


def _accuracy_gradient(run: ClosedRun) -> Tensor:
    run.optimizer.zero_grad()
    run.policy.pass_rates(run.held_out, held_out=True).mean().backward()
    return torch.cat([gradient.flatten() for gradient in _gradients(run)])


def _shared(run: ClosedRun) -> list[Tensor]:
    """What held-out problems depend on."""
    return [run.policy.strategy_TM, run.policy.skill_S, run.policy.fine_TS]


def _gradients(run: ClosedRun) -> list[Tensor]:
    """Those of the shared parameters, of the last backward pass."""
    return [torch.zeros_like(p) if p.grad is None else p.grad for p in _shared(run)]


def _scaled(run: ClosedRun, gradients: Sequence[Tensor]) -> Tensor:
    """Divided by Adam's root mean square, element by element; as it is before the first step.

    Elements that were seldom moved count like a tenth of their tensor's mean: their own estimate is of few numbers.
    """
    parts = []
    for parameter, gradient in zip(_shared(run), gradients, strict=True):
        state = run.optimizer.state.get(parameter)
        scale = state["exp_avg_sq"].sqrt() if state else torch.ones_like(gradient)
        parts.append((gradient / scale.clamp(min=0.1 * float(scale.mean()))).flatten())
    return torch.cat(parts)


def main(arguments: list[str]) -> int:
    """Print the table of a world."""
    world = arguments[0] if arguments else "skewed"
    steps = [int(s) for s in (arguments[1] if len(arguments) > 1 else "20,100,300").split(",")]
    arms = [arm for arm in arm_names() if not needs_several_updates(arm) and not section_of(arm).has_critic]
    size = _closed(world).rollouts
    header = ["step", "arm", "efficiency", *(f"{k}/{size}" for k in range(1, size))]
    print(markdown(header, rows(world, steps, arms)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
