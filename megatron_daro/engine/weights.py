"""Replacing a model's weights from buckets: everything arrives and fits, or nothing changes.

Place in the data flow: WeightBucket stream -> `WeightStage` (a second copy of the weights) -> the engine's model.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from megatron_daro.errors import EngineError
from megatron_daro.sync.buckets import WeightBucket

_SHOWN = 4


class WeightStage:
    """Collects the new weights of a model beside the old ones.

    Args:
        model: a transformers causal language model. Its parameters, tied ones once, are what must arrive.
    """

    def __init__(self, model: nn.Module) -> None:
        self._parameters: Mapping[str, nn.Parameter] = dict(model.named_parameters())
        # named_parameters leaves out the second name of a tied tensor (lm_head.weight); a stream may bring it or not.
        self._aliases = set(dict(model.named_parameters(remove_duplicate=False))) - set(self._parameters)
        self._staged: dict[str, Tensor] = {}

    def add(self, bucket: WeightBucket) -> None:
        """Copy a bucket's tensors, cast to the model's dtype.

        Raises:
            EngineError: an unknown name, a name that came before, or another shape than the model's.
            SyncError: the bucket is torn.
        """
        for name, tensor in bucket.tensors():
            if name in self._aliases:
                continue
            if name not in self._parameters:
                raise EngineError(f"weight update: the model has no tensor {name}; it has {self._some()}.")
            if name in self._staged:
                raise EngineError(f"weight update: {name} came twice; each tensor is sent once per update.")
            parameter = self._parameters[name]
            if tensor.shape != parameter.shape:
                raise EngineError(
                    f"weight update: {name} has shape {tuple(tensor.shape)}, the model's is {tuple(parameter.shape)}. "
                    "Actor and engine must be built from the same config.json; padding is dropped before sending."
                )
            self._staged[name] = tensor.to(parameter.dtype, copy=True)

    def check_complete(self) -> None:
        """Raise EngineError, naming what is missing, unless every parameter has arrived."""
        missing = [name for name in self._parameters if name not in self._staged]
        if missing:
            shown = ", ".join(missing[:_SHOWN]) + (", ..." if len(missing) > _SHOWN else "")
            raise EngineError(f"weight update: {len(missing)} of {len(self._parameters)} tensors never came: {shown}.")

    def apply(self) -> None:
        """Put the new weights in place of the old; not to be called while the model runs."""
        self.check_complete()
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                parameter.data = self._staged.pop(name)

    def _some(self) -> str:
        names = list(self._parameters)
        return ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")
