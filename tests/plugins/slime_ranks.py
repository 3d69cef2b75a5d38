"""One gloo rank of slime's real data path and loss function, with DARO's hooks, on a small model.

From slime, as it is: Sample, build_dp_schedule, get_data_iterator, get_batch, compute_advantages_and_returns and
loss_function. From Megatron-core: its schedule, DistributedDataParallel, finalize_model_grads, its learning-rate
scheduler. slime's own train loop needs megatron.training, which is in no package: `train` here makes its calls in its
order (tests/contract/hosts/slime.toml pins them).

    RANK=0 WORLD_SIZE=2 MASTER_ADDR=... MASTER_PORT=... python slime_ranks.py OUTPUT_DIRECTORY CP PER_TOKEN
"""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

sys.path.insert(0, os.environ["MEGATRON_DARO_SLIME"])
sys.modules.setdefault("wandb", ModuleType("wandb"))  # slime's logger imports it; what it is given is kept here

import torch  # noqa: E402

from megatron_daro.actor import device  # noqa: E402

device.prepare()
import rollout_batches as batches  # noqa: E402
from megatron.core import mpu  # noqa: E402
from megatron.core.pipeline_parallel import get_forward_backward_func  # noqa: E402
from slime.backends.megatron_utils import data, loss  # noqa: E402
from slime.observability import logging_utils  # noqa: E402
from slime.utils import accelerator  # noqa: E402
from slime.utils.dp_schedule import build_dp_schedule  # noqa: E402
from slime.utils.types import Sample  # noqa: E402
from table_model import PlainStep, scheduler_of, table_model  # noqa: E402

from megatron_daro.actor.parallel import Layout, initialize  # noqa: E402
from megatron_daro.plugins import slime as adapter  # noqa: E402

accelerator.current_device = accelerator.device = lambda *args: torch.device("cpu")


def arguments(cp: int, per_token: bool) -> Namespace:
    """slime's options, as far as its data path and loss read them."""
    hooks = {option: f"{adapter.MODULE}.{name}" for option, name in adapter.HOOKS.items()}
    return Namespace(
        n_samples_per_prompt=batches.K,
        rollout_batch_size=batches.GROUPS,
        global_batch_size=batches.GROUPS * batches.K // batches.STEPS,
        loss_type="custom_loss",
        advantage_estimator="grpo",
        custom_advantage_function_path=None,
        eps_clip=0.2,
        eps_clip_high=0.28,
        eps_clip_c=None,
        entropy_coef=0.0,
        kl_coef=0,
        reward_key=None,
        use_kl_loss=False,
        kl_loss_coef=0.0,
        use_tis=False,
        use_opd=False,
        use_rollout_logprobs=True,
        normalize_advantages=False,
        calculate_per_token_loss=per_token,
        recompute_loss_function=False,
        allgather_cp=False,
        rollout_temperature=1.0,
        rollout_top_p=1.0,
        log_probs_chunk_size=-1,
        use_dynamic_batch_size=True,
        max_tokens_per_gpu=40 // cp,
        micro_batch_size=1,
        balance_data=False,
        balance_by_flops=False,
        context_parallel_size=cp,
        **hooks,
    )


