"""What the adapters of Megatron hosts share: sums over Megatron's ranks, and a state that its checkpoints carry.

Place in the data flow: an adapter calls `carry` once, before the checkpoint is loaded; Megatron keeps the state of its
learning-rate scheduler in the common part of its checkpoints, also without the optimizer's state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from megatron_daro.errors import CheckpointError
from megatron_daro.plugins.core import DifficultyStep, Reduce, over_group
from megatron_daro.plugins.options import VARIABLE

STATE_KEY = "daro"
"""Entry of DARO's state in the scheduler's."""

Session = Callable[[], tuple[DifficultyStep, bool]]
"""Returns the state of this process, and whether a checkpoint without one may be resumed."""


def carry(session: Session) -> None:
    """Let every `OptimizerParamScheduler` of this process carry the state of `session`.

    The patched `load_state_dict` raises CheckpointError where a checkpoint has no state, or one of another K.
    """
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    if getattr(OptimizerParamScheduler, "_daro", None) is not None:
        OptimizerParamScheduler._daro = session
        return
    own_state, own_load = OptimizerParamScheduler.state_dict, OptimizerParamScheduler.load_state_dict

    def state_dict(self: object) -> dict[str, object]:
        return {**own_state(self), STATE_KEY: OptimizerParamScheduler._daro()[0].state_dict()}

    def load_state_dict(self: object, state: Mapping[str, object], *others: object, **named: object) -> None:
        step, start_fresh = OptimizerParamScheduler._daro()
        saved = state.get(STATE_KEY)
        if isinstance(saved, Mapping):
            step.load_state_dict(saved)
        elif not start_fresh:
            raise CheckpointError(
                "DARO's state: the checkpoint has none, allowed is one that was saved with DARO; start from the model "
                f"alone (--finetune), or set start_fresh=true in {VARIABLE} to go on with weights of 1"
            )
        own_load(self, {key: value for key, value in state.items() if key != STATE_KEY}, *others, **named)

    OptimizerParamScheduler.state_dict = state_dict
    OptimizerParamScheduler.load_state_dict = load_state_dict
    OptimizerParamScheduler._daro = session


def _device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def over_data(*, with_context: bool) -> Reduce:
    """Return the sum over data-parallel ranks.

    Args:
        with_context: over context-parallel ranks as well: where each of them holds its own part of a sample.
    """
    from megatron.core import mpu

    return over_group(mpu.get_data_parallel_group(with_context_parallel=with_context), _device())


def over_data_and_stages(*, with_context: bool) -> Reduce:
    """Return the sum over data-parallel ranks, then over pipeline stages: only the last one has losses."""
    from megatron.core import mpu

    data = over_data(with_context=with_context)
    if mpu.get_pipeline_model_parallel_world_size() == 1:
        return data
    stages = over_group(mpu.get_pipeline_model_parallel_group(), _device())
    return lambda vector: stages(data(vector))
