"""The part of sgl_kernel that SGLang uses on a CPU with the torch_native attention backend.

Place in the data flow: tools/sglang_cpu_env.sh copies it into the site-packages of its environment, since sgl_kernel
has no CPU package for every machine. SGLang imports many kernels by name, and modules of them, and calls one. Refuses
every other call. It also serves on a GPU for which the compiled package cannot be had, where SGLang 0.5.23 needs none
of it with Triton's attention and torch's operators (SGLANG_FORCE_FUSED_OP_BACKEND=torch; tests/gpu/gpu_runs.py).
"""

import importlib.abc
import importlib.machinery
import os
import sys
import types


def assign_req_to_token_pool_cpu(rows_B, table_RS, starts_B, ends_B, slots, row_length):
    """Write the cache slots of new tokens into the requests' rows of the table of slots, in place.

    Args:
        rows_B: row of each request.
        table_RS: cache slot of every token: rows of requests, columns of positions.
        starts_B: first position to fill, per request.
        ends_B: the position behind the last one to fill, per request.
        slots: the slots of all requests, one after the other.
        row_length: columns of the table; known from the table, not used.
    """
    used = 0
    for row, start, end in zip(rows_B.tolist(), starts_B.tolist(), ends_B.tolist(), strict=True):
        table_RS[row, start:end] = slots[used : used + end - start].to(table_RS.dtype)
        used += end - start


def is_arch_support_pdl():
    """Whether kernels may begin before the one before them ended, which compiled ones of Hopper can."""
    return False


class Missing:
    """A kernel, or a table of kernels' names, that is not here."""

    def __init__(self, name):
        self._name = name

    def __getattr__(self, name):
        return _named(name, f"{self._name}.")

    def __call__(self, *_args, **_kwargs):
        raise NotImplementedError(
            f"sgl_kernel.{self._name} is not in this environment (tools/sglang_cpu_env.sh); on a CPU start the server "
            "with --device cpu --attention-backend torch_native --grammar-backend none, on a GPU install sglang-kernel"
        )


def _named(name, before=""):
    if name.startswith("__"):
        raise AttributeError(name)
    return globals().get(name) or Missing(before + name)


class Modules(importlib.abc.Loader):
    """Makes `sgl_kernel.anything` a module of missing kernels."""

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        """None for other packages: the ordinary finders go on."""
        return importlib.machinery.ModuleSpec(name, cls()) if name.startswith("sgl_kernel.") else None

    @staticmethod
    def create_module(spec):
        """Make the module."""
        module = types.ModuleType(spec.name)
        vars(module)["__getattr__"] = _named
        return module

    @staticmethod
    def exec_module(module):
        """Do nothing more."""


__getattr__ = _named
if os.environ.get("SGLANG_USE_CPU_ENGINE") != "1":  # there SGLang takes a missing module for what it is
    sys.meta_path.append(Modules)