def rollout_data(args: Namespace, seed: int, dp: int, cp: int) -> dict[str, Any]:
    """This rank's part of a rollout, as slime's manager packages it and its train side unpacks it."""
    samples = [
        Sample(group_index=s.group, index=i, reward=s.reward, tokens=s.prompt + s.response, response_length=len(s.mask))
        for i, s in enumerate(batches.samples(seed))
    ]
    whole = batches.samples(seed)
    raw, rewards = adapter.reward_post_process(args, samples)
    totals = [len(s.tokens) for s in samples]
    config = {"dp_size": dp, "cp_size": cp, "vpp_size": 1, "microbatch_group_size_per_vp_stage": 1}
    partitions, indices, numbers, sizes = build_dp_schedule(
        args, config, totals, global_batch_size=args.global_batch_size, rollout_indices=list(range(len(samples)))
    )
    rank = mpu.get_data_parallel_rank(with_context_parallel=False)
    mine = partitions[rank]
    found: dict[str, Any] = {
        "partition": mine,
        "raw_reward": raw,
        "rewards": [rewards[i] for i in mine],
        "tokens": [torch.tensor(samples[i].tokens) for i in mine],
        "total_lengths": [totals[i] for i in mine],
        "response_lengths": [len(whole[i].mask) for i in mine],
        "loss_masks": [torch.tensor(whole[i].mask, dtype=torch.int) for i in mine],
        "rollout_mask_sums": [torch.tensor(sum(whole[i].mask)) for i in mine],
        "global_batch_sizes": sizes,
        "num_microbatches": numbers,
        "micro_batch_indices": indices[rank],
    }
    from slime.backends.megatron_utils.cp_utils import slice_log_prob_with_cp

    found["rollout_log_probs"] = [
        slice_log_prob_with_cp(torch.tensor(whole[i].old), totals[i], len(whole[i].mask)) for i in mine
    ]
    return found


def train(args: Namespace, model: Any, optimizer: PlainStep, rollout_id: int, rollout: dict[str, Any]) -> None:
    """The calls of slime's train_actor and train_one_step."""
    loss.compute_advantages_and_returns(args, rollout)
    adapter.rollout_data_postprocess(args, rollout_id, rollout)
    iterator = data.get_data_iterator(rollout)[0]
    keys = ["tokens", "total_lengths", "response_lengths", "loss_masks", "rollout_log_probs", "log_probs"]
    keys += ["advantages", "returns", "rollout_mask_sums", "multimodal_train_inputs"]
    for step_id, number in enumerate(rollout["num_microbatches"]):
        model.zero_grad_buffer()
        adapter.before_train_step(args, rollout_id, step_id, [model], optimizer, None)
        size = rollout["global_batch_sizes"][step_id]

        def forward_step(source: Any, inner: Any, number: int = number, size: int = size) -> tuple[Any, Any]:
            batch = data.get_batch(source, keys, 4, False)
            return inner(batch["tokens"]), partial(loss.loss_function, args, batch, number, size)

        get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iterator,
            model=[model],
            num_microbatches=number,
            seq_length=8,
            micro_batch_size=1,
            forward_only=False,
        )
        optimizer.step()


def main(out: Path, cp: int, per_token: bool) -> None:
    """Two rollouts of several optimizer steps each, a checkpoint, a resume."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    address = f"tcp://{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    initialize(Layout(context=cp, data=size // cp), rank=rank, init_method=address, seed=1, timeout_s=120)
    args = arguments(cp, per_token)
    logged: list[Any] = []
    logging_utils.log = lambda args, metrics, step_key: logged.append(metrics)
    sys.modules["slime.backends.megatron_utils.initialize"] = Namespace(is_megatron_main_rank=lambda: rank == 0)
    adapter.megatron_init(args)
    model = table_model(context=cp, per_token=per_token)
    optimizer = PlainStep(model)
    found: dict[str, Any] = {"gradients": optimizer.gradients, "logged": logged, "num_microbatches": []}
    for rollout_id in range(2):
        rollout = rollout_data(args, rollout_id, size // cp, cp)
        found["num_microbatches"].append(rollout["num_microbatches"])
        train(args, model, optimizer, rollout_id, rollout)
    found["state"] = adapter.session().step.state_dict()
    found["resumed"] = resumed_state(args, optimizer)
    torch.save(found, out / f"rank_{rank}.pt")


def resumed_state(args: Namespace, optimizer: PlainStep) -> dict[str, Any]:
    """DARO's state after a round trip through the scheduler that Megatron saves with every checkpoint."""
    saved = scheduler_of(optimizer).state_dict()
    adapter.megatron_init(args)
    assert adapter.session().step.steps == 0
    scheduler_of(optimizer).load_state_dict(saved)
    return adapter.session().step.state_dict()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "per_token")
