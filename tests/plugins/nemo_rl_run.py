"""NeMo-RL's own GRPO example with DARO, on a CPU, for three steps of a small model.

As `examples/plugins/nemo_rl/run_grpo_daro.py RUN_GRPO --config ...` does it. From NeMo-RL, as it is:
examples/run_grpo.py, its configuration, `grpo_train` (rewards, advantages, masks, train data, metrics, checkpoints),
`CheckpointManager`, `ClippedPGLossFn`, `BatchedDataDict`. Stood in for: Ray, tokenizer and data set, the generator
(answers are canned), and the policy, which shards rows and sums losses as NeMo-RL's workers do. Packages that NeMo-RL
imports and that are not used here are empty where they are not installed (`UNUSED`).

    python nemo_rl_run.py OUTPUT_DIRECTORY [key=value ...]
"""

from __future__ import annotations

import importlib
import os
import sys
import typing
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

from empty_packages import stand_in_for

SOURCE = Path(os.environ["MEGATRON_DARO_NEMO_RL"])
UNUSED = {"swanlab", "decord", "mlflow", "pynvml", "matplotlib", "prometheus_client", "math_verify", "nltk", "wandb"}
sys.path[:0] = [str(SOURCE), str(Path(__file__).parents[2] / "examples" / "plugins" / "nemo_rl")]
stand_in_for(UNUSED)
if sys.version_info < (3, 12):  # which NeMo-RL asks for: there pydantic takes typing's own
    import typing_extensions

    typing.TypedDict = typing_extensions.TypedDict
import nemo_rl.algorithms.utils  # noqa: E402
import nemo_rl.data.utils  # noqa: E402
import nemo_rl.distributed.virtual_cluster  # noqa: E402
import nemo_rl.models.generation  # noqa: E402
import rollout_batches as batches  # noqa: E402
import run_grpo_daro  # noqa: E402
import torch  # noqa: E402
from nemo_rl.algorithms import grpo  # noqa: E402
from nemo_rl.algorithms.loss.loss_functions import ClippedPGLossFn  # noqa: E402
from nemo_rl.distributed.batched_data_dict import BatchedDataDict  # noqa: E402
from nemo_rl.utils.checkpoint import CheckpointManager  # noqa: E402

from megatron_daro.errors import DaroError  # noqa: E402

STEPS, RANKS = 3, 2


