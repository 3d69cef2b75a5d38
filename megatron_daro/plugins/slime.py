"""DARO inside slime, through its hooks: `python -m megatron_daro.plugins.slime --flags` prints the flags to add.

The hooks: `reward_post_process` (rollout manager) makes the advantages of whole groups; `megatron_init` (each train
rank) makes the state and has it saved and loaded with checkpoints; `rollout_data_postprocess` writes each sample's bin
into `returns`, which slime's policy loss does not use; `before_train_step` counts tokens over ranks and wraps
optimizer.step, so that the weights move after it; `loss` calls slime's own policy loss, with `reduce_token_losses` as
its reduction of the token losses. Clipping, corrections, KL, entropy and every metric stay slime's.
Refuses: options of slime that it does not know, groups that are not whole and in order, shaped rewards that do not tell
the verdict, and ranks whose advantages do not fit their bins.

Scale: slime divides what `loss` returns by the number of rollouts in the step (default) or, with
--calculate-per-token-loss, by its number of tokens, at least 1 for each sample, and undoes every other factor itself;
so `loss` returns X times that number. Each context-parallel rank holds its own part of a sample, so loss sums run over
DP x CP and counts over DP. plugins/miles.py has the same hooks for miles.

Shape letters: N samples of the whole rollout batch, n of this rank.
"""

from __future__ import annotations

import argparse
import copy
import functools
import importlib.util
from collections.abc import Callable, Collection, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from megatron_daro.algo.difficulty import pass_rate_bins
from megatron_daro.errors import AlgorithmError, ConfigError
from megatron_daro.plugins.core import DifficultyStep, SampleSums
from megatron_daro.plugins.host import ANY, Host
from megatron_daro.plugins.megatron_host import (
    Checkpointing,
    checkpoint_problems,
    defaults_of,
    keep_state,
    over_data,
    over_data_and_stages,
)
from megatron_daro.plugins.options import PluginSection, read_options


class Arguments(Protocol):
    """The options of slime that are read here."""

    n_samples_per_prompt: int
    calculate_per_token_loss: bool
    custom_pg_loss_reducer_function_path: str | None
    custom_megatron_init_path: str | None
    qkv_format: str
    """Only miles has it."""


RolloutData = MutableMapping[str, Any]
"""One rank's part of a rollout batch: lists with one entry per sample, by slime's names."""


@dataclass(slots=True)
class Plan:
    """What this rank will train in one optimizer step of a rollout.

    bins_N, lengths_N: int64, of its samples. floored_tokens: sum of max(trained tokens, 1) over them. rollouts: in the
    step, over all ranks.
    """

    bins_N: Tensor
    lengths_N: Tensor
    floored_tokens: int
    rollouts: int


class Sample(Protocol):
    """The part of slime's samples that is read here."""

    group_index: int | None

    def get_reward_value(self, args: Arguments) -> float:
        """Return the reward that the arguments choose."""


class Placed(float):
    """An advantage with its sample's place in the rollout batch, which Ray passes on with it.

    slime's newest release does not tell the train ranks which samples of the batch they hold.
    """

    place: int

    def __new__(cls, value: float, place: int) -> Placed:
        """Return the value, with a place."""
        instance = super().__new__(cls, value)
        instance.place = place
        return instance

    def __reduce__(self) -> tuple[type[Placed], tuple[float, int]]:
        """Keep the place when pickled."""
        return Placed, (float(self), self.place)


def places_of(rollout_data: RolloutData) -> Tensor:
    """Return the places of this rank's samples in the whole batch, int64 [n].

    Raises:
        AlgorithmError: the rewards are not those that `reward_post_process` made.
    """
    if "partition" in rollout_data:
        return torch.as_tensor(list(rollout_data["partition"]), dtype=torch.int64)
    rewards = rollout_data.get("rewards", ())
    if not all(isinstance(reward, Placed) for reward in rewards):
        raise AlgorithmError(
            "rollout data: rewards have lost their places in the batch, allowed are those that reward_post_process "
            "made: the host converts them on their way to the train ranks; use a version that this adapter was tested "
            "with"
        )
    return torch.tensor([reward.place for reward in rewards], dtype=torch.int64)


