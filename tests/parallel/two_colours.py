"""What a GPU would refuse or wait for, seen on a CPU: every storage has a colour, "device" or "host".

Place in the data flow: `watched()` stands around what a rank does in a test. Inside it the policy's methods run under
two modes. The one over Python's calls gives `Tensor.device`, `.to`, `.cpu()`, factories and reads of values the meaning
that they have with a GPU; the one over dispatched operations carries the colours on, through the backward pass too.

It raises where an operation mixes the colours, and where a tensor of the host is handed to a collective call, which
NCCL would serve. Where the host reads a value of the device, and so waits for it, it counts (`Call.reads`), by the
innermost function of this package or of Megatron-core; colour_limits.py says which of these are allowed.

`RankPool(4, coloured=True)` does all of this around every task of its ranks (conftest.py says for which files).

What it cannot see: threads of writers, kernels of Transformer Engine, and tensors that were made before a policy was
and are no part of it: these count as the host's.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

GPU, HOST = torch.device("cpu", 0), torch.device("cpu")
"""What `Tensor.device` says of the two; both are the CPU, and differ."""
METHODS = ("train_step", "logprobs", "reference_logprobs", "values", "offload", "onload")
METHODS += ("start_save", "load", "start_snapshot", "restore")
"""Of MegatronPolicy; `export` and `export_critic` beside them, one tensor at a time, and `step.forward_backward`."""
_READS = {"item", "tolist", "numpy", "__bool__", "__int__", "__float__", "__index__", "__array__", "cpu", "nonzero"}
_READS |= {"masked_select", "unique", "unique_consecutive", "equal", "allclose", "__contains__"}
_FREE = {"barrier", "monitored_barrier_"}
"""Collective calls with a tensor of torch's own."""
_DEVICE = torch.Tensor.device.__get__  # type: ignore[attr-defined]
_PACKAGES = {
    f"{name.replace('.', '/')}/": f"{Path(str(spec.origin)).parent}/"
    for name in ("megatron_daro", "megatron.core")
    if (spec := find_spec(name)) is not None
}
"""How files of a package are named here -> the folder it lies in."""


class ColourError(RuntimeError):
    """An operation that a GPU would refuse."""


@dataclass(slots=True)
class Call:
    """Of a method in METHODS, with so many micro-batches (1 where it has none), of a policy with so many models.

    reads: (what, where) -> how often the host read values of the device.
    """

    name: str
    micro_batches: int = 1
    models: int = 1
    reads: Counter[tuple[str, str]] = field(default_factory=Counter)


@dataclass(slots=True)
class Found:
    """calls: one after the other; what a method calls in its turn is its own. operations: that ran on the device."""

    colours: Colours
    calls: list[Call] = field(default_factory=list)
    operations: int = 0
    current: Call | None = None

    @contextmanager
    def inside(self, name: str, micro_batches: int = 1, models: int = 1) -> Iterator[None]:
        """Watch what is done here as a call, unless one runs already."""
        if self.current is not None:
            yield
            return
        self.current = Call(name, micro_batches, models)
        self.calls.append(self.current)
        try:
            with _inside(self.colours):
                yield
        finally:
            self.current = None


class Colours:
    """Storage -> colour. A storage is known by a weak reference, which keeps its address from being another one's."""

    def __init__(self) -> None:
        self.found = Found(self)
        self._known: dict[int, tuple[StorageWeakRef, str]] = {}

    def of(self, tensor: torch.Tensor) -> str:
        """ "device", "host", or "either": made by an operation of torch's own that nobody gave a device."""
        entry = self._known.get(tensor.untyped_storage()._cdata)
        return entry[1] if entry else "host"

    def paint(self, tensor: torch.Tensor, colour: str) -> None:
        if type(tensor) is torch.Tensor or isinstance(tensor, torch.nn.Parameter):
            storage = tensor.untyped_storage()
            self._known[storage._cdata] = StorageWeakRef(storage), colour
            if len(self._known) > 20_000:
                self._known = {key: entry for key, entry in self._known.items() if not entry[0].expired()}

    def read(self, what: str) -> None:
        if self.found.current is not None:
            self.found.current.reads[what, place()] += 1


