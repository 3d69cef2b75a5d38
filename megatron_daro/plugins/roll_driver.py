"""DARO on ROLL's driver: `python -m megatron_daro.plugins.roll_driver --config_path DIR --config_name NAME`.

Starts ROLL's RLVR pipeline as ROLL's examples/start_rlvr_pipeline.py does, with a wrapper around `compute_advantage`,
which sees whole groups: the wrapper writes DARO's advantages, and the bin of each sample as a column that travels to
the workers (`roll.py`).
Refuses: options that give other advantages, filter by the loss, or average differently; lists all of them at once.

Shape letters: B samples of a batch, S - 1 positions of log-probs.
"""

from __future__ import annotations

import argparse
import functools
import importlib
from collections.abc import Callable, MutableMapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from megatron_daro.algo.difficulty import pass_rate_bins
from megatron_daro.config.problems import Problem, show
from megatron_daro.errors import AlgorithmError
from megatron_daro.plugins.core import consecutive_groups
from megatron_daro.plugins.host import ANY, Host, fields_of
from megatron_daro.plugins.options import read_options

MODULE = "megatron_daro.plugins.roll_driver"
WORKER = "megatron_daro.plugins.roll.DaroActorWorker"
BINS = "daro_bins"
"""Column [B, S - 1]; every entry of a row is the bin of the sample's group."""
_REWARD_TOLERANCE = 0.02
"""Allowed difference of a normalised reward: ROLL may compute it in half precision."""

HOST = Host("ROLL", "roll", ("0.3.0", "main at 8eb27cc2"))
NAMES = (
    "roll.pipeline.rlvr.rlvr_config:RLVRConfig",
    "roll.pipeline.rlvr.rlvr_pipeline:RLVRPipeline",
    "roll.pipeline.rlvr.rlvr_pipeline:compute_advantage",
    "roll.distributed.scheduler.initialize:init",
)
"""What this module takes from ROLL."""

FIXED: dict[str, object] = {
    "adv_estimator": "grpo",
    "loss_agg_mode": "token-mean",
    "importance_sampling": "token",
    "gamma": 1,
    "whiten_advantages": False,
    "whiten_rewards": False,
    "advantage_clip": None,
    "reward_clip": None,
    "add_token_level_kl": False,
    "difficulty_loss_weight": False,
    "length_loss_weight": False,
    "use_opd": False,
    "is_pure_opd": False,
}
"""Options of ROLL that must have this value with DARO."""
_FREE = """
    exp_name seed rpc_timeout output_dir base_dir logging_dir rollout_dump_dir track_with tracker_kwargs max_steps
    save_steps max_ckpt_to_keep logging_steps eval_steps rollout_batch_size max_running_requests val_batch_size
    local_rank resume_from_checkpoint checkpoint_config prompt_length response_length sequence_length val_prompt_length
    val_sequence_length profiler_timeline profiler_memory report_length_and_rewards is_offload_states
    is_offload_optimizer_states_in_train_step length_profiler_dir profiler_output_dir otlp_output_dir system_envs
    model_update_buffer_size_mb num_nodes num_gpus_per_node model_download_type rollout_mock transfer_backend
    generate_opt_level is_num_return_sequences_expand is_use_additional_prompts max_additional_running_prompts
    user_defined_rollout_loop_cls router_args async_generation_ratio global_template tag_to_template dataset_filter
    num_return_sequences_in_group save_logging_board_dir
    pretrain reward_pretrain actor_train actor_infer critic reference reward validation rewards reward_model teacher
    student_train student_infer pure_opd_pipeline_type
    ppo_epochs max_grad_norm lambd pg_clip use_pg_clip_range pg_clip_low pg_clip_high dual_clip_loss value_clip
    kl_penalty target_kl init_kl_coef kl_horizon norm_mean_type norm_std_type critic_warmup use_kl_loss kl_loss_coef
    entropy_loss_coef rl_loss_coef enable_reference enable_old_logprobs_recompute force_disable_old_logprobs_recompute
    train_infer_correction max_len_mask mask_type difficulty_mask difficulty_low_threshold difficulty_high_threshold
    error_max_len_clip error_max_len_threshold val_greedy val_n_sample
"""
"""Options of ROLL that may have any value with DARO. Any that are neither here nor in FIXED must have their default."""


class Data(Protocol):
    """ROLL's DataProto, as far as it is read here."""

    batch: MutableMapping[str, Tensor]


class WorkerOptions(Protocol):
    """ROLL's options of a worker."""

    worker_cls: str | None
    strategy_args: object


class PipelineOptions(Protocol):
    """ROLL's options of a pipeline that are read here, beside those of FIXED."""

    actor_train: WorkerOptions
    actor_infer: WorkerOptions


