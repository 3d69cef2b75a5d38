"""The `algorithm` section: which loss, how advantages are made, corrections, shaping, and DARO's weights.

Read by algo (through the actor and the batch builder). Holds numbers and names only; the mathematics is in
megatron_daro.algo, which cannot be imported here because config/ does without torch.
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

    critic: it trains a critic, with the options of section `critic`.
    difficulty_weights: it learns DARO's weights, with the options of section `daro`.
    own_surrogate: it has a token loss of its own, so `trust_region` must not be set.
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
"""`trust_region` -> which of the options for trust regions it reads."""

TRAITS: Mapping[str, Traits] = {
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
"""The algorithms of megatron_daro.algo.weighting, in the order there; a test compares them with its classes."""


PASSES = ("old_logprobs", "ref_logprobs", "values")
"""Passes over a batch before its first optimizer step, in order; each is named by the column of response tokens that it
computes."""


class KlSection(Section):
    """KL term that holds the policy near the initial one."""

    coefficient: float = Field(default=0.0, ge=0, le=1000)
    """Factor of the KL term. 0: no term, and no pass for reference log-probs, unless an algorithm of your own names
    them in token_columns."""
    estimator: Literal["k1", "k2", "k3"] = "k3"
    """k1 = -log r, k2 = (log r)^2 / 2, k3 = r - 1 - log r, with r = reference / policy."""
    place: Literal["loss", "reward", "token_reward"] = "loss"
    """loss: a term of the loss; reward: the sum over an answer's tokens is subtracted from the answer's reward;
    token_reward: minus the KL term is each token's own reward (needs a critic)."""
    mean: Literal["tokens", "rollouts"] = "tokens"
    """With place loss. tokens: mean over the step's tokens; rollouts: mean over rollouts of the mean over the tokens of
    each (as in DeepSeekMath)."""

    @property
    def in_reward(self) -> bool:
        """Whether the KL term is subtracted from rewards, of answers or of tokens."""
        return self.coefficient > 0 and self.place != "loss"


class CorrectionSection(Section):
    """Importance correction between the engine that sampled and the policy that trains. The ratio is the probability
    under the old policy over that under the engine."""

    kind: Literal["none", "tis", "mis"] = "none"
    """none: no correction; tis: a token's loss is multiplied by the ratio, at most cap; mis: it is multiplied by the
    ratio, and is 0 where the ratio is outside [low, high]."""
    level: Literal["token", "sequence"] = "token"
    """What has a ratio. token: each token; sequence: each rollout as a whole, with all of its contexts."""
    cap: float = Field(default=2.0, ge=1e-6, le=1e6)
    """tis: upper bound of the ratio."""
    low: float = Field(default=0.5, ge=0, le=1e6)
    """mis: lower bound of the ratio, at most 1."""
    high: float = Field(default=2.0, ge=1e-6, le=1e6)
    """mis: upper bound of the ratio, at least 1."""


class SapoSection(Section):
    """SAPO's soft gate in place of a clip: its slope falls smoothly on both sides of ratio 1."""

    positive: float = Field(default=1.0, ge=1e-3, le=1e3)
    """Temperature for positive advantages: the larger, the narrower the gate."""
    negative: float = Field(default=1.05, ge=1e-3, le=1e3)
    """Temperature for all other advantages."""


Overlong = Literal["none", "penalty", "filter", "both"]


class OverlongSection(Section):
    """What happens to answers that are too long (DAPO, which uses both)."""

    kind: Overlong = "none"
    """none: nothing; penalty: a soft penalty on the reward; filter: truncated rollouts leave the loss, but still count
    in the pass rate; both: penalty and filter."""
    max_tokens: int | None = Field(default=None, ge=1)
    """penalty: length of a response, in generated tokens, from which the penalty is -1. Unset:
    rollout.max_response_tokens."""
    cache_tokens: int | None = Field(default=None, ge=1)
    """penalty: width in tokens of the zone below max_tokens in which the penalty falls from 0 to -1. Unset: a fifth of
    max_tokens."""

    @property
    def penalizes(self) -> bool:
        """Whether long answers get a lower reward."""
        return self.kind in ("penalty", "both")


