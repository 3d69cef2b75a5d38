"""DARO inside verl: algorithm.adv_estimator=daro, with this package installed beside verl.

verl loads this module in every process (entry point `verl.plugins` through verl_plugin.py, or
VERL_USE_EXTERNAL_MODULES). Before the first step the driver asks every worker of the actor whether it has loaded the
module. The advantage estimator (driver) sees whole groups: it writes group-normalised advantages, and each sample's
pass rate plus MARK into `returns`, which the actor's loss does not use. The actor's worker counts tokens per bin before
each optimizer step of a marked batch, and its loss replaces verl's `ppo_loss`. Where the package is only installed and
no option of it is set, verl's own training runs until the first marked batch.
Refuses: other loss modes than vanilla, other aggregations than token-mean, distillation, dynamic context parallel,
shaped rewards without a threshold, and in the first step a micro-batch whose loss differs from verl's own with A' = A
w_k N / N_k.

Scale: verl expects dp_size * (this rank's share of the mean over the global batch) and multiplies by the number of
micro-batches and, for Megatron's per-token mode, by tokens itself; so the loss is dp_size * X.
"""

from __future__ import annotations

import contextvars
import functools
import logging
import math
import os
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_daro.algo.difficulty import pass_rate_bins
from megatron_daro.algo.surrogate import clipped_token_loss
from megatron_daro.config.problems import Problem, show
from megatron_daro.errors import AlgorithmError, ConfigError
from megatron_daro.plugins.core import (
    STATE_FILE,
    DifficultyStep,
    Reduce,
    SampleSums,
    bins_of_pass_rates,
    over_group,
    resume,
    save_state,
)
from megatron_daro.plugins.host import ANY, Host, fields_of
from megatron_daro.plugins.options import VARIABLE, PluginSection, read_options

if TYPE_CHECKING:
    from tensordict import TensorDict
    from verl.workers.config import ActorConfig

logger = logging.getLogger(__name__)

HOST = Host("verl", "verl", ("0.9.1", "0.10.0.dev at 1dda039b9"))
(
    agg_loss,
    get_policy_loss_fn,
    kl_penalty,
    register_adv_est,
    AlgoConfig,
    tu,
    get_device_name,
    AggregationType,
    Metric,
    ActorRolloutRefWorker,
    TrainingWorker,
    ppo_loss,
    no_padding_2_padding,
    ray_trainer,
    RayWorkerGroup,
    *_,
) = HOST.look_up(
    (
        "verl.trainer.ppo.core_algos:agg_loss",
        "verl.trainer.ppo.core_algos:get_policy_loss_fn",
        "verl.trainer.ppo.core_algos:kl_penalty",
        "verl.trainer.ppo.core_algos:register_adv_est",
        "verl.trainer.config:AlgoConfig",
        "verl.utils.tensordict_utils",
        "verl.utils.device:get_device_name",
        "verl.utils.metric:AggregationType",
        "verl.utils.metric:Metric",
        "verl.workers.engine_workers:ActorRolloutRefWorker",
        "verl.workers.engine_workers:TrainingWorker",
        "verl.workers.utils.losses:ppo_loss",
        "verl.workers.utils.padding:no_padding_2_padding",
        "verl.trainer.ppo.ray_trainer",
        "verl.single_controller.ray:RayWorkerGroup",
        "verl.trainer.ppo.ray_trainer:compute_advantage",
        "verl.workers.engine_workers:ActorRolloutRefWorker.actor_worker_cls",
        "verl.single_controller.ray:RayWorkerGroup.execute_all_async",
        "verl.workers.engine_workers:ActorRolloutRefWorker.update_actor",
        "verl.workers.engine_workers:TrainingWorker.set_loss_fn",
        "verl.workers.engine_workers:TrainingWorker.train_batch",
        "verl.workers.engine_workers:TrainingWorker.save_checkpoint",
        "verl.workers.engine_workers:TrainingWorker.load_checkpoint",
    )
).values()

