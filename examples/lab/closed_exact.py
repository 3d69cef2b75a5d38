"""The expectation of a step of the closed-form world, over every answer that the policy could give to its prompts.

With pass rate q a group of K has k right answers with the binomial probability of k, and the mean of grad log pi over
the right (wrong) answers is grad log q (grad log (1 - q)). So where an algorithm weighs answers by their group's bin
and their own verdict, the expected gradient is a sum over k, and lengths come in by their means alone. Denominators
and the sums that weights are learnt from are those of infinitely many groups for each prompt, in which each bin has its
expected share. Advantages, filter, coefficients and token losses are the product's, as in `closed_run`.

Place in the data flow: policy, prompts, algorithm -> (loss whose gradient is the expected one, step_stats). Refuses
algorithms that look at single lengths or at other groups: there the expectation is not such a sum.

Letters: G prompts, M strategies, J steps, K rollouts, B = K + 1 bins, V = 2 verdicts (wrong, right).
"""

from __future__ import annotations

import torch
from closed_world import Dials, Policy, Problems, binary_entropy, mean_more_tokens
from torch import Tensor

from megatron_daro.algo.objective import ObjectiveSettings, token_objective
from megatron_daro.algo.weighting import Algorithm, Samples, StepStats, StepTotals

_COPIES = 2.0**40
"""Groups for each prompt: totals are whole numbers, and are rounded by less than one token in so many."""


def refusal(algorithm: Algorithm) -> str:
    """Return why the expectation of this algorithm's gradient is not a sum over right answers per group, or ""."""
    if algorithm.token_columns is not None:
        return "its advantages are those of single tokens"
    if algorithm.std == "batch":
        return "its advantages depend on the other groups of the batch"
    if algorithm.needs_group_lengths or len(algorithm.classes[1]) > 1:
        return "its coefficients depend on lengths of single answers"
    bins_N, lengths_N, ones_N = torch.ones(2, dtype=torch.int64), torch.tensor([3, 9]), torch.ones(2).double()
    totals = StepTotals.of(bins_N, lengths_N, algorithm.rollouts_per_prompt)
    short, long = algorithm.coefficients(Samples(bins_N, lengths_N, ones_N), totals).tolist()
    return "" if short == long else "its coefficients depend on lengths of single answers"


def expected_step(
    policy: Policy,
    problems: Problems,
    prompts_G: Tensor,
    dials: Dials,
    algorithm: Algorithm,
    settings: ObjectiveSettings,
) -> tuple[Tensor, StepStats]:
    """Return a scalar whose gradient is the expected one of the policy loss, and what the algorithm learns from.

    Args:
        policy, problems: the world. prompts_G: int64 [G], problems of the step. dials: for the verifier's mistakes.
        algorithm, settings: the arm; `refusal` of it must be empty.
    """
    size = algorithm.rollouts_per_prompt
    chance_GV, lengths_GV, entropies_GV = _answers(policy, problems, prompts_G, dials)
    counts_BV = torch.stack([size - torch.arange(size + 1), torch.arange(size + 1)], dim=1).double()
    kept_B = algorithm.keep(torch.arange(size + 1))
    share_GB = _binomial(chance_GV[:, 1].detach(), size) * kept_B
    mass_GBV = _COPIES * share_GB[:, :, None] * counts_BV
    tokens_GBV = mass_GBV * lengths_GV[:, None]
    tokens_B = tokens_GBV.sum((0, 2))
    totals = StepTotals(tokens_B.round().long()[:, None], mass_GBV.sum((0, 2)).round().long())

    bins_N = torch.arange(size + 1).repeat_interleave(2)
    advantages_N = _advantages(algorithm, size).reshape(-1)
    one_token = torch.zeros(len(bins_N), dtype=torch.float64, requires_grad=True)
    objective = token_objective(
        one_token,
        None,
        old_logprobs_T=None,
        rollout_logprobs_T=None,
        ref_logprobs_T=None,
        advantages_T=advantages_N,
        mask_T=torch.ones_like(bins_N, dtype=torch.bool),
        sample_T=torch.arange(len(bins_N)),
        num_samples=len(bins_N),
        settings=settings,
    )
    (slopes_N,) = torch.autograd.grad(objective.loss_T.sum(), one_token, retain_graph=True)
    samples = Samples(bins_N, torch.ones_like(bins_N), advantages_N)
    pull_BV = (algorithm.coefficients(samples, totals) * slopes_N).reshape(-1, 2)
    loss = ((mass_GBV * pull_BV).sum(1) * chance_GV.clamp(min=1e-300).log()).sum()

    per_token = {"loss_sums": objective.sample_losses_M.detach(), **objective.sample_sums_M}
    per_token["gradient_squares"] = slopes_N.square()
    sums = {n: (tokens_GBV * values_N.reshape(-1, 2)).sum((0, 2))[:, None] for n, values_N in per_token.items()}
    entropy = float((mass_GBV * entropies_GV[:, None]).sum() / tokens_B.sum().clamp(min=1e-300))
    return loss, StepStats(totals, sums, entropy)