class DaroSection(Section):
    """DARO's learnable weights, one per pass-rate bin."""

    learning_rate: float = Field(default=0.01, ge=1e-12, le=100)
    """Adam learning rate of the weights. Not read with half_life."""
    betas: tuple[Decay, Decay] = (0.9, 0.999)
    """Adam decay rates of the weights. Not read with half_life."""
    parameter: Literal["log", "linear"] = "log"
    """What Adam moves. log: s = ln w, so that w is always positive; linear: w itself."""
    magnitude: Literal["abs", "signed", "token", "advantage"] = "abs"
    """Measured size of a bin, whose loss is L_k. abs: |L_k|; signed: L_k; token: mean |token loss|; advantage: mean
    |advantage|."""
    half_life: float | None = Field(default=None, ge=1e-3, le=1e6)
    """Each weight is the inverse of a moving average of its bin's magnitude, with this half-life in steps. Unset: Adam
    moves the weights."""
    normalizer: Literal["bin", "batch", "shared"] = "bin"
    """What a bin's summed loss is divided by. bin: the bin's own tokens; batch: the tokens of all bins 0 < k < K;
    shared: as bin for learning the weights, as batch in the policy's loss."""
    scale: Literal["sum", "mean"] = "sum"
    """sum: the loss is the sum over bins; mean: the mean over the bins that are present."""
    weights_by: Literal["pass_rate", "environment_pass_rate"] = "pass_rate"
    """pass_rate: one weight for each pass rate; environment_pass_rate: one for each pass rate in each environment of
    `environments`."""
    clamp: tuple[float, float] = (0.1, 10.0)
    """Bounds of a weight; 0 < lower <= 1 <= upper, because weights start at 1. A weight reaches 10 where right and
    wrong answers are about equally long (wrong ones up to 1.2 to 1.4 times as long, depending on the pass rate)."""


class LengthRewardSection(Section):
    """Kimi k1.5's reward for short right answers, added to the reward: 0.5 for the shortest of a group, -0.5 for the
    longest, never above 0 for a wrong one."""

    weight: float = Field(default=0.0, ge=0, le=1000)
    """Factor of this reward; 0: off."""
    start_step: int = Field(default=0, ge=0)
    """Number of optimizer steps before it begins."""

    def weight_at(self, step: int) -> float:
        """Return the factor at an optimizer step (1, 2, ...)."""
        return self.weight if step > self.start_step else 0.0


class CriticSection(Section):
    """The critic: a second model on the policy's ranks. Read by algorithms that use its values (ppo, daro_ppo)."""

    path: ExpandedPath | None = None
    """Hugging Face checkpoint to start from, of any supported shape, with the policy's tokenizer. Unset: the policy's
    checkpoint."""
    learning_rate: float = Field(default=5e-6, ge=1e-12, le=10)
    """Peak learning rate; options of the optimizer that are not here are those of actor.optimizer."""
    warmup_steps: int = Field(default=0, ge=0)
    """Optimizer steps of linear warm-up."""
    grad_clip: float = Field(default=1.0, ge=0, le=1e9)
    """Largest global gradient norm; 0: no clipping."""
    value_clip: float | None = Field(default=None, gt=0, le=1e9)
    """How far a value may move in the loss from what it was when the batch began. Unset: no clip."""
    pretrain_steps: int = Field(default=0, ge=0)
    """Number of optimizer steps, at the start of the run, in which only the critic is trained."""
    offload: bool = False
    """Policy and critic take turns on the GPUs: while one computes, the other's weights, gradients and optimizer state
    are in host memory. The results are the same, and the GPUs need memory for only one model."""

    def optimizer_of(self, policy: OptimizerSection) -> OptimizerSection:
        """Return the critic's optimizer: the policy's, with the options of this section in place."""
        own = {name: getattr(self, name) for name in ("learning_rate", "warmup_steps", "grad_clip")}
        return policy.model_copy(update=own)


class DistillSection(Section):
    """On-policy distillation from a teacher on SGLang servers: the more probable a token is under the policy than under
    the teacher, the lower its advantage (reverse KL divergence per token; Thinking Machines, October 2025)."""

    urls: Servers = ()
    """Servers of one teacher that has the policy's tokenizer, as http://host:port. Empty: no distillation."""
    coefficient: float = Field(default=1.0, ge=0, le=1000)
    """Factor of log p(teacher) - log p(policy) in a token's advantage."""
    reward_weight: float = Field(default=0.0, ge=0, le=1000)
    """Factor of the algorithm's own advantage, which is added to it; 0: only the teacher counts."""


