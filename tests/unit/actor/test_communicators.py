"""NCCL's communicators give their memory back in one order on all ranks. NCCL is faked: it needs GPUs."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from single_rank import GRPO, policy_of, save_random_model
from torch.distributed import distributed_c10d as c10d

from megatron_daro.actor import communicators
from megatron_daro.types import KINDS_OF_MEMORY


class Backend:
    """Of a group: refuses what NCCL refuses."""

    def __init__(self, name, log, kind="nccl", used=True):
        self._name, self._log, self._kind, self._used, self._away = name, log, kind, used, False

    def name(self):
        return self._kind

    def _is_initialized(self):
        return self._used

    def suspend(self):
        assert not self._away and self._kind == "nccl" and self._used
        self._away = True
        self._log.append(("suspend", self._name))

    def resume(self):
        assert self._away
        self._away = False
        self._log.append(("resume", self._name))

    def memory_stats(self):
        return {"suspend": 1000, "suspended": int(self._away), "persist": 7, "total": 1007}


class Group:
    def __init__(self, backend):
        self._get_backend = lambda device: backend


@pytest.fixture
def groups(monkeypatch):
    """Have groups as a rank on a GPU has them; returns what was done, and Megatron's state."""
    log: list[tuple[str, str]] = []
    backends = [
        Backend("world", log),
        Backend("tensor", log),
        Backend("gloo", log, kind="gloo"),
        Backend("never used", log, used=False),
        Backend("pipeline", log),
    ]
    made = [Group(backend) for backend in backends]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 30, 7))
    monkeypatch.setattr(c10d, "_world", SimpleNamespace(pg_map=dict.fromkeys(made)))
    state = SimpleNamespace(get_pipeline_model_parallel_group=lambda: made[-1])
    state.get_virtual_pipeline_model_parallel_world_size = lambda: None
    monkeypatch.setattr(communicators, "parallel_state", state)
    return log, state


@pytest.mark.parametrize("virtual", [None, 2], ids=["in groups", "virtual stages, in pairs"])
def test_communicators_leave_and_come_back_in_the_order_in_which_groups_were_made(groups, virtual):
    log, state = groups
    state.get_virtual_pipeline_model_parallel_world_size = lambda: virtual
    names = ["world", "tensor"] + ["pipeline"] * (virtual is None)
    assert communicators.suspend() == 7 * len(names), "what stays is counted"
    communicators.resume()
    assert log == [("suspend", name) for name in names] + [("resume", name) for name in names]


@pytest.mark.usefixtures("world")
def test_a_policy_gives_them_back_with_its_weights_and_has_them_before_it_computes(tmp_path, monkeypatch):
    done, policy = [], policy_of(save_random_model(tmp_path), GRPO)
    monkeypatch.setattr(communicators, "suspend", lambda: done.append("suspend") or 7)
    monkeypatch.setattr(communicators, "resume", lambda: done.append("resume"))
    assert policy.offload(("gradients", "optimizer")).left > 7 and not done, "the weights are still to be sent"
    assert policy.offload(("weights",)).left == 7 and policy.offload(("weights",)).left == 0
    policy.onload(KINDS_OF_MEMORY)
    policy.onload(KINDS_OF_MEMORY)
    assert done == ["suspend", "resume"]


def test_an_older_nccl_keeps_its_memory(groups, monkeypatch):
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 28, 9))
    assert communicators.suspend() == 0
    communicators.resume()
    assert groups[0] == []