def place() -> str:
    """Return "file:function" of the innermost frame of this package or of Megatron-core; outside of both, of whatever
    called torch."""
    frame, outside = sys._getframe(2), ""
    while frame is not None:
        path = frame.f_code.co_filename
        for name, folder in _PACKAGES.items():
            if path.startswith(folder):
                return f"{name}{path.removeprefix(folder)}:{frame.f_code.co_name}"
        if not outside and path != __file__ and "/torch/" not in path:
            outside = f"{Path(path).name}:{frame.f_code.co_name}"
        frame = frame.f_back
    return outside


class _Calls(TorchFunctionMode):
    """Python's calls of torch."""

    def __init__(self, colours: Colours) -> None:
        super().__init__()
        self._colours = colours

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name == "__get__" and func != _DEVICE:
            return func(*args)
        kwargs, colours = kwargs or {}, self._colours
        first = args[0] if args and isinstance(args[0], torch.Tensor) else None
        if name == "backward":
            return self._backward(func, args, kwargs)
        if func == _DEVICE:
            return func(*args) if args[0].device.type != "cpu" else (GPU if colours.of(args[0]) == "device" else HOST)
        if name in ("to", "cpu") and first is not None:
            return self._moved(first, HOST if name == "cpu" else _target(args[1:], kwargs), func, args, kwargs)
        if name in _READS and first is not None and colours.of(first) == "device":
            colours.read(name)
        if name == "copy_" and self._leaves(*args[:2]) and not kwargs.get("non_blocking"):
            colours.read("copy_")
        if name == "type_with_cuda_name" or name == "type":  # the redirection's own, which torch looks up again
            out = func(*args, **kwargs)
            return out.replace("torch.cuda.", "torch.", 1) if isinstance(out, str) else out
        given = kwargs.get("device")
        if given is not None:
            kwargs = {**kwargs, "device": "cpu" if torch.device(given).type == "cpu" else given}
        out = func(*args, **kwargs)
        if isinstance(out, torch.Tensor) and out.device.type == "cpu" and not name.startswith("__get__"):
            if given is not None:
                colours.paint(out, "device" if torch.device(given) == GPU else "host")
            elif name in _FACTORIES:
                colours.paint(out, "host")
        return out

    def _backward(self, func: Any, args: Any, kwargs: Any) -> None:
        """Run a backward pass under this mode too: torch leaves a mode while it serves one of its calls."""
        if func is torch.Tensor.backward:
            func = torch.autograd.backward
        with self, mock.patch.object(torch.autograd, "has_torch_function", lambda _: False):
            func(*args, **kwargs)

    def _leaves(self, to: torch.Tensor, source: Any) -> bool:
        """Whether a copy goes from the device to the host."""
        of = self._colours.of
        return isinstance(source, torch.Tensor) and of(source) == "device" and of(to) != "device"

    def _moved(self, tensor: torch.Tensor, target: Any, func: Any, args: Any, kwargs: Any) -> torch.Tensor:
        """Return the tensor on another device: a copy, where it is not there yet."""
        colours = self._colours
        own = colours.of(tensor)
        if target is None or torch.device(target).type != "cpu":
            return func(*args, **kwargs)
        wanted = "device" if torch.device(target) == GPU else "host"
        copy = kwargs.pop("copy", False)
        dtype = None if func.__name__ == "cpu" else _parsed(args[1:], kwargs)[1]
        if own == "device" and wanted == "host":
            colours.read("to the host")
        if own == wanted:
            return tensor.to(dtype or tensor.dtype, copy=copy)
        with _unchecked(colours):
            out = tensor.clone() if dtype is None or dtype == tensor.dtype else tensor.to(dtype)
        colours.paint(out, wanted)
        return out


_FACTORIES = {
    "arange",
    "zeros",
    "ones",
    "empty",
    "full",
    "tensor",
    "from_numpy",
    "as_tensor",
    "rand",
    "randn",
    "randint",
}
_FACTORIES |= {"linspace", "frombuffer", "eye", "randperm", "scalar_tensor"}


def _target(arguments: Any, kwargs: Any) -> Any:
    """Return the device that `Tensor.to` is given, if any."""
    if arguments and isinstance(arguments[0], torch.Tensor):
        return arguments[0].device  # of the other tensor, by the mode that is around
    return _parsed(arguments, kwargs)[0]


