"""The table of algorithms, and the function that makes one by its name.

`algorithm.name` and its options -> one Algorithm in the driver (advantages, which groups are trained) and one on every
rank (coefficients, learning; advantages of tokens, and with `kl.place: reward` of rollouts). This file has GRPO, its
relatives and DARO; algorithms that weight by the pass rate alone are in `pass_rate_rules`, HA-DW is in `histories`, PPO
in `ppo`. Refuses names and options that do not exist.

Shape letters: N samples (of any part of the step), K rollouts per prompt, [K+1] one entry per bin 0..K.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor
from typing_extensions import Unpack

from megatron_daro.algo.advantages import AdvantageStd, leave_one_out_advantages
from megatron_daro.algo.algorithm import (
    Algorithm,
    Common,
    GroupFilter,
    SampleAlgorithm,
    Samples,
    StepStats,
    StepTotals,
    constant,
    inverse,
    number,
    token_mean,
)
from megatron_daro.algo.difficulty_weights import DifficultyWeights
from megatron_daro.algo.histories import HaDw
from megatron_daro.algo.objective import KIMI_TAU
from megatron_daro.algo.pass_rate_rules import Dgpo, FGrpo, MaxRl, Mgpo
from megatron_daro.algo.ppo import Ppo, WithCritic
from megatron_daro.algo.token_columns import COLUMN_NAMES, TokenColumns
from megatron_daro.errors import AlgorithmError
from megatron_daro.options import options_of, unknown_option, wrong_option

__all__ = [
    "ALGORITHMS",
    "WITH_CRITIC",
    "Algorithm",
    "Daro",
    "SampleAlgorithm",
    "Samples",
    "StepStats",
    "StepTotals",
    "TokenColumns",
    "make_algorithm",
]


class Grpo(Algorithm):
    """Token mean over all trained tokens: 1/N."""

    name = "grpo"

    def bin_coefficients(self, bins_N: Tensor, lengths_N: Tensor, totals: StepTotals) -> Tensor:
        """See `Algorithm.bin_coefficients`."""
        return token_mean(lengths_N, totals)


class GrpoSequence(Algorithm):
    """The original GRPO: the mean over rollouts of the mean over their tokens, 1/(|o_i| * rollouts)."""

    name = "grpo_sequence"

    def bin_coefficients(self, bins_N: Tensor, lengths_N: Tensor, totals: StepTotals) -> Tensor:
        """See `Algorithm.bin_coefficients`."""
        return constant(inverse(totals.num_rollouts), lengths_N) / lengths_N.to(torch.float64).clamp(min=1)


Denominator = Literal["batch", "prompt"]


class Dapo(Algorithm):
    """Token mean over the groups with 0 < mu < 1; the others are filtered and replaced.

    `denominator` "batch" takes the mean over the tokens of all these groups, as the authors' code does; "prompt" takes
    the mean over prompts of the mean over the tokens of each prompt's answers, as the paper prints it.

    Source: DAPO, arXiv 2503.14476, eq. 8.
    """

    name = "dapo"
    dynamic_filter = True

    def __init__(self, *, denominator: Denominator = "batch", **common: Unpack[Common]) -> None:
        """Take the options of `Algorithm`, and:

        Args:
            denominator: batch: mean over the step's tokens (as in the authors' code); prompt: mean over prompts of the
                mean over a prompt's tokens (eq. 8).
        """
        super().__init__(**common)
        self.denominator = denominator
        self.needs_group_lengths = denominator == "prompt"

    def bin_coefficients(self, bins_N: Tensor, lengths_N: Tensor, totals: StepTotals) -> Tensor:
        """See `Algorithm.bin_coefficients`."""
        if self.denominator == "prompt":
            raise AlgorithmError(
                "denominator: got 'prompt', whose coefficients depend on the lengths of the whole group; call "
                "`coefficients` with Samples, or set it to 'batch'"
            )
        return torch.where(self._mixed(bins_N), constant(inverse(totals.mixed_tokens), lengths_N), 0.0)

    def coefficients(self, samples: Samples, totals: StepTotals) -> Tensor:
        """See `Algorithm.coefficients`."""
        if self.denominator == "batch":
            return self.bin_coefficients(samples.bins_N, samples.lengths_N, totals)
        if samples.group_lengths_NK is None:
            raise AlgorithmError(
                "dapo with denominator prompt: the samples have no group_lengths_NK; build the batch with this "
                "algorithm, whose `needs_group_lengths` says so"
            )
        prompts = totals.mixed_rollouts / self.rollouts_per_prompt
        tokens_N = samples.group_lengths_NK.sum(dim=1).to(torch.float64)
        kept_N = self._mixed(samples.bins_N) & (samples.lengths_N > 0)
        return torch.where(kept_N, 1 / (max(prompts, 1.0) * tokens_N.clamp(min=1)), 0.0)


class LitePpo(Grpo):
    """Token mean with group mean and batch standard deviation: grpo with w_k proportional to sqrt(mu(1-mu))."""

    name = "lite_ppo"
    advantage_std = "batch"
    std_defines = True


class DrGrpo(Algorithm):
    """No standard deviation and a constant denominator: 1/(rollouts * max_response_tokens)."""

    name = "dr_grpo"
    advantage_std = "none"
    std_defines = True

    def bin_coefficients(self, bins_N: Tensor, lengths_N: Tensor, totals: StepTotals) -> Tensor:
        """See `Algorithm.bin_coefficients`."""
        return constant(inverse(totals.num_rollouts * self.max_response_tokens), lengths_N)


class Rloo(Grpo):
    """Token mean with the leave-one-out advantage."""

    name = "rloo"
    advantage_std = "none"
    std_allowed = ("none",)

    def advantages(self, rewards_N: Tensor, group_ids_N: Tensor) -> Tensor:
        """See `leave_one_out_advantages`."""
        return leave_one_out_advantages(rewards_N, group_ids_N)


class Kimi(Algorithm):
    """Kimi k1.5's policy mirror descent: the advantage is the reward less the group's mean; token losses are summed
    over each rollout and averaged over rollouts.

    Source: arXiv 2501.12599, eq. 3.
    """

    name = "kimi"
    advantage_std = "none"
    std_defines = True

    def __init__(self, *, tau: float = KIMI_TAU, reset_optimizer: bool = False, **common: Unpack[Common]) -> None:
        """Take the options of `Algorithm`, and:

        Args:
            tau: weight of the relative entropy to the policy with which the batch began, above 0; it has an effect only
                with several optimizer steps per batch, or with `algorithm.old_logprobs` rollout.
            reset_optimizer: whether the optimizer's moments are set to zero when a batch begins.
        """
        super().__init__(**common)
        self.tau, self.resets_optimizer = number("tau", tau, 0.0, closed=False), reset_optimizer

    @property
    def own_objective(self) -> Mapping[str, Any]:
        """The surrogate, which is the other half of the method."""
        return {"trust_region": "mirror", "mirror_tau": self.tau}

    def bin_coefficients(self, bins_N: Tensor, lengths_N: Tensor, totals: StepTotals) -> Tensor:
        """See `Algorithm.bin_coefficients`."""
        return constant(inverse(totals.num_rollouts), lengths_N)


class Daro(Algorithm):
    """w_k / N_k with learnt difficulty weights, optionally separate for each environment; groups with mu of 0 or 1 are
    filtered."""

    name = "daro"
    dynamic_filter = True

    def __init__(
        self,
        *,
        rollouts_per_prompt: int,
        max_response_tokens: int,
        std: AdvantageStd | Literal["auto"] = "auto",
        group_filter: GroupFilter = "auto",
        **difficulty: Any,
    ) -> None:
        """Take the options of `Algorithm` and, as keywords, those of `DifficultyWeights`.

        Raises:
            AlgorithmError: an option is out of range.
        """
        super().__init__(
            rollouts_per_prompt=rollouts_per_prompt,
            max_response_tokens=max_response_tokens,
            std=std,
            group_filter=group_filter,
        )
        self.difficulty = DifficultyWeights(rollouts_per_prompt, **difficulty)

    @property
    def classes(self) -> tuple[str, tuple[str, ...]]:
        """See `Algorithm.classes`."""
        names = self.difficulty.environments
        return ("environment", names) if names else super().classes

    def classes_of(self, samples: Samples) -> Tensor:
        """See `Algorithm.classes_of`. Raises AlgorithmError if the samples do not name their environments."""
        if not self.difficulty.environments:
            return super().classes_of(samples)
        if samples.environments_N is None:
            raise AlgorithmError(
                "daro: weights by environment_pass_rate, but the samples have no environments_N; build the batch with "
                "the run's environments, or set weights_by to pass_rate"
            )
        return samples.environments_N

    def bin_coefficients(self, bins_N: Tensor, lengths_N: Tensor, totals: StepTotals) -> Tensor:
        """See `Algorithm.bin_coefficients`. Raises AlgorithmError if each environment has weights of its own."""
        return self._of_cells(Samples(bins_N, lengths_N, torch.zeros(len(bins_N))), totals)

    def coefficients(self, samples: Samples, totals: StepTotals) -> Tensor:
        """See `Algorithm.coefficients`."""
        return (
            self._of_cells(samples, totals) if self.difficulty.environments else super().coefficients(samples, totals)
        )

    def _of_cells(self, samples: Samples, totals: StepTotals) -> Tensor:
        bins_N = samples.bins_N
        coefficients = self.difficulty.coefficients(totals.tokens_per_cell.reshape(-1)).to(bins_N.device)
        cells_N = bins_N * self.difficulty.num_classes + self.classes_of(samples).to(bins_N.device)
        return torch.where(samples.lengths_N > 0, coefficients[cells_N], 0.0)

    def extra_loss(self, totals: StepTotals) -> float:
        """See `Algorithm.extra_loss`."""
        return self.difficulty.barrier(totals.tokens_per_cell.reshape(-1))

    def learn(self, step_stats: StepStats) -> None:
        """See `DifficultyWeights.update`."""
        sums = {name: values.reshape(-1) for name, values in step_stats.sums.items()}
        self.difficulty.update(token_counts=step_stats.totals.tokens_per_cell.reshape(-1), **sums)

    @property
    def weights(self) -> Tensor:
        """float64 [K+1], each the mean over classes."""
        return self.cell_weights.mean(dim=1)

    @property
    def cell_weights(self) -> Tensor:
        """float64 [K+1, L]."""
        return self.difficulty.weights.reshape(-1, self.difficulty.num_classes)

    @property
    def clamped(self) -> int:
        """See `DifficultyWeights.clamped`."""
        return self.difficulty.clamped

    def state_dict(self) -> dict[str, Any]:
        """Return the name and the state of the weights."""
        return {**super().state_dict(), "difficulty": self.difficulty.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a saved state.

        Raises:
            CheckpointError: it is of another algorithm or K, its weights have another form or are for other
                environments, or it is torn.
        """
        super().load_state_dict(state)
        self.difficulty.load_state_dict(state.get("difficulty") or {})


