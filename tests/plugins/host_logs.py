"""Writes what a host's own code writes: its metrics of a run with DARO, and its dump of rollouts.

    python host_logs.py nemo_rl|slime_train|slime_rollout|roll OUTPUT_DIRECTORY

From NeMo-RL: `Logger` (TensorBoard, hyperparameters, `log_batched_dict_as_jsonl`) and `BatchedDataDict`. From slime:
`logging_utils.log` and its TensorBoard adapter; its train rank and its rollout manager are two processes, as there.
From ROLL: `DataProto` and `dump_rollout_to_specific_path`. The numbers are those of `metrics` and `GROUPS`.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
from argparse import Namespace
from pathlib import Path

from empty_packages import stand_in_for

K, STEPS, ROLLOUTS = 4, 6, 3
# Each prompt's tokens, and of each of its K answers how many tokens it has and whether it is right.
GROUPS = [
    ([7, 8], [(3, True), (5, False), (2, False), (4, False)]),
    ([7, 9, 1], [(1, True), (2, True), (6, False), (4, True)]),
    ([5], [(2, False), (2, False), (2, False), (2, False)]),
]
UNUSED = {"transfer_queue", "omegaconf", "more_itertools", "opentelemetry", "pybase64", "peft", "imageio", "datasets"}
UNUSED |= {"httpx", "accelerate"}
TRACKERS = {"mlflow", "swanlab", "wandb", "pynvml", "prometheus_client", "matplotlib", "zmq"}


def metrics(step: int) -> dict[str, float]:
    """What the adapters hand to a host's logger."""
    found = {f"difficulty/weight/{k}": 1 + 0.1 * k * step for k in range(1, K)}
    found |= {f"difficulty/{name}/{k}": 2.0 + k for name in ("tokens", "groups", "loss") for k in range(K + 1)}
    return found | {"loss/policy": -0.1 * step}


def nemo_rl(out: Path) -> None:
    """As grpo_train does: hyperparameters once, then for each step metrics and a dump."""
    stand_in_for(TRACKERS)
    sys.path.insert(0, os.environ["MEGATRON_DARO_NEMO_RL"])
    import torch
    from nemo_rl.utils.logger import Logger

    off = {f"{name}_enabled": False for name in ("wandb", "swanlab", "mlflow")}
    logger = Logger({"log_dir": str(out), "tensorboard_enabled": True, "tensorboard": {}, "monitor_gpus": False, **off})
    logger.log_hyperparams({"grpo": {"num_generations_per_prompt": K}, "cluster": {"num_nodes": 1}})
    longest = max(len(prompt) + n for prompt, answers in GROUPS for n, _ in answers)
    rows = [(prompt, n, right) for prompt, answers in GROUPS for n, right in answers]
    for step in range(STEPS):
        ids = torch.tensor([p + [3] * n + [0] * (longest - len(p) - n) for p, n, _ in rows])
        mask = torch.tensor([[0.0] * len(p) + [1.0] * n + [0.0] * (longest - len(p) - n) for p, n, _ in rows])
        dump = {
            "content": [f"{p} {n}" for p, n, _ in rows],
            "rewards": torch.tensor([float(right) for *_, right in rows]).tolist(),
            "input_lengths": torch.tensor([len(p) + n for p, n, _ in rows]).tolist(),
            "token_ids": ids.tolist(),
            "token_loss_mask": mask.tolist(),
            "sample_loss_mask": torch.ones(len(rows)).tolist(),
            "advantages": mask.tolist(),
        }
        logger.log_batched_dict_as_jsonl(dump, f"train_data_step{step + 1}.jsonl")
        logger.log_batched_dict_as_jsonl({"content": ["x"], "rewards": [0.3]}, f"val_data_step{step + 1}.jsonl")
        values = {**metrics(step), "reward": torch.tensor(0.1 * step), "mean_gen_tokens_per_sample": 3.0, "lr": 1e-6}
        logger.log_metrics(values, step + 1, prefix="train")
        logger.log_metrics({"total_step_time": 2.0}, step + 1, prefix="timing/train")
        logger.log_metrics({"accuracy": 0.5}, step + 1, prefix="validation")
    for backend in logger.loggers:
        backend.writer.close()


def slime(out: Path, *, trains: bool) -> None:
    """The train rank, or the rollout manager. Two optimizer steps for each rollout."""
    stand_in_for({"wandb", "httpx"})
    sys.path.insert(0, os.environ["MEGATRON_DARO_SLIME"])
    os.chdir(out)
    from slime.observability import logging_utils
    from slime.observability.metric_utils import compute_rollout_step
    from slime.observability.tensorboard_utils import _TensorboardAdapter

    name = os.environ.get("EXPERIMENT") or ("train" if trains else "rollouts")
    args = Namespace(use_wandb=False, use_tensorboard=True, tb_project_name="daro", tb_experiment_name=name)
    args.wandb_always_use_train_step = False
    for rollout in range(ROLLOUTS):
        step = compute_rollout_step(args, rollout)
        found = {"rollout/raw_reward": 0.1 * rollout} if trains else {"rollout/response_len/mean": 10.0 + rollout}
        logging_utils.log(args, {**found, "rollout/step": step}, step_key="rollout/step")
        for number in range(rollout * 2, rollout * 2 + 2) if trains else ():
            values = {**metrics(number), "train/grad_norm": 1.0, "train/step": number}
            logging_utils.log(args, values, step_key="train/step")
    _TensorboardAdapter(args).finish()


def roll(out: Path) -> None:
    """The dump of RLVR's pipeline, with a tokenizer whose tokens are one character each."""
    stand_in_for(UNUSED)
    sys.path.insert(0, os.environ["MEGATRON_DARO_ROLL"])
    os.environ["ROLL_LOG_DIR"] = str(out.absolute() / "log")
    import numpy
    import torch
    from roll.distributed.scheduler.protocol import DataProto
    from roll.pipeline.rlvr.utils import dump_rollout_to_specific_path

    rows = [(prompt, n, right) for prompt, answers in GROUPS for n, right in answers]
    longest = max(n for _, n, _ in rows)
    messages = [json.dumps([{"role": "user", "content": str(prompt)}]) for prompt, *_ in rows]
    data = DataProto.from_dict(
        tensors={
            "responses": torch.tensor([[3] * n + [0] * (longest - n) for _, n, _ in rows]),
            "scores": torch.tensor([float(right) for *_, right in rows]),
        },
        non_tensors={
            "messages": numpy.array(messages, dtype=object),
            "id": numpy.array([str(i // K) for i in range(len(rows))], dtype=object),
            "domain": numpy.array(["math_rule"] * len(rows), dtype=object),
        },
        meta_info={"global_step": 0},
    )
    tokenizer = Namespace(batch_decode=lambda ids, **_: ["".join("x" for i in row if i) for row in ids.tolist()])
    for step in range(STEPS):
        dump_rollout_to_specific_path(str(out.absolute()), step, data, tokenizer)
    for process in multiprocessing.active_children():
        process.join()


if __name__ == "__main__":
    kind, out = sys.argv[1], Path(sys.argv[2])
    if kind.startswith("slime"):
        slime(out, trains=kind == "slime_train")
    else:
        {"nemo_rl": nemo_rl, "roll": roll}[kind](out)
