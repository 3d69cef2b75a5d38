"""The `algorithm` section: which loss, how advantages are made, corrections, shaping, and DARO's weights.

Read by algo (through the actor and the batch builder). Holds numbers and names only; the
mathematics is in megatron_daro.algo, which this file cannot import because it is torch-free.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from megatron_daro.config.actor import OptimizerSection
from megatron_daro.config.base import Decay, ExpandedPath, OneOf, Section, Servers, changed


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """What an algorithm of the package means for other options.

    critic: it trains one, by section `critic`.
    difficulty_weights: it learns DARO's, by section `daro`.
    own_surrogate: its loss of a token is its own, and no trust region is chosen.
    """

    critic: bool = False
    difficulty_weights: bool = False
    own_surrogate: bool = False


_CLIPPED = frozenset({"clip_low", "clip_high", "dual_clip"})
READ_BY_REGION: Mapping[str, frozenset[str]] = {
    "clip": _CLIPPED,
    "gspo": _CLIPPED,
    "cispo": frozenset({"clip_high"}),
    "sapo": frozenset({"sapo"}),
    "reinforce": frozenset(),
}
"""By `trust_region`: the options, of those that are for one, which it reads."""

ALGORITHMS: Mapping[str, Traits] = {
    "grpo": Traits(),
    "grpo_sequence": Traits(),
    "dapo": Traits(),
    "lite_ppo": Traits(),
    "dr_grpo": Traits(),
    "rloo": Traits(),
    "kimi": Traits(own_surrogate=True),
    "daro": Traits(difficulty_weights=True),
    "maxrl": Traits(),
    "f_grpo": Traits(),
    "mgpo": Traits(),
    "dgpo": Traits(),
    "ha_dw": Traits(),
    "ppo": Traits(critic=True),
    "daro_ppo": Traits(critic=True, difficulty_weights=True),
}
"""Those of megatron_daro.algo.weighting, in its order; a test compares them with its classes."""


PASSES = ("old_logprobs", "ref_logprobs", "values")
"""Passes over a batch before its first optimizer step, in order, by the column of response tokens that each gives."""


class KlSection(Section):
    """KL term towards the initial policy."""

    coefficient: float = Field(default=0.0, ge=0, le=1000)
    """Factor of the KL term. 0: no term, and no reference log-probs unless token_columns has them."""
    estimator: Literal["k1", "k2", "k3"] = "k3"
    """k1 = -log r, k2 = (log r)^2 / 2, k3 = r - 1 - log r."""
    place: Literal["loss", "reward", "token_reward"] = "loss"
    """loss: a term of the loss; reward: its sum over an answer is taken from the answer's reward; token_reward: each
    token's is that token's own reward, with its sign turned (with a critic)."""
    mean: Literal["tokens", "rollouts"] = "tokens"
    """In the loss: a mean over the step's tokens, or over rollouts of the mean over their tokens (DeepSeekMath's)."""

    @property
    def in_reward(self) -> bool:
        """Whether rewards, of answers or of tokens, are reduced by it."""
        return self.coefficient > 0 and self.place != "loss"


class CorrectionSection(Section):
    """Importance correction between the engine that sampled and the policy that trains."""

    kind: Literal["none", "tis", "mis"] = "none"
    """none; tis: times the truncated ratio; mis: times the ratio, without what is outside [low, high]."""
    level: Literal["token", "sequence"] = "token"
    """Per token, or per rollout (sequence: with all of its contexts)."""
    cap: float = Field(default=2.0, ge=1e-6, le=1e6)
    """tis: upper bound of the ratio."""
    low: float = Field(default=0.5, ge=0, le=1e6)
    """mis: lower bound of the ratio, at most 1."""
    high: float = Field(default=2.0, ge=1e-6, le=1e6)
    """mis: upper bound of the ratio, at least 1."""


class SapoSection(Section):
    """SAPO's soft gate in the place of a clip: its slope falls smoothly away from ratio 1."""

    positive: float = Field(default=1.0, ge=1e-3, le=1e3)
    """Temperature for positive advantages: the larger, the narrower."""
    negative: float = Field(default=1.05, ge=1e-3, le=1e3)
    """Temperature for the others."""


Overlong = Literal["none", "penalty", "filter", "both"]


class OverlongSection(Section):
    """What happens to answers that are too long (DAPO, which uses both)."""

    kind: Overlong = "none"
    """none; penalty: soft reward penalty; filter: truncated rollouts leave the loss but count in the pass rate."""
    max_tokens: int | None = Field(default=None, ge=1)
    """penalty: generated tokens of a response from which the penalty is -1. Unset: rollout.max_response_tokens."""
    cache_tokens: int | None = Field(default=None, ge=1)
    """penalty: width of the zone below max_tokens, tokens. Unset: a fifth of max_tokens."""

    @property
    def penalizes(self) -> bool:
        """Whether rewards are less for long answers."""
        return self.kind in ("penalty", "both")


