"""One gloo rank of ROLL's RLVR pipeline with DARO: its driver's loop and its actor worker, on a small model.

From ROLL, as it is: RLVRConfig, RLVRPipeline.run (masks, rewards, advantages, balancing, corrections, metrics,
checkpoints), postprocess_generate, DataProto, ActorWorker (initialize, compute_log_probs, train_step, loss_func,
do_checkpoint), its Megatron strategy (forward_step, train_step, inner_forward_step, log-probs, counts). From
Megatron-core: schedule, DistributedDataParallel. The command is that of the page: `roll_driver.main`.
Stood in for: Ray, the clusters it makes (`__init__` of the pipeline), the generator and reward workers (answers are
canned), the model, its optimizer, offloading. Each rank runs the driver's loop on the same answers. What ROLL imports
and does not use here is empty where it is not installed (`UNUSED`).

    RANK=0 WORLD_SIZE=2 MASTER_ADDR=... MASTER_PORT=... python roll_ranks.py OUTPUT_DIRECTORY recompute|cached
"""

from __future__ import annotations

import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from empty_packages import stand_in_for

SOURCE = Path(os.environ["MEGATRON_DARO_ROLL"])
UNUSED = {"transfer_queue", "more_itertools", "opentelemetry", "pybase64", "peft", "imageio", "datasets"}
UNUSED |= {"httpx", "accelerate"}
sys.path[:0] = [str(SOURCE), str(SOURCE / "mcore_adapter" / "src")]
stand_in_for(UNUSED)
import numpy as np  # noqa: E402
import torch  # noqa: E402

from megatron_daro.actor import device  # noqa: E402

device.prepare()
import rollout_batches as batches  # noqa: E402
from megatron.core import mpu  # noqa: E402
from megatron.core.pipeline_parallel import get_forward_backward_func  # noqa: E402
from megatron.core.transformer import TransformerConfig  # noqa: E402
from roll.distributed.scheduler import initialize as roll_start  # noqa: E402
from roll.distributed.scheduler import protocol  # noqa: E402
from roll.distributed.scheduler.protocol import DataProto  # noqa: E402
from roll.distributed.strategy.megatron_strategy import MegatronTrainStrategy  # noqa: E402
from roll.pipeline import base_worker  # noqa: E402
from roll.pipeline.rlvr import rlvr_pipeline  # noqa: E402
from roll.utils import worker_state  # noqa: E402
from roll.utils.checkpoint_manager import CheckpointManager  # noqa: E402
from roll.utils.functionals import RunningMoments, postprocess_generate  # noqa: E402
from roll.utils.kl_controller import get_kl_controller  # noqa: E402
from table_model import PlainStep, table_model  # noqa: E402

from megatron_daro.actor.parallel import Layout, initialize  # noqa: E402
from megatron_daro.errors import DaroError  # noqa: E402
from megatron_daro.plugins import roll, roll_driver  # noqa: E402

PROMPT, LONGEST = 8, 24
DOMAINS = ("math_rule", "code_sandbox")


class Models(list):  # type: ignore[type-arg]
    """What ROLL calls its model: a list of chunks."""

    def train(self) -> None:
        """It is."""

    eval = train

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


def answers(seed: int, domain: str) -> Any:
    """What a domain's scheduler hands to the driver: the first four groups, or the last two, of canned answers."""
    everything = batches.samples(seed)
    rows = [i for i, s in enumerate(everything) if (s.group < 4) == (domain == DOMAINS[0])]
    whole = [everything[i] for i in rows]
    pad = batches.VOCAB
    left = torch.tensor([[pad] * (PROMPT - len(s.prompt)) + s.prompt for s in whole])
    output = [
        [*row, *s.response, *[pad] * (LONGEST - PROMPT - len(s.response))]
        for row, s in zip(left.tolist(), whole, strict=True)
    ]
    present = (left != pad).long()
    prompts = DataProto.from_dict(
        {"input_ids": left, "attention_mask": present, "position_ids": (present.cumsum(1) - 1).clamp(min=0)}
    )
    data = postprocess_generate(
        prompts, torch.tensor(output), 1, LONGEST, pad + 1, pad, output_logprobs=[s.old for s in whole]
    )
    for row, sample in enumerate(whole):  # tokens that no model wrote, such as those of a tool
        start = len(sample.prompt)
        data.batch["response_mask"][row, start : start + len(sample.mask)] = torch.tensor(sample.mask)
    verdicts = torch.tensor([s.reward for s in whole], dtype=torch.float16)  # as ROLL's math_rule_reward_worker
    data.batch["scores"] = data.batch["response_level_rewards"] = verdicts
    data.batch["token_level_rewards"] = torch.zeros_like(data.batch["responses"], dtype=torch.float16)
    data.batch["row"] = torch.tensor(rows)
    data.non_tensor_batch["domain"] = np.array([domain] * len(whole), dtype=object)
    data.meta_info["metrics"] = {}
    return data


