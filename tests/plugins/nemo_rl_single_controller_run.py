"""NeMo-RL's own single controller with DARO, on a CPU, started by examples/plugins/nemo_rl/run_grpo_daro.py.

From NeMo-RL, as it is: examples/run_grpo_single_controller.py, its configuration, the controller with its pumps, its
advantage stage and its checkpoints, the sampler, the buffer, and the data plane of one process. Stood in for: Ray (what
its actor is given is pickled and unpickled), tokenizer and data set, the rollouts (answers are canned), and the
trainer, which sums losses and divides at the end of a step as megatron_policy_worker.py does.

    python nemo_rl_single_controller_run.py OUTPUT_DIRECTORY [key=value ...]
"""

from __future__ import annotations

import asyncio
import importlib
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cloudpickle
import nemo_rl_run as synchronous
import ray
import rollout_batches as batches
import run_grpo_daro
import torch
from nemo_rl.algorithms import grpo, single_controller, single_controller_utils
from nemo_rl.algorithms.async_utils.replay_buffer import TQReplayBuffer
from nemo_rl.algorithms.loss.interfaces import MetricNormalizer
from nemo_rl.algorithms.loss.loss_functions import ClippedPGLossFn
from nemo_rl.algorithms.metric_utils import SetupTimingMetrics
from nemo_rl.algorithms.single_controller_utils import SingleControllerActorArgs
from nemo_rl.algorithms.single_controller_utils.utils import fields_for_put
from nemo_rl.data_plane import materialize
from nemo_rl.data_plane.adapters.noop import NoOpDataPlaneClient
from nemo_rl.data_plane.schema import DP_TRAIN_FIELDS
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.experience.interfaces import Completion, PromptGroupRecord
from nemo_rl.experience.rollout_manager import RolloutOutcome
from nemo_rl.utils.checkpoint import CheckpointManager

from megatron_daro.errors import DaroError

PARTITION = "rollout_data"
OWN_CONTROLLER = single_controller.SingleControllerActor.__ray_metadata__.modified_class
FOUND: dict[str, list[Any]] = {"tables": [], "gradients": [], "metrics": []}


class Trainer(synchronous.Policy):
    """The split step of tq_policy.py:470 over megatron_policy_worker.py:1376: sums first, 1/N at its end."""

    def __init__(self, rows: int, plane: NoOpDataPlaneClient) -> None:
        super().__init__(rows)
        self.plane = plane

    def rows(self, meta: Any, fields: list[str]) -> BatchedDataDict:
        """Some columns of a batch, from the data plane."""
        found = self.plane.get_samples(sample_ids=meta.sample_ids, partition_id=PARTITION, select_fields=fields)
        return materialize(found, layout="padded", pad_value_dict={"input_ids": 0})

    def get_logprobs_from_meta(self, meta: Any) -> None:
        """Of the policy and of the reference, which are the same: into the data plane."""
        logprobs = self.get_logprobs(self.rows(meta, ["input_ids"]))["logprobs"]
        columns = {"prev_logprobs": logprobs, "reference_policy_logprobs": logprobs}
        fields = fields_for_put(meta, columns)
        self.plane.put_samples(sample_ids=meta.sample_ids, partition_id=PARTITION, fields=fields)

    get_reference_policy_logprobs_from_meta = get_logprobs_from_meta

    def begin_train_step(self, loss_fn: Any) -> None:
        """As it is sent to the workers."""
        self.loss_fn, self.metrics, self.tokens = cloudpickle.loads(cloudpickle.dumps(loss_fn)), [], 0.0
        self.table.grad = None
        FOUND["tables"].append(self.table.detach().clone())

    def train_microbatches_from_meta(self, meta: Any) -> None:
        """Sums of losses: the normalizers are 1 until the step's end (megatron_policy_worker.py:1490)."""
        data, one = self.rows(meta, list(DP_TRAIN_FIELDS)), torch.tensor(1.0)
        self.tokens += float((data["token_mask"][:, 1:] * data["sample_mask"][:, None]).sum())
        for rank in range(synchronous.RANKS):
            rows = list(range(rank, data.size, synchronous.RANKS))
            for part in (rows[:1], rows[1:5], rows[5:]):
                if part:
                    micro_batch = data.select_indices(part)
                    logprobs = synchronous.table_log_probs(self.table, micro_batch["input_ids"])
                    loss, found = self.loss_fn(logprobs, micro_batch, one, one)
                    loss.backward()
                    self.metrics.append({**found, "loss": float(loss.detach())})

    def finish_train_step(self) -> dict[str, Any]:
        """1/N for the gradients and for each metric what the loss says (megatron_policy_worker.py:1715)."""
        self.table.grad /= self.tokens
        FOUND["gradients"].append(self.table.grad.clone())
        with torch.no_grad():
            self.table -= batches.LEARNING_RATE * self.table.grad
        kinds, metrics = self.loss_fn.metric_normalizations, {}
        for found in self.metrics:
            for name, value in found.items():
                whole = kinds.get(name) is MetricNormalizer.NONE or "_min" in name or "_max" in name
                metrics.setdefault(name, []).append(value if whole else value / self.tokens)
        return {"grad_norm": torch.stack([self.table.grad.norm()]), "all_mb_metrics": metrics}