MODULE = "megatron_daro.plugins.verl"
MARK = 1024.0
"""Added to the pass rates in `returns`, so that a worker recognizes a batch of this estimator."""
_PROBE_TOLERANCE = 1e-4
_FREE_ACTOR = """
    _target_ strategy ppo_mini_batch_size ppo_micro_batch_size ppo_micro_batch_size_per_gpu
    ppo_infer_micro_batch_size_per_gpu use_dynamic_bsz ppo_max_token_len_per_gpu ppo_infer_max_token_len_per_gpu
    clip_ratio clip_ratio_low clip_ratio_high clip_ratio_c freeze_vision_tower policy_loss loss_scale_factor
    entropy_coeff tau_pos tau_neg calculate_entropy calculate_sum_pi_squared sum_pi_squared_checkpointing use_kl_loss
    use_torch_compile kl_loss_coef kl_loss_type ppo_epochs shuffle data_loader_seed checkpoint optim use_fused_kernels
    profiler profile engine rollout_n model_config router_replay global_batch_info qat fsdp_config megatron grad_clip
    ulysses_sequence_parallel_size entropy_from_logits_with_chunking entropy_from_logits_chunk_size pad_to_length
    entropy_checkpointing use_remove_padding use_rollout_log_probs veomni torchtitan automodel mindspeed
"""
_FREE_ALGORITHM = """
    _target_ adv_estimator gamma lam use_kl_in_reward kl_penalty kl_ctrl pf_ppo filter_groups rollout_correction
"""
"""Options of verl's actor and algorithm that may have any value with DARO; others must have verl's default."""


class _Driver:
    """State of the driver's process: whether it has scored a batch with DARO."""

    scored = False


_driver = _Driver()
_rollouts_per_prompt: contextvars.ContextVar[int] = contextvars.ContextVar("rollouts_per_prompt")


def _with_rollouts_per_prompt(compute_advantage: Callable[..., object]) -> Callable[..., object]:
    """Let the estimator know rollout.n, which verl passes to compute_advantage but not to estimators."""

    @functools.wraps(compute_advantage)
    def compute(*arguments: object, **options: object) -> object:
        count = options.get("num_repeat")
        if not isinstance(count, int):
            return compute_advantage(*arguments, **options)
        token = _rollouts_per_prompt.set(count)
        try:
            return compute_advantage(*arguments, **options)
        finally:
            _rollouts_per_prompt.reset(token)

    return compute


def _groups(index: Sequence[Hashable], response_mask: Tensor) -> tuple[Tensor, Tensor, int]:
    """Return each sample's group, the mask of samples in whole groups, and K.

    Groups without any trained token carry no signal: verl pads a batch with such rows, all under one uid.
    """
    numbers: dict[Hashable, int] = {}
    group_B = torch.tensor([numbers.setdefault(uid, len(numbers)) for uid in index])
    sizes_G = torch.bincount(group_B)
    trained_G = torch.bincount(group_B, response_mask.sum(1).cpu().double()) > 0
    largest = int((sizes_G * trained_G).max())
    rollouts_per_prompt = _rollouts_per_prompt.get(largest)
    short, groups = int((trained_G & (sizes_G < rollouts_per_prompt)).sum()), int(trained_G.sum())
    if 2 * short > groups or largest > rollouts_per_prompt:
        raise AlgorithmError(
            f"groups: got {short} of {groups} with fewer than {rollouts_per_prompt} answers, the largest with "
            f"{largest}; allowed are groups of actor_rollout_ref.rollout.n answers: a filter removed single answers, "
            "prompts share a uid, or one answer became several samples"
        )
    if short:
        logger.warning("DARO: %d of %d groups are incomplete and carry no signal", short, groups)
    return group_B, (trained_G & (sizes_G == rollouts_per_prompt))[group_B], rollouts_per_prompt


@register_adv_est("daro")
def daro_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Sequence[Hashable],
    config: Mapping[str, object] | None = None,
    **others: object,
) -> tuple[Tensor, Tensor]:
    """Return the advantages of whole groups, and the pass rate of each sample's group in place of returns.

    Args:
        token_level_rewards: [B, R]; their sum over a row is the answer's reward.
        response_mask: [B, R].
        index: [B], verl's uid of each sample's prompt.
        config: verl's algorithm section.
        others: what verl passes to other estimators; not used.

    Returns:
        (advantages, pass rates + MARK), both [B, R]. A group with fewer answers than rollout.n has advantages 0 and
        pass rate 0: no signal.

    Raises:
        AlgorithmError: rewards are not verdicts, most groups are incomplete, or one has more than rollout.n answers.
        ConfigError: options of the algorithm section do not go with DARO.
    """
    options = read_options()
    _check_algorithm(config, options)
    _driver.scored = True
    rewards_B = token_level_rewards.sum(-1)
    group_B, whole_B, rollouts_per_prompt = _groups(index, response_mask)
    algorithm = options.algorithm(rollouts_per_prompt)
    correct_B = options.verdicts(rewards_B)
    advantages_B, rates_B = torch.zeros_like(rewards_B), torch.zeros_like(rewards_B)
    mine_B = torch.unique(group_B[whole_B], return_inverse=True)[1]
    advantages_B[whole_B] = algorithm.advantages(rewards_B[whole_B], mine_B).to(rewards_B.dtype)
    bins_B = pass_rate_bins(correct_B[whole_B], mine_B, rollouts_per_prompt)
    rates_B[whole_B] = (bins_B / rollouts_per_prompt).to(rewards_B.dtype)
    return advantages_B[:, None] * response_mask, (rates_B[:, None] + MARK).expand_as(response_mask).clone()