def _parsed(arguments: Any, kwargs: Any) -> Any:
    """Return what `Tensor.to` is given: device, dtype, and more."""
    if arguments and isinstance(arguments[0], torch.Tensor):
        return arguments[0].device, arguments[0].dtype
    return torch._C._nn._parse_to(*arguments, **{name: value for name, value in kwargs.items() if name != "copy"})


class _Operations(TorchDispatchMode):
    """What torch executes."""

    def __init__(self, colours: Colours) -> None:
        super().__init__()
        self._colours, self.checks = colours, True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, colours = kwargs or {}, self._colours
        tensors = list(_tensors(args, kwargs.values()))
        name = func.overloadpacket.__name__
        found = {colours.of(tensor) for tensor in tensors}
        if func.namespace == "c10d":
            self._collective(name, tensors)
        elif self.checks and "device" in found and "host" in found and name != "copy_":
            # Torch takes a number of the host in the place of one on the device.
            hosts = [tensor for tensor in tensors if colours.of(tensor) == "host" and tensor.dim()]
            if hosts:
                shapes = ", ".join(f"{tuple(t.shape)} on the {colours.of(t)}" for t in tensors)
                raise ColourError(f"{func} in {place()} mixes tensors of device and host: {shapes}")
        out = func(*args, **kwargs)
        if "device" in found:
            colours.found.operations += 1
        colour = "device" if "device" in found and name != "copy_" else "either" if not tensors else ""
        if colour:
            own = {tensor.untyped_storage()._cdata for tensor in tensors}
            for tensor in _tensors((out,)):
                if tensor.untyped_storage()._cdata not in own:
                    colours.paint(tensor, colour)
        if "either" in found and "device" in found and name != "copy_":
            for tensor in tensors:  # what torch made itself goes along with what it is used with
                if colours.of(tensor) == "either":
                    colours.paint(tensor, "device")
        return out

    def _collective(self, name: str, tensors: Iterable[torch.Tensor]) -> None:
        if name in _FREE:
            return
        if _in_an_object_collective():
            self._colours.read("objects to other ranks")
            return
        hosts = [tensor for tensor in tensors if self._colours.of(tensor) == "host"]
        if hosts and self.checks:
            shapes = ", ".join(str(tuple(tensor.shape)) for tensor in hosts)
            raise ColourError(f"{name} in {place()} is given tensors of the host, {shapes}; NCCL refuses them")


def _tensors(*groups: Iterable[Any]) -> Iterator[torch.Tensor]:
    """Tensors of a CPU among arguments or results, in lists too. (torch's tree_leaves takes half of a test's time.)"""
    for values in groups:
        for value in values:
            if isinstance(value, torch.Tensor):
                if value.device.type == "cpu":
                    yield value
            elif isinstance(value, (list, tuple)):
                yield from _tensors(value)


def _in_an_object_collective() -> bool:
    """Torch puts pickles of objects on the device of a group by itself, and waits for them."""
    frame = sys._getframe(2)
    while frame is not None:
        if (
            frame.f_code.co_name.endswith(("_object", "_object_list"))
            and "distributed_c10d" in frame.f_code.co_filename
        ):
            return True
        frame = frame.f_back
    return False


_current: list[tuple[Colours, _Operations]] = []


@contextmanager
def _unchecked(colours: Colours) -> Iterator[None]:
    operations = next(mode for known, mode in _current if known is colours)
    before, operations.checks = operations.checks, False
    try:
        yield
    finally:
        operations.checks = before


@contextmanager
def _inside(colours: Colours) -> Iterator[None]:
    """Run under both modes; within them already, on."""
    if any(known is colours for known, _ in _current):
        yield
        return
    operations = _Operations(colours)
    _current.append((colours, operations))
    try:
        with _redirected(colours), _Calls(colours), operations:
            yield
    finally:
        _current.pop()


