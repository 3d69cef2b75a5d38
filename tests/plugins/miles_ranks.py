"""One gloo rank of miles' own train loop, with DARO's hooks on miles' own command line, on a small model.

From miles, as it is: its parser, the conversion of samples and their split over ranks with the schedule of
micro-batches, and of MegatronTrainRayActor `init`, `train` and `save_model`; so `compute_advantages_and_returns`,
`train_one_step`, `loss_function`, `load_checkpoint`. From Megatron-LM, as it is: its parser, `get_model`, schedule,
DDP, optimizer, scheduler and checkpoints. Stood in for: packages that nothing here uses (empty), the tokenizer, the
object store, the fused cross entropy (the plain one), what passes weights to servers; the model comes by miles'
--custom-model-provider-path.

    RANK=0 WORLD_SIZE=2 MASTER_ADDR=... MASTER_PORT=... python miles_ranks.py OUTPUT CP [option of train.py ...]

The options decide: `--load X` resumes; otherwise the run begins with the table of rollout_batches.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import typing
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import typing_extensions

sys.path[:0] = [os.environ["MEGATRON_DARO_MILES"], os.environ["MEGATRON_DARO_MEGATRON_LM"]]
# Megatron-LM asks for Python 3.12, of which it uses this.
typing.override = getattr(typing, "override", typing_extensions.override)  # type: ignore[attr-defined]

from empty_packages import stand_in_for  # noqa: E402

EMPTY = "einops httpx pynvml ring_flash_attn sglang sglang_router six torch_memory_saver wandb mooncake polars"
stand_in_for(EMPTY.split())

import torch  # noqa: E402

from megatron_daro.actor import device  # noqa: E402

device.prepare()
import rollout_batches as batches  # noqa: E402
from megatron.core.fusions import fused_cross_entropy  # noqa: E402
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy  # noqa: E402
from miles.backends.megatron_utils import actor, initialize  # noqa: E402
from miles.backends.megatron_utils import model as training  # noqa: E402
from miles.ray.rollout import train_data_conversion as conversion  # noqa: E402
from miles.utils import arguments  # noqa: E402
from miles.utils.ft_utils.indep_dp import IndepDPInfo  # noqa: E402
from miles.utils.misc import load_function  # noqa: E402
from miles.utils.tracking_utils import tracking  # noqa: E402
from miles.utils.types import Sample  # noqa: E402

from megatron_daro.plugins import miles as adapter  # noqa: E402
from megatron_daro.plugins import slime  # noqa: E402

NUM_ROLLOUTS = 3


os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
torch.cuda.get_device_properties = lambda *given: SimpleNamespace(major=9, minor=0)


def parse(out: Path, cp: int, more: list[str]) -> Any:
    """miles' options, parsed and validated by miles."""
    text = f"""
        --debug-train-only --distributed-backend gloo --transformer-impl local --tokenizer-type NullTokenizer
        --num-layers 1 --hidden-size 4 --num-attention-heads 1 --vocab-size {batches.VOCAB} --seq-length 64
        --max-position-embeddings 64 --micro-batch-size 1 --no-gradient-accumulation-fusion
        --custom-model-provider-path table_model.provider --actor-num-gpus-per-node {os.environ["WORLD_SIZE"]}
        --context-parallel-size {cp} --use-dynamic-batch-size --max-tokens-per-gpu {40 // cp}
        --rollout-batch-size {batches.GROUPS} --n-samples-per-prompt {batches.K} --num-rollout {NUM_ROLLOUTS}
        --global-batch-size {batches.GROUPS * batches.K // batches.STEPS} --data-pad-size-multiplier 4
        --optimizer adam --lr 0.05 --lr-decay-style constant --weight-decay 0 --clip-grad 0
        --eps-clip 0.2 --eps-clip-high 0.28 --ref-load {out / "start"} --save {out / "saved"} --save-interval 1
        {" ".join(slime.flags(adapter.MODULE))}
    """
    sys.argv = ["train.py", *text.split(), *more]
    arguments.sglang_validate_args = lambda args: None  # of the servers, whose options come from SGLang
    args = arguments.parse_args()
    args.bf16, args.params_dtype = False, torch.float32  # miles has no option for it; the reference needs it
    return args