def _check_algorithm(config: object, options: PluginSection) -> None:
    """Raise ConfigError with the options of verl's algorithm section that do not go with DARO."""
    allowed = dict.fromkeys(_FREE_ALGORITHM.split(), ANY) | {"use_pf_ppo": (False,)}
    allowed["norm_adv_by_std_in_grpo"] = (True,) if options.std == "auto" else ANY
    given = dict(config) if isinstance(config, Mapping) else fields_of(config)[0] if config is not None else {}
    HOST.check(given, allowed, defaults=fields_of(AlgoConfig())[1], options=options, prefix="algorithm.")


def daro_loss(
    config: ActorConfig,
    model_output: Mapping[str, Tensor],
    data: TensorDict,
    dp_group: object = None,
    *,
    step: DifficultyStep,
) -> tuple[Tensor, dict[str, object]]:
    """Return the loss of one micro-batch, in place of verl's ppo_loss: dp_size * sum of w_k / N_k * token losses.

    Args:
        config: of the actor: clip range, entropy and KL.
        model_output: "log_probs" and perhaps "entropy", as the engine returns them.
        data: the micro-batch; `returns` holds pass rates.
        dp_group: used only by verl's own loss; DARO's denominators were summed before the forward pass.
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
    if step.first_here:
        _probe(config, fields, log_probs_BR, bins_B, step, float(loss.detach()))
    with torch.no_grad():  # for its metrics: clip fractions, KL, entropy, and those of later versions
        metrics: dict[str, object] = dict(ppo_loss(config, model_output, data, dp_group)[1])
    metrics["actor/pg_loss"] = Metric(value=loss.detach(), aggregation=AggregationType.SUM)
    return _regularized(loss, config, model_output, data, fields, log_probs_BR), metrics


def _regularized(
    loss: Tensor,
    config: ActorConfig,
    model_output: Mapping[str, Tensor],
    data: TensorDict,
    fields: TensorDict,
    log_probs_BR: Tensor,
) -> Tensor:
    """Return the loss with verl's entropy and KL terms: means over all trained tokens of the step."""
    mask_BR, info = fields["response_mask"].bool(), config.global_batch_info
    if model_output.get("entropy") is not None:
        entropy_BR = no_padding_2_padding(model_output["entropy"], data)
        entropy = agg_loss(loss_mat=entropy_BR, loss_mask=mask_BR, loss_agg_mode="token-mean", **info)
        loss = loss - config.entropy_coeff * entropy
    if config.use_kl_loss:
        kl_BR = kl_penalty(logprob=log_probs_BR, ref_logprob=fields["ref_log_prob"], kl_penalty=config.kl_loss_type)
        kl = agg_loss(loss_mat=kl_BR, loss_mask=mask_BR, loss_agg_mode="token-mean", **info)
        loss = loss + config.kl_loss_coef * kl
    return loss


def _clip(config: ActorConfig) -> tuple[float, float, float]:
    """Return verl's clip range: below, above, dual."""
    low = config.clip_ratio if config.clip_ratio_low is None else config.clip_ratio_low
    high = config.clip_ratio if config.clip_ratio_high is None else config.clip_ratio_high
    return low, high, config.get("clip_ratio_c", 3.0)


def _marked(data: TensorDict) -> Tensor | None:
    """Return the pass rate of each sample, [B], that travelled as `returns`; None where another estimator wrote them.

    Raises:
        AlgorithmError: some samples have the mark and others do not.
    """
    if "returns" not in data:
        return None
    returns = data["returns"]
    rows = list(returns.unbind()) if returns.is_nested else list(returns)
    rates_B = torch.stack([row[0] if row.numel() else row.new_tensor(MARK) for row in rows]) - MARK
    marked_B = (rates_B >= -0.01) & (rates_B <= 1.01)
    if bool(marked_B.any()) and not bool(marked_B.all()):
        raise AlgorithmError(
            f"returns: {int((~marked_B).sum())} of {len(rates_B)} samples are not of algorithm.adv_estimator=daro, "
            "allowed are all or none: something else writes returns as well"
        )
    return rates_B if bool(marked_B.all()) else None


