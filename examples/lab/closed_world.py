"""The closed-form world: problems whose answers are short chains of softmax choices, so that pass rates are formulas.

An answer to problem p is written token by token, and each token is a choice of the policy:
    1. a strategy m, by softmax over logits that all problems of one type share;
    2. each step of that strategy, one token a step: right with probability sigmoid(sign * (skill + fine) + own -
       hardness). `skill` is shared by every problem that needs it, `fine` by those of one type, and `own` belongs to
       this problem alone. The sign is -1 where a rule has an exception: most exceptions belong to a type and can be
       learnt, some to a single problem and cannot, so problems pull the shared parameters in different directions and
       no policy solves all held-out problems. With `step_tokens` above 1 a step is that long, and the tokens after its
       first are certain: as in long chains of thought, few tokens decide anything;
    3. how long to go on: continue tokens and a stop token, with one shared logit after right and one after wrong steps.
The answer is right if all steps are. So pass rates are sums of products of sigmoids, accuracy is known without
sampling, and the gradient of an answer is the sum of the gradients of its tokens, as in a language model.

Place in the data flow: dials and a seed -> problems, a fresh policy, sampled answers with packed token log-probs.
Refuses dials without a meaning. Letters: P problems, M strategies, J steps at most, N answers, T tokens, S skills.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron_daro.errors import ConfigError

STRATEGIES, STEPS, SKILLS, TYPES = 3, 6, 24, 8
MOST_EXTRA = 48
MAX_TOKENS = 2 + STEPS + MOST_EXTRA
TYPE_EXCEPTIONS, OWN_EXCEPTIONS = 0.25, 0.1
"""How often a rule is reversed for a type, and for a single step of a problem."""
_RULES_SEED = 20251009
_RIGHT_EXTRA = 3.0
_MEAN_STEPS = 4.0


@dataclass(frozen=True, slots=True)
class Dials:
    """What a closed-form world is made of.

    spectrum: (a, b) of the Beta distribution of the first policy's pass rates; below 1 both is a U.
    wrong_length: mean tokens of wrong answers over those of right ones, for the first policy; 0.75 or more.
    false_wrong, false_right: how often the verifier of the training rewards is mistaken about a right or wrong answer.
    groups, rollouts: prompts per batch, and K. updates: optimizer steps for each batch; above 1 the later are
    off-policy.
    steps: optimizer steps. problems, held_out: how many of each. refills: rounds of further prompts for algorithms
    that filter. gradients: of sampled answers, or "exact": their expectation over all answers to the step's prompts.
    step_tokens: tokens of each step. critic_bias: by how much the critic's first values are too low before an answer
    begins; it shrinks with each step to 0 after the last, like the bias of a reward model on unfinished answers.
    """

    spectrum: tuple[float, float] = (0.5, 0.5)
    wrong_length: float = 1.5
    false_wrong: float = 0.0
    false_right: float = 0.0
    groups: int = 32
    rollouts: int = 8
    updates: int = 1
    steps: int = 300
    problems: int = 2048
    held_out: int = 1024
    refills: int = 3
    gradients: str = "sampled"
    step_tokens: int = 1
    critic_bias: float = 0.0

    def __post_init__(self) -> None:
        if not min(self.spectrum) > 0:
            raise ConfigError(f"spectrum: got {self.spectrum}, allowed are two numbers above 0")
        if not 0.75 <= self.wrong_length <= 3:
            raise ConfigError(f"wrong_length: got {self.wrong_length}, allowed is 0.75 to 3")
        for name in ("false_wrong", "false_right"):
            if not 0 <= getattr(self, name) < 0.5:
                raise ConfigError(f"{name}: got {getattr(self, name)}, allowed is 0 to below 0.5")
        if self.gradients not in ("sampled", "exact"):
            raise ConfigError(f"gradients: got {self.gradients!r}, allowed are sampled, exact")
        if self.gradients == "exact" and self.updates > 1:
            raise ConfigError(f"updates: got {self.updates}, allowed with exact gradients is 1: they are on-policy")
        if self.step_tokens < 1 or (self.step_tokens > 1 and self.gradients == "exact"):
            raise ConfigError(f"step_tokens: got {self.step_tokens}, allowed is 1 or more, with exact gradients 1")
        if self.groups % self.updates or self.steps % self.updates:
            raise ConfigError(f"updates: got {self.updates}, allowed is a divisor of groups and of steps")


@dataclass(frozen=True, slots=True, eq=False)
class Problems:
    """A set of problems: type_P, skill_PMJ int64; sign_PMJ 1.0 or -1.0; used_PMJ bool, the steps that a strategy has;
    hardness_PM float64; first_P: pass rate of the first policy."""

    type_P: Tensor
    skill_PMJ: Tensor
    sign_PMJ: Tensor
    used_PMJ: Tensor
    hardness_PM: Tensor
    first_P: Tensor

    def __len__(self) -> int:
        return len(self.type_P)


class Policy:
    """The parameters: strategy_TM, skill_S, fine_TS, own_P (of the training problems), extra_2 (continue after wrong,
    right).

    The first policy is the same for all arms of a seed: only `extra_2` is not 0.
    """

    def __init__(self, problems: int, wrong_length: float) -> None:
        right = _MEAN_STEPS + 2 + _RIGHT_EXTRA
        wrong_extra = wrong_length * right - _MEAN_STEPS - 2
        extras = torch.tensor([wrong_extra, _RIGHT_EXTRA], dtype=torch.float64)
        # A geometric number of continue tokens with mean e continues with probability e / (1 + e): the logit is ln e.
        self.extra_2 = extras.log().requires_grad_()
        self.strategy_TM = torch.zeros(TYPES, STRATEGIES, dtype=torch.float64, requires_grad=True)
        self.skill_S = torch.zeros(SKILLS, dtype=torch.float64, requires_grad=True)
        self.fine_TS = torch.zeros(TYPES, SKILLS, dtype=torch.float64, requires_grad=True)
        self.own_P = torch.zeros(problems, dtype=torch.float64, requires_grad=True)

    @property
    def parameters(self) -> list[Tensor]:
        """The tensors that the optimizer moves."""
        return [self.strategy_TM, self.skill_S, self.fine_TS, self.own_P, self.extra_2]

    def strategy_logprobs(self, problems: Problems) -> Tensor:
        """Return log-probs of the strategies, [P, M]."""
        return torch.log_softmax(self.strategy_TM, dim=1)[problems.type_P]

    def step_logits(self, problems: Problems, rows_N: Tensor, chosen_N: Tensor, own_N: Tensor) -> Tensor:
        """Return step logits [N, J] of one strategy for each of some problems; meaningless where there is no step."""
        skill_NJ = problems.skill_PMJ[rows_N, chosen_N]
        rule_NJ = self.skill_S[skill_NJ] + self.fine_TS[problems.type_P[rows_N, None], skill_NJ]
        return problems.sign_PMJ[rows_N, chosen_N] * rule_NJ + (own_N - problems.hardness_PM[rows_N, chosen_N])[:, None]

    def pass_rates(self, problems: Problems, *, held_out: bool) -> Tensor:
        """Return exact pass rates [P]: the sum over strategies of their probability times that of all their steps."""
        own_P = torch.zeros(len(problems), dtype=torch.float64) if held_out else self.own_P
        strategy_PM, chain_PM = self.log_chances(problems, torch.arange(len(problems)), own_P)
        return (strategy_PM + chain_PM).exp().sum(1)

    def log_chances(self, problems: Problems, rows_G: Tensor, own_P: Tensor) -> tuple[Tensor, Tensor]:
        """Return the log chance of each strategy, and of all its steps being right, [G, M] each, for some problems."""
        rows_N = rows_G.repeat_interleave(STRATEGIES)
        chosen_N = torch.arange(STRATEGIES).repeat(len(rows_G))
        right_NJ = torch.nn.functional.logsigmoid(self.step_logits(problems, rows_N, chosen_N, own_P[rows_N]))
        chain_N = torch.where(problems.used_PMJ[rows_N, chosen_N], right_NJ, 0.0).sum(1)
        return self.strategy_logprobs(problems)[rows_G], chain_N.reshape(-1, STRATEGIES)

    def mean_lengths(self) -> tuple[float, float]:
        """Return the expected extra tokens after (wrong, right) steps, without the limit."""
        wrong, right = self.extra_2.detach().exp().tolist()
        return wrong, right


@dataclass(frozen=True, slots=True, eq=False)
class Answers:
    """N sampled answers, as choices: problem_N, strategy_N; used_NJ, the steps that there are; good_NJ, the steps that
    are right; extra_N continue tokens; stopped_N, false where the limit ended it; right_N, whether it truly is right;
    certain_N, tokens of each step after its first."""

    problem_N: Tensor
    strategy_N: Tensor
    good_NJ: Tensor
    used_NJ: Tensor
    extra_N: Tensor
    stopped_N: Tensor
    right_N: Tensor
    certain_N: Tensor

    @property
    def lengths_N(self) -> Tensor:
        """int64 [N], tokens."""
        return 1 + self.used_NJ.sum(1) * (1 + self.certain_N) + self.extra_N + self.stopped_N

    @property
    def sample_T(self) -> Tensor:
        """The answer of every token, in the order of `token_logprobs`."""
        rows_N = torch.arange(len(self.problem_N))
        step = rows_N[:, None].expand_as(self.used_NJ)[self.used_NJ]
        ends = [rows_N.repeat_interleave(self.extra_N), rows_N[self.stopped_N]]
        return torch.cat([rows_N, step, *ends, step.repeat_interleave(self.certain_N[step])])

    def select(self, rows: Tensor) -> Answers:
        """Return some of the answers."""
        return Answers(*(getattr(self, name)[rows] for name in self.__dataclass_fields__))


def make_problems(count: int, spectrum: tuple[float, float], noise: torch.Generator) -> Problems:
    """Return problems whose first pass rates are draws from Beta(a, b); harder ones have longer chains."""
    first_P = _beta(count, spectrum, noise)
    type_P = torch.randint(TYPES, (count,), generator=noise)
    # A few skills are needed often and most are needed seldom: probability 1 / rank.
    common_S = 1.0 / torch.arange(1, SKILLS + 1, dtype=torch.float64)
    drawn = torch.multinomial(common_S, count * STRATEGIES * STEPS, replacement=True, generator=noise)
    # From 2 steps for the easiest to 6 for the hardest, 4 on average, and one to either side of that.
    around_PM = (2 + 4 * (1 - first_P))[:, None] + 2 * torch.rand(count, STRATEGIES, generator=noise).double() - 1
    steps_PM = around_PM.round().clamp(1, STEPS)
    used_PMJ = torch.arange(STEPS) < steps_PM[:, :, None]
    apart_PM = torch.randn(count, STRATEGIES, generator=noise, dtype=torch.float64)
    skill_PMJ = drawn.reshape(count, STRATEGIES, STEPS)
    # Which rules are reversed for which type is a fact of the world, for training and held-out problems alike.
    rules = torch.Generator().manual_seed(_RULES_SEED)
    flipped_TS = torch.rand(TYPES, SKILLS, generator=rules) < TYPE_EXCEPTIONS
    flipped_PMJ = torch.rand(skill_PMJ.shape, generator=noise) < OWN_EXCEPTIONS
    sign_PMJ = 1.0 - 2.0 * (flipped_TS[type_P[:, None, None], skill_PMJ] ^ flipped_PMJ).double()
    problems = Problems(type_P, skill_PMJ, sign_PMJ, used_PMJ, apart_PM, first_P)
    return replace(problems, hardness_PM=apart_PM + _offsets(problems)[:, None])


def sample_answers(
    policy: Policy, problems: Problems, problem_N: Tensor, noise: torch.Generator, step_tokens: int = 1
) -> Answers:
    """Return one answer of the policy to each problem of `problem_N` (repeats allowed)."""
    with torch.no_grad():
        strategy_NM = policy.strategy_logprobs(problems).exp()[problem_N]
        strategy_N = torch.multinomial(strategy_NM, 1, generator=noise)[:, 0]
        logits_NJ = policy.step_logits(problems, problem_N, strategy_N, policy.own_P[problem_N])
        used_NJ = problems.used_PMJ[problem_N, strategy_N]
        uniform_NJ = torch.rand(logits_NJ.shape, generator=noise, dtype=torch.float64)
        good_NJ = uniform_NJ < torch.sigmoid(logits_NJ)
        right_N = (good_NJ | ~used_NJ).all(1)
        # A geometric number: how many draws in a row fall below the probability to continue.
        continue_N = torch.nn.functional.logsigmoid(policy.extra_2)[right_N.long()]
        uniform_N = torch.rand(len(problem_N), generator=noise, dtype=torch.float64).clamp(min=1e-300)
        wanted_N = (uniform_N.log() / continue_N.clamp(max=-1e-12)).floor()
        stopped_N = wanted_N < MOST_EXTRA
        extra_N = wanted_N.clamp(max=MOST_EXTRA).long()
    certain_N = torch.full_like(extra_N, step_tokens - 1)
    return Answers(problem_N, strategy_N, good_NJ, used_NJ, extra_N, stopped_N, right_N, certain_N)


def token_logprobs(policy: Policy, problems: Problems, answers: Answers) -> Tensor:
    """Return log-probs [T] of the sampled choices, with gradient, in the order of `Answers.sample_T`."""
    rows_N, chosen_N = answers.problem_N, answers.strategy_N
    strategy_N = torch.log_softmax(policy.strategy_TM, dim=1)[problems.type_P[rows_N], chosen_N]
    logits_NJ = policy.step_logits(problems, rows_N, chosen_N, policy.own_P[rows_N])
    signed_NJ = torch.where(answers.good_NJ, logits_NJ, -logits_NJ)
    steps = torch.nn.functional.logsigmoid(signed_NJ[answers.used_NJ])
    after_N = answers.right_N.long()
    more = torch.nn.functional.logsigmoid(policy.extra_2)[after_N].repeat_interleave(answers.extra_N)
    stop = torch.nn.functional.logsigmoid(-policy.extra_2)[after_N[answers.stopped_N]]
    certain = steps.new_zeros(int((answers.used_NJ.sum(1) * answers.certain_N).sum()))
    return torch.cat([strategy_N, steps, more, stop, certain])


def mean_entropy(policy: Policy, problems: Problems, answers: Answers) -> float:
    """Return the mean entropy, in nats, of the distributions that the answers' tokens were drawn from."""
    with torch.no_grad():
        rows_N, chosen_N = answers.problem_N, answers.strategy_N
        log_NM = torch.log_softmax(policy.strategy_TM, dim=1)[problems.type_P[rows_N]]
        logits_NJ = policy.step_logits(problems, rows_N, chosen_N, policy.own_P[rows_N])
        choices = binary_entropy(logits_NJ[answers.used_NJ]).sum() - (log_NM.exp() * log_NM).sum()
        on_N = (answers.extra_N + answers.stopped_N) * binary_entropy(policy.extra_2)[answers.right_N.long()]
        return float((choices + on_N.sum()) / answers.lengths_N.sum())


