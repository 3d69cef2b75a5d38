"""What a CPU does for a GPU in calls between ranks, where Transformer Engine is used, memory as readers get it,
and how a rank of its own process prepares itself."""

from __future__ import annotations

import math
import os
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from megatron_daro.actor import device


def test_unequal_parts_are_gathered_from_all_ranks():
    """As rank 0 of two: torch's own gets tensors of one shape."""
    own, other = torch.arange(6.0).view(2, 3), torch.arange(9.0).view(3, 3) + 10

    def original(tensors, tensor, group=None):
        assert group == "g" and {t.shape for t in [*tensors, tensor]} == {(3, 3)} and not tensor[2].any()
        tensors[0].copy_(tensor), tensors[1].copy_(other)
        return "done"

    parts = [torch.zeros(2, 3), torch.zeros(3, 3)]
    assert device._uneven_all_gather(original)(parts, own, group="g") == "done"
    assert torch.equal(parts[0], own) and torch.equal(parts[1], other)
    equal = [torch.zeros(2, 3)]
    assert device._uneven_all_gather(lambda tensors, tensor: tensors is equal and tensor is own)(equal, own) is True


def test_unequal_parts_are_summed_over_ranks(monkeypatch):
    """As rank 1 of two, the other of which has the same numbers."""
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda whole, group: whole.mul_(2))
    monkeypatch.setattr(torch.distributed, "get_rank", lambda group: 1)
    output, parts = torch.zeros(3), [torch.arange(2.0), torch.arange(3.0) + 5]
    assert device._uneven_reduce_scatter(None)(output, parts, group="g") is None
    assert output.tolist() == [10, 12, 14]
    equal = [torch.zeros(3)]
    assert device._uneven_reduce_scatter(lambda out, parts: parts is equal and out is output)(output, equal) is True


def test_what_is_sent_keeps_its_memory_when_the_tensor_loses_it(monkeypatch):
    from torch.distributed import distributed_c10d

    sent = []
    monkeypatch.setattr(torch.distributed, "isend", None)
    monkeypatch.setattr(distributed_c10d, "isend", lambda tensor, *args, **kwargs: sent.append((tensor, args, kwargs)))
    device._redirect_sends()
    assert torch.distributed.isend is distributed_c10d.isend
    numbers = torch.arange(4.0)
    torch.distributed.isend(numbers, 1, tag=3)
    numbers.data = torch.empty(1)
    ((tensor, *arguments),) = sent
    assert tensor.tolist() == [0, 1, 2, 3] and arguments == [(1,), {"tag": 3}]


def test_counts_of_tokens_are_on_the_host_already():
    counts = torch.tensor([1, 2])
    assert device._on_host(counts) is counts and device._on_host(None, as_numpy=True) is None
    assert isinstance(device._on_host(counts, as_numpy=True), np.ndarray)


@pytest.mark.parametrize(
    ("gpu", "installed", "found"), [(False, True, False), (True, True, True), (True, False, False)]
)
def test_transformer_engine_is_used_where_it_and_a_gpu_are(monkeypatch, gpu, installed, found):

    modules = SimpleNamespace(pytorch=object()), object()
    for name, module in zip(("transformer_engine", "transformer_engine.pytorch"), modules, strict=True):
        monkeypatch.setitem(sys.modules, name, module if installed else None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    assert device.has_transformer_engine() is found


@pytest.mark.parametrize(
    ("needs", "engine", "named", "folder"),
    [
        (['nvidia-cudnn-cu13==9.19.0.56; platform_system == "Linux"'], True, None, "torchs"),
        (['nvidia-cudnn-cu13==9.19.0.56; platform_system == "Linux"'], True, "/mine", "/mine"),
        (["filelock", "nvidia-nccl-cu13==2.28.9"], True, None, None),
        (None, True, None, None),
        (["nvidia-cudnn-cu13==9.19.0.56"], False, None, None),
    ],
)
def test_transformer_engine_gets_all_of_torchs_cudnn(needs, engine, named, folder, monkeypatch, tmp_path):
    (tmp_path / "lib").mkdir()
    for part in ("libcudnn.so.9", "libcudnn_graph.so.9", "notes.txt"):
        (tmp_path / "lib" / part).touch()
    found = {"transformer_engine": object() if engine else None, "nvidia": object()}
    found["nvidia.cudnn"] = SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr(device.importlib.util, "find_spec", found.get)
    monkeypatch.setattr(device.metadata, "requires", lambda name: needs)
    loaded = []
    monkeypatch.setattr(device.ctypes, "CDLL", lambda path, mode: loaded.append((path, mode)))
    monkeypatch.setenv("CUDNN_HOME", named or "")  # put back at the end, whatever is set meanwhile
    if not named:
        del os.environ["CUDNN_HOME"]
    device._have_transformer_engine_take_torchs_cudnn.__wrapped__()
    parts = [
        (str(tmp_path / "lib" / part), device.ctypes.RTLD_GLOBAL) for part in ("libcudnn.so.9", "libcudnn_graph.so.9")
    ]
    assert loaded == (parts if folder else [])
    assert os.environ.get("CUDNN_HOME") == (str(tmp_path) if folder == "torchs" else folder)


def test_readers_get_the_same_memory_under_another_storage():
    tensor, elsewhere = torch.arange(3.0, requires_grad=True), torch.empty(1, device="meta")
    shown = device.shown(tensor)
    assert shown.data_ptr() == tensor.data_ptr() and not shown.requires_grad
    assert shown.untyped_storage()._cdata != tensor.untyped_storage()._cdata
    assert device.shown(elsewhere) is elsewhere
    assert math.isfinite(float(shown.sum()))


@pytest.mark.parametrize(
    ("kind", "variable", "set_to"),
    [
        ("cuda", "", ["expandable_segments:True"]),
        ("cuda", "PYTORCH_ALLOC_CONF", []),
        ("cuda", "PYTORCH_CUDA_ALLOC_CONF", []),
        ("cpu", "", []),
    ],
)
def test_segments_grow_on_a_gpu_unless_the_environment_says_how_memory_is_allocated(
    kind, variable, set_to, monkeypatch
):
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    if variable:
        monkeypatch.setenv(variable, "max_split_size_mb:64")
    seen = []
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", seen.append)  # fails where torch has it no more
    device.expand_segments(torch.device(kind))
    assert seen == set_to


def test_a_rank_of_its_own_process_has_all_of_its_environment_from_one_function(monkeypatch):
    from megatron_daro.actor import parallel

    gpu, seen = torch.device("cuda", 0), list[object]()
    monkeypatch.setattr(os, "environ", {"PATH": ""})
    monkeypatch.setattr(device, "prepare", lambda: seen.append(os.environ["NCCL_CUMEM_ENABLE"]) or gpu)
    monkeypatch.setattr(device, "expand_segments", lambda target: seen.append(("segments", target)))
    monkeypatch.setattr(device, "bind_to_numa_node", lambda target: ("far away", target))
    assert parallel.prepare_process(expandable_segments=True) == ("far away", gpu)
    assert seen == ["0", ("segments", gpu)]
    parallel.prepare_process(expandable_segments=False)
    assert seen[2:] == ["0"]