def on_cpu() -> None:
    """What asks the device for its memory."""
    for module in (sys.modules["miles.utils.memory_utils"], actor, training):
        for name in ("clear_memory", "print_memory", "available_memory"):
            if hasattr(module, name):
                setattr(module, name, lambda *given, **named: None)
    # The fused one rounds its gradient to bf16 (calculate_gradients of fused_cross_entropy.py), 1e-3 of the reference.
    fused_cross_entropy.fused_vocab_parallel_cross_entropy = lambda logits, target, group: vocab_parallel_cross_entropy(
        logits, target
    )
    torch.cuda.set_device = lambda *given: None
    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.cuda.mem_get_info = lambda *given: (2**34, 2**34)


def start(args: Any) -> tuple[Any, int]:
    """A train actor after its own init, and the rollout that it goes on with."""
    initialize._build_tokenizer = lambda args: None
    actor.load_hf_config = actor.load_tokenizer = MagicMock()
    for name in ("UpdateWeightFromDistributed", "UpdateWeightFromTensor"):
        setattr(actor, name, MagicMock())
    actor.TensorBackuper = MagicMock()
    actor.TensorBackuper.create.return_value.backup_tags = ["actor"]
    on_cpu()
    made = object.__new__(actor.MegatronTrainRayActor)
    made._rank = int(os.environ["RANK"])
    made._indep_dp_store_addr, made._heartbeat = None, MagicMock()
    loaded = made.init(args, "actor", indep_dp_info=IndepDPInfo.create_trivial())
    return made, loaded if args.start_rollout_id is None else args.start_rollout_id  # as train.py chooses


def rollout(args: Any, parallel: dict[str, int], seed: int) -> list[Any]:
    """A rollout as miles' manager hands it to the train ranks."""
    samples = [
        Sample(
            group_index=s.group,
            index=i,
            reward=s.reward,
            tokens=s.prompt + s.response,
            response_length=len(s.mask),
            loss_mask=s.mask,
            rollout_log_probs=s.old,
        )
        for i, s in enumerate(batches.samples(seed))
    ]
    rewards = load_function(args.custom_reward_post_process_path)
    data = conversion.convert_samples_to_train_data(args, samples, {}, None, rewards)
    return conversion.split_train_data_by_dp(args, data, parallel)


def watch(optimizer: Any, model: Any, found: dict[str, Any]) -> None:
    """Keep the table and its gradient before each optimizer step: of the gradient what this rank's optimizer owns."""
    own, table = optimizer.step, model.module.table
    owned = optimizer.chained_optimizers[0]._get_model_param_range_map(table)["param"]
    found.update(tables=[], gradients=[])

    def step() -> Any:
        gradient = torch.zeros(table.numel())
        gradient[owned.start : owned.end] = table.main_grad.flatten()[owned.start : owned.end]
        found["gradients"].append(gradient.view_as(table))
        found["tables"].append(table.detach().clone())
        return own()

    optimizer.step = step


def main(out: Path, cp: int, more: list[str]) -> None:
    """Train the rollouts that are left, saving after each."""
    rank = int(os.environ["RANK"])
    (out / "start").mkdir(exist_ok=True)
    (out / "start" / "weights").touch()  # not empty; what is in it is the table's own start
    training.load_checkpoint.__globals__["_load_checkpoint_hf"] = lambda **given: (0, 0)
    store = SimpleNamespace(put=lambda *, value, value_spec: value, get=Held)
    conversion.object_store.get_instance = lambda: store
    args = parse(out, cp, more)
    logged: list[Any] = []
    tracking.log = lambda args, metrics, step_key: logged.append(metrics)
    train_actor, first = start(args)
    found: dict[str, Any] = {"first": first, "begins": slime.session().step.state_dict(), "logged": logged}
    watch(train_actor.optimizer, train_actor.model[0], found)
    for rollout_id in range(first, NUM_ROLLOUTS):
        train_actor.train(rollout_id, rollout(args, train_actor.train_parallel_config, rollout_id))
        train_actor.save_model(rollout_id)
    found["state"] = slime.session().step.state_dict()
    torch.save(found, out / f"rank_{rank}.pt")
    for child in multiprocessing.active_children():  # Megatron-LM's writers of checkpoints
        child.kill()
    sys.stdout.flush()
    os._exit(0)  # their threads would wait for them


class Held(nullcontext):
    """What miles' object store gives: the value, for the time that it is used."""

    def __init__(self, value: Any) -> None:
        super().__init__(value)
        self.value = value


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
