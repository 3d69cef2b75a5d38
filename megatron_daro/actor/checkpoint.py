"""Saving and loading what training changes: model, optimizer, schedule, DARO's weights.

Place in the data flow: called by the policy with a directory that recovery.py prepared, sealed and verified. Uses
Megatron's sharded state dicts, so that a checkpoint of one layout loads into another.
Refuses: a checkpoint of another model, algorithm or K.
"""

from __future__ import annotations

import json
import threading
import warnings
from pathlib import Path
from typing import Any

import torch.distributed as dist
from safetensors import SafetensorError

from megatron_daro.actor import device
from megatron_daro.actor.checkpoint_format import load_sharded, save_sharded
from megatron_daro.actor.compat import allocate_optimizer_state, load_optimizer_state, quiet
from megatron_daro.actor.optimizer import group_options, set_group_options
from megatron_daro.actor.optimizer_shards import common_state, is_distributed, load_own_boxes, own_boxes
from megatron_daro.actor.shard_file import ShardFile
from megatron_daro.actor.step import Trainee
from megatron_daro.errors import CheckpointError, DaroError

device.prepare()
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from megatron.core import parallel_state
    from megatron.core.dist_checkpointing.core import CheckpointingException

ALGORITHM_FILE = "algorithm.json"
# Optimizer state is stored in the shapes of the parameters: any TP, PP and DP can load it.
_METADATA = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "singleton_local_shards": False,
    "chained_optim_avoid_prefix": True,
}


_COPIED_BYTES = 2
"""For each parameter of a rank: what a save may copy where the next update comes before the file is written."""


class PendingSave:
    """A checkpoint that a thread of this rank is writing, from the live tensors: they must not change until `release`.

    Args:
        directory: of the checkpoint. file: of this rank. most_copied: bytes of host memory that it may take.
    """

    def __init__(self, directory: Path, file: ShardFile, *, most_copied: int) -> None:
        self._directory, self._file, self._most_copied = directory, file, most_copied
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="checkpoint", daemon=True)
        self._thread.start()

    def release(self) -> None:
        """Return when weights and optimizer state may change. The file may not be on the disk yet."""
        self._file.release(self._most_copied)

    def wait(self) -> None:
        """Return when this rank's file was written or failed; `finish` says how it went."""
        self._thread.join()

    def finish(self) -> None:
        """Return when this rank's file is on the disk. Raises CheckpointError: the disk refused."""
        self._thread.join()
        if self._error is not None:
            raise _refused(self._directory, self._error) from self._error

    def _run(self) -> None:
        try:
            self._file.write()
        except BaseException as error:
            self._error = error


def start_save(trainee: Trainee, directory: Path) -> PendingSave:
    """Begin to write into an existing, empty directory. Collective over all ranks.

    Everything small is written when this returns; weights and optimizer state are written by a thread.

    Raises:
        CheckpointError: the disk refused. The other ranks then wait for this one: the group is not usable any more.
    """
    try:
        with quiet():
            state = _state(trainee, is_loading=False)
            own = own_boxes(trainee.optimizer, state["model"]) if is_distributed(trainee.optimizer) else []
            file = save_sharded(state, directory, own)
        if dist.get_rank() == 0:
            (directory / ALGORITHM_FILE).write_text(json.dumps(trainee.algorithm.state_dict()))
    except (OSError, SafetensorError) as error:
        raise _refused(directory, error) from error
    parameters = sum(p.numel() for chunk in trainee.chunks for p in chunk.module.parameters())
    return PendingSave(directory, file, most_copied=_COPIED_BYTES * parameters)


def _refused(directory: Path, error: BaseException) -> CheckpointError:
    return CheckpointError(
        f"checkpoint {directory} could not be written: {error}; free disk space, then --resume from the last one"
    )


def load(trainee: Trainee, directory: Path) -> None:
    """Fill the trainee from what `save` wrote, on this or another layout. Collective.

    State comes from the checkpoint; options of the optimizer and its schedule stay those that this run was built with.

    Raises:
        CheckpointError: files are missing or torn, or belong to another model, algorithm or K.
    """
    try:
        with quiet():
            wanted = _state(trainee, is_loading=True)
            state = load_sharded(wanted, directory)
        algorithm = json.loads((directory / ALGORITHM_FILE).read_text())
    except DaroError:
        raise
    except (CheckpointingException, OSError, ValueError) as error:
        raise CheckpointError(f"checkpoint {directory} cannot be loaded: {error}") from error
    for place, chunk in enumerate(trainee.chunks):
        chunk.module.load_state_dict(state["model"][str(place)], strict=True)
    options = group_options(trainee.optimizer)
    load_optimizer_state(trainee.optimizer, state["optimizer"], lambda: _fill(trainee, wanted["model"], directory))
    set_group_options(trainee.optimizer, options)
    trainee.scheduler.load_state_dict(state["scheduler"])
    trainee.algorithm.load_state_dict(algorithm)


def _fill(trainee: Trainee, model: dict[str, Any], directory: Path) -> None:
    if is_distributed(trainee.optimizer):
        load_own_boxes(trainee.optimizer, model, directory)


def _state(trainee: Trainee, *, is_loading: bool) -> dict[str, Any]:
    allocate_optimizer_state(trainee.optimizer)
    metadata = {**_METADATA, "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
    # The keys of the tensors count the layers of the whole model: parts of a rank are no part of them.
    model = {str(place): c.module.sharded_state_dict(metadata=metadata) for place, c in enumerate(trainee.chunks)}
    if is_distributed(trainee.optimizer):
        optimizer = common_state(trainee.optimizer)
    else:
        optimizer = trainee.optimizer.sharded_state_dict(model, is_loading=is_loading, metadata=metadata)
    return {
        "model": model,
        "optimizer": optimizer,
        "scheduler": trainee.scheduler.state_dict(),
    }
