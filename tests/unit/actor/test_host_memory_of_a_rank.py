"""Memory of one rank that leaves for the host and comes back: what is moved, counted and kept, and in which blocks."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import policy_tasks
import pytest
import torch
from single_rank import GRPO, ROWS, policy_of, rates
from small_models import random_batch

from megatron_daro.actor import host_memory
from megatron_daro.actor.host_memory import HostCopy, HostMemory
from megatron_daro.types import KINDS_OF_MEMORY

pytestmark = pytest.mark.usefixtures("world")


def test_what_leaves_is_counted_and_comes_back(model):
    policy = policy_of(model, GRPO)
    rates(policy, 1)
    memory, before = policy._memory, policy_tasks.everything(policy)
    whole = memory.left_behind()
    move = memory.offload(("weights", "gradients"))
    assert memory.away == {"weights", "gradients"} and move.left == memory.left_behind() == whole - move.moved > 0
    assert 0 <= move.seconds < 60 and move.others == 0
    assert memory.offload(("weights",)).moved == 0, "it is away already"
    with pytest.raises(RuntimeError, match=r"^weights: on the host while servers have the device$"):
        policy.logprobs(random_batch(), ROWS)
    back = memory.onload(KINDS_OF_MEMORY)
    assert (back.moved, back.left, memory.away) == (move.moved, whole, frozenset()) and memory.onload(
        ("weights",)
    ).moved == 0
    after = policy_tasks.everything(policy)
    assert all(np.array_equal(after[name], value) for name, value in before.items())
    gradients = [buffer.grad_data for chunk in policy.train_state.chunks for buffer in chunk.buffers]
    assert gradients and not any(gradient.any() for gradient in gradients)
    gradients[0].fill_(3.0)
    memory.offload(("gradients",), keep_gradients=True)
    memory.onload(("gradients",))
    assert (gradients[0] == 3.0).all() and memory.device.type == "cpu"


@pytest.mark.parametrize(("pinned", "lengths"), [(True, [10, 64, 64]), (False, [10, 64, 26])])
def test_pinned_memory_is_taken_in_whole_blocks(monkeypatch, pinned, lengths):
    monkeypatch.setattr(host_memory, "_BLOCK_BYTES", 64)
    first = torch.empty(10, dtype=torch.uint8)
    blocks = host_memory.extended([first], 100, pinned=pinned)
    assert [len(block) for block in blocks] == lengths and blocks[0] is first and blocks[1].dtype == torch.uint8
    assert host_memory.extended(blocks, 100, pinned=pinned) is blocks and len(blocks) == 3


def test_pinned_memory_is_kept_for_the_next_time(monkeypatch):
    monkeypatch.setattr(host_memory, "_BLOCK_BYTES", 64)
    memory = host_memory.HostMemory()
    assert memory._host_blocks("weights", 10) is not memory._host_blocks("weights", 10)
    memory._where = torch.device("cuda", 0)
    first = memory._host_blocks("weights", 10)
    assert memory._host_blocks("weights", 100) is first and len(first) == 2
    assert memory._host_blocks("optimizer", 10) is not first


def test_pieces_fill_blocks_one_after_the_other():
    storages = [torch.arange(size, dtype=torch.uint8).untyped_storage() for size in (5, 3, 0, 4)]
    blocks = [torch.zeros(size, dtype=torch.uint8) for size in (2, 6, 6)]
    lengths = []
    for piece, held in host_memory.pieces_of(storages, blocks):
        held.copy_(piece)
        lengths.append(len(piece))
    assert lengths == [2, 3, 3, 4] and [b.tolist() for b in blocks] == [
        [0, 1], [2, 3, 4, 0, 1, 2], [0, 1, 2, 3, 0, 0]
    ]  # fmt: skip
    assert list(host_memory.pieces_of(storages, [])) == []


def test_on_a_gpu_memory_is_that_of_the_process_and_goes_back_to_the_driver(monkeypatch):
    called = []
    for name in ("ipc_collect", "empty_cache", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, lambda name=name: called.append(name))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 7)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 30)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (10, 100))
    memory = host_memory.HostMemory()
    memory._where = torch.device("cuda", 0)
    move = memory.offload(("weights",))
    assert (move.moved, move.left, move.others) == (0, 7, 60) and called == [
        "synchronize",
        "ipc_collect",
        "empty_cache",
    ]
    back = memory.onload(("weights",))
    assert (back.moved, back.left, back.others, called[3:]) == (0, 7, 60, ["synchronize"])


def test_the_8_bit_copies_of_the_weights_leave_with_the_first_thing_that_leaves():
    layer = torch.nn.Linear(2, 2)
    layer._fp8_workspaces = {"weight": torch.zeros(4, dtype=torch.uint8)}
    chunk = torch.nn.Sequential(layer, torch.nn.Identity())
    chunk.buffers, chunk.expert_parallel_buffers, chunk.module = [], [], chunk[0]
    optimizer = SimpleNamespace(zero_grad=lambda: None, param_groups=[], state={})
    HostMemory(SimpleNamespace(chunks=[chunk], optimizer=optimizer)).offload(["gradients"])
    assert layer._fp8_workspaces == {}


def test_a_copy_on_the_host_takes_whole_blocks_and_gives_the_values_back(monkeypatch):
    """Not each tensor's bytes rounded up to a power of two, as torch does with pinned memory."""
    monkeypatch.setattr(host_memory, "_BLOCK_BYTES", 64)
    shared = torch.arange(40.0)
    tensors = [torch.arange(33.0).view(3, 11).bfloat16(), shared[5:12], torch.tensor([1.5]), torch.randn(9, 5)]
    copy = HostCopy(tensors)
    wanted = [tensor.clone() for tensor in tensors]
    assert copy.num_bytes == sum(tensor.nbytes for tensor in tensors)
    for tensor in tensors:
        tensor.zero_()
    for _ in range(2):
        for got, want in zip(copy.on_device(), wanted, strict=True):
            assert got.dtype == want.dtype and torch.equal(got, want)
