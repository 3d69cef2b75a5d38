"""Lets Megatron-core 0.16.1 to 0.19.x run on a machine without a GPU: one file, imported only when there is none.

Megatron-core asks for CUDA by name in four ways: factory calls with device="cuda", `torch.cuda.*` functions,
`.cuda()` methods, and the type strings "torch.cuda.FloatTensor". Each is redirected to the CPU here. The functions that
Megatron-core fuses with torch.compile run as they are written: loading the compiler alone takes seconds of every start.

Upstream: megatron-core 0.16.1 to 0.19.2. Reason: no CPU back end upstream; tests, CI and laptops need the same code as
a GPU. Can go: when upstream takes its device from configuration.
Refuses: to be installed when a GPU is there (it would send its work to the CPU in silence).
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch

from megatron_daro.errors import ModelError

_FACTORIES = (
    "tensor",
    "zeros",
    "ones",
    "empty",
    "full",
    "arange",
    "rand",
    "randn",
    "randint",
    "empty_like",
    "zeros_like",
)
_installed = False


class _NoStream:
    """Stands in for torch.cuda.Stream and Event: everything on a CPU is already in order."""

    def __init__(self, *args: object, **kwargs: object) -> None: ...
    def wait_stream(self, *args: object) -> None: ...
    def wait_event(self, *args: object) -> None: ...
    def synchronize(self) -> None: ...
    def wait(self, *args: object) -> None: ...

    def record(self, *args: object) -> None: ...

    def query(self) -> bool:
        return True

    def record_event(self, *args: object) -> _NoStream:
        return _NoStream()


def install() -> None:
    """Redirect Megatron-core's CUDA calls of this process to the CPU. A second call does nothing.

    Raises:
        ModelError: there is a GPU in this process.
    """
    global _installed
    if _installed:
        return
    if torch.cuda.is_available():
        raise ModelError("actor.cpu: a GPU is available; the CPU redirection is only for machines without one")
    _installed = True
    _redirect_factories()
    _redirect_cuda_module()
    _redirect_tensor_methods()
    torch.compile = _uncompiled  # type: ignore[assignment]  # before the next, which imports Megatron-core
    _redirect_random_state()


def _uncompiled(function: Callable[..., Any] | None = None, **options: object) -> Callable[..., Any]:
    """In place of torch.compile, also with options alone: `@torch.compile(dynamic=True)`."""
    return function if function is not None else _uncompiled


def _on_cpu(device: object) -> object:
    """Return the device with any CUDA device replaced by the CPU."""
    if isinstance(device, str) and device.startswith("cuda"):
        return "cpu"
    if isinstance(device, torch.device) and device.type == "cuda":
        return torch.device("cpu")
    return device


def _device_rewritten(factory: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(factory)
    def call(*args: object, **kwargs: object) -> object:
        if "device" in kwargs:
            kwargs["device"] = _on_cpu(kwargs["device"])
        if "pin_memory" in kwargs:
            kwargs["pin_memory"] = False
        return factory(*args, **kwargs)

    return call


def _redirect_factories() -> None:
    # torch remembers at first use which functions `with torch.device(...)` covers. That must happen before they are
    # replaced: else transformers' from_pretrained, which builds on "meta", leaves rotary frequencies uninitialised.
    from torch.utils import _device as device_mode

    device_mode._device_constructors()
    for name in _FACTORIES:
        setattr(torch, name, _device_rewritten(getattr(torch, name)))


def _redirect_cuda_module() -> None:
    cuda: Any = torch.cuda
    cpu_device = torch.device("cpu")
    cuda.current_device = lambda: cpu_device
    cuda.synchronize = lambda *args, **kwargs: None
    cuda.Stream = cuda.Event = _NoStream
    cuda.current_stream = cuda.default_stream = lambda *args: _NoStream()
    cuda.stream = lambda stream: contextlib.nullcontext()
    cuda.set_device = cuda.empty_cache = lambda *args: None
    cuda.manual_seed = torch.manual_seed
    cuda.get_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    cuda.set_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)


def _redirect_tensor_methods() -> None:
    tensor: Any = torch.Tensor
    module: Any = torch.nn.Module
    tensor.cuda = lambda self, *args, **kwargs: self
    module.cuda = lambda self, *args, **kwargs: self
    tensor.record_stream = lambda self, stream: None
    original_type = tensor.type

    @functools.wraps(original_type)
    def type_with_cuda_name(self: torch.Tensor, *args: object, **kwargs: object) -> object:
        out = original_type(self, *args, **kwargs)
        return out.replace("torch.", "torch.cuda.", 1) if isinstance(out, str) else out

    tensor.type = type_with_cuda_name


def _redirect_random_state() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import megatron.core.tensor_parallel.random as tp_random
    module: Any = tp_random
    module._get_cuda_rng_state = lambda device="cuda", clone=False, graph_safe=False: torch.get_rng_state()
    module._set_cuda_rng_state = lambda state, device=-1, graph_safe=False: torch.set_rng_state(state)