class DaroPpo(WithCritic, Daro):
    """PPO's advantages per token, weighted with DARO's weights, which learn from the losses of the bins as in daro.
    Groups with mu of 0 or 1 are filtered, so the critic does not train on them either."""

    name = "daro_ppo"


_TABLE: tuple[type[Algorithm], ...] = (Grpo, GrpoSequence, Dapo, LitePpo, DrGrpo, Rloo, Kimi, Daro)
_TABLE += (MaxRl, FGrpo, Mgpo, Dgpo, HaDw)

ALGORITHMS: Mapping[str, type[Algorithm]] = {cls.name: cls for cls in _TABLE}
"""Algorithms that need only rollouts and their log-probs."""
WITH_CRITIC: Mapping[str, type[Algorithm]] = {cls.name: cls for cls in (Ppo, DaroPpo)}
"""Algorithms that need values as well; they cannot be used in other frameworks' loops."""


def make_algorithm(
    name: str, *, daro: Mapping[str, Any] | None = None, options: Mapping[str, Any] | None = None, **arguments: Any
) -> Algorithm:
    """Return the algorithm of this name. The driver and every rank make the same call.

    Args:
        name: one of `ALGORITHMS` or `WITH_CRITIC`, or `module:Class`, a subclass of `Algorithm` that Python can import.
        daro: further arguments for the constructor of `Daro` or a subclass. options: further arguments for the
            constructor, from the user. arguments: those that every algorithm takes (`Common`).

    Raises:
        AlgorithmError: there is no such algorithm, or an option is unknown, out of range or given twice.
    """
    cls = ALGORITHMS.get(name) or WITH_CRITIC.get(name) or _imported(name)
    for option, value in (options or {}).items():
        if option in arguments or option in (daro or {}):
            raise AlgorithmError(
                f"{option}: got {value!r}, allowed are other names: the run gives {option} to the algorithm itself"
            )
    if daro and not issubclass(cls, Daro):
        raise AlgorithmError(
            f"daro: got {', '.join(daro)} with algorithm {name}; allowed: only with daro, daro_ppo and subclasses of "
            "Daro; fix: remove them, or give the class options of its own"
        )
    given = {**arguments, **(daro or {}), **(options or {})}
    own = options_of(cls, without=Common.__annotations__)
    if wrong := wrong_option(own, given):
        raise AlgorithmError(wrong)
    try:
        inspect.signature(cls).bind(**given)
        return cls(**given)
    except TypeError as error:
        unknown = re.search(r"unexpected keyword argument '(\w+)'", str(error))
        if unknown is None or unknown[1] not in given:  # perhaps from another call, inside the constructor
            text = f"options of algorithm {name}: {error}; allowed are those of {cls.__name__}"
            raise AlgorithmError(text) from error
        raise AlgorithmError(unknown_option(unknown[1], own)) from None