def _bins(data: TensorDict, rollouts_per_prompt: int) -> Tensor:
    """Return the bin of each sample, int64 [B], from the pass rates that travelled as `returns`."""
    rates_B = _marked(data)
    if rates_B is None:
        raise AlgorithmError(
            f"returns: the actor's batch has no pass rates, allowed are those of algorithm.adv_estimator=daro; set it, "
            f"or, to train without DARO, unset {VARIABLE} and remove {MODULE} from VERL_USE_EXTERNAL_MODULES"
        )
    return bins_of_pass_rates(rates_B, rollouts_per_prompt)


def _trained_lengths(data: TensorDict) -> Tensor:
    """Return the trained response tokens of each sample, int64 [B]."""
    mask = data["response_mask"]
    rows = mask.unbind() if mask.is_nested else mask
    return torch.stack([row.sum(dtype=torch.int64) for row in rows])


def _probe(
    config: ActorConfig, fields: TensorDict, log_probs_BR: Tensor, bins_B: Tensor, step: DifficultyStep, got: float
) -> None:
    """Compare DARO's loss with verl's own loss function, which is homogeneous of degree one in the advantages.

    With A' = A w_k N / N_k its token mean over the global batch is the weighted sum; both have verl's own scale.
    """
    info, bins_B = config.global_batch_info, bins_B.to(log_probs_BR.device)
    ones_B = torch.ones(len(bins_B), device=bins_B.device)
    factor_B = step.algorithm.bin_coefficients(bins_B, ones_B, step.totals) * info["batch_num_tokens"]
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
            f"of {', '.join(HOST.tested)}"
        )


class DaroTrainingWorker(TrainingWorker):  # type: ignore[misc,valid-type]
    """verl's actor with DARO's loss: it counts tokens before each optimizer step and updates DARO's weights after it.

    Where the package is only installed and no option of it is set, this is verl's own actor until a batch has the mark.
    """

    daro: DifficultyStep | None = None
    _resume_from: Path | None = None

    def set_loss_fn(self, loss_fn: partial[object]) -> None:
        """Put DARO's loss in the place of ppo_loss.

        Raises:
            ConfigError: lists the options of verl that DARO does not support.
        """
        super().set_loss_fn(loss_fn)
        self._own_loss_fn = loss_fn
        if _wanted():
            self._start()

    def _start(self) -> None:
        """Replace the loss, and take over the state of the checkpoint that was loaded."""
        options = read_options()
        config = _supported_config(self._own_loss_fn, self.engine_config, options)
        self.daro = DifficultyStep(options.algorithm(config.rollout_n))
        self.loss_fn = partial(daro_loss, config=config, step=self.daro)
        self._grad_norm: object = None
        step_of_engine = self.engine.optimizer_step

        def optimizer_step() -> object:
            self._grad_norm = step_of_engine()
            return self._grad_norm

        self.engine.optimizer_step = optimizer_step
        HOST.announce(self.daro, options)
        self._resume()

    def _resume(self) -> None:
        if self.daro is not None and self._resume_from is not None:
            resume(self.daro, self._resume_from, start_fresh=read_options().start_fresh)
            self._resume_from = None

    def train_batch(self, data: TensorDict) -> TensorDict | None:
        """Take one optimizer step as `TrainingWorker.train_batch` does, and add the metrics of docs/metrics.md."""
        if self.daro is None:
            if _marked(data) is None:
                return super().train_batch(data)
            self._start()
        assert self.daro is not None
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
        """Return a `Reduce` over data-parallel ranks, then over pipeline stages, of which only the last has losses.

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
        if self.daro is not None:
            if dist.get_rank() == 0:
                save_state(self.daro, Path(local_path) / STATE_FILE)
            dist.barrier()
        return result

    def load_checkpoint(self, local_path: str, *arguments: object, **options: object) -> object:
        """Load DARO's state, which is checked (once DARO has started), then verl's checkpoint.

        Raises:
            CheckpointError: the state is missing (without start_fresh), torn, or of another K.
        """
        if local_path is not None:  # verl passes None where there is nothing to resume from
            self._resume_from = Path(local_path) / STATE_FILE
            self._resume()
        return super().load_checkpoint(local_path, *arguments, **options)


def _wanted() -> bool:
    """Return whether the user asks for DARO in this process, beyond having the package installed."""
    return VARIABLE in os.environ or MODULE in os.environ.get("VERL_USE_EXTERNAL_MODULES", "").split(",")


def _supported_config(loss_fn: partial[object], engine_config: object, options: PluginSection) -> ActorConfig:
    """Return the actor's configuration that verl bound to its loss; refuse what DARO does not support."""
    config: ActorConfig = getattr(loss_fn, "keywords", {}).get("config")
    if getattr(loss_fn, "func", None) is not ppo_loss or config is None:
        allowed = "verl's ppo_loss"
        raise HOST.refusal([Problem("loss function", show(loss_fn), allowed, "switch distillation off")])
    problems = []
    mode = config.policy_loss.get("loss_mode", "vanilla")
    if mode != "vanilla":
        problems.append(Problem("actor.policy_loss.loss_mode", show(mode), "vanilla", "remove it"))
    if getattr(engine_config, "dynamic_context_parallel", False):
        problems.append(Problem("dynamic_context_parallel", "true", "false", "ranks share samples there"))
    given, defaults = fields_of(config)
    fixed = {"loss_agg_mode": ("token-mean",), "use_prefix_grouper": (False,)}
    allowed_values = dict.fromkeys(_FREE_ACTOR.split(), ANY) | fixed
    HOST.check(given, allowed_values, defaults=defaults, options=options, prefix="actor.", further=problems)
    return config


