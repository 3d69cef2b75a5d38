"""DARO inside verl 0.9: VERL_USE_EXTERNAL_MODULES=megatron_daro.plugins.verl and algorithm.adv_estimator=daro.

Place in the data flow: verl imports this module in every process. The advantage estimator (driver) sees whole groups:
it writes group-normalised advantages, and each sample's pass rate into `returns`, which the actor's loss does not use.
The actor's worker counts tokens per bin before each optimizer step, and its loss replaces verl's `ppo_loss`.
Refuses: other loss modes than vanilla, other aggregations than token-mean, distillation, dynamic context parallel,
shaped rewards without a threshold, and a micro-batch whose loss differs from verl's own with A' = A w_k N / N_k.

Scale: verl expects dp_size * (this rank's share of the mean over the global batch) and multiplies by the number of
micro-batches and, for Megatron's per-token mode, by tokens itself; so the loss is dp_size * X.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Hashable, Mapping, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor
from verl.trainer.ppo.core_algos import agg_loss, get_policy_loss_fn, kl_penalty, register_adv_est
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_name
from verl.utils.metric import AggregationType, Metric
from verl.workers.engine_workers import ActorRolloutRefWorker, TrainingWorker
from verl.workers.utils.losses import ppo_loss
from verl.workers.utils.padding import no_padding_2_padding

from megatron_daro.algo.difficulty import pass_rate_bins
from megatron_daro.algo.surrogate import clipped_token_loss
from megatron_daro.errors import AlgorithmError, ConfigError
from megatron_daro.plugins.core import (
    STATE_FILE,
    DifficultyStep,
    Reduce,
    SampleSums,
    bins_of_pass_rates,
    load_state,
    over_group,
    save_state,
    whole_groups,
)
from megatron_daro.plugins.options import read_options

if TYPE_CHECKING:
    from tensordict import TensorDict
    from verl.workers.config import ActorConfig

logger = logging.getLogger(__name__)

TESTED = ("0.9.1",)
_PROBE_TOLERANCE = 1e-4


@register_adv_est("daro")
def daro_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Sequence[Hashable],
    config: Mapping[str, object] | None = None,
    **others: object,
) -> tuple[Tensor, Tensor]:
    """Advantages of whole groups, and the pass rate of each sample's group in the place of returns.

    Args:
        token_level_rewards: [B, R]; their sum over a row is the answer's reward.
        response_mask: [B, R].
        index: [B], verl's uid of each sample's prompt.
        config: verl's algorithm section.
        others: what verl hands to estimators that need more.

    Returns:
        (advantages, pass rates), both [B, R]. A group with fewer answers than the others has 0 in both: no signal.

    Raises:
        AlgorithmError: rewards are no verdicts, or most groups are incomplete.
        ConfigError: norm_adv_by_std_in_grpo=False, which is another algorithm.
    """
    options = read_options()
    if options.std == "auto" and config is not None and config.get("norm_adv_by_std_in_grpo", True) is False:
        raise ConfigError(
            "algorithm.norm_adv_by_std_in_grpo: got False, allowed with adv_estimator=daro is True: DARO's advantage "
            "is divided by the group's standard deviation; remove it, or set std=none in MEGATRON_DARO_OPTIONS"
        )
    rewards_B = token_level_rewards.sum(-1)
    numbers: dict[Hashable, int] = {}
    group_B = torch.tensor([numbers.setdefault(uid, len(numbers)) for uid in index])
    whole_B, rollouts_per_prompt = whole_groups(group_B)
    algorithm = options.algorithm(rollouts_per_prompt)
    correct_B = options.verdicts(rewards_B)
    advantages_B, rates_B = torch.zeros_like(rewards_B), torch.zeros_like(rewards_B)
    advantages_B[whole_B] = algorithm.advantages(rewards_B[whole_B], group_B[whole_B]).to(rewards_B.dtype)
    bins_B = pass_rate_bins(correct_B[whole_B], group_B[whole_B], rollouts_per_prompt)
    rates_B[whole_B] = (bins_B / rollouts_per_prompt).to(rewards_B.dtype)
    return advantages_B[:, None] * response_mask, rates_B[:, None].expand_as(response_mask).clone()


def daro_loss(
    config: ActorConfig,
    model_output: Mapping[str, Tensor],
    data: TensorDict,
    dp_group: object = None,
    *,
    step: DifficultyStep,
) -> tuple[Tensor, dict[str, object]]:
    """Return the loss of one micro-batch, in the place of verl's ppo_loss: dp_size * sum of w_k / N_k * token losses.

    Args:
        config: of the actor: clip range, entropy and KL.
        model_output: "log_probs" and perhaps "entropy", as the engine makes them.
        data: the micro-batch; `returns` holds pass rates.
        dp_group: not used: every denominator was summed before the forward pass.
        step: this rank's state; a step must be open.

    Returns:
        (loss, metrics of the micro-batch).

    Raises:
        AlgorithmError: no step is open, pass rates did not arrive, or the first step's probe failed.
    """
    if not torch.is_grad_enabled():
        return ppo_loss(config=config, model_output=model_output, data=data, dp_group=dp_group)
    log_probs_BR = no_padding_2_padding(model_output["log_probs"], data).float()
    bins_B = _bins(data, step.rollouts_per_prompt)
    config.global_batch_info.update(
        dp_size=data["dp_size"],
        batch_num_tokens=data["batch_num_tokens"],
        global_batch_size=data["global_batch_size"],
        loss_scale_factor=config.loss_scale_factor,
    )
    wanted = ["response_mask", "old_log_probs", "advantages", "rollout_is_weights", "ref_log_prob"]
    fields = data.select(*(name for name in wanted if name in data)).to_padded_tensor()
    mask_BR, importance_BR = fields["response_mask"].bool(), fields.get("rollout_is_weights", None)
    losses_BR = clipped_token_loss(log_probs_BR, fields["old_log_probs"], fields["advantages"], *_clip(config))
    if importance_BR is not None:
        losses_BR = losses_BR * importance_BR
    weighed = step.weigh(SampleSums.of_rows(losses_BR, mask_BR), bins_B)
    loss = (data["dp_size"] * weighed).float()
    if step.steps == 0:
        _probe(config, fields, log_probs_BR, bins_B, step, float(loss.detach()))
    metrics: dict[str, object] = {"actor/pg_loss": Metric(value=loss.detach(), aggregation=AggregationType.SUM)}
    return _regularized(loss, config, model_output, data, fields, log_probs_BR, metrics), metrics


def _regularized(
    loss: Tensor,
    config: ActorConfig,
    model_output: Mapping[str, Tensor],
    data: TensorDict,
    fields: TensorDict,
    log_probs_BR: Tensor,
    metrics: dict[str, object],
) -> Tensor:
    """Return the loss with verl's entropy and KL terms: means over all trained tokens of the step."""
    mask_BR, info = fields["response_mask"].bool(), config.global_batch_info
    if model_output.get("entropy") is not None:
        entropy_BR = no_padding_2_padding(model_output["entropy"], data)
        entropy = agg_loss(loss_mat=entropy_BR, loss_mask=mask_BR, loss_agg_mode="token-mean", **info)
        metrics["actor/entropy_loss"] = Metric(value=entropy.detach(), aggregation=AggregationType.SUM)
        loss = loss - config.entropy_coeff * entropy
    if config.use_kl_loss:
        kl_BR = kl_penalty(logprob=log_probs_BR, ref_logprob=fields["ref_log_prob"], kl_penalty=config.kl_loss_type)
        kl = agg_loss(loss_mat=kl_BR, loss_mask=mask_BR, loss_agg_mode="token-mean", **info)
        metrics["kl_loss"] = Metric(value=kl.detach(), aggregation=AggregationType.SUM)
        loss = loss + config.kl_loss_coef * kl
    return loss


