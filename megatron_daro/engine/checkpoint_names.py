"""Where the tensors of a checkpoint stand in transformers' model: it keeps all experts of a layer in one parameter.

Place in the data flow: names of a weight update -> `checkpoint_places` -> engine/weights.py.
Source: transformers 5, `conversion_mapping.py`; the names in the checkpoint are those of families/.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from megatron_daro.families import families
from megatron_daro.families.table import Family


@dataclass(frozen=True, slots=True)
class Place:
    """A parameter by name, and which part of it; () is the whole."""

    parameter: str
    part: tuple[int | slice, ...] = ()


def checkpoint_places(model: nn.Module) -> dict[str, Place]:
    """Return the place of every tensor of the model's checkpoint; of tied parameters the first name counts."""
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    places = {name: Place(name) for name in shapes}
    family = families().get(getattr(getattr(model, "config", None), "model_type", ""))
    if family is None or family.experts is None:
        return places
    for name, shape in shapes.items():
        start, _, ending = name.partition(".mlp.experts.")
        if ending in ("gate_up_proj", "down_proj"):
            del places[name]
            places |= _expert_places(family, int(start.rpartition(".")[2]), name, shape)
            router = f"{start}.mlp.gate.weight"
            places[_named(family, "router", start.rpartition(".")[2])] = places.pop(router, Place(router))
    return places


def _expert_places(family: Family, layer: int, name: str, shape: tuple[int, ...]) -> dict[str, Place]:
    """Return where the tensors of the experts stand in one parameter [experts, rows, columns]."""
    role = "expert_gate_up" if name.endswith("gate_up_proj") else "expert_down"
    rows = shape[1] // len(family.tensors[role])
    return {
        template.format(layer=layer, expert=expert): Place(name, (expert, slice(i * rows, (i + 1) * rows)))
        for expert in range(shape[0])
        for i, template in enumerate(family.tensors[role])
    }


def _named(family: Family, role: str, layer: str) -> str:
    return family.tensors[role][0].format(layer=layer)