def mean_more_tokens(extra_logits: Tensor) -> Tensor:
    """Return expected tokens after the steps, with the stop: 1 + c + ... + c^47, c the chance to go on; any shape."""
    on = torch.sigmoid(extra_logits)
    return sum((on**n for n in range(MOST_EXTRA)), start=torch.zeros_like(on))


def binary_entropy(logits: Tensor) -> Tensor:
    """Return the entropy of a choice between two with this logit, in nats; any shape."""
    both = (torch.sigmoid(x) * torch.nn.functional.logsigmoid(x) for x in (logits, -logits))
    return -sum(both, start=torch.zeros_like(logits))


def _offsets(problems: Problems, rounds: int = 60) -> Tensor:
    """Return what to add to each problem's hardness so that the first policy's pass rate is `first_P`; by bisection."""
    policy = Policy(len(problems), 1.0)
    low_P = torch.full_like(problems.first_P, -30.0)
    high_P = -low_P
    with torch.no_grad():
        for _ in range(rounds):
            middle_P = (low_P + high_P) / 2
            moved = replace(problems, hardness_PM=problems.hardness_PM + middle_P[:, None])
            too_easy_P = policy.pass_rates(moved, held_out=True) > problems.first_P
            low_P = torch.where(too_easy_P, middle_P, low_P)
            high_P = torch.where(too_easy_P, high_P, middle_P)
    return (low_P + high_P) / 2


def _beta(count: int, spectrum: tuple[float, float], noise: torch.Generator) -> Tensor:
    """Return draws from Beta(a, b), kept off 0 and 1: X / (X + Y) of two gamma variates."""
    shape = torch.tensor(spectrum, dtype=torch.float64)
    gammas = torch._standard_gamma(shape.expand(count, 2).contiguous(), generator=noise)
    return (gammas[:, 0] / gammas.sum(1)).clamp(0.001, 0.999)