def _clip(config: ActorConfig) -> tuple[float, float, float]:
    """Return verl's clip range: below, above, dual."""
    low = config.clip_ratio if config.clip_ratio_low is None else config.clip_ratio_low
    high = config.clip_ratio if config.clip_ratio_high is None else config.clip_ratio_high
    return low, high, config.get("clip_ratio_c", 3.0)


def _bins(data: TensorDict, rollouts_per_prompt: int) -> Tensor:
    """Return the bin of each sample, int64 [B], from the pass rates that travelled as `returns`."""
    if "returns" not in data:
        raise AlgorithmError(
            "returns: the actor's batch has none, allowed are the pass rates that algorithm.adv_estimator=daro writes "
            "there; set algorithm.adv_estimator=daro"
        )
    returns = data["returns"]
    rows = list(returns.unbind()) if returns.is_nested else list(returns)
    rates_B = torch.stack([row[0] if row.numel() else row.new_zeros(()) for row in rows])
    try:
        return bins_of_pass_rates(rates_B, rollouts_per_prompt)
    except AlgorithmError as error:
        raise AlgorithmError(f"{error}; is algorithm.adv_estimator set to daro?") from None


def _trained_lengths(data: TensorDict) -> Tensor:
    """Return the trained response tokens of each sample, int64 [B]."""
    mask = data["response_mask"]
    rows = mask.unbind() if mask.is_nested else mask
    return torch.stack([row.sum(dtype=torch.int64) for row in rows])


