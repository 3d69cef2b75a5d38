"""One rank of verl's real training worker on the CPU: its FSDP engine, its micro-batches, DARO's worker over gloo.

Run by torchrun-like environment variables (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT):
    python verl_ranks.py OUTPUT_DIRECTORY MODEL_DIRECTORY variable|entry-point
verl finds DARO's module by VERL_USE_EXTERNAL_MODULES, or by the entry point of the installed package. Writes
OUTPUT_DIRECTORY/rank_N.pt: parameters, gradients, metrics and weights of each step, and those of a resumed worker.
"""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

os.environ |= {
    "VERL_PLATFORM": "cpu",
    "VERL_USE_EXTERNAL_MODULES": "verl_cpu_platform"
    + (",megatron_daro.plugins.verl" if sys.argv[3] == "variable" else ""),
}

import torch
import verl  # first, as in verl's own processes: it loads its plugins
import verl_batches as batches
import verl_cpu_platform
from tensordict import NonTensorData
from verl import DataProto
from verl.trainer.config import AlgoConfig, CheckpointConfig
from verl.trainer.ppo.ray_trainer import compute_advantage
from verl.utils import tensordict_utils as tu
from verl.utils.metric import reduce_metrics
from verl.utils.py_functional import rename_dict
from verl.utils.tracking import Tracking
from verl.workers.config import ActorConfig, FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
from verl.workers.config.engine import TrainingWorkerConfig
from verl.workers.engine_workers import ActorRolloutRefWorker
from verl.workers.utils.losses import ppo_loss

STEPS = 3


def new_worker(model: Path, **actor: Any) -> Any:
    """The class that verl would make its actor of, with verl's own configuration objects."""
    checkpoint = CheckpointConfig()
    hf = HFModelConfig(
        path=str(model),
        use_remove_padding=False,
        enable_gradient_checkpointing=False,
        load_tokenizer=False,
        override_config={"attn_implementation": "eager"},
    )
    engine = FSDPEngineConfig(
        strategy="fsdp2",
        fsdp_size=-1,
        use_dynamic_bsz=True,
        max_token_len_per_gpu=60,
        use_torch_compile=False,
        dtype="float32",
        mixed_precision={"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"},
        model_dtype="float32",
    )
    optimizer = FSDPOptimizerConfig(lr=1e-3, weight_decay=0.0, total_training_steps=100, clip_grad=1e9)
    worker = ActorRolloutRefWorker.actor_worker_cls(
        TrainingWorkerConfig(
            model_type="language_model",
            model_config=hf,
            engine_config=engine,
            optimizer_config=optimizer,
            checkpoint_config=checkpoint,
        )
    )
    worker.reset()
    options = {"strategy": "fsdp2", "rollout_n": batches.K, "ppo_micro_batch_size_per_gpu": 1, "clip_ratio_high": 0.28}
    worker.set_loss_fn(partial(ppo_loss, config=ActorConfig(**{**options, **actor})))
    return worker


def full(worker: Any, kind: str) -> dict[str, torch.Tensor]:
    """Gradients ("grad") or parameters ("data") by Hugging Face name, put together from FSDP's shards. Collective."""
    named = worker.engine.module.named_parameters()
    return {name: (p.grad if kind == "grad" else p.detach()).full_tensor().clone() for name, p in named}


def batch(whole: list[batches.Sample], estimator: str, part: range, seed: int) -> Any:
    """A rank's part of a batch, after verl's own compute_advantage."""
    tensors = {"token_level_rewards": batches.token_rewards(whole), "response_mask": batches.response_mask(whole)}
    scored = DataProto.from_dict(tensors=tensors, non_tensors={"uid": batches.uids(whole)})
    scored = compute_advantage(scored, adv_estimator=estimator, num_repeat=batches.K, config=AlgoConfig())
    data = batches.as_tensordict(whole, scored.batch["advantages"], scored.batch["returns"], part=part)
    tu.assign_non_tensor(data, global_batch_size=len(whole), temperature=1.0, global_token_num=NonTensorData(None))
    options = {"mini_batch_size": len(whole), "dataloader_kwargs": {"shuffle": False}, "seed": seed}
    tu.assign_non_tensor(data, **options)
    return data


def log_as_the_trainer_does(tracking: Tracking, metrics: dict[str, Any], step: int) -> None:
    """The calls of verl's trainer between its actor's answer and its logger."""
    tracking.log(data=reduce_metrics(rename_dict(dict(metrics), "actor/")), step=step)


def main(model: Path, out: Path) -> None:
    """Three steps, a save, a resume in a new worker."""
    assert verl.__version__
    torch.distributed.init_process_group("gloo")
    verl_cpu_platform.enable_engines()
    worker = new_worker(model)
    rank, size = worker.rank, worker.world_size
    found: dict[str, Any] = {"metrics": [], "state": [], "gradients": [], "parameters": []}
    if sys.argv[3] == "entry-point":  # DARO is only installed: another estimator trains as without it
        plain = batch(batches.samples(9), "grpo", range(rank, batches.K * batches.GROUPS, size), 9)
        found["plain"] = sorted(tu.get(worker.train_mini_batch(plain), "metrics"))
        assert worker.daro is None
    engine_step = worker.engine.optimizer_step

    def keep_gradients() -> Any:
        found["parameters"].append(full(worker, "data"))
        found["gradients"].append(full(worker, "grad"))
        return engine_step()

    worker.engine.optimizer_step = keep_gradients
    os.environ["VERL_FILE_LOGGER_ROOT"] = str(out / "logs" / str(rank))
    tracking = Tracking("daro", "test", default_backend=["console", "file"])
    for seed in range(STEPS):
        whole = batches.samples(seed)
        data = batch(whole, "daro", range(rank, len(whole), size), seed)
        metrics = tu.get(worker.train_mini_batch(data), "metrics")
        found["metrics"].append({name: values[0] for name, values in metrics.items()})  # of one mini-batch
        found["state"].append(worker.daro.state_dict())
        log_as_the_trainer_does(tracking, metrics, seed + 1)
    worker.save_checkpoint(str(out / "checkpoint"), global_step=STEPS)
    resumed = type(worker.daro)(worker.daro.algorithm.__class__(rollouts_per_prompt=batches.K, max_response_tokens=1))
    worker.daro = resumed
    worker.load_checkpoint(str(out / "checkpoint"))
    found["resumed"] = worker.daro.state_dict()
    torch.save(found, out / f"rank_{rank}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[2]), Path(sys.argv[1]))