class DaroSection(Section):
    """DARO's learnable weight per pass-rate bin."""

    learning_rate: float = Field(default=0.01, ge=1e-12, le=100)
    """Adam learning rate of the weights. Not read with half_life."""
    betas: tuple[Decay, Decay] = (0.9, 0.999)
    """Adam decay rates of the weights. Not read with half_life."""
    parameter: Literal["log", "linear"] = "log"
    """What Adam moves: s = ln w (positive by construction), or w itself."""
    magnitude: Literal["abs", "signed", "token", "advantage"] = "abs"
    """Measured size of a bin: |L_k|, L_k, mean |token loss|, or mean |advantage|."""
    half_life: float | None = Field(default=None, ge=1e-3, le=1e6)
    """Weights are the inverse of a moving average of the measure with this half-life, steps. Unset: Adam."""
    normalizer: Literal["bin", "batch", "shared"] = "bin"
    """bin: a bin's loss over its own tokens; batch: over the tokens of all bins 0 < k < K; shared: weights learn as
    with bin, the policy's loss is divided as with batch."""
    scale: Literal["sum", "mean"] = "sum"
    """Sum over bins, or mean over the bins present."""
    weights_by: Literal["pass_rate", "environment_pass_rate"] = "pass_rate"
    """A weight for each pass rate, or for each pass rate of each of `environments`."""
    clamp: tuple[float, float] = (0.1, 10.0)
    """Bounds of a weight; 0 < lower <= 1 <= upper, because weights start at 1. 10 binds where right and wrong
    answers are about equally long: wrong ones up to 1.2 to 1.4 times as long, by pass rate."""


class LengthRewardSection(Section):
    """Kimi k1.5's reward for short right answers, added to the reward: 0.5 for the shortest of a group, -0.5 for the
    longest, never above 0 for a wrong one."""

    weight: float = Field(default=0.0, ge=0, le=1000)
    """Factor; 0: off."""
    start_step: int = Field(default=0, ge=0)
    """Optimizer steps before it begins."""

    def weight_at(self, step: int) -> float:
        """Return the factor at an optimizer step (1, 2, ...)."""
        return self.weight if step > self.start_step else 0.0


class CriticSection(Section):
    """The critic: a second model on the policy's ranks. Read by algorithms with values (ppo)."""

    path: ExpandedPath | None = None
    """Hugging Face checkpoint that it starts from, of any supported shape, with the policy's tokenizer. Unset: the
    policy's."""
    learning_rate: float = Field(default=5e-6, ge=1e-12, le=10)
    """Peak learning rate; the rest of its optimizer is actor.optimizer."""
    warmup_steps: int = Field(default=0, ge=0)
    """Optimizer steps of linear warm-up."""
    grad_clip: float = Field(default=1.0, ge=0, le=1e9)
    """Largest global gradient norm; 0: no clipping."""
    value_clip: float | None = Field(default=None, gt=0, le=1e9)
    """How far a value may move from that of the batch's beginning, in the loss. Unset: no clip."""
    pretrain_steps: int = Field(default=0, ge=0)
    """First optimizer steps of the run in which the critic alone is trained."""
    offload: bool = False
    """Policy and critic take turns on the GPUs: while one computes, the other's weights, gradients and optimizer state
    are in host memory. Same numbers, memory of one model."""

    def optimizer_of(self, policy: OptimizerSection) -> OptimizerSection:
        """Return the critic's optimizer: the policy's but for what stands here."""
        own = {name: getattr(self, name) for name in ("learning_rate", "warmup_steps", "grad_clip")}
        return policy.model_copy(update=own)


class DistillSection(Section):
    """On-policy distillation from a teacher on SGLang servers: a token's advantage falls by how much likelier it is for
    the policy than for the teacher, the reverse KL divergence token by token (Thinking Machines, October 2025)."""

    urls: Servers = ()
    """Servers of one teacher that has the policy's tokenizer, as http://host:port. Empty: no distillation."""
    coefficient: float = Field(default=1.0, ge=0, le=1000)
    """Factor of log p(teacher) - log p(policy) in a token's advantage."""
    reward_weight: float = Field(default=0.0, ge=0, le=1000)
    """Factor of the algorithm's own advantage, which is added; 0: the teacher alone."""