def _probe(
    config: ActorConfig, fields: TensorDict, log_probs_BR: Tensor, bins_B: Tensor, step: DifficultyStep, got: float
) -> None:
    """Compare with verl's own loss function, which is homogeneous of degree one in the advantages.

    With A' = A w_k N / N_k its token mean over the global batch is the weighted sum; both are at verl's own scale.
    """
    info, bins_B = config.global_batch_info, bins_B.to(log_probs_BR.device)
    ones_B = torch.ones(len(bins_B), device=bins_B.device)
    factor_B = step.algorithm.sample_coefficients(bins_B, ones_B, step.totals) * info["batch_num_tokens"]
    with torch.no_grad():
        advantages_BR = fields["advantages"] * factor_B[:, None].float()
        arguments = {
            "old_log_prob": fields["old_log_probs"],
            "log_prob": log_probs_BR,
            "response_mask": fields["response_mask"].bool(),
            "loss_agg_mode": "token-mean",
            "config": config,
            "rollout_is_weights": fields.get("rollout_is_weights", None),
        }
        wanted = float(get_policy_loss_fn("vanilla")(advantages=advantages_BR, **arguments)[0])
        size = float(agg_loss(advantages_BR.abs(), arguments["response_mask"], "token-mean", **info))
    if not math.isclose(got, wanted, rel_tol=_PROBE_TOLERANCE, abs_tol=_PROBE_TOLERANCE * max(size, 1e-12)):
        raise AlgorithmError(
            f"loss of the first step: got {got:g}, verl's own loss with reweighted advantages gives {wanted:g}, "
            f"allowed is a difference of {_PROBE_TOLERANCE:g}: this version of verl scales or clips otherwise; use one "
            f"of {', '.join(TESTED)}"
        )