class Rollouts:
    """In the place of NeMo-RL's RolloutManager: the canned answers, committed to its buffer."""

    def __init__(self, buffer: TQReplayBuffer) -> None:
        self._tq_buffer, self.version = buffer, 0

    def set_weight_version(self, version: int) -> None:
        """Stamped on each group."""
        self.version = version

    async def generate_and_push(self, prompt: dict[str, Any], *, target_step: Any, **others: Any) -> RolloutOutcome:
        """One group: the answers to this prompt of the canned batch that it is of."""
        (message,) = prompt["message_log"]
        mine = [s for s in batches.samples(prompt["seed"]) if s.prompt == message["token_ids"].tolist()]
        group = self._tq_buffer.reserve(weight_version=self.version, target_step=target_step)
        completions = []
        for sample in mine:
            answer = {"role": "assistant", "content": "!", "token_ids": torch.tensor(sample.response)}
            answer["generation_logprobs"] = torch.tensor(sample.old)
            completions.append(
                Completion([dict(message), answer], env_extras=None, truncated=False, reward=sample.reward)
            )
        record = PromptGroupRecord(0, [dict(message)], None, {}, completions, {})
        await self._tq_buffer.commit(group, record, self.version, self.version)
        return RolloutOutcome.COMMITTED


class Logger:
    """What the controller logs."""

    def __init__(self, *arguments: Any) -> None:
        pass

    def log_metrics(self, metrics: dict[str, Any], step: int, prefix: str = "") -> None:
        """Noted."""
        FOUND["metrics"].append((prefix, step, metrics))

    def log_hyperparams(self, *arguments: Any) -> None:
        """Nothing."""

    finish = log_hyperparams


def set_up(master_config: Any, tokenizer: Any) -> tuple[Any, Any]:
    """In the place of NeMo-RL's, which starts workers and servers (single_controller_utils/setup.py:784)."""
    plane, rows = NoOpDataPlaneClient(), batches.GROUPS * batches.K
    fields = [*DP_TRAIN_FIELDS, "total_reward", "prompt_ids_for_adv"]
    plane.register_partition(PARTITION, fields, synchronous.STEPS * rows, ["prev_lp", "ref_lp", "train"])
    buffer = TQReplayBuffer(plane, PARTITION, pad_value_dict={"token_ids": 0, "input_ids": 0})
    checkpointer = CheckpointManager(master_config.checkpointing)
    idle = SimpleNamespace(sync_weights=synchronous_weights, shutdown=nothing)
    return SingleControllerActorArgs(
        gen_handle=synchronous.Generation(),
        trainer_handle=Trainer(rows, plane),
        env_handles={},
        train_cluster=None,
        inference_cluster=None,
        dp_client=plane,
        dataloader=synchronous.Loader(),
        weight_synchronizer=idle,
        advantage_estimator=None,
        loss_fn=ClippedPGLossFn(master_config.loss_fn),
        rollout_manager=Rollouts(buffer),
        tq_buffer=buffer,
        partition_id=PARTITION,
        save_state=grpo._initial_grpo_save_state(),
        last_checkpoint_path=checkpointer.get_latest_checkpoint_path(),
    ), SetupTimingMetrics()


def synchronous_weights(*, kv_scales: Any = None) -> None:
    """There are no servers."""


def nothing(*arguments: Any, **options: Any) -> None:
    """Ray."""


class Controller:
    """In the place of Ray's actor: NeMo-RL's class with pickled arguments; `remote` of its methods is a coroutine."""

    @classmethod
    def remote(cls, **arguments: Any) -> Any:
        """Its handle."""
        actor = OWN_CONTROLLER(**cloudpickle.loads(cloudpickle.dumps(arguments)))
        return SimpleNamespace(run=SimpleNamespace(remote=actor.run), ping=SimpleNamespace(remote=actor.ping))


def main(out: Path, *overrides: str) -> None:
    """Three steps and a checkpoint; what is refused."""
    synchronous.prepare()
    single_controller_utils.setup_single_controller = set_up
    single_controller.Logger = Logger
    ray.cluster_resources = dict
    ray.wait = lambda references, **options: (references, [])
    ray.get = lambda reference, **options: asyncio.run(reference)
    single_controller.SingleControllerActor = Controller
    sys.argv = synchronous.command(
        "run_grpo_single_controller.py",
        "grpo_math_1B_megatron_single_controller.yaml",
        out,
        "checkpointing.enabled=true",
        *overrides,
    )
    refused = ""
    try:
        run_grpo_daro.main()
    except DaroError as error:
        refused = str(error)
    torch.save({**FOUND, "refused": refused}, out / "found.pt")


if __name__ == "__main__":  # as a module: what is of __main__ would be pickled with a FOUND of its own
    importlib.import_module("nemo_rl_single_controller_run").main(Path(sys.argv[1]), *sys.argv[2:])