class AlgorithmSection(Section):
    """The loss."""

    name: Annotated[str, OneOf(tuple(ALGORITHMS))] = "daro"
    """Advantage, filter and weighting of the token losses; module:Class: a subclass of
    megatron_daro.algo.weighting.Algorithm."""
    options: dict[str, Any] = {}
    """Options of this algorithm, or of your own: keyword arguments of its constructor, which judges them."""
    std: Literal["auto", "population", "sample", "batch", "none"] = "auto"
    """Divisor of the advantage: standard deviation of the group (population, sample) or of all of the optimizer step
    (batch), or none; auto: the algorithm's."""
    filter: Literal["auto", "none", "pass_rate"] = "auto"
    """pass_rate: keep groups with 0 < pass rate < 1 and refill the batch; auto: the algorithm's."""
    trust_region: Literal["clip", "gspo", "cispo", "sapo", "reinforce"] = "clip"
    """clip: PPO's clipped ratio; gspo: the same with one ratio per rollout; cispo: the ratio as a constant weight,
    at most 1 + clip_high; sapo: a soft gate; reinforce: no ratio, no clip."""
    sapo: SapoSection = SapoSection()
    """SAPO; read when trust_region is sapo."""
    clip_low: float = Field(default=0.2, gt=0, lt=1)
    """The ratio is clipped below at 1 - clip_low (clip, gspo)."""
    clip_high: float = Field(default=0.28, ge=1e-6, le=1e6)
    """The ratio is clipped above at 1 + clip_high (clip, gspo, cispo)."""
    dual_clip: float | None = Field(default=None, gt=1, le=1e6)
    """Bound of the loss for negative advantages, as a multiple of |A| (clip, gspo). Unset: off."""
    entropy_coefficient: float = Field(default=0.0, ge=0, le=100)
    """Factor of the entropy bonus."""
    old_logprobs: Literal["auto", "forward", "recompute", "rollout"] = "auto"
    """Denominator of the ratio. forward: the train pass's detached values (one optimizer step per batch); recompute: an
    extra pass; rollout: the engine's; auto: forward with one optimizer step per batch, else recompute."""
    kl: KlSection = KlSection()
    """KL term."""
    correction: CorrectionSection = CorrectionSection()
    """Off-policy correction."""
    overlong: OverlongSection = OverlongSection()
    """Overlong answers."""
    repetition_penalty: float = Field(default=0.0, ge=0, le=1000)
    """Taken from the reward of an answer that ended at rollout.repetition."""
    length_reward: LengthRewardSection = LengthRewardSection()
    """Reward for short answers."""
    daro: DaroSection = DaroSection()
    """DARO's weights; read by daro, daro_ppo and subclasses of Daro, whose constructors get what is set here."""
    critic: CriticSection = CriticSection()
    """The critic; read by algorithms that have one."""
    distill: DistillSection = DistillSection()
    """On-policy distillation."""
    turn_rewards: bool = False
    """Advantages by turn of a conversation (DeepSeekMath's process supervision): each turn's reward is normalised over
    all turns of the group; a token's advantage is the sum of those of its turn and of later ones."""

    @property
    def traits(self) -> Traits | None:
        """What this algorithm means for other options; None for one of your own, whose class says it."""
        return ALGORITHMS.get(self.name)

    @property
    def shapes_rewards(self) -> bool:
        """Whether rewards of training are others than the verdicts' (data/advantages.py, actor/advantages.py)."""
        lengths = self.overlong.penalizes or self.length_reward.weight > 0
        return lengths or self.repetition_penalty > 0 or self.kl.in_reward

    @property
    def has_critic(self) -> bool:
        """Whether this is an algorithm of the package that trains a critic."""
        return self.traits is not None and self.traits.critic

    def passes(self, columns: Collection[str] = ()) -> tuple[str, ...]:
        """Return those of PASSES that the ranks make.

        Args:
            columns: what the algorithm makes advantages of, per token.
        """
        wanted = "old_logprobs" in columns or self.kl.in_reward
        old = self.old_logprobs != "rollout" and (self.old_logprobs == "recompute" or wanted)
        reference = self.kl.coefficient > 0 or "ref_logprobs" in columns
        made = {"old_logprobs": old, "ref_logprobs": reference, "values": "values" in columns}
        return tuple(name for name in PASSES if made[name])

    def arguments(
        self, *, rollouts_per_prompt: int, max_response_tokens: int, environments: Sequence[str] = ()
    ) -> dict[str, Any]:
        """Return the keyword arguments of megatron_daro.algo.weighting.make_algorithm for this run.

        Args:
            rollouts_per_prompt: K. max_response_tokens: the longest response allowed. environments: names of several.
        """
        learnt = self.traits is not None and self.traits.difficulty_weights
        names = type(self.daro).model_fields if learnt else changed(self.daro)
        daro = {name: getattr(self.daro, name) for name in names}
        if "weights_by" in daro:
            daro["environments"] = tuple(environments) if daro.pop("weights_by") == "environment_pass_rate" else ()
        return {
            "name": self.name,
            "rollouts_per_prompt": rollouts_per_prompt,
            "max_response_tokens": max_response_tokens,
            "std": self.std,
            "group_filter": self.filter,
            "daro": daro,
            "options": self.options,
        }
