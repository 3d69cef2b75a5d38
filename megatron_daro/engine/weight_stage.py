"""New weights of a transformers model, collected beside the old ones: unless all arrive and fit, nothing changes.

`checkpoint_parts` says where a checkpoint's tensor belongs in transformers' model, which keeps all experts of a layer
in one parameter. Source: transformers 5, `conversion_mapping.py`; names in the checkpoint are those of families/.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megatron_daro.errors import EngineError
from megatron_daro.families import families
from megatron_daro.families.table import Family
from megatron_daro.sync.buckets import WeightBucket


@dataclass(frozen=True, slots=True)
class ParameterPart:
    """Where a tensor belongs. parameter: name of the model's. part: index into that parameter; () is all of it."""

    parameter: str
    part: tuple[int | slice, ...] = ()


def checkpoint_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors that a checkpoint of the model holds, by the model's names: parameters (tied ones under their
    first name), and saved buffers such as the bias of a router."""
    saved = model.state_dict()
    return {**dict(model.named_parameters()), **{n: buffer for n, buffer in model.named_buffers() if n in saved}}


def checkpoint_parts(model: nn.Module) -> dict[str, ParameterPart]:
    """Return HF name -> where it belongs, for every tensor of the model's checkpoint."""
    shapes = {name: tuple(tensor.shape) for name, tensor in checkpoint_tensors(model).items()}
    parts = {name: ParameterPart(name) for name in shapes}
    family = families().get(getattr(getattr(model, "config", None), "model_type", ""))
    if family is None or family.experts is None or family.stacked:
        return parts
    for name, shape in shapes.items():
        start, _, ending = name.partition(".mlp.experts.")
        if ending in ("gate_up_proj", "down_proj"):
            del parts[name]
            parts |= _expert_parts(family, int(start.rpartition(".")[2]), name, shape)
            router = f"{start}.mlp.gate.weight"
            parts[_named(family, "router", start.rpartition(".")[2])] = parts.pop(router, ParameterPart(router))
    return parts


def _expert_parts(family: Family, layer: int, name: str, shape: tuple[int, ...]) -> dict[str, ParameterPart]:
    """Return where the experts' tensors belong in one parameter [experts, rows, columns]."""
    role = "expert_gate_up" if name.endswith("gate_up_proj") else "expert_down"
    rows = shape[1] // len(family.tensors[role])
    return {
        template.format(layer=layer, expert=expert): ParameterPart(name, (expert, slice(i * rows, (i + 1) * rows)))
        for expert in range(shape[0])
        for i, template in enumerate(family.tensors[role])
    }


def _named(family: Family, role: str, layer: str) -> str:
    return family.tensors[role][0].format(layer=layer)


_SHOWN = 4


class WeightStage:
    """Collects the new weights of a model beside the old ones.

    Args:
        model: a transformers causal language model. All tensors of its checkpoint must arrive, tied ones once.
    """

    def __init__(self, model: nn.Module) -> None:
        self._parameters: Mapping[str, Tensor] = checkpoint_tensors(model)
        self._parts = checkpoint_parts(model)
        # named_parameters leaves out the second name of a tied tensor (lm_head.weight); a stream may have it or not.
        self._aliases = set(dict(model.named_parameters(remove_duplicate=False))) - set(self._parameters)
        self._staged: dict[str, Tensor] = {}
        self._came: set[str] = set()

    def add(self, bucket: WeightBucket) -> None:
        """Copy a bucket's tensors into the stage, cast to the model's dtype.

        Raises:
            EngineError: a name is unknown or came before, or a shape differs from the model's.
            SyncError: the bucket is torn.
        """
        for name, tensor in bucket.tensors():
            if name in self._aliases:
                continue
            if name not in self._parts:
                raise EngineError(f"weight update: the model has no tensor {name}; it has {self._some()}.")
            if name in self._came:
                raise EngineError(f"weight update: {name} came twice; each tensor is sent once per update.")
            target = self._parts[name]
            parameter = self._parameters[target.parameter]
            own_shape = parameter[target.part].shape
            if tensor.shape != own_shape:
                raise EngineError(
                    f"weight update: {name} has shape {tuple(tensor.shape)}, the model's is {tuple(own_shape)}. "
                    "Actor and engine must be built from the same config.json; padding is dropped before sending."
                )
            if target.parameter not in self._staged:
                self._staged[target.parameter] = torch.empty_like(parameter, requires_grad=False)
            self._staged[target.parameter][target.part].copy_(tensor)
            self._came.add(name)

    def check_complete(self) -> None:
        """Raise EngineError, with the names of missing tensors, unless all have arrived."""
        missing = [name for name in self._parts if name not in self._came]
        if missing:
            shown = ", ".join(missing[:_SHOWN]) + (", ..." if len(missing) > _SHOWN else "")
            raise EngineError(f"weight update: {len(missing)} of {len(self._parts)} tensors never came: {shown}.")

    def apply(self) -> None:
        """Replace the old weights by the new; must not be called while the model runs."""
        self.check_complete()
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                parameter.data = self._staged.pop(name)

    def _some(self) -> str:
        names = list(self._parts)
        return ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")