def reward_post_process(args: Arguments, samples: Sequence[Sample]) -> tuple[list[float], list[float]]:
    """Return (raw rewards, advantages) of a whole rollout batch, as a hook of slime.

    Raises:
        ConfigError: `megatron_init`, which checks all hooks, is not set; without it the loss would be the host's own.
        AlgorithmError: groups are not whole and in order, or rewards are no verdicts.
    """
    checking = args.custom_megatron_init_path
    if checking is None or not checking.endswith(".megatron_init"):
        raise ConfigError(
            f"--custom-megatron-init-path: got {checking}, allowed beside this hook is that of the same adapter: add "
            f"every flag of `python -m {MODULE} --flags` (or of miles); without it the loss would be the host's own"
        )
    rewards_N = torch.tensor([float(sample.get_reward_value(args)) for sample in samples], dtype=torch.float64)
    groups = [sample.group_index for sample in samples]
    expected = [i // args.n_samples_per_prompt for i in range(len(samples))]
    order: dict[int | None, int] = {}
    if None not in groups and [order.setdefault(g, len(order)) for g in groups] != expected:
        raise AlgorithmError(
            "samples: groups are not whole and in order, allowed are n_samples_per_prompt = "
            f"{args.n_samples_per_prompt} samples of each prompt, one after another: a filter removed single samples, "
            "or a rollout was split into several samples"
        )
    _, advantages_N = bins_and_advantages(args, rewards_N)
    return rewards_N.tolist(), [Placed(advantage, place) for place, advantage in enumerate(advantages_N.tolist())]


def bins_and_advantages(args: Arguments, rewards_N: Tensor) -> tuple[Tensor, Tensor]:
    """Return bins int64 [N] and advantages float64 [N] of a batch whose groups are whole and in order."""
    if len(rewards_N) % args.n_samples_per_prompt:
        raise AlgorithmError(
            f"samples: got {len(rewards_N)}, allowed is a multiple of n_samples_per_prompt = "
            f"{args.n_samples_per_prompt}: some group is incomplete, or a rollout was split into several samples"
        )
    options = read_options()
    group_N = torch.arange(len(rewards_N)) // args.n_samples_per_prompt
    bins_N = pass_rate_bins(options.verdicts(rewards_N), group_N, args.n_samples_per_prompt)
    return bins_N, options.algorithm(args.n_samples_per_prompt).advantages(rewards_N, group_N)


def plans_of(rollout_data: RolloutData, bins_n: Tensor, lengths_n: Tensor) -> list[Plan]:
    """Return one plan per optimizer step, from slime's own schedule of micro-batches."""
    plans: list[Plan] = []
    start = 0
    for number, rollouts in zip(rollout_data["num_microbatches"], rollout_data["global_batch_sizes"], strict=True):
        rows = [i for indices in rollout_data["micro_batch_indices"][start : start + number] for i in indices]
        start += number
        lengths = lengths_n[rows]
        plans.append(Plan(bins_n[rows], lengths, int(lengths.clamp(min=1).sum()), int(rollouts)))
    return plans


__all__ = ["before_train_step", "loss", "megatron_init", "reward_post_process", "rollout_data_postprocess"]

MODULE = "megatron_daro.plugins.slime"
HOST = Host("slime", "slime", ("0.3.1", "main at 624b824a8"))
HOOKS = {
    "custom_reward_post_process_path": "reward_post_process",
    "custom_megatron_init_path": "megatron_init",
    "rollout_data_postprocess_path": "rollout_data_postprocess",
    "custom_megatron_before_train_step_hook_path": "before_train_step",
    "custom_loss_function_path": "loss",
}
"""Option of slime -> function of this module."""

FIXED: dict[str, tuple[object, ...]] = {
    "loss_type": ("custom_loss",),
    "advantage_estimator": ("grpo",),
    "kl_coef": (0,),
    "normalize_advantages": (False,),
    "use_critic": (False,),
    "use_opsm": (False,),
    "use_opd": (False,),
    "recompute_loss_function": (False,),
    "custom_advantage_function_path": (None,),
    "custom_pg_loss_reducer_function_path": (None,),
    "custom_convert_samples_to_train_data_path": (None,),
    "compute_advantages_and_returns": (True,),
    # reward_post_process makes the advantages: `std` of MEGATRON_DARO_OPTIONS takes the place of these two.
    "grpo_std_normalization": (True,),
    "rewards_normalization": (True,),
}
"""Options whose value decides whether the loss is DARO's."""

_FREE = """
    actor_num_nodes actor_num_gpus_per_node rollout_num_gpus rollout_num_gpus_per_engine num_gpus_per_node colocate
    offload offload_train offload_rollout distributed_backend distributed_timeout_minutes train_env_vars
    custom_update_weight_post_write_path custom_model_provider_path log_probs_chunk_size only_train_params_name_list
    freeze_params_name_list freeze_indexer hf_checkpoint model_name over_sampling_batch_size
    dynamic_sampling_filter_path partial_rollout mask_offpolicy_in_partial_rollout custom_generate_function_path
    custom_rollout_log_function_path custom_eval_rollout_log_function_path buffer_filter_path keep_old_actor
    use_fault_tolerance num_rollout num_epoch data_source_path prompt_data apply_chat_template
    apply_chat_template_kwargs input_key label_key multimodal_keys metadata_key tool_key start_rollout_id
    n_samples_per_prompt n_samples_per_eval_prompt global_batch_size num_steps_per_rollout micro_batch_size
    balance_data balance_by_flops use_dynamic_batch_size max_tokens_per_gpu log_probs_max_tokens_per_gpu
    skip_eval_before_train ref_load ref_ckpt_step ref_update_interval load save save_interval async_save
    no_save_optim save_hf seed clip_grad calculate_per_token_loss lr megatron_config_path eps_clip eps_clip_high
    eps_clip_c kl_loss_type use_kl_loss kl_loss_coef use_unbiased_kl entropy_coef use_rollout_entropy
    get_mismatch_metrics reset_optimizer_states use_stateless_adam use_rollout_logprobs use_tis tis_clip
    tis_clip_low custom_tis_function_path use_routing_replay use_rollout_routing_replay log_multi_turn log_passrate
    log_reward_category log_correct_samples use_tensorboard use_wandb save_debug_rollout_data save_debug_train_data
    dump_details memory_snapshot_dir memory_snapshot_num_steps profile_target memory_recorder record_memory_history
    check_weight_update_equal http_proxy use_distributed_post rm_type reward_key group_rm rm_url custom_rm_path
    rollout_buffer_url fetch_trajectory_retry_times min_batch_collection_ratio loss_mask_type
    data_pad_size_multiplier mtp_num_layers mtp_loss_scaling_factor enable_mtp_training
    custom_megatron_before_log_prob_hook_path custom_config_path padded_vocab_size qwen_gdn_backend
"""
FREE = frozenset(_FREE.split())
"""Options that may have any value with DARO: they choose where, how fast and on what data to train, or concern parts of
the loss that stay slime's own."""
FREE_PREFIXES = ("ci_", "eval_", "megatron_deepgemm_", "rollout_", "sglang_", "tb_", "update_weight", "wandb_")
"""Options that begin with one of these may have any value too: rollouts, evaluation, weight updates, logs."""


@dataclass(frozen=True)
class Parts:
    """The functions of slime, or of miles, that the hooks call.

    policy_loss: as slime's policy_loss_function. local_masks: takes (batch, whole masks) and returns the parts of the
    masks whose log-probs this context-parallel rank holds. report: passes metrics to the host's logger, on the rank
    that logs.
    """

    policy_loss: Callable[..., tuple[Tensor, dict[str, Tensor]]]
    local_masks: Callable[[Mapping[str, Any], Sequence[Tensor]], Sequence[Tensor]]
    report: Callable[[Arguments, dict[str, float]], None]


@dataclass(slots=True, eq=False)
class Session:
    """DARO in this train process."""

    step: DifficultyStep
    parts: Parts
    start_fresh: bool = False
    plans: list[Plan] = field(default_factory=list)
    divisor: float = 0.0
    """What slime will divide the loss of the open step by."""
    armed: object = None
    """The optimizer whose `step` was wrapped."""
    where: tuple[int, int] = (0, 0)
    """Rollout id and `train/step` of the open step."""
    batch: Mapping[str, Any] | None = None
    """The micro-batch whose loss is being computed; None once its token losses are reduced."""


_session: Session | None = None


def session() -> Session:
    """Return this process's session.

    Raises:
        ConfigError: `megatron_init` did not run.
    """
    if _session is None:
        raise ConfigError(
            f"custom_megatron_init_path: the hook {MODULE}.megatron_init did not run here, "
            f"allowed is a start with every flag of `python -m {MODULE} --flags`; add them"
        )
    return _session


def megatron_init(args: Arguments) -> None:
    """Look up what the hooks call, check the options and begin the session; slime's hook before it makes the model.

    Raises:
        ConfigError: lists every name of slime that is missing, or every option that is missing or does not go with
            DARO.
    """
    backend = "slime.backends.megatron_utils"
    # The newest release has the logger in slime.utils, the main branch in slime.observability.
    log = f"slime.{'observability' if importlib.util.find_spec('slime.observability') else 'utils'}.logging_utils:log"
    names = (
        f"{backend}.loss:policy_loss_function",
        f"{backend}.cp_utils:get_logits_and_tokens_offset_with_cp",
        f"{backend}.initialize:is_megatron_main_rank",
        log,
        "slime.utils.arguments:get_slime_extra_args_provider",
        f"{backend}.model",
        *(f"{backend}.model:{name}" for name in ("save_checkpoint", "load_checkpoint", "get_args")),
    )
    policy_loss, offsets, is_main_rank, write, provider, model, *_ = HOST.look_up(names).values()

    def report(args: Arguments, metrics: dict[str, float]) -> None:
        if is_main_rank():
            write(args, metrics, step_key="train/step")

    options = read_options()
    check_flags(args, HOST, MODULE, defaults_of(provider()), options)
    begin_session(args, HOST, model, options, Parts(policy_loss, functools.partial(_local_masks, offsets), report))


def begin_session(args: Arguments, host: Host, model: Checkpointing, options: PluginSection, parts: Parts) -> None:
    """Make this process's state, let the module `model` save and load it with checkpoints, and log that DARO is on."""
    global _session
    step = DifficultyStep(options.algorithm(args.n_samples_per_prompt))
    _session = Session(step, parts, start_fresh=options.start_fresh)
    keep_state(model, lambda: (session().step, session().start_fresh))
    host.announce(step, options)


def check_flags(
    args: Arguments,
    host: Host,
    module: str,
    defaults: Mapping[str, object],
    options: PluginSection,
    *,
    more_free: Collection[str] = (),
) -> None:
    """Refuse options of the host that are missing, do not go with DARO, or are not known here.

    Args:
        args: every option; of Megatron's only those in `checkpoint_problems` are checked.
        host: slime or miles.
        module: the hooks must be functions of this module.
        defaults: of the host's own options.
        options: of the plug-in.
        more_free: options of this host, beside FREE, that may have any value.

    Raises:
        ConfigError: lists all of them.
    """
    free = set(more_free) | {name for name in defaults if name in FREE or name.startswith(FREE_PREFIXES)}
    hooks = {option: (f"{module}.{function}",) for option, function in HOOKS.items()}
    given = {name: getattr(args, name) for name in (*defaults, *FIXED) if hasattr(args, name)}
    given |= {option: getattr(args, option, None) for option in HOOKS}
    host.check(
        {name.replace("_", "-"): value for name, value in given.items()},
        {name.replace("_", "-"): values for name, values in {**dict.fromkeys(free, ANY), **FIXED, **hooks}.items()},
        defaults={name.replace("_", "-"): value for name, value in defaults.items()},
        options=options,
        prefix="--",
        further=checkpoint_problems(args),
    )


def rollout_data_postprocess(args: Arguments, rollout_id: int, rollout_data: RolloutData) -> None:
    """Write bins into `returns`, and plan each optimizer step; slime's hook before it trains on a rollout.

    Raises:
        AlgorithmError: raw rewards or their places are missing, or the advantages are not those of the bins.
    """
    missing = [key for key in ("raw_reward", "rewards", "micro_batch_indices") if key not in rollout_data]
    if missing:
        raise AlgorithmError(
            f"rollout data: {', '.join(missing)} missing, allowed is what slime's own rollout manager hands out; a "
            "custom_convert_samples_to_train_data_path must keep them"
        )
    rewards_N = torch.tensor([float(r) for r in rollout_data["raw_reward"]], dtype=torch.float64)
    bins_N, advantages_N = bins_and_advantages(args, rewards_N)
    mine = places_of(rollout_data)
    sent = torch.tensor([float(r) for r in rollout_data["rewards"]], dtype=torch.float64)
    if not torch.allclose(sent, advantages_N[mine], rtol=1e-4, atol=1e-4):
        worst = int((sent - advantages_N[mine]).abs().argmax())
        raise AlgorithmError(
            f"advantages: sample {int(mine[worst])} has {float(sent[worst]):g}, its group's raw rewards give "
            f"{float(advantages_N[mine][worst]):g}, allowed are equal ones: samples were reordered, or their raw "
            "rewards overwritten (metadata['raw_reward']) after reward_post_process"
        )
    bins_n = bins_N[mine]
    if "advantages" in rollout_data:
        _check_advantages(rollout_data["advantages"], sent, mine)
        advantages = rollout_data["advantages"]
        rollout_data["returns"] = [torch.full_like(a, float(k)) for a, k in zip(advantages, bins_n, strict=True)]
    lengths_n = torch.tensor([int(mask.sum()) for mask in rollout_data["loss_masks"]], dtype=torch.int64)
    session().plans = plans_of(rollout_data, bins_n, lengths_n)


def _check_advantages(advantages: Sequence[Tensor], sent: Tensor, mine: Tensor) -> None:
    """Refuse tokens whose advantage differs from that of their sample."""
    for values_R, wanted, number in zip(advantages, sent.tolist(), mine.tolist(), strict=True):
        difference_R = (values_R.detach().double() - wanted).abs()
        if not bool((difference_R <= 1e-2 * max(1.0, abs(wanted))).all()):
            raise AlgorithmError(
                f"advantages: a token of sample {number} has {float(values_R[difference_R.argmax()]):g}, its reward "
                f"gives {wanted:g}, allowed are equal ones: the host changed advantages after they were made "
                "(a penalty, whitening, distillation); remove the option that does"
            )


def before_train_step(
    args: Arguments, rollout_id: int, step_id: int, model: object, optimizer: object, opt_param_scheduler: object
) -> None:
    """Count tokens over ranks, and let the weights move after the step; slime's hook before each optimizer step."""
    own = session()
    if step_id >= len(own.plans):
        raise AlgorithmError(
            f"optimizer step {step_id} of rollout {rollout_id}: {len(own.plans)} were planned, allowed is one plan per "
            "step: the hook rollout_data_postprocess did not run"
        )
    plan, over_ranks = own.plans[step_id], over_data(with_context=False)
    own.step.begin(plan.bins_N, plan.lengths_N, over_ranks)
    tokens = over_ranks(torch.tensor([float(plan.floored_tokens)], dtype=torch.float64))
    own.divisor = float(tokens) if args.calculate_per_token_loss else float(plan.rollouts)
    own.where = (rollout_id, rollout_id * len(own.plans) + step_id)
    if own.armed is not optimizer:
        _update_after(args, optimizer, own)


def _update_after(args: Arguments, optimizer: object, own: Session) -> None:
    """Wrap `optimizer.step`, so that the weights move after each step that the optimizer applied."""
    take_step: Callable[[], tuple[bool, object, object]] = optimizer.step  # type: ignore[attr-defined]

    @functools.wraps(take_step)
    def step() -> tuple[bool, object, object]:
        result = take_step()
        metrics = own.step.end(over_data_and_stages(with_context=True), applied=bool(result[0]))
        own.parts.report(args, {**metrics, "train/step": own.where[1]})
        return result

    optimizer.step = step  # type: ignore[attr-defined]
    own.armed = optimizer


def loss(
    args: Arguments,
    batch: Mapping[str, Any],
    logits: Tensor,
    sum_of_sample_mean: Callable[[Tensor], Tensor],
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss of a micro-batch on the last pipeline stage, and its metrics, as a hook of slime.

    Args:
        args: slime's options.
        batch: the micro-batch: lists with one entry per sample.
        logits: [1, T, V over tensor-parallel ranks], float32.
        sum_of_sample_mean: slime's reduction, still used for its entropy, KL and metrics.

    Raises:
        AlgorithmError: the host's policy loss did not call `reduce_token_losses`.
    """
    own = session()
    own.batch = batch
    reducing = copy.copy(args)
    reducing.custom_pg_loss_reducer_function_path = f"{MODULE}.reduce_token_losses"
    result = own.parts.policy_loss(reducing, batch, logits, sum_of_sample_mean)
    if own.batch is not None:
        raise AlgorithmError(
            "policy loss: the host's own did not call custom_pg_loss_reducer_function_path, so its token losses have "
            "no weights; allowed is a version that does"
        )
    return result


def reduce_token_losses(
    total_lengths: Sequence[int], response_lengths: Sequence[int], loss_masks: Sequence[Tensor], per_token: bool
) -> Callable[[Tensor], Tensor]:
    """Return the function that reduces the open micro-batch's token losses; the host's policy loss asks for it.

    Only `loss_masks` is used: whole masks, one for each sample, in which tokens that a correction rejected are 0.
    """
    return functools.partial(_weigh, session(), loss_masks)


def _weigh(own: Session, kept_masks: Sequence[Tensor], losses_R: Tensor) -> Tensor:
    batch, own.batch = own.batch, None
    assert batch is not None  # the host calls this within `loss`
    masks = own.parts.local_masks(batch, batch["loss_masks"])
    kept = own.parts.local_masks(batch, kept_masks)
    split = losses_R.split([mask.numel() for mask in masks])
    # A token that a correction rejects has no loss; it stays in the denominators, as in slime's own loss.
    losses = [torch.where(keep != 0, values * keep, 0) for values, keep in zip(split, kept, strict=True)]
    bins_M = torch.tensor([int(values[0]) if values.numel() else 0 for values in batch["returns"]])
    weighed = own.step.weigh(SampleSums.of_list(losses, masks), bins_M)
    return (own.divisor * weighed).to(losses_R.dtype)


def _local_masks(offsets: Callable[..., Any], batch: Mapping[str, Any], masks: Sequence[Tensor]) -> Sequence[Tensor]:
    """Cut whole masks with slime's own get_logits_and_tokens_offset_with_cp."""
    from megatron.core import mpu

    if mpu.get_context_parallel_world_size() == 1:
        return masks
    parts = []
    for mask, total, response in zip(masks, batch["total_lengths"], batch["response_lengths"], strict=True):
        prompt = total - response
        spans = offsets(total, response)[3]
        parts.append(torch.cat([mask[max(a - prompt, 0) : max(b - prompt, 0)] for a, b in spans]))
    return parts


def flags(module: str = MODULE) -> list[str]:
    """Return the flags to add to a working command line of slime, or of miles."""
    lines = [f"--{option.replace('_', '-')} {module}.{name}" for option, name in HOOKS.items()]
    return ["--advantage-estimator grpo", "--loss-type custom_loss", *lines]


def main(module: str = MODULE) -> None:
    """Print the flags."""
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description=f"DARO inside {module.split('.')[-1]}")
    parser.add_argument("--flags", action="store_true", help="print what to add to the command line of train.py")
    if parser.parse_args().flags:
        print(" \\\n".join(flags(module)))
    else:
        parser.print_help()


if __name__ == "__main__":
    main()