class Remote:
    """A Ray actor's method that answers at once."""

    def __init__(self, function: Any) -> None:
        self.remote = function


class Scheduler:
    """ROLL's scheduler of a domain, with canned answers."""

    def __init__(self, domain: str) -> None:
        self.get_batch = Remote(lambda data, global_step, batch_size: answers(global_step, domain))
        self.get_scheduler_state = Remote(lambda: {"domain": domain})
        self.pause_sampling = self.shutdown = Remote(lambda: None)


class Cluster:
    """The workers of a role: this rank's own, and the others' answers."""

    def __init__(self, config: Any, size: int) -> None:
        self.world_size = self.dp_size = size
        self.worker = new_worker(config)

    def offload_states(self, **options: Any) -> None:
        """Nothing is offloaded."""

    load_states = offload_states

    def _on_every_rank(self, output: Any) -> list[Any]:
        outputs: list[Any] = [None] * self.world_size
        torch.distributed.all_gather_object(outputs, output)
        return outputs

    def _mine(self, batch: Any) -> Any:
        return batch.chunk(chunks=self.world_size)[mpu.get_data_parallel_rank()]

    def compute_log_probs(self, batch: Any, blocking: bool) -> list[Any]:
        """ROLL's worker, dispatched over ranks."""
        return self._on_every_rank(self.worker.compute_log_probs(self._mine(batch)))

    def train_step(self, batch: Any, blocking: bool) -> list[Any]:
        """ROLL's worker, dispatched over ranks; in a process of its own the driver's no_grad does not hold."""
        with torch.enable_grad():
            return self._on_every_rank(self.worker.train_step(self._mine(batch)))

    def do_checkpoint(self, global_step: int, is_last_step: bool, blocking: bool) -> list[Any]:
        """ROLL's worker, on every rank."""
        return self._on_every_rank(self.worker.do_checkpoint(global_step, is_last_step))


def new_worker(config: Any) -> Any:
    """The class that ROLL's cluster would make its actor of."""
    worker = roll.DaroActorWorker.__new__(roll.DaroActorWorker)
    worker.worker_config, worker._logprobs_cache = config.actor_train, {}
    worker.cluster_name = worker.worker_name = "actor_train"
    worker.rank_info = SimpleNamespace(tp_rank=0, cp_rank=0, is_pipeline_last_stage=True)
    worker.initialize(config)
    return worker


def without_ray(pipeline: Any, pipeline_config: Any) -> None:
    """In the place of RLVRPipeline.__init__, which starts Ray actors: the attributes that `run` reads."""
    config = pipeline.pipeline_config = pipeline_config
    idle = SimpleNamespace(offload_states=lambda **k: None, load_states=lambda **k: None, world_size=1, dp_size=1)
    pipeline.use_ref_model, pipeline.tokenizer = False, SimpleNamespace(batch_decode=lambda rows, **k: [""] * len(rows))
    idle.worker_config = config.actor_infer
    pipeline.actor_infer, pipeline.rewards, pipeline.reward_model_cluster = idle, {}, None
    pipeline.actor_train = Cluster(config, int(os.environ["WORLD_SIZE"]))
    pipeline.generate_schedulers = {domain: Scheduler(domain) for domain in DOMAINS}
    pipeline.domain_batch_size, pipeline.val_dataset = {DOMAINS[0]: 4, DOMAINS[1]: 2}, None
    pipeline.kl_ctrl = get_kl_controller(config.init_kl_coef, config.target_kl, config.kl_horizon)
    pipeline.running = {domain: RunningMoments() for domain in DOMAINS}
    pipeline.state, pipeline.resource_manager = worker_state.WorkerState(), SimpleNamespace(num_gpus=1)
    pipeline.logged = []
    pipeline.tracker = SimpleNamespace(log=lambda values, step: pipeline.logged.append(values))
    pipeline.checkpoint_manager = CheckpointManager(checkpoint_config=config.checkpoint_config)
    pipeline.executor, pipeline.resume_futures = ThreadPoolExecutor(1), []
    pipeline.set_checkpoint_clusters(pipeline.actor_train)
    RUNS.append(pipeline)


