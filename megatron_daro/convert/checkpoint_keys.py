"""How Megatron's distributed checkpoints name each parameter: by a key, and an index along the prepended axes.

All layers share one tensor per parameter, whose first axis is the layer and whose second, for experts, is the expert; a
checkpoint may also hold each layer under its own key (`non_homogeneous_layers`, and newer Megatron with
`singleton_local_shards`). Source: megatron/core/transformer/transformer_block.py and moe/experts.py,
`sharded_state_dict`, 0.16.1.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_daro.convert.mapping import TensorRule

_EXPERT_WEIGHT = re.compile(
    r"^(mlp\.experts)\.(?:local_experts\.\d+\.(linear_fc[12]\.(?:weight|bias))|(linear_fc[12]\.(?:weight|bias))\d+)$"
)

_EXPERTS_NORM, _DENSE_NORM = ".pre_mlp_layernorm.weight", ".mlp.linear_fc1.layer_norm_weight"


@dataclass(frozen=True, slots=True)
class GlobalBox:
    """The place of a parameter in a global tensor: `index` along the prepended axes, whose sizes are `sizes`."""

    key: str
    index: tuple[int, ...] = ()
    sizes: tuple[int, ...] = ()
    layer_key: str | None = None
    """The key if each layer has its own key; the first axis is then absent. None for parameters outside the layers."""

    @property
    def name(self) -> str:
        """The key with its index, for messages."""
        return self.key + "".join(f"[{i}]" for i in self.index)

    def without_layers(self) -> GlobalBox:
        """Return the same parameter in a checkpoint with a key for each layer."""
        return self if self.layer_key is None else GlobalBox(self.layer_key, self.index[1:], self.sizes[1:])


def other_name(box: GlobalBox) -> GlobalBox | None:
    """Return the box under a second name that Megatron-core gives to the same parameter; None if it has only one.

    Only the norm before a layer's experts has two: with Transformer Engine's layers its key is that of the module, with
    Megatron's own layers that of a dense layer's norm (gpt_layer_specs.py, `sharded_state_dict_keys_map`, 0.16.1).
    """
    if not box.key.endswith(_EXPERTS_NORM):
        return None
    keys = [key and key.removesuffix(_EXPERTS_NORM) + _DENSE_NORM for key in (box.key, box.layer_key)]
    return GlobalBox(keys[0] or "", box.index, box.sizes, keys[1])


def possible_boxes(box: GlobalBox) -> list[GlobalBox]:
    """Return all boxes in which checkpoints may hold a parameter, the most usual one first."""
    return [candidate for own in (box, other_name(box)) if own is not None for candidate in (own, own.without_layers())]


def global_boxes(rules: Sequence[TensorRule]) -> list[GlobalBox]:
    """Return the box of each rule's parameter.

    Args:
        rules: of a whole model, with Transformer Engine's names, which checkpoints use.
    """
    layers = 1 + max((rule.layer for rule in rules if rule.layer is not None), default=-1)
    experts = 1 + max((rule.expert for rule in rules if rule.expert is not None), default=-1)
    boxes = [_box(rule, layers, experts) for rule in rules]
    of_layer: dict[int, set[str]] = {}
    for rule, box in zip(rules, boxes, strict=True):
        if rule.layer is not None:
            of_layer.setdefault(rule.layer, set()).add(box.key)
    if len({frozenset(keys) for keys in of_layer.values()}) > 1:  # dense layers among layers of experts
        return [box.without_layers() for box in boxes]
    return boxes


def _box(rule: TensorRule, layers: int, experts: int) -> GlobalBox:
    if rule.layer is None:
        return GlobalBox(rule.megatron_name)
    name = rule.megatron_name.removeprefix(f"decoder.layers.{rule.layer}.")
    index, sizes = (rule.layer,), (layers,)
    if rule.expert is None:
        return GlobalBox(f"decoder.layers.{name}", index, sizes, f"decoder.layers.{rule.layer}.{name}")
    match = _EXPERT_WEIGHT.match(name)
    if match is None:
        raise AssertionError(f"{rule.megatron_name} has expert {rule.expert}, but not the name of an expert's weight")
    name = f"{match[1]}.experts.{match[2] or match[3]}"
    return GlobalBox(
        f"decoder.layers.{name}", (*index, rule.expert), (*sizes, experts), f"decoder.layers.{rule.layer}.{name}"
    )