class AlgorithmSection(Section):
    """The loss."""

    name: Annotated[str, OneOf(tuple(TRAITS))] = "daro"
    """The algorithm: advantage, filter, and weighting of the token losses (docs/algorithms.md). module:Class: a
    subclass of megatron_daro.algo.weighting.Algorithm of your own."""
    options: dict[str, Any] = {}
    """Options of this algorithm: keyword arguments of its constructor, which checks them."""
    std: Literal["auto", "population", "sample", "batch", "none"] = "auto"
    """Divisor of the advantage: the standard deviation over the group (population, sample) or over the whole optimizer
    step (batch), or none. auto: the algorithm's default."""
    filter: Literal["auto", "none", "pass_rate"] = "auto"
    """none: train all groups; pass_rate: keep only groups with 0 < pass rate < 1, and refill the batch; auto: the
    algorithm's default."""
    trust_region: Literal["clip", "gspo", "cispo", "sapo", "reinforce"] = "clip"
    """clip: PPO's clipped ratio; gspo: the same with one ratio per rollout; cispo: the ratio, at most 1 + clip_high, as
    a weight without gradient; sapo: a soft gate; reinforce: no ratio, no clip."""
    sapo: SapoSection = SapoSection()
    """SAPO's options; read with trust_region sapo."""
    clip_low: float = Field(default=0.2, gt=0, lt=1)
    """The ratio is clipped below at 1 - clip_low (clip, gspo)."""
    clip_high: float = Field(default=0.28, ge=1e-6, le=1e6)
    """The ratio is clipped above at 1 + clip_high (clip, gspo, cispo)."""
    dual_clip: float | None = Field(default=None, gt=1, le=1e6)
    """Bound of the loss for negative advantages, as a multiple of |A| (clip, gspo). Unset: off."""
    entropy_coefficient: float = Field(default=0.0, ge=0, le=100)
    """Factor of the entropy bonus."""
    old_logprobs: Literal["auto", "forward", "recompute", "rollout"] = "auto"
    """Log-probs in the denominator of the ratio. forward: those of the training pass, detached (only with one optimizer
    step per batch); recompute: those of an extra pass; rollout: the engine's; auto: forward with one optimizer step per
    batch, else recompute."""
    kl: KlSection = KlSection()
    """KL term."""
    correction: CorrectionSection = CorrectionSection()
    """Off-policy correction."""
    overlong: OverlongSection = OverlongSection()
    """Overlong answers."""
    repetition_penalty: float = Field(default=0.0, ge=0, le=1000)
    """Subtracted from the reward of an answer that was ended by rollout.repetition."""
    length_reward: LengthRewardSection = LengthRewardSection()
    """Reward for short answers."""
    daro: DaroSection = DaroSection()
    """DARO's weights; read by daro and daro_ppo. A subclass of Daro gets the options that are set here."""
    critic: CriticSection = CriticSection()
    """The critic; read by algorithms that have one."""
    distill: DistillSection = DistillSection()
    """On-policy distillation."""
    turn_rewards: bool = False
    """Advantages by turn of a conversation (DeepSeekMath's process supervision): each turn's reward is normalised over
    all turns of the group; a token's advantage is the sum of the normalised rewards of its turn and of all later
    turns."""

    @property
    def traits(self) -> Traits | None:
        """What this algorithm means for other options; None for an algorithm of your own, whose class says it."""
        return TRAITS.get(self.name)

    @property
    def shapes_rewards(self) -> bool:
        """Whether training uses other rewards than those of the verdicts (data/advantages.py, actor/advantages.py)."""
        lengths = self.overlong.penalizes or self.length_reward.weight > 0
        return lengths or self.repetition_penalty > 0 or self.kl.in_reward

    @property
    def has_critic(self) -> bool:
        """Whether this is an algorithm of the package that trains a critic."""
        return self.traits is not None and self.traits.critic

    def passes(self, columns: Collection[str] = ()) -> tuple[str, ...]:
        """Return which of PASSES the ranks must make.

        Args:
            columns: columns per token from which the algorithm makes advantages (`Algorithm.token_columns`).
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
            rollouts_per_prompt: K. max_response_tokens: the longest response allowed. environments: their names, if the
                run has several.
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
