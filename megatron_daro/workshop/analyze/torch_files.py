"""Reads files of `torch.save` from other programs. Of the functions and classes that a file names, only those that make
tensors, arrays and built-in containers are used; an inert record takes the place of any other."""

from __future__ import annotations

import pickle
import types
import zipfile
from collections import OrderedDict
from pathlib import Path

from megatron_daro.convert.inert_pickle import Inert
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


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> object:
        if (module, name) in _BUILT_IN:
            return _BUILT_IN[module, name]
        if (module, name) in _TORCH | _NUMPY:
            return super().find_class(module, name)
        return Inert


def load_torch_file(path: Path) -> object:
    """Return the content of a file of `torch.save`, with tensors on the CPU.

    Raises:
        DataError: it is no such file, or is damaged.
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