@contextmanager
def _redirected(colours: Colours) -> Iterator[None]:
    """Let the package and Megatron-core mean the device where they say CUDA."""
    from megatron_daro.actor import cpu, device

    def on_gpu(asked: object) -> object:
        return GPU if str(asked).startswith("cuda") else asked

    def cuda(self: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
        return self.to(GPU)

    own_shown = device.shown

    def shown(tensor: torch.Tensor) -> torch.Tensor:
        out = own_shown(tensor)  # the same memory under another storage
        colours.paint(out, colours.of(tensor))
        return out

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(device, "current", lambda: GPU))
        stack.enter_context(mock.patch.object(cpu, "_on_cpu", on_gpu))
        stack.enter_context(mock.patch.object(device, "shown", shown))
        stack.enter_context(mock.patch.object(torch.cuda, "current_device", lambda: GPU))
        stack.enter_context(mock.patch.object(torch.Tensor, "cuda", cuda))
        yield


def _paint_policy(colours: Colours, policy: Any) -> None:
    """Everything that a GPU rank has on its GPU once it is built."""
    from megatron_daro.actor.compat import optimizer_parts

    if policy.reference is not None:
        policy.reference._device = GPU
    states = [policy.train_state] + ([policy.critic.state] if policy.critic is not None else [])
    for state in states:
        for chunk in state.chunks:
            for module in chunk.modules():
                # `buffers` of Megatron's DistributedDataParallel are something else.
                for tensor in (*module.parameters(recurse=False), *module._buffers.values()):
                    if tensor is not None:
                        colours.paint(tensor, "device")
                inverse = getattr(module, "inv_freq", None)
                if isinstance(inverse, torch.Tensor):  # of Megatron-core's rotary embedding, made on the GPU
                    colours.paint(inverse, "device")
            for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
                for tensor in (buffer.param_data, buffer.grad_data):
                    if tensor is not None:
                        colours.paint(tensor, "device")
            for parameter in chunk.parameters():
                if getattr(parameter, "main_grad", None) is not None:
                    colours.paint(parameter.main_grad, "device")
        for part in optimizer_parts(state.optimizer):
            for tensor in tree_leaves([list(part.param_groups), list(part.optimizer.state.values())]):
                if isinstance(tensor, torch.Tensor) and (tensor.dim() or tensor.numel() != 1):
                    colours.paint(tensor, "device")


def _run_by_the_schedule(micro_batches: int) -> int:
    """Virtual stages have at least one micro-batch for each stage: silent ones fill them up."""
    from megatron.core import parallel_state

    if (parallel_state.get_virtual_pipeline_model_parallel_world_size() or 1) == 1:
        return micro_batches
    return max(micro_batches, parallel_state.get_pipeline_model_parallel_world_size())


@contextmanager
def watched() -> Iterator[Found]:
    """Watch every policy that is built inside; yields what is found."""
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

    from megatron_daro.actor import step
    from megatron_daro.actor.policy import MegatronPolicy

    colours = Colours()
    found = colours.found

    def built(original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def init(self: Any, *args: Any, **kwargs: Any) -> None:
            original(self, *args, **kwargs)
            _paint_policy(colours, self)

        return init

    def inside(original: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(original)

        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            micro_batches = signature.bind(*args, **kwargs).arguments.get("micro_batches", [()])
            models = 2 if getattr(args[0], "critic", None) is not None else 1
            with found.inside(original.__name__, _run_by_the_schedule(len(micro_batches)), models):
                return original(*args, **kwargs)

        return call

    def one_by_one(original: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
        @functools.wraps(original)
        def export(*args: Any, **kwargs: Any) -> Iterator[Any]:
            items = original(*args, **kwargs)
            while True:
                with found.inside("export"):
                    item = next(items, None)
                if item is None:
                    return
                yield item

        return export

    with ExitStack() as stack:
        wrappers = {"__init__": built, "export": one_by_one, "export_critic": one_by_one}
        for name, wrap in (wrappers | dict.fromkeys(METHODS, inside)).items():
            stack.enter_context(mock.patch.object(MegatronPolicy, name, wrap(getattr(MegatronPolicy, name))))
        # A tensor of the class, which the policies of a process share; each pool of ranks builds many.
        stack.enter_context(mock.patch.object(MoEAuxLossAutoScaler, "main_loss_backward_scale", None))
        stack.enter_context(mock.patch.object(step, "forward_backward", inside(step.forward_backward)))
        yield found
