"""What Transformer Engine's optimizer and layers keep, or lack, that a run must add or drop."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from megatron_daro.actor import host_memory
from megatron_daro.actor.compat import allocate_optimizer_state
from megatron_daro.actor.host_memory import HostCopy, HostMemory


class LikeFusedAdam(torch.optim.Optimizer):
    """Moments come with the first step, which is counted in the group: transformer_engine 2.20.2,
    pytorch/optimizers/fused_adam.py: `if "step" in group`, `if len(state) == 0: self.initialize_state(p, ...)`."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})


def test_moments_of_zeros_before_the_first_step_and_nothing_after_it():
    parameters = [torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(2, 2))]
    fused, adam = LikeFusedAdam(parameters[:1]), torch.optim.AdamW(parameters[1:])
    optimizer = SimpleNamespace(
        chained_optimizers=[SimpleNamespace(optimizer=fused), SimpleNamespace(optimizer=adam), SimpleNamespace()]
    )
    allocate_optimizer_state(optimizer)
    assert {name: value.tolist() for name, value in fused.state[parameters[0]].items()} == {
        "exp_avg": [0, 0, 0],
        "exp_avg_sq": [0, 0, 0],
    }
    assert adam.state[parameters[1]].keys() == {"step", "exp_avg", "exp_avg_sq"}
    fused.state[parameters[0]]["exp_avg"] += 1
    allocate_optimizer_state(optimizer)
    assert fused.state[parameters[0]]["exp_avg"].tolist() == [1, 1, 1]


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
