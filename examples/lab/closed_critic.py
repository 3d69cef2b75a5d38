"""The critic of the closed-form world: what an answer will still be worth, before each of its choices.

It sees what a critic of a language model could read: the problem, how many steps are left, and whether all steps so far
were right; not the pass rate. Its value is a number from a table (steps left x still right) and, while an answer is
still undecided, also one for the problem and one for the problem's type and strategy; all are 0 at first, except for
the world's `critic_bias`. Its learning rate is the policy's. Targets, advantages and losses are the product's
(`megatron_daro.algo.ppo`).

Place in the data flow: the answers of a step, in the token order of `closed_world` -> values -> the product's
`TokenColumns`, whose tokens are ordered answer by answer -> advantages and targets, in the world's order again.

Letters: N answers of a step, T tokens, J steps, M strategies, P problems.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from closed_world import STEPS, STRATEGIES, TYPES, Answers, Problems
from torch import Tensor

from megatron_daro.algo.ppo import value_losses
from megatron_daro.algo.weighting import Algorithm, TokenColumns
from megatron_daro.config.algorithm import CriticSection

_BEFORE_ALL = STEPS + 1
"""The row of the table for an answer before its first token."""


@dataclass(frozen=True, slots=True, eq=False)
class CriticColumns:
    """What the critic makes of a step, [T] each: values when the batch began, advantages and targets."""

    values_T: Tensor
    advantages_T: Tensor
    targets_T: Tensor


class Critic:
    """The parameters, their optimizer, and how they learn."""

    def __init__(self, problems: Problems, section: CriticSection, learning_rate: float, bias: float = 0.0) -> None:
        self._problems, self._clip = problems, section.value_clip
        self.pretrain_steps = section.pretrain_steps
        low_L = -bias * torch.arange(_BEFORE_ALL + 1, dtype=torch.float64) / _BEFORE_ALL
        self.table = low_L[:, None].repeat(1, 2).requires_grad_()
        self.own_P = torch.zeros(len(problems), dtype=torch.float64, requires_grad=True)
        self.kind = torch.zeros(TYPES, STRATEGIES + 1, dtype=torch.float64, requires_grad=True)
        parameters = [self.table, self.own_P, self.kind]
        self._optimizer = torch.optim.AdamW(parameters, lr=learning_rate, weight_decay=0.0)

    def values(self, answers: Answers) -> Tensor:
        """Return the values [T], differentiable, in the order of `Answers.sample_T`."""
        left_T, right_T = _states(answers)
        problem_T = answers.problem_N[answers.sample_T]
        strategy_T = torch.where(left_T == _BEFORE_ALL, STRATEGIES, answers.strategy_N[answers.sample_T])
        of_problem_T = self.own_P[problem_T] + self.kind[self._problems.type_P[problem_T], strategy_T]
        undecided_T = right_T & (left_T > 0)
        return self.table[left_T, right_T.long()] + torch.where(undecided_T, of_problem_T, 0.0)

    def columns(
        self, algorithm: Algorithm, answers: Answers, values_T: Tensor, samples: Sequence[Tensor]
    ) -> CriticColumns:
        """Return the algorithm's advantages and targets of a step.

        Args:
            values_T: when the batch began. samples: rewards_N, bins_N and group_ids_N.
        """
        rewards_N, bins_N, group_ids_N = samples
        order_T = _answer_by_answer(answers)
        tokens = TokenColumns(
            mask_R=torch.ones(len(order_T), dtype=torch.bool),
            columns={"values": values_T[order_T]},
            lengths_N=answers.lengths_N,
            rewards_N=rewards_N,
            advantages_N=rewards_N,
            bins_N=bins_N,
            group_ids_N=group_ids_N,
            truncated_N=~answers.stopped_N,
            sum_over_step=lambda values: values,
        )
        back_T = order_T.argsort()
        advantages_R, targets_R = algorithm.token_advantages(tokens), algorithm.value_targets(tokens)
        return CriticColumns(values_T, advantages_R[back_T], targets_R[back_T])

    def learn(self, answers: Answers, columns: CriticColumns) -> None:
        """Take one optimizer step towards the targets."""
        losses_T, _ = value_losses(self.values(answers), columns.values_T, columns.targets_T, self._clip)
        self._optimizer.zero_grad()
        losses_T.mean().backward()
        self._optimizer.step()


def _states(answers: Answers) -> tuple[Tensor, Tensor]:
    """Return, before each token, the row of the table and whether all steps so far are right; [T] each."""
    used_NJ = answers.used_NJ
    left_NJ = used_NJ.flip(1).cumsum(1).flip(1)
    right_NJ = torch.nn.functional.pad((answers.good_NJ | ~used_NJ).long().cumprod(1), (1, 0), value=1) > 0
    certain = answers.certain_N[:, None].expand_as(used_NJ)[used_NJ]
    left, before, behind = (column_NJ[used_NJ] for column_NJ in (left_NJ, right_NJ[:, :-1], right_NJ[:, 1:]))
    after_N = answers.right_N
    more = torch.cat([after_N.repeat_interleave(answers.extra_N), after_N[answers.stopped_N]])
    first_N = torch.full_like(answers.problem_N, _BEFORE_ALL)
    left_T = torch.cat(
        [first_N, left, torch.zeros(len(more), dtype=torch.int64), (left - 1).repeat_interleave(certain)]
    )
    return left_T, torch.cat([torch.ones_like(after_N), before, more, behind.repeat_interleave(certain)])


def _answer_by_answer(answers: Answers) -> Tensor:
    """Return the places, in the world's order, of the tokens of the first answer, then those of the next; int64 [T]."""
    used_NJ, extra_N, certain_N = answers.used_NJ, answers.extra_N, answers.certain_N
    steps_N = used_NJ.sum(1) * (1 + certain_N)
    choice = (1 + (used_NJ.cumsum(1) - 1) * (1 + certain_N[:, None]))[used_NJ]
    certain = certain_N[:, None].expand_as(used_NJ)[used_NJ]
    place_T = torch.cat(
        [
            torch.zeros_like(extra_N),
            choice,
            1 + steps_N.repeat_interleave(extra_N) + _counted(extra_N),
            (1 + steps_N + extra_N)[answers.stopped_N],
            1 + choice.repeat_interleave(certain) + _counted(certain),
        ]
    )
    return (answers.sample_T * (int(place_T.max()) + 1) + place_T).argsort()


def _counted(counts: Tensor) -> Tensor:
    """Return 0, 1, ... for each of some counts, one after the other."""
    return torch.arange(int(counts.sum())) - (counts.cumsum(0) - counts).repeat_interleave(counts)