def _answers(policy: Policy, problems: Problems, prompts_G: Tensor, dials: Dials) -> tuple[Tensor, Tensor, Tensor]:
    """Return each verdict's chance [G, V], with gradient, and its answers' mean tokens and mean sum of entropies."""
    strategy_GM, chain_GM = policy.log_chances(problems, prompts_G, policy.own_P)
    right_G = (strategy_GM + chain_GM).exp().sum(1)
    # Rows: truly wrong, truly right; columns: the verdict.
    judged = torch.tensor([[1 - dials.false_right, dials.false_right], [dials.false_wrong, 1 - dials.false_wrong]])
    chance_GV = torch.stack([1 - right_G, right_G], dim=1) @ judged.double()
    with torch.no_grad():
        used_GMJ = problems.used_PMJ[prompts_G]
        rows_N = prompts_G.repeat_interleave(used_GMJ.shape[1])
        chosen_N = torch.arange(used_GMJ.shape[1]).repeat(len(prompts_G))
        logits_NJ = policy.step_logits(problems, rows_N, chosen_N, policy.own_P[rows_N])
        steps_GM = torch.where(used_GMJ, binary_entropy(logits_NJ).reshape(used_GMJ.shape), 0.0).sum(2)
        begin_G = -(strategy_GM.exp() * strategy_GM).sum(1)
        joint_GMT = strategy_GM.exp()[:, :, None] * torch.stack([1 - chain_GM.exp(), chain_GM.exp()], dim=2)
        more_T = mean_more_tokens(policy.extra_2)
        lengths_GMT = 1 + used_GMJ.sum(2)[:, :, None] + more_T
        entropies_GMT = (begin_G[:, None] + steps_GM)[:, :, None] + more_T * binary_entropy(policy.extra_2)
        over_GV = chance_GV.clamp(min=1e-300)
        means = [((joint_GMT * x).sum(1) @ judged.double()) / over_GV for x in (lengths_GMT, entropies_GMT)]
    return chance_GV, means[0], means[1]


def _advantages(algorithm: Algorithm, size: int) -> Tensor:
    """Return those of a wrong and a right answer in a group of each bin, float64 [B, V]; 0 where it has none."""
    rewards_BK = (torch.arange(size) < torch.arange(size + 1)[:, None]).double()
    groups_N = torch.arange(size + 1).repeat_interleave(size)
    advantages_BK = algorithm.advantages(rewards_BK.reshape(-1), groups_N).double().reshape(size + 1, size)
    ends_BV = torch.stack([advantages_BK[:, -1], advantages_BK[:, 0]], dim=1)
    ends_BV[-1, 0] = ends_BV[0, 1] = 0.0
    return ends_BV


def _binomial(chance_G: Tensor, size: int) -> Tensor:
    """Return the probability of k right answers of `size`, [G, B]."""
    k_B = torch.arange(size + 1, dtype=torch.float64)
    ways_B = torch.lgamma(torch.tensor(size + 1.0).double()) - torch.lgamma(k_B + 1) - torch.lgamma(size - k_B + 1)
    q_G1 = chance_G[:, None]
    return (ways_B + torch.special.xlogy(k_B, q_G1) + torch.special.xlogy(size - k_B, 1 - q_G1)).exp()
