"""Megatron-core without a GPU: its CUDA calls are redirected to the CPU.

Upstream (0.16.1 to 0.19.2) has no CPU back end, and tests, CI and laptops need the same code as a GPU. It asks for CUDA
by name in four ways: factory calls with device="cuda", `torch.cuda.*` functions, `.cuda()` methods, and type strings
such as "torch.cuda.FloatTensor". Functions that it compiles with torch.compile run uncompiled: loading the compiler
alone takes seconds at every start. What gloo lacks compared with NCCL (it does not keep the memory of tensors in
flight, and refuses parts of unequal size) is made up for. Used only where there is no GPU. Can go when upstream takes
its device from configuration and snapshot.py, the only file of this package whose `torch.cuda` calls rely on the
redirection, checks for the device itself.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable
from typing import Any, cast

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
    _redirect_sends()
    torch.compile = _uncompiled  # type: ignore[assignment]  # before the next, which imports Megatron-core
    _keep_compiler_from_optimizers()
    _redirect_random_state()
    _redirect_experts()


def _uncompiled(function: Callable[..., Any] | None = None, **options: object) -> Callable[..., Any]:
    """Stand in for torch.compile, also when called with options alone: `@torch.compile(dynamic=True)`."""
    return function if function is not None else _uncompiled


def _keep_compiler_from_optimizers() -> None:
    """Unwrap methods of torch's optimizers, which load the compiler only to tell it to leave them alone.

    Source: torch 2.13, torch/_compile.py, `_disable_dynamo`; torch/optim/optimizer.py, `_use_grad_for_differentiable`.
    """
    for name in ("add_param_group", "state_dict", "load_state_dict", "zero_grad"):
        setattr(torch.optim.Optimizer, name, getattr(torch.optim.Optimizer, name).__wrapped__)
    for kind in (torch.optim.Adam, torch.optim.SGD):  # AdamW's step is Adam's
        _replace(kind, step=torch.no_grad()(kind.step.__wrapped__))  # type: ignore[union-attr]


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
    cpu_device = torch.device("cpu")
    _replace(
        torch.cuda,
        current_device=lambda: cpu_device,
        synchronize=lambda *args, **kwargs: None,
        Stream=_NoStream,
        Event=_NoStream,
        current_stream=lambda *args: _NoStream(),
        default_stream=lambda *args: _NoStream(),
        stream=lambda stream: contextlib.nullcontext(),
        set_device=lambda *args: None,
        empty_cache=lambda *args: None,
        manual_seed=torch.manual_seed,
        get_rng_state=lambda *args, **kwargs: torch.get_rng_state(),
        set_rng_state=lambda state, *args, **kwargs: torch.set_rng_state(state),
    )


def _replace(owner: object, **attributes: object) -> None:
    for name, value in attributes.items():
        setattr(owner, name, value)


def _redirect_tensor_methods() -> None:
    original_type: Callable[..., object] = torch.Tensor.type

    @functools.wraps(original_type)
    def type_with_cuda_name(self: torch.Tensor, *args: object, **kwargs: object) -> object:
        out = original_type(self, *args, **kwargs)
        return out.replace("torch.", "torch.cuda.", 1) if isinstance(out, str) else out

    _replace(torch.nn.Module, cuda=lambda self, *args, **kwargs: self)
    _replace(
        torch.Tensor,
        cuda=lambda self, *args, **kwargs: self,
        record_stream=lambda self, stream: None,
        type=type_with_cuda_name,
    )


def _redirect_random_state() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import megatron.core.tensor_parallel.random as tp_random
    _replace(
        tp_random,
        _get_cuda_rng_state=lambda device="cuda", clone=False, graph_safe=False: torch.get_rng_state(),
        _set_cuda_rng_state=lambda state, device=-1, graph_safe=False: torch.set_rng_state(state),
    )


def _redirect_sends() -> None:
    """Keep the memory of a tensor that is in flight.

    When messages overlap computation, Megatron-core takes the storage out of a tensor that it is still sending. NCCL's
    streams hold on to it; gloo would send whatever lies there by then.
    """
    import torch.distributed.distributed_c10d as c10d

    original: Callable[..., object] = c10d.isend

    @functools.wraps(original)
    def call(tensor: torch.Tensor, *args: object, **kwargs: object) -> object:
        return original(tensor.detach(), *args, **kwargs)  # another tensor of the same storage

    for module in (torch.distributed, c10d):  # c10d tells by it which operations a batch may have
        _replace(module, isend=call)


def _redirect_experts() -> None:
    """Make routing and dispatch of a mixture of experts work on a CPU.

    The dispatcher counts tokens on the device, and turns the counts into the lists that all_to_all_single wants only
    when it copies them to the host, which on a CPU it does not do. The router names a kernel that only Transformer
    Engine has. Ranks that share experts gather unequal numbers of tokens, which gloo refuses, unlike NCCL.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import megatron.core.transformer.moe.moe_utils as moe_utils
        import megatron.core.transformer.moe.token_dispatcher as token_dispatcher
    _replace(token_dispatcher, maybe_move_tensor_to_cpu=_on_host)
    if not hasattr(moe_utils, "te_general_gemm"):
        _replace(moe_utils, te_general_gemm=None)
    _replace(
        torch.distributed,
        all_gather=_uneven_all_gather(torch.distributed.all_gather),
        reduce_scatter=_uneven_reduce_scatter(torch.distributed.reduce_scatter),
    )


def _on_host(tensor: object, as_numpy: bool = False, record_stream: bool = False) -> object:
    """Stand in for upstream's copy to the host: tensors are there already; return a numpy array if asked for one."""
    return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor


def _uneven_all_gather(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return an all_gather that also takes tensors with unequal first dimensions: it pads them for the transfer."""

    @functools.wraps(original)
    def call(tensors: list[torch.Tensor], tensor: torch.Tensor, *args: object, **kwargs: object) -> object:
        if all(part.shape == tensor.shape for part in tensors):
            return original(tensors, tensor, *args, **kwargs)
        padded = tensor.new_zeros(max(len(part) for part in tensors), *tensor.shape[1:])
        padded[: len(tensor)] = tensor
        whole = [torch.empty_like(padded) for _ in tensors]
        done = original(whole, padded, *args, **kwargs)
        for part, full in zip(tensors, whole, strict=True):
            part.copy_(full[: len(part)])
        return done

    return call


def _uneven_reduce_scatter(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a reduce_scatter that also takes parts of unequal first dimensions: it sums all and keeps this rank's."""

    @functools.wraps(original)
    def call(output: torch.Tensor, parts: list[torch.Tensor], *args: object, **kwargs: object) -> object:
        if all(part.shape == output.shape for part in parts):
            return original(output, parts, *args, **kwargs)
        group = cast(Any, kwargs.get("group"))
        whole = torch.cat(parts)
        torch.distributed.all_reduce(whole, group=group)
        output.copy_(whole.split([len(part) for part in parts])[torch.distributed.get_rank(group)])
        return None

    return call