class DaroTrainingWorker(TrainingWorker):
    """verl's actor with DARO's loss: it counts before each optimizer step and learns after it."""

    daro: DifficultyStep

    def set_loss_fn(self, loss_fn: partial[object]) -> None:
        """Put DARO's loss in the place of ppo_loss.

        Raises:
            ConfigError: lists the options of verl that DARO does not support.
        """
        config = _supported_config(loss_fn, self.engine_config)
        options = read_options()
        self._start_fresh = options.start_fresh
        self.daro = DifficultyStep(options.algorithm(config.rollout_n))
        self.loss_fn = partial(daro_loss, config=config, step=self.daro)
        self._grad_norm: object = None
        step_of_engine = self.engine.optimizer_step

        def optimizer_step() -> object:
            self._grad_norm = step_of_engine()
            return self._grad_norm

        self.engine.optimizer_step = optimizer_step
        logger.warning("DARO is on: %d bins, weights %s", config.rollout_n + 1, self.daro.algorithm.weights)

    def train_batch(self, data: TensorDict) -> TensorDict | None:
        """One optimizer step; see `TrainingWorker.train_batch`. The metrics gain those of docs/metrics.md."""
        bins_B = _bins(data, self.daro.rollouts_per_prompt)
        over_data = over_group(self.engine.get_data_parallel_group(), get_device_name())
        self.daro.begin(bins_B, _trained_lengths(data), over_data)
        output = super().train_batch(data)
        norm = self._grad_norm
        applied = norm is None or bool(torch.isfinite(torch.as_tensor(norm)))
        metrics = self.daro.end(self._over_data_and_stages(over_data), applied=applied)
        if output is not None:
            tu.get(output, "metrics").update(metrics)
        return output

    def _over_data_and_stages(self, over_data: Reduce) -> Reduce:
        """Sum over data-parallel ranks, then over pipeline stages: only the last stage has losses.

        Context-parallel ranks compute the loss of whole sequences in verl, so the sum does not run over them.
        """
        if self.engine_config.strategy != "megatron":
            return over_data
        from megatron.core import parallel_state

        if parallel_state.get_pipeline_model_parallel_world_size() == 1:
            return over_data
        over_stages = over_group(parallel_state.get_pipeline_model_parallel_group(), get_device_name())
        return lambda vector: over_stages(over_data(vector))

    def save_checkpoint(self, local_path: str, *arguments: object, **options: object) -> object:
        """Save verl's checkpoint, and DARO's state beside it."""
        result = super().save_checkpoint(local_path, *arguments, **options)
        if dist.get_rank() == 0:
            save_state(self.daro, Path(local_path) / STATE_FILE)
        dist.barrier()
        return result

    def load_checkpoint(self, local_path: str, *arguments: object, **options: object) -> object:
        """Load verl's checkpoint and DARO's state.

        Raises:
            CheckpointError: the state is missing (without start_fresh), torn, or of another K.
        """
        path = Path(local_path) / STATE_FILE
        if not (self._start_fresh and not path.exists()):
            load_state(self.daro, path)
        return super().load_checkpoint(local_path, *arguments, **options)


def _supported_config(loss_fn: partial[object], engine_config: object) -> ActorConfig:
    """Return the actor's configuration that verl bound to its loss; refuse what DARO does not support."""
    config: ActorConfig = getattr(loss_fn, "keywords", {}).get("config")
    problems = []
    if getattr(loss_fn, "func", None) is not ppo_loss or config is None:
        problems.append(f"loss function: got {loss_fn!r}, allowed is verl's ppo_loss: switch distillation off")
    else:
        if config.policy_loss.get("loss_mode", "vanilla") != "vanilla":
            got = config.policy_loss.get("loss_mode")
            problems.append(f"actor.policy_loss.loss_mode: got {got!r}, allowed is vanilla: remove it")
        if config.loss_agg_mode != "token-mean":
            problems.append(f"actor.loss_agg_mode: got {config.loss_agg_mode!r}, allowed is token-mean: remove it")
    if getattr(engine_config, "dynamic_context_parallel", False):
        problems.append("dynamic_context_parallel: got True, allowed is False: ranks share samples there")
    if version("verl") not in TESTED:
        logger.warning("DARO was tested with verl %s, this is %s", ", ".join(TESTED), version("verl"))
    if problems:
        raise ConfigError("verl's options do not go with DARO:\n" + "\n".join(f"  {p}" for p in problems))
    return config


if not hasattr(ActorRolloutRefWorker, "actor_worker_cls"):
    raise ImportError(
        f"verl {version('verl')} has no ActorRolloutRefWorker.actor_worker_cls, which this adapter sets; "
        f"it was tested with {', '.join(TESTED)}"
    )
ActorRolloutRefWorker.actor_worker_cls = DaroTrainingWorker