RUNS: list[Any] = []
CONFIG = {
    "exp_name": "tiny",
    "track_with": "stdout",
    "rewards": {domain: {"tag_included": [domain]} for domain in DOMAINS},
    "max_steps": 2,
    "save_steps": 1,
    "rollout_batch_size": 6,
    "prompt_length": PROMPT,
    "response_length": LONGEST - PROMPT,
    "num_return_sequences_in_group": batches.K,
    "ppo_epochs": 2,
    "seed": 5,
    "init_kl_coef": 0.0,
    "adv_estimator": "grpo",
    "loss_agg_mode": "token-mean",
    "use_pg_clip_range": True,
    "pg_clip_low": 0.2,
    "pg_clip_high": 0.28,
    "checkpoint_config": {"type": "file_system", "async_upload": False},
    "actor_train": {
        "worker_cls": roll_driver.WORKER,
        "infer_batch_size": 3,
        "training_args": {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 3},
        "strategy_args": {"strategy_name": "megatron_train", "strategy_config": {}},
        "device_mapping": "[0]",
    },
    "actor_infer": {"generating_args": {"max_new_tokens": 16}, "strategy_args": {"strategy_name": "vllm"}},
}


def run(out: Path, mode: str, **changes: Any) -> Any:
    """`python -m megatron_daro.plugins.roll_driver` with a configuration of its own; the pipeline that it ran."""
    folders = {"output_dir": str(out), "logging_dir": str(out / "logs")}
    tree = {**CONFIG, **folders, "enable_old_logprobs_recompute": mode == "recompute", **changes}
    tree["force_disable_old_logprobs_recompute"] = mode == "cached"
    tree["checkpoint_config"] = {**CONFIG["checkpoint_config"], "output_dir": str(out / "saved")}
    out.mkdir(parents=True, exist_ok=True)
    (out / "tiny.yaml").write_text(json.dumps(tree), encoding="utf-8")
    sys.argv = ["roll_driver", "--config_path", str(out), "--config_name", "tiny"]
    roll_driver.main()
    return RUNS[-1]


def refused(out: Path, mode: str, **changes: Any) -> str:
    """Why a run does not start."""
    try:
        run(out, mode, **changes)
    except DaroError as error:
        return str(error)
    return ""


def prepare() -> None:
    """gloo ranks, and stand-ins for what ROLL takes from Ray and from a GPU."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    address = f"tcp://{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    initialize(Layout(data=size), rank=rank, init_method=address, seed=1, timeout_s=120)
    base_worker.create_strategy = Strategy
    base_worker.state_offload_manger = lambda **given: nullcontext()
    base_worker.Worker.initialize = lambda self, config: setattr(self, "pipeline_config", config)
    base_worker.current_platform = SimpleNamespace(device_type="cpu")
    base_worker.download_model = roll.download_model = lambda path: path
    random = SimpleNamespace(get_rng_state_all=list)
    worker_state.current_platform = SimpleNamespace(device_type="cpu", random=random)
    at_once = SimpleNamespace(get=lambda answers, timeout=None: answers)
    rlvr_pipeline.ray = protocol.ray = at_once
    rlvr_pipeline.RLVRPipeline.__init__ = without_ray
    roll_start.init = lambda: None


def main(out: Path, mode: str) -> None:
    """Two batches of several optimizer steps, a checkpoint, a resume."""
    prepare()
    rank = int(os.environ["RANK"])
    pipeline = run(out / f"driver_{rank}", mode)
    worker = pipeline.actor_train.worker
    torch.distributed.barrier()
    saved = str(out / "driver_0" / "actor_train" / "checkpoint-1")
    again = run(out / f"again_{rank}", mode, resume_from_checkpoint=saved, max_steps=0)
    more = {"num_return_sequences_in_group": batches.K + 1}
    found = {
        "gradients": worker.strategy.optimizer.gradients,
        "rows": worker.strategy.rows,
        "logged": pipeline.logged,
        "state": worker.daro.state_dict(),
        "resumed": again.actor_train.worker.daro.state_dict(),
        "other_k": refused(out / f"k_{rank}", mode, resume_from_checkpoint=saved, max_steps=0, **more),
        "without": refused(out / f"no_{rank}", mode, resume_from_checkpoint=str(out), max_steps=0),
    }
    torch.save(found, out / f"rank_{rank}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