def check_options(config: PipelineOptions) -> None:
    """Refuse options of ROLL that do not go with DARO, and those that DARO does not know.

    Raises:
        ConfigError: lists every one of them.
    """
    problems, actor = [], config.actor_train
    strategy = getattr(actor.strategy_args, "strategy_name", None)
    wanted: tuple[tuple[str, object, object], ...] = (
        ("worker_cls", actor.worker_cls, WORKER),
        ("strategy_args.strategy_name", strategy, "megatron_train"),
        ("apply_loss_scale", getattr(actor, "apply_loss_scale", True), True),
    )
    for name, got, allowed in wanted:
        if got != allowed:
            problems.append(Problem(f"actor_train.{name}", show(got), show(allowed), "set it so"))
    if getattr(actor, "mtp_training_mode", None) == "joint":
        problems.append(Problem("actor_train.mtp_training_mode", "joint", "disabled", "its loss was not tried"))
    correction = getattr(config, "train_infer_correction", None)
    if getattr(correction, "filters", None) and not getattr(config, "enable_old_logprobs_recompute", False):
        field, allowed = "train_infer_correction.filters", "none, or with enable_old_logprobs_recompute"
        problems.append(Problem(field, "given", allowed, "the tokens must be known before the loss"))
    given, defaults = fields_of(config)
    allowed_values = dict.fromkeys(_FREE.split(), ANY) | {name: (value,) for name, value in FIXED.items()}
    HOST.check(given, allowed_values, defaults=defaults, options=read_options(), further=problems)


def daro_advantages(data: Data, response_mask: Tensor, rollouts_per_prompt: int) -> None:
    """Write advantages and bins of whole groups into a batch.

    Args:
        data: "scores" [B], the verdicts; K consecutive rows are a group, as in ROLL's own reward_norm (ROLL's
            "prompt_id" numbers rows, not prompts). "prompts" [B, P] of the rows; "response_level_rewards" [B], ROLL's
            own normalised rewards.
        response_mask: [B, S - 1], trained tokens.
        rollouts_per_prompt: K.

    Raises:
        AlgorithmError: scores are not verdicts, K consecutive rows are not of one prompt, or ROLL's rewards are not
            those of the scores.
    """
    options = read_options()
    scores_B = data.batch["scores"].detach().to("cpu", torch.float64).flatten()
    group_B = consecutive_groups(data.batch["prompts"], rollouts_per_prompt, "num_return_sequences_in_group")
    algorithm = options.algorithm(rollouts_per_prompt)
    _check_rewards(data, scores_B.view(-1, rollouts_per_prompt))
    advantages_B = algorithm.advantages(scores_B, group_B)
    bins_B = pass_rate_bins(options.verdicts(scores_B), group_B, rollouts_per_prompt)
    advantages = advantages_B.to(response_mask.device)[:, None].float() * response_mask
    data.batch["advantages"] = data.batch["raw_advantages"] = advantages
    data.batch[BINS] = bins_B.to(response_mask.device)[:, None].expand(response_mask.shape).clone()


def _check_rewards(data: Data, scores_GK: Tensor) -> None:
    """Refuse shaped rewards: DARO makes advantages from the scores alone, so the shaping would be ignored."""
    got_GK = data.batch["response_level_rewards"].detach().to("cpu", torch.float64).view(scores_GK.shape)
    # ROLL divides by the group's sample standard deviation; its reward workers may use half precision.
    wanted_GK = (scores_GK - scores_GK.mean(1, keepdim=True)) / (scores_GK.std(1, keepdim=True) + 1e-6)
    far_G = ((got_GK - wanted_GK).abs() > _REWARD_TOLERANCE).any(1)
    if bool(far_G.any()):
        group = int(far_G.nonzero()[0])
        raise AlgorithmError(
            f"rewards: in {int(far_G.sum())} of {len(far_G)} groups response_level_rewards are not those of the scores "
            f"(group {group}: scores {scores_GK[group].tolist()}, normalised rewards "
            f"{[round(v, 3) for v in got_GK[group].tolist()]}); allowed are rewards that are the verdicts: "
            "remove penalties of length, repetition or format, which DARO would ignore"
        )


def with_daro(compute_advantage: Callable[..., Data]) -> Callable[..., Data]:
    """Return ROLL's compute_advantage with DARO's advantages in place of its own."""

    @functools.wraps(compute_advantage)
    def compute(*arguments: Data, **options: object) -> Data:
        data = compute_advantage(*arguments, **options)
        config, mask = options["pipeline_config"], options["response_mask"]
        assert isinstance(mask, Tensor)
        count: int = config.actor_infer.generating_args.num_return_sequences  # type: ignore[attr-defined]
        daro_advantages(data, mask, count)
        return data

    return compute


def install() -> dict[str, Any]:
    """Put DARO's advantages into ROLL's RLVR pipeline, and return the objects of NAMES.

    Raises:
        ConfigError: a name is not in this version of ROLL.
    """
    names = HOST.look_up(NAMES)
    pipeline = importlib.import_module("roll.pipeline.rlvr.rlvr_pipeline")
    pipeline.compute_advantage = with_daro(pipeline.compute_advantage)  # type: ignore[attr-defined]
    return names


def main() -> None:
    """Start ROLL's RLVR pipeline with DARO."""
    parser = argparse.ArgumentParser(prog=f"python -m {MODULE}", description="ROLL's RLVR pipeline with DARO")
    parser.add_argument("--config_path", default="config", help="folder of the configuration")
    parser.add_argument("--config_name", required=True, help="its file, without .yaml")
    given = parser.parse_args()

    from dacite import from_dict
    from hydra import compose, initialize_config_dir
    from omegaconf import OmegaConf

    config_class, pipeline_class, _, init = install().values()
    with initialize_config_dir(config_dir=str(Path(given.config_path).resolve()), job_name="app", version_base=None):
        tree = OmegaConf.to_container(compose(config_name=given.config_name), resolve=True)
    config = from_dict(data_class=config_class, data=tree)
    check_options(config)
    init()
    pipeline_class(pipeline_config=config).run()


if __name__ == "__main__":
    main()
