"""DARO inside miles, a fork of slime: `python -m megatron_daro.plugins.miles --flags`.

Has the hooks of plugins/slime.py under the same names. Two things differ from slime. miles calls
--rollout-data-postprocess-path without the data, so `megatron_init` wraps `compute_advantages_and_returns` in the
module of miles' actor and runs slime's hook after it; and miles drops the places of a rank's samples, so a wrapper of
`process_rollout_data_shard` keeps them. The schedule of micro-batches must come from the rollout manager.
Refuses: what slime's adapter refuses; independent data-parallel replicas, LoRA adapters side by side, packed images,
a train step without an optimizer.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from megatron_daro.errors import AlgorithmError
from megatron_daro.plugins import slime
from megatron_daro.plugins.host import Host
from megatron_daro.plugins.megatron_host import defaults_of
from megatron_daro.plugins.options import read_options
from megatron_daro.plugins.slime import Arguments, RolloutData, before_train_step, loss, reward_post_process

__all__ = ["before_train_step", "loss", "megatron_init", "reward_post_process", "rollout_data_postprocess"]

MODULE = "megatron_daro.plugins.miles"
HOST = Host("miles", "miles", ("0.1.0", "main at 31f1ca961"))
_BACKENDS = "miles.backends"
_FREE = """
    offload_rollout_level offload_train_target offload_train_disk_dir offload_train_disk_chunk_mb
    linear_attention_backend miles_dsa_topk_backend dsa_attention_backend recompute_logprobs_via_prefill
    train_memory_margin_bytes rematerialize_param_from_master_weight megatron_to_hf_mode low_memory_resume
    mfu_peak_tflops fully_async object_store_backend mooncake_store_init_kwargs mooncake_replica_num
    max_weight_staleness pause_generation_mode pin_rollout_manager_to_head p2p_transfer_num_workers p2p_transfer_timeout
    control_server_port debug_exit_after_rollout debug_train_only load_debug_rollout_data chat_template_path
    save_trigger_sentinel custom_megatron_post_save_hook_path observe_training_entropy use_indexer_replay
    use_rollout_indexer_replay use_mlflow use_prometheus use_miles_dashboard use_miles_router use_session_server
    tito_model prefill_num_servers env_report ft_components critic_load critic_save critic_lr
"""
_FREE_PREFIXES = (
    *("async_", "dashboard_", "extra_high_precision_layers_", "miles_router_", "mlflow_", "prometheus_"),
    *("save_debug_", "session_"),
)


def megatron_init(args: Arguments) -> None:
    """Look up what the hooks call, check the options and begin the session; miles' hook before it makes the model.

    Raises:
        ConfigError: lists every name of miles that is missing, or every option that is missing or does not go with
            DARO.
    """
    names = (
        f"{_BACKENDS}.training_utils.loss_hub.losses:policy_loss_function",
        f"{_BACKENDS}.training_utils.cp_utils:get_local_response_loss_masks",
        f"{_BACKENDS}.megatron_utils.initialize:is_first_replica_megatron_main_rank",
        "miles.utils.tracking_utils.tracking:log",
        "miles.utils.arguments:get_miles_extra_args_provider",
        f"{_BACKENDS}.megatron_utils.model",
        f"{_BACKENDS}.megatron_utils.actor",
        "miles.ray.rollout.train_data_conversion",
        *(f"{_BACKENDS}.megatron_utils.model:{name}" for name in ("save_checkpoint", "load_checkpoint", "get_args")),
        f"{_BACKENDS}.megatron_utils.actor:compute_advantages_and_returns",
        "miles.ray.rollout.train_data_conversion:process_rollout_data_shard",
    )
    policy_loss, local_masks, is_main_rank, write, provider, model, actor, shards, *_ = HOST.look_up(names).values()

    def cut(batch: Mapping[str, Any], masks: Sequence[Tensor]) -> Sequence[Tensor]:
        columns = (batch["total_lengths"], batch["response_lengths"], masks)
        return local_masks(*columns, args.qkv_format, batch.get("max_seq_lens"))

    def report(args: Arguments, metrics: dict[str, float]) -> None:
        if is_main_rank():
            write(args, metrics, step_key="train/step")

    options = read_options()
    defaults, names_free = defaults_of(provider()), set(_FREE.split())
    free = {name for name in defaults if name in names_free or name.startswith(_FREE_PREFIXES)}
    slime.check_flags(args, HOST, MODULE, defaults, options, more_free=free)
    _wrap(shards, "process_rollout_data_shard", _with_places)
    _wrap(actor, "compute_advantages_and_returns", _with_bins)
    slime.begin_session(args, HOST, model, options, slime.Parts(policy_loss, cut, report))


def _wrap(module: object, name: str, around: Callable[..., Any]) -> None:
    own = getattr(module, name)
    if not hasattr(own, "_daro"):
        wrapped = functools.wraps(own)(functools.partial(around, own))
        wrapped._daro = True  # type: ignore[attr-defined]
        setattr(module, name, wrapped)


def _with_places(own: Callable[..., RolloutData], args: Arguments, rollout_data: RolloutData) -> RolloutData:
    """Keep the places of this rank's samples in the batch, which miles removes."""
    places = list(rollout_data["partition"])
    return {**own(args, rollout_data), "partition": places}


def _with_bins(
    own: Callable[..., None], args: Arguments, rollout_data: RolloutData, *more: object, **named: object
) -> None:
    """Run slime's hook rollout_data_postprocess after miles has made the advantages."""
    own(args, rollout_data, *more, **named)
    if "num_rollouts" not in rollout_data:
        raise AlgorithmError(
            "rollout data: num_rollouts missing, allowed are batches whose micro-batches miles' rollout manager has "
            "scheduled: that is not so with images, with --delay-split-train-data-by-dp, or for fewer rollouts than "
            "--global-batch-size"
        )
    rollout_data["global_batch_sizes"] = rollout_data["num_rollouts"]
    slime.rollout_data_postprocess(args, -1, rollout_data)


def rollout_data_postprocess(args: Arguments) -> None:
    """Check that there is a session; miles calls this hook without data, after `_with_bins` has done the work."""
    slime.session()


if __name__ == "__main__":
    slime.main(MODULE)