def table_log_probs(table: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """[B, S] -> [B, S - 1], of each token after the first."""
    return torch.log_softmax(table[ids[:, :-1]], -1).gather(-1, ids[:, 1:, None])[..., 0]


class Policy:
    """Shards rows over ranks, splits them unevenly, sums losses, steps; metrics as NeMo-RL gathers them."""

    def __init__(self, rows: int) -> None:
        self.cfg = {"train_global_batch_size": rows}
        self.table = batches.start_table().float().requires_grad_()
        self.found: dict[str, list[Any]] = {"tables": [], "gradients": [], "metrics": []}

    def train(self, data: Any, loss_fn: Any, **options: Any) -> dict[str, Any]:
        """One optimizer step."""
        mask = data["token_mask"][:, 1:] * data["sample_mask"][:, None]
        tokens, metrics = mask.sum(), {"global_valid_toks": [float(mask.sum())], "lr": [1.0], "wd": [0.0]}
        self.table.grad, total = None, 0.0
        self.found["tables"].append(self.table.detach().clone())
        for rank in range(RANKS):
            rows = list(range(rank, len(mask), RANKS))
            for part in (rows[:1], rows[1:5], rows[5:]):
                micro_batch = data.select_indices(part)
                loss, found = loss_fn(
                    table_log_probs(self.table, micro_batch["input_ids"]), micro_batch, torch.tensor(len(mask)), tokens
                )
                loss.backward()
                total += float(loss.detach())
                for name, value in found.items():
                    metrics.setdefault(name, []).append(value)
        self.found["gradients"].append(self.table.grad.clone())
        with torch.no_grad():
            self.table -= batches.LEARNING_RATE * self.table.grad
        norm = self.table.grad.norm()
        return {"loss": torch.tensor(total), "grad_norm": norm, "all_mb_metrics": metrics}

    def get_logprobs(self, data: Any, **options: Any) -> dict[str, torch.Tensor]:
        """[B, S], 0 for the first token."""
        with torch.no_grad():
            found = table_log_probs(self.table, data["input_ids"])
        return {"logprobs": torch.nn.functional.pad(found, (1, 0))}

    def save_checkpoint(self, weights_path: str, *arguments: Any, **options: Any) -> None:
        """The table."""
        Path(weights_path).mkdir(parents=True)
        torch.save(self.table, Path(weights_path) / "table.pt")

    def get_reference_policy_logprobs(self, data: Any, **options: Any) -> dict[str, torch.Tensor]:
        """Those of the policy."""
        return {"reference_logprobs": self.get_logprobs(data)["logprobs"]}

    def prepare_for_training(self, *arguments: Any, **options: Any) -> None:
        """Nothing is offloaded."""

    prepare_for_lp_inference = offload_after_refit = finalize_async_save = prepare_for_training


class Generation:
    """The generator, whose answers are canned: see `rollouts`."""

    requires_kv_scale_sync = False

    def prepare_for_generation(self, *arguments: Any, **options: Any) -> None:
        """Nothing to do."""

    finish_generation = clear_logger_metrics = shutdown = prepare_for_generation

    def get_logger_metrics(self) -> dict[str, Any]:
        """None."""
        return {}


class Loader:
    """The data set: three batches of six prompts."""

    def __len__(self) -> int:
        return STEPS

    def __iter__(self) -> Any:
        for seed in range(STEPS):
            firsts = batches.samples(seed)[:: batches.K]
            logs = [[{"role": "user", "content": "?", "token_ids": torch.tensor(s.prompt)}] for s in firsts]
            yield BatchedDataDict(
                {
                    "message_log": logs,
                    "length": torch.tensor([len(s.prompt) for s in firsts]),
                    "loss_multiplier": torch.ones(len(firsts)),
                    "extra_env_info": [{} for _ in firsts],
                    "task_name": ["math"] * len(firsts),
                    "seed": [seed] * len(firsts),
                }
            )

    def state_dict(self) -> dict[str, Any]:
        """Nothing."""
        return {}


def rollouts(policy_generation: Any, input_batch: Any, **options: Any) -> tuple[Any, dict[str, float]]:
    """In the place of NeMo-RL's rollouts: the canned answers, with their verdicts."""
    whole = batches.samples(input_batch["seed"][0])
    for log, sample in zip(input_batch["message_log"], whole, strict=True):
        answer = {"role": "assistant", "content": "!", "token_ids": torch.tensor(sample.response)}
        log.append({**answer, "generation_logprobs": torch.tensor(sample.old)})
    input_batch["total_reward"] = torch.tensor([s.reward for s in whole])
    input_batch["truncated"] = torch.zeros(len(whole), dtype=torch.bool)
    return input_batch, {"mean_gen_tokens_per_sample": 1.0}


POLICIES: list[Policy] = []


def setup(master_config: Any, tokenizer: Any, dataset: Any, val_dataset: Any, **options: Any) -> tuple[Any, ...]:
    """In the place of NeMo-RL's, which starts Ray workers: what its script unpacks, in this version's order."""
    sections = dict(master_config)
    policy = Policy(batches.GROUPS * batches.K)
    POLICIES.append(policy)
    checkpointer = CheckpointManager(sections["checkpointing"])
    logger = MagicMock()
    logger.log_metrics = lambda values, step, prefix="", **o: policy.found["metrics"].append((prefix, step, values))
    state = getattr(grpo, "_initial_grpo_save_state", None) or grpo._default_grpo_save_state
    loss_fn = ClippedPGLossFn(sections["loss_fn"])
    rest = (None, Loader(), None, loss_fn, logger, checkpointer, state(), master_config)
    if isinstance(master_config, dict):  # 0.6: one without nemo_gym and teachers
        return (policy, Generation(), *rest)
    return (policy, Generation(), None, *rest, None, None)


def prepare() -> None:
    """Stand-ins for what the script and the trainer take from Ray and from GPUs."""
    idle = lambda *arguments, **options: {}
    nemo_rl.distributed.virtual_cluster.init_ray = idle
    nemo_rl.algorithms.utils.get_tokenizer = lambda *a, **k: SimpleNamespace(pad_token_id=0, eos_token_id=1)
    nemo_rl.models.generation.configure_generation_config = lambda config, *a, **k: config
    nemo_rl.data.utils.setup_response_data = lambda *a, **k: (None, None, {}, {})
    grpo.setup = setup
    grpo.MemoryTracker = lambda: SimpleNamespace(snapshot_start_of_stage=idle)
    for name in ("run_multi_turn_rollout", "run_async_multi_turn_rollout"):
        setattr(grpo, name, rollouts)
    for name in ("refit_policy_generation", "print_performance_metrics", "maybe_gpu_profile_step"):
        setattr(grpo, name, idle)


def command(script: str, config: str, out: Path, *overrides: str) -> list[str]:
    """The command of the page, for three steps of the canned answers and a checkpoint."""
    return [
        "run_grpo_daro.py",
        str(SOURCE / "examples" / script),
        "--config",
        str(SOURCE / "examples" / "configs" / config),
        f"grpo.num_prompts_per_batch={batches.GROUPS}",
        f"grpo.num_generations_per_prompt={batches.K}",
        f"policy.train_global_batch_size={batches.GROUPS * batches.K}",
        "grpo.use_leave_one_out_baseline=false",
        "grpo.max_num_steps=3",
        "grpo.val_period=0",
        "loss_fn.reference_policy_kl_penalty=0",
        "loss_fn.ratio_clip_max=0.28",
        "policy.make_sequence_length_divisible_by=1",
        f"checkpointing.checkpoint_dir={out}/checkpoints",
        "checkpointing.save_period=3",
        "checkpointing.save_optimizer=false",
        "checkpointing.metric_name=null",
        f"logger.log_dir={out}/logs",
        *overrides,
    ]


def run(out: Path, *overrides: str) -> str:
    """Run the command; why it does not start."""
    prepare()
    sys.argv = command("run_grpo.py", "grpo_math_1B.yaml", out, "grpo.val_at_start=false", *overrides)
    try:
        run_grpo_daro.main()
    except DaroError as error:
        return str(error)
    finally:
        importlib.reload(grpo)  # its functions were wrapped
    return ""


def main(out: Path, *overrides: str) -> None:
    """Three steps and a checkpoint; what is refused."""
    refused = run(out, *overrides)
    found = dict(POLICIES[0].found) if POLICIES else {}
    found["refused"] = refused
    torch.save(found, out / "found.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
