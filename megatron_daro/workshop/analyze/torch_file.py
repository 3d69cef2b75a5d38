"""Files of `torch.save` from other programs, read without running anything that they name.

A pickle names functions and classes and says what to call. Here it reaches a list of harmless ones (tensors, numpy's
arrays and numbers, built-in containers); whatever else it names becomes a placeholder that takes every call and does
nothing. So metadata with objects of a framework that is not installed is read past.
"""

from __future__ import annotations

import pickle
import types
import zipfile
from collections import OrderedDict
from pathlib import Path

from megatron_daro.errors import DataError

_TORCH = {("torch._utils", "_rebuild_tensor_v2"), ("torch", "Size")}
_NUMPY = {
    *(("numpy.core.multiarray", name) for name in ("scalar", "_reconstruct")),
    *(("numpy._core.multiarray", name) for name in ("scalar", "_reconstruct")),
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
    ("_codecs", "encode"),  # numpy's bytes in protocol 2
}
_BUILT_IN: dict[tuple[str, str], object] = {
    ("collections", "OrderedDict"): OrderedDict,
    ("builtins", "set"): set,
    ("builtins", "frozenset"): frozenset,
    ("builtins", "bytearray"): bytearray,
    ("builtins", "complex"): complex,
}


class Placeholder:
    """Stands for an object of a class that was not loaded."""

    def __new__(cls, *args: object, **options: object) -> Placeholder:
        """Ignore what it would be made of."""
        return super().__new__(cls)

    def __init__(self, *args: object, **options: object) -> None:
        """Ignore what it would be made of."""

    def __setstate__(self, state: object) -> None:
        """Ignore its state."""

    def __setitem__(self, key: object, value: object) -> None:
        """Ignore an entry, where the class is a kind of dict."""

    def append(self, value: object) -> None:
        """Ignore an element, where the class is a kind of list."""

    def extend(self, values: object) -> None:
        """Ignore elements, where the class is a kind of list."""


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> object:
        if (module, name) in _BUILT_IN:
            return _BUILT_IN[module, name]
        if (module, name) in _TORCH | _NUMPY:
            return super().find_class(module, name)
        return type(name.rpartition(".")[2] or "Placeholder", (Placeholder,), {})


def load(path: Path) -> object:
    """Return what a file of `torch.save` holds, tensors on the CPU.

    Raises:
        DataError: it is no such file, or damaged.
    """
    import torch

    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
    except (zipfile.BadZipFile, OSError) as error:
        raise DataError(
            f"dump: {path} is no file of torch.save ({error}); allowed is its zip format, of torch 1.6 and newer"
        ) from None
    if any(name.rpartition("/")[2] == "constants.pkl" for name in names):
        raise DataError(f"dump: {path} is a TorchScript program, which is not run; allowed is a file of torch.save")
    reader = types.SimpleNamespace(Unpickler=_Unpickler, __name__="pickle")
    try:
        return torch.load(path, map_location="cpu", pickle_module=reader, weights_only=False)
    except Exception as error:  # a damaged pickle raises anything
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise DataError(f"dump: {path} cannot be read ({type(error).__name__}: {first}); the file is torn") from None
