"""Checkpoints of what training changes: model, optimizer, schedule and what the algorithm has learned.

The policy calls this with a directory that checkpoints.py prepares, seals and verifies. What a rank holds goes through
sharded_state.py, the state of a distributed optimizer through optimizer_shards.py, and a thread writes the file.
Rejected: a checkpoint of another model or algorithm, or with difficulty weights of another K.
"""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor

from megatron_daro.actor.compat import allocate_optimizer_state, load_optimizer_state, quiet
from megatron_daro.actor.lora import is_base, sharded_adapters
from megatron_daro.actor.megatron import CheckpointingException, parallel_state
from megatron_daro.actor.optimizer import group_options, set_group_options
from megatron_daro.actor.optimizer_shards import common_state, is_distributed, load_own_boxes, own_boxes
from megatron_daro.actor.shard_file import ShardFile
from megatron_daro.actor.sharded_state import load_sharded, save_sharded
from megatron_daro.actor.step import TrainedModel, TrainState
from megatron_daro.algo.weighting import Algorithm
from megatron_daro.errors import CheckpointError, DaroError, how_to_go_on

ALGORITHM_FILE = "algorithm.json"
# Optimizer state is stored in the shapes of the parameters: any TP, PP and DP can load it.
_METADATA = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "singleton_local_shards": False,
    "chained_optim_avoid_prefix": True,
}


_COPIED_BYTES = 2
"""Bytes per trained parameter of a rank that a save may copy if the next update comes before the file is written."""


class PendingSave:
    """A checkpoint that a thread of this rank writes from the live tensors, which must not change until `release`.

    Args:
        directory: of the checkpoint. file: of this rank. most_copied: bytes of host memory that copies may take.
    """

    def __init__(self, directory: Path, file: ShardFile, *, most_copied: int) -> None:
        self._directory, self._file, self._most_copied = directory, file, most_copied
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="checkpoint", daemon=True)
        self._thread.start()

    def release(self) -> None:
        """Wait until weights and optimizer state may change. The file may not be on the disk yet."""
        self._file.release(self._most_copied)

    def join(self) -> None:
        """Wait until this rank's file was written or failed; `wait` says how it went."""
        self._thread.join()

    def wait(self) -> None:
        """Wait until this rank's file is on the disk. Raises CheckpointError: the disk refused."""
        self._thread.join()
        if self._error is not None:
            raise _refused(self._directory, self._error) from self._error

    def _run(self) -> None:
        try:
            self._file.write()
        except BaseException as error:
            self._error = error


def start_save(train_state: TrainedModel, directory: Path, checkpoint: Path) -> PendingSave:
    """Begin to write into an existing, empty directory. Collective over all ranks.

    Everything small is written when this returns; weights and optimizer state are written by a thread.

    Args:
        directory: of this model. checkpoint: the whole checkpoint's directory, the same one or the one around it.

    Raises:
        CheckpointError: the disk refused. Other ranks then wait for this one, so the group is not usable any more.
    """
    try:
        with quiet():
            state = _state(train_state, is_loading=False)
            own = own_boxes(train_state.optimizer, state["model"]) if is_distributed(train_state.optimizer) else []
            file = save_sharded(state, directory, own)
        if isinstance(train_state, TrainState) and dist.get_rank() == 0:
            (directory / ALGORITHM_FILE).write_text(json.dumps(train_state.algorithm.state_dict()))
    except (OSError, SafetensorError) as error:
        raise _refused(checkpoint, error) from error
    parameters = (p for chunk in train_state.chunks for p in chunk.module.parameters() if p.requires_grad)
    return PendingSave(checkpoint, file, most_copied=_COPIED_BYTES * sum(p.numel() for p in parameters))


def _refused(directory: Path, error: BaseException) -> CheckpointError:
    return CheckpointError(
        f"checkpoint {directory} could not be written: {error}; free disk space and "
        f"{how_to_go_on(directory.parent.parent)}"
    )


def load(train_state: TrainedModel, directory: Path) -> None:
    """Fill the train_state from what `start_save` wrote, on this or another layout. Collective.

    State comes from the checkpoint; options of the optimizer and its schedule stay those that this run was built with.

    Raises:
        CheckpointError: files are missing or torn, or belong to another model or algorithm, or to another K.
    """
    try:
        with quiet():
            wanted = _state(train_state, is_loading=True)
            state = load_sharded(wanted, directory)
    except DaroError:
        raise
    except (CheckpointingException, OSError, ValueError) as error:
        raise CheckpointError(f"checkpoint {directory} cannot be loaded: {error}") from error
    for place, chunk in enumerate(train_state.chunks):
        chunk.module.load_state_dict(state["model"][str(place)] | _base(chunk.module), strict=True)
    options = group_options(train_state.optimizer)
    load_optimizer_state(
        train_state.optimizer, state["optimizer"], lambda: _fill(train_state, wanted["model"], directory)
    )
    set_group_options(train_state.optimizer, options)
    train_state.scheduler.load_state_dict(state["scheduler"])
    if isinstance(train_state, TrainState):
        load_algorithm(train_state.algorithm, directory / ALGORITHM_FILE)


def load_algorithm(algorithm: Algorithm, path: Path) -> None:
    """Load what the algorithm had learned. Raises CheckpointError where the file is not its state."""
    try:
        algorithm.load_state_dict(json.loads(path.read_text()))
    except (OSError, LookupError, TypeError, ValueError, ArithmeticError, AttributeError, RuntimeError) as error:
        if isinstance(error, DaroError):
            raise
        raise CheckpointError(
            f"{path}: not the state of algorithm {algorithm.name} ({type(error).__name__}: {error}): edited, or of "
            "another version; use another checkpoint"
        ) from error


def _fill(train_state: TrainedModel, model: dict[str, Any], directory: Path) -> None:
    if is_distributed(train_state.optimizer):
        load_own_boxes(train_state.optimizer, model, directory)


def _trained(chunk: Any, metadata: dict[str, Any]) -> dict[str, Any]:
    """Return a part's sharded state, without frozen base weights, which are read at each start."""
    state, base = chunk.sharded_state_dict(metadata=metadata), _base(chunk)
    # Replaces upstream's entries, which take adapters to be whole on every rank.
    return {name: value for name, value in state.items() if name not in base} | sharded_adapters(chunk)


def _base(chunk: torch.nn.Module) -> dict[str, Tensor]:
    return {name: p.detach() for name, p in chunk.named_parameters() if is_base(p)}


def _state(train_state: TrainedModel, *, is_loading: bool) -> dict[str, Any]:
    allocate_optimizer_state(train_state.optimizer)
    metadata = {**_METADATA, "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
    # Tensor keys number the layers of the whole model, so they do not name a rank's parts.
    model = {str(place): _trained(chunk.module, metadata) for place, chunk in enumerate(train_state.chunks)}
    if is_distributed(train_state.optimizer):
        optimizer = common_state(train_state.optimizer)
    else:
        optimizer = train_state.optimizer.sharded_state_dict(model, is_loading=is_loading, metadata=metadata)
    return {
        "model": model,
        "optimizer": optimizer,
        "scheduler": train_state.scheduler.state_dict(),
    }
