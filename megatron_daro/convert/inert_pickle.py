"""Pickles of other programs, read without running any code: each name in them is replaced by what a list allows, or by
an inert record."""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from megatron_daro.errors import CheckpointError

_DTYPES = {("torch", name): value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}


class Inert:
    """Stands for an object of a class that is not loaded: accepts everything that a pickle does to it, without effect.

    Compared by identity, also as a dictionary key. state: the state that the pickle set.
    """

    state: object

    def __new__(cls, *arguments: object, **named: object) -> Inert:
        """Create the object; pickles may do this without calling the constructor."""
        record = super().__new__(cls)
        record.state = {}
        return record

    def __init__(self, *arguments: object, **named: object) -> None:
        """Take any arguments."""

    def __setstate__(self, state: object) -> None:
        self.state = state

    @property
    def fields(self) -> dict[str, Any]:
        """The attributes that the pickle set by name; empty if its state is something else."""
        return self.state if isinstance(self.state, dict) else {}

    def __setitem__(self, key: object, value: object) -> None:
        """Ignore an entry, for classes that are a kind of dict."""

    def append(self, value: object) -> None:
        """Ignore an element, for classes that are a kind of list."""

    def extend(self, values: object) -> None:
        """Ignore elements, for classes that are a kind of list."""


class RestrictedUnpickler(pickle.Unpickler):
    """Accepts only the names in `allowed` and torch's dtypes."""

    def __init__(self, content: bytes, allowed: Mapping[tuple[str, str], object], where: Path) -> None:
        super().__init__(io.BytesIO(content))
        self._allowed, self._where = allowed, where

    def find_class(self, module: str, name: str) -> object:
        """Return the object that replaces a name. Raises CheckpointError if the name is not allowed."""
        if (module, name) in _DTYPES:
            return _DTYPES[module, name]
        if (module, name) not in self._allowed:
            raise CheckpointError(
                f"{self._where} is a pickle that names {module}.{name}, which a checkpoint does not need and which is "
                "not loaded, since it could run code. Get the checkpoint from a source that you trust"
            )
        return self._allowed[module, name]

    def persistent_load(self, pid: object) -> object:
        """Return the record of a tensor's storage unchanged, as torch.save wrote it."""
        return pid


class InertUnpickler(RestrictedUnpickler):
    """Accepts every name and replaces each with `Inert`."""

    def __init__(self, content: bytes, where: Path) -> None:
        super().__init__(content, {}, where)

    def find_class(self, module: str, name: str) -> object:
        """Return `Inert`; nothing that the pickle names is imported."""
        return Inert
