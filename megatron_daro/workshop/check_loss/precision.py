"""Finds in which floating types shorter than float64 a loss computes, and can make it compute in float64 instead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

_SHORTER = (torch.bfloat16, torch.float16, torch.float32)


class Precision(TorchDispatchMode):
    """Notes in which types shorter than float64 a function computes. widen: also make it compute in float64."""

    def __init__(self, *, widen: bool) -> None:
        """Begin with no types noted."""
        super().__init__()
        self.types: set[str] = set()
        self._widen = widen

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> object:
        """Run one operator, and note or widen its results."""
        kwargs = dict(kwargs or {})
        if self._widen and kwargs.get("dtype") in _SHORTER:
            kwargs["dtype"] = torch.float64
        out = func(*args, **kwargs)
        input_ids = {id(arg) for arg in tree_leaves((args, kwargs)) if isinstance(arg, Tensor)}
        return tree_map(lambda value: self._noted(value, input_ids), out)

    def _noted(self, value: object, input_ids: set[int]) -> object:
        if not isinstance(value, Tensor) or value.dtype not in _SHORTER:
            return value
        self.types.add(str(value.dtype).removeprefix("torch."))
        return value.double() if self._widen and id(value) not in input_ids else value
