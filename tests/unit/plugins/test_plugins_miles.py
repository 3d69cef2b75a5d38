"""miles' hooks where miles itself is not needed: what differs from slime."""

from __future__ import annotations

import sys
from argparse import Namespace
from types import ModuleType

import pytest
import torch

from megatron_daro.errors import AlgorithmError, ConfigError
from megatron_daro.plugins import miles, slime
from megatron_daro.plugins.slime import bins_and_advantages

K = 4
REWARDS = [1.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 0.0]
PLACES = {
    "miles.backends.training_utils.loss_hub.losses": ("policy_loss_function",),
    "miles.backends.training_utils.cp_utils": ("get_local_response_loss_masks",),
    "miles.backends.megatron_utils.initialize": ("is_first_replica_megatron_main_rank",),
    "miles.utils.tracking_utils.tracking": ("log",),
    "miles.utils.arguments": ("get_miles_extra_args_provider",),
    "miles.backends.megatron_utils.model": ("save_checkpoint", "load_checkpoint", "get_args"),
    "miles.backends.megatron_utils.actor": ("compute_advantages_and_returns",),
    "miles.ray.rollout.train_data_conversion": ("process_rollout_data_shard",),
}


def provider():
    def add(parser):
        parser.add_argument("--n-samples-per-prompt", type=int, required=True)
        parser.add_argument("--indep-dp", action="store_true")
        for option in ("--critic-load", "--critic-save", "--critic-lr", "--ft-components"):
            parser.add_argument(option)
        for option in slime.HOOKS:
            parser.add_argument(f"--{option.replace('_', '-')}")
        return parser

    return add


def process_rollout_data_shard(args, rollout_data):
    """As train_data_conversion.py has it: `partition = rollout_data.pop("partition")`."""
    partition = rollout_data.pop("partition")
    rollout_data["total_lengths"] = [rollout_data["total_lengths"][i] for i in partition]
    return rollout_data


def compute_advantages_and_returns(args, rollout_data):
    """As loss_hub/advantages.py has it for grpo: the reward on every token."""
    pairs = zip(rollout_data["rewards"], rollout_data["loss_masks"], strict=True)
    rollout_data["advantages"] = [torch.full((len(mask),), float(reward)) for reward, mask in pairs]
    rollout_data["returns"] = rollout_data["advantages"]


def arguments(**changes):
    hooks = {option: f"{miles.MODULE}.{name}" for option, name in slime.HOOKS.items()}
    base = {"loss_type": "custom_loss", "advantage_estimator": "grpo", "kl_coef": 0, "qkv_format": "thd"}
    # miles_validate_args fills the last four, also where there is no critic and nothing is fault tolerant
    filled = {"critic_load": "checkpoints", "critic_save": "checkpoints_critic", "critic_lr": 1e-6, "ft_components": []}
    return Namespace(**{"n_samples_per_prompt": K, "indep_dp": False, **base, **filled, **hooks, **changes})


@pytest.fixture
def host(monkeypatch):
    functions = dict.fromkeys((name for names in PLACES.values() for name in names), lambda *given, **named: None)
    functions |= {"get_miles_extra_args_provider": provider, "process_rollout_data_shard": process_rollout_data_shard}
    functions["compute_advantages_and_returns"] = compute_advantages_and_returns
    for path, names in PLACES.items():
        module = ModuleType(path)
        module.__dict__.update({name: functions[name] for name in names})
        monkeypatch.setitem(sys.modules, path, module)
    return sys.modules


@pytest.mark.parametrize("rank", [0, 1])
def test_bins_reach_the_loss_behind_the_hooks_that_get_no_data(host, rank):
    args = arguments()
    for _ in range(2):  # a second start wraps nothing twice
        miles.megatron_init(args)
    _, advantages = bins_and_advantages(args, torch.tensor(REWARDS))
    partition = [6, 0, 3] if rank else [7, 1]
    data = {
        "partition": partition,
        "rewards": torch.tensor([float(advantages[i]) for i in partition]).numpy(),
        "raw_reward": REWARDS,
        "total_lengths": list(range(10, 18)),
        "loss_masks": [torch.tensor([1, 1])] * len(partition),
        "num_microbatches": [1, 1],
        "micro_batch_indices": [[1], [0, *range(2, len(partition))]],
        "num_rollouts": [3, 5],
    }
    data = host["miles.ray.rollout.train_data_conversion"].process_rollout_data_shard(args, data)
    host["miles.backends.megatron_utils.actor"].compute_advantages_and_returns(args, data)
    miles.rollout_data_postprocess(args)
    assert [int(values[0]) for values in data["returns"]] == [3 if i >= K else 1 for i in partition]
    assert data["total_lengths"] == [10 + i for i in partition]
    assert [plan.rollouts for plan in slime.session().plans] == [3, 5]


def test_a_batch_without_a_schedule_is_refused(host):
    miles.megatron_init(arguments())
    with pytest.raises(AlgorithmError, match="num_rollouts"):
        host["miles.backends.megatron_utils.actor"].compute_advantages_and_returns(
            arguments(), {"rewards": [], "loss_masks": []}
        )


def test_what_is_missing_or_unknown_is_named(host, monkeypatch):
    with pytest.raises(ConfigError, match="--indep-dp"):
        miles.megatron_init(arguments(indep_dp=True))
    monkeypatch.delattr(host["miles.backends.megatron_utils.model"], "save_checkpoint")
    with pytest.raises(ConfigError, match=r"miles\.backends\.megatron_utils\.model:save_checkpoint"):
        miles.megatron_init(arguments())