def _imported(name: str) -> type[Algorithm]:
    allowed = f"allowed are {', '.join([*ALGORITHMS, *WITH_CRITIC])}, or module:Class of a subclass of Algorithm"
    module, _, attribute = name.partition(":")
    if not attribute:
        raise AlgorithmError(f"name: got {name!r}, {allowed}")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise AlgorithmError(
            f"name: got {name!r}, which cannot be imported ({error}), {allowed}; the folder of the module must be in "
            "PYTHONPATH, on every machine of the run"
        ) from error
    if not (isinstance(found, type) and issubclass(found, Algorithm) and not inspect.isabstract(found)):
        raise AlgorithmError(f"name: got {name!r}, which is no subclass of Algorithm with all its methods, {allowed}")
    if not isinstance(getattr(found, "name", None), str):
        raise AlgorithmError(f"name: {name!r} has no attribute `name`, which stands in its checkpoints; give it one")
    _check_token_columns(name, found)
    return found


def _check_token_columns(name: str, cls: type[Algorithm]) -> None:
    """Refuse a class whose advantages per token would never be called, or need columns that nothing computes."""
    wanted, own = cls.token_columns, cls.token_advantages is not Algorithm.token_advantages
    if (wanted is not None) != own:
        lacking, there = ("token_columns", "token_advantages") if own else ("token_advantages", "token_columns")
        raise AlgorithmError(
            f"name: {name} has {there} but no {lacking}; allowed are both or neither: {lacking} must be there for "
            "advantages per token"
        )
    if wanted is None:
        return
    unknown = [column for column in wanted if column not in COLUMN_NAMES] if isinstance(wanted, tuple) else [wanted]
    if unknown:
        raise AlgorithmError(
            f"name: {name}.token_columns: got {', '.join(map(repr, unknown))}, allowed is a tuple of some of "
            f"{', '.join(COLUMN_NAMES)}"
        )
    targets = cls.value_targets is not Algorithm.value_targets
    if ("values" in wanted) != targets:
        lacking, there = ("the column values", "value_targets") if targets else ("value_targets", "the column values")
        raise AlgorithmError(
            f"name: {name} has {there} but no {lacking}; allowed are both or neither: a critic says values and is "
            "trained towards targets"
        )
    for method in ("token_advantages", *(["value_targets"] if targets else [])):
        try:
            inspect.signature(getattr(cls, method)).bind(None, None)
        except TypeError as error:
            raise AlgorithmError(f"name: {name}.{method}: {error}; write it as `def {method}(self, tokens)`") from None