def in_force(process: object) -> tuple[bool, str]:
    """Return whether the actor in a worker process of verl is DARO's, and the options there; runs in that process."""
    roles: Mapping[str, object] = getattr(process, "worker_dict", None) or getattr(process, "fused_worker_dict", {})
    actors = [role.actor for role in (process, *roles.values()) if hasattr(role, "actor")]
    ours = bool(actors) and all(isinstance(actor, DaroTrainingWorker) for actor in actors)
    return ours, read_options().model_dump_json()


def _check_workers(group: object) -> None:
    """Refuse to train a batch of DARO on workers that would train it as PPO, or with other options.

    Raises:
        ConfigError: a worker process has not loaded this module, or its options are not the driver's.
    """
    import ray

    wanted = read_options().model_dump_json()
    fix = (
        f"install megatron_daro on every node, leave VERL_USE_EXTERNAL_PLUGINS at auto (or name {MODULE} in "
        f"VERL_USE_EXTERNAL_MODULES), and hand {VARIABLE} to Ray's workers as docs/plugins.md says"
    )
    # Through Ray's own method: nodes without this package do not have a method that it adds to verl's class.
    answers = [worker.__ray_call__.remote(in_force) for worker in group.workers]  # type: ignore[attr-defined]
    for rank, answer in enumerate(answers):
        try:
            ours, options = ray.get(answer)
        except ray.exceptions.RayError as error:
            cause = str(error).strip().splitlines()[-1]
            raise ConfigError(f"DARO: worker {rank} of verl's actor has none of it ({cause}); {fix}") from error
        if not ours or options != wanted:
            got = f"the options {options}, the driver {wanted}" if ours else "verl's own loss"
            raise ConfigError(f"DARO: worker {rank} of verl's actor has {got}, allowed are DARO's, alike; {fix}")
    logger.warning("DARO is in force on all %d workers of verl's actor", len(answers))


def _checks_workers(execute_all: Callable[..., object]) -> Callable[..., object]:
    """Wrap `execute_all` to check the workers once, before they train the first batch that DARO scored."""
    checked = weakref.WeakSet[object]()

    @functools.wraps(execute_all)
    def execute(group: object, method_name: str, *arguments: object, **options: object) -> object:
        # Colocated roles prefix the method's name: actor_rollout_update_actor.
        if _driver.scored and method_name.endswith("update_actor") and group not in checked:
            _check_workers(group)
            checked.add(group)
        return execute_all(group, method_name, *arguments, **options)

    return execute


ray_trainer.compute_advantage = _with_rollouts_per_prompt(ray_trainer.compute_advantage)
ActorRolloutRefWorker.actor_worker_cls = DaroTrainingWorker
RayWorkerGroup.execute_all_async = _checks_workers(RayWorkerGroup.execute_all_async)
