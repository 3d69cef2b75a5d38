"""One gloo rank of ROLL's actor worker with DARO's class, on a small model.

From ROLL, as it is: DataProto, compute_advantage, ActorWorker (initialize, train_step, loss_func, do_checkpoint), its
Megatron strategy (train_step, inner_forward_step, log-probs, counts). From Megatron-core: schedule,
DistributedDataParallel. Stood in for: Ray, the model, its optimizer, offloading. What ROLL imports and does not use
here is empty (`UNUSED`).

    RANK=0 WORLD_SIZE=2 MASTER_ADDR=... MASTER_PORT=... python roll_ranks.py OUTPUT_DIRECTORY recompute|cached
"""

from __future__ import annotations

import os
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from empty_packages import stand_in_for

SOURCE = Path(os.environ["MEGATRON_DARO_ROLL"])
UNUSED = {"transfer_queue", "omegaconf", "more_itertools", "opentelemetry", "pybase64", "peft", "imageio", "datasets"}
UNUSED |= {"httpx", "accelerate"}
sys.path[:0] = [str(SOURCE), str(SOURCE / "mcore_adapter" / "src")]
stand_in_for(UNUSED)
import torch  # noqa: E402

from megatron_daro.actor import device  # noqa: E402

device.prepare()
import rollout_batches as batches  # noqa: E402
from megatron.core import mpu  # noqa: E402
from megatron.core.pipeline_parallel import get_forward_backward_func  # noqa: E402
from megatron.core.transformer import TransformerConfig  # noqa: E402
from roll.configs.base_config import TrainInferCorrectionConfig  # noqa: E402
from roll.distributed.scheduler.protocol import DataProto  # noqa: E402
from roll.distributed.strategy.megatron_strategy import MegatronTrainStrategy  # noqa: E402
from roll.pipeline import base_worker  # noqa: E402
from roll.utils import functionals  # noqa: E402
from table_model import PlainStep, table_model  # noqa: E402

from megatron_daro.actor.parallel import Layout, initialize  # noqa: E402
from megatron_daro.errors import CheckpointError  # noqa: E402
from megatron_daro.plugins import roll, roll_driver  # noqa: E402

LONGEST = 24


class Models(list):  # type: ignore[type-arg]
    """What ROLL calls its model: a list of chunks."""

    def train(self) -> None:
        """It is."""

    def get_models(self) -> list[Any]:
        """The chunks."""
        return list(self)

    @property
    def config(self) -> TransformerConfig:
        return self[0].config


class Strategy(MegatronTrainStrategy):
    """ROLL's Megatron strategy around the small model."""

    def __init__(self, worker: Any) -> None:
        self.worker, self.worker_config, self.tokenizer = worker, worker.worker_config, None
        self.rows: list[list[int]] = []

    def initialize(self, model_provider: Any) -> None:
        """Model and optimizer."""
        model = table_model()
        model.zero_grad_buffer()
        self.model, self.optimizer = Models([model]), PlainStep(model)
        self.models_unwrapped = [SimpleNamespace(get_batch_on_this_cp_rank=lambda batch, dim3_keys: batch)]
        self.forward_backward_func, self.seq_length = get_forward_backward_func(), LONGEST
        steps = self.worker_config.training_args.gradient_accumulation_steps
        self.megatron_train_args = SimpleNamespace(gradient_accumulation_steps=steps, cross_entropy_loss_fusion=False)
        self.enable_router_replay = self.use_sequence_packing = self.is_multimodal = False
        self.scheduler = SimpleNamespace(step=lambda: None, get_last_lr=lambda: [1.0])

    def train_step(self, batch: Any, loss_func: Any) -> Any:
        """ROLL's; notes which rows the step holds."""
        self.rows.append(batch.batch["row"].tolist())
        return super().train_step(batch, loss_func)

    def get_data_input(self, batch: Any) -> Any:
        """Each rank has its own."""
        return batch

    def load_states(self, *given: Any, **named: Any) -> None:
        """Nothing is offloaded."""

    offload_states = load_states

    def load_checkpoint(self, load_dir: str, tag: str) -> None:
        """The small model is not saved."""

    def save_checkpoint(self, *given: Any, **named: Any) -> dict[str, Any]:
        """The small model is not saved."""
        return {}


