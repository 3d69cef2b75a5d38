"""Pickles of other programs, read without running anything: names stand for what a list says, or for inert records."""

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
    """Stands for an object of a class that is not loaded: takes what a pickle does to it, and does nothing.

    Compared by identity, also as a key. state: what the pickle gave it.
    """

    state: object

    def __new__(cls, *arguments: object, **named: object) -> Inert:
        """Make it without its constructor too, as pickles do."""
        record = super().__new__(cls)
        record.state = {}
        return record

    def __init__(self, *arguments: object, **named: object) -> None:
        """Take any arguments."""

    def __setstate__(self, state: object) -> None:
        self.state = state

    @property
    def fields(self) -> dict[str, Any]:
        """The attributes that it was given by name; none where it was given something else."""
        return self.state if isinstance(self.state, dict) else {}

    def __setitem__(self, key: object, value: object) -> None:
        """Ignore an entry, where the class is a kind of dict."""

    def append(self, value: object) -> None:
        """Ignore an element, where the class is a kind of list."""

    def extend(self, values: object) -> None:
        """Ignore elements, where the class is a kind of list."""


class RestrictedUnpickler(pickle.Unpickler):
    """Takes the names it is given and torch's dtypes, and no other."""

    def __init__(self, content: bytes, allowed: Mapping[tuple[str, str], object], where: Path) -> None:
        super().__init__(io.BytesIO(content))
        self._allowed, self._where = allowed, where

    def find_class(self, module: str, name: str) -> object:
        """Return what stands for a name. Raises CheckpointError for one that is not on the list."""
        if (module, name) in _DTYPES:
            return _DTYPES[module, name]
        if (module, name) not in self._allowed:
            raise CheckpointError(
                f"{self._where} is a pickle that names {module}.{name}, which a checkpoint does not need and which is "
                "not loaded, since it could run code. Get the checkpoint from a source that you trust"
            )
        return self._allowed[module, name]

    def persistent_load(self, pid: object) -> object:
        """Return the record of a tensor's storage, as torch.save writes it."""
        return pid


class InertUnpickler(RestrictedUnpickler):
    """Takes every name: each stands for an `Inert`."""

    def __init__(self, content: bytes, where: Path) -> None:
        super().__init__(content, {}, where)

    def find_class(self, module: str, name: str) -> object:
        """Return an inert class; nothing of the pickle is imported."""
        return Inert