def options(out: Path, mode: str, **changes: Any) -> SimpleNamespace:
    """ROLL's options of a pipeline, as far as its worker reads them."""
    training = SimpleNamespace(per_device_train_batch_size=2, gradient_accumulation_steps=3)
    actor = SimpleNamespace(
        worker_cls=roll_driver.WORKER,
        strategy_args=SimpleNamespace(strategy_name="megatron_train"),
        apply_loss_scale=True,
        training_args=training,
        use_dynamic_batching_in_train=False,
        use_sequence_packing=False,
        offload_nccl=False,
        name="actor_train",
        logits_in_fp32=True,
        checkpoint_config={},
    )
    base: dict[str, Any] = {
        **roll_driver.FIXED,
        "actor_train": actor,
        "actor_infer": SimpleNamespace(generating_args=SimpleNamespace(num_return_sequences=batches.K)),
        "resume_from_checkpoint": False,
        "checkpoint_config": None,
        "output_dir": str(out),
        "enable_old_logprobs_recompute": mode == "recompute",
        "train_infer_correction": TrainInferCorrectionConfig(),
        "ppo_epochs": 2,
        "seed": 5,
        "use_pg_clip_range": True,
        "pg_clip": 0.2,
        "pg_clip_low": 0.2,
        "pg_clip_high": 0.28,
        "dual_clip_loss": False,
        "use_kl_loss": False,
        "kl_loss_coef": 0.0,
        "rl_loss_coef": 1.0,
        "entropy_loss_coef": 0.0,
        "reference_configs": {"default": None},
    }
    return SimpleNamespace(**{**base, **changes})


def batch_of(config: SimpleNamespace, seed: int) -> Any:
    """What ROLL's driver hands to the actor, after its own compute_advantage with DARO's around it."""
    whole = batches.samples(seed)

    def column(rows: list[list[Any]], dtype: torch.dtype, length: int = LONGEST) -> torch.Tensor:
        return torch.stack([torch.tensor(row + [0] * (length - len(row)), dtype=dtype) for row in rows])

    tokens = [s.prompt + s.response for s in whole]
    old = column([[0.0] * (len(s.prompt) - 1) + s.old for s in whole], torch.float32, LONGEST - 1)
    mask = column([[0] * len(s.prompt) + s.mask for s in whole], torch.int64)
    tensors = {
        "input_ids": column(tokens, torch.int64),
        "attention_mask": column([[1] * len(t) for t in tokens], torch.int64),
        "position_ids": torch.arange(LONGEST).expand(len(whole), LONGEST),
        "response_mask": mask,
        "final_response_mask": mask[:, 1:].clone(),
        "old_log_probs": old,
        "ref_log_probs": old.clone(),
        "train_infer_is_weight": torch.ones_like(old),
        "token_level_rewards": torch.zeros_like(old),
        "scores": torch.tensor([s.reward for s in whole]),
        "prompt_id": torch.tensor([s.group for s in whole]),
        "row": torch.arange(len(whole)),
    }
    data = DataProto.from_dict(tensors, meta_info={"loss_mask_keys": ["response_mask", "final_response_mask"]})
    compute = roll_driver.with_daro(functionals.compute_advantage)
    data = compute(
        data=data,
        gamma=1.0,
        lambd=1.0,
        adv_estimator="grpo",
        response_mask=data.batch["final_response_mask"].clone(),
        pipeline_config=config,
    )
    data.pop(batch_keys=["prompt_id"])
    rank, size = mpu.get_data_parallel_rank(), mpu.get_data_parallel_world_size()
    return data.chunk(chunks=size)[rank]


def new_worker(config: SimpleNamespace) -> Any:
    """The class that ROLL's cluster would make its actor of."""
    worker = roll.DaroActorWorker.__new__(roll.DaroActorWorker)
    worker.worker_config, worker._logprobs_cache = config.actor_train, {}
    worker.cluster_name = worker.worker_name = "actor_train"
    worker.initialize(config)
    return worker


def refused(config: SimpleNamespace) -> str:
    """Why a worker does not start."""
    try:
        new_worker(config)
    except CheckpointError as error:
        return str(error)
    return ""


def main(out: Path, mode: str) -> None:
    """Two batches of several optimizer steps, a checkpoint, a resume."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    address = f"tcp://{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    initialize(Layout(data=size), rank=rank, init_method=address, seed=1, timeout_s=120)
    base_worker.create_strategy = Strategy
    base_worker.state_offload_manger = lambda **given: nullcontext()
    base_worker.Worker.initialize = lambda self, config: setattr(self, "pipeline_config", config)
    base_worker.current_platform = SimpleNamespace(device_type="cpu")
    config = options(out, mode)
    worker = new_worker(config)
    metrics = [worker.train_step(batch_of(config, seed)).meta_info["metrics"] for seed in range(2)]
    worker.do_checkpoint(global_step=7)
    torch.distributed.barrier()
    saved = str(out / "actor_train" / "checkpoint-7")
    more = SimpleNamespace(generating_args=SimpleNamespace(num_return_sequences=batches.K + 1))
    strategy = worker.strategy
    found = {
        "gradients": strategy.optimizer.gradients,
        "rows": strategy.rows,
        "metrics": metrics,
        "state": worker.daro.state_dict(),
        "resumed": new_worker(options(out, mode, resume_from_checkpoint=saved)).daro.state_dict(),
        "other_k": refused(options(out, mode, resume_from_checkpoint=saved, actor_infer=more)),
        "without": refused(options(out, mode, resume_from_checkpoint=str(out))),
    }
    torch.save(found, out / f"rank_{rank}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
