"""Handles of GPU memory, as SGLang's own code reads them: it needs no GPU to find out which one is meant."""

from __future__ import annotations

import base64
import subprocess

import pytest
import torch
from sglang_pool import required_environment
from torch.multiprocessing import reductions

from megatron_daro.sync.handles import handles_of

pytestmark = pytest.mark.slow

# In a server's interpreter: two GPUs, of which the second is the sender's, and torch's rebuilding made visible.
RECEIVER = """
import sys
from types import SimpleNamespace
import torch
from torch.multiprocessing import reductions
from sglang.srt.utils.common import MultiprocessingSerializer
from sglang.srt.utils.patch_torch import monkey_patch_torch_reductions
monkey_patch_torch_reductions()
torch.cuda.device_count = lambda: 2
torch.cuda.get_device_properties = lambda device: SimpleNamespace(uuid=["own", "senders"][device])
reductions._rebuild_cuda_tensor_original = lambda *arguments: arguments
for name, arguments in MultiprocessingSerializer.deserialize(sys.stdin.read()):
    print(name, tuple(arguments[1]), arguments[5], arguments[6])
"""


def test_a_server_finds_the_senders_gpu_among_its_own(monkeypatch):
    python = required_environment() / "bin" / "python"

    def handle(value):
        kinds = (torch.Tensor, value.size(), value.stride(), 0, torch.storage.TypedStorage, value.dtype)
        return reductions.rebuild_cuda_tensor, (*kinds, 0, b"handle", value.nbytes, 0, False, b"1", 0, b"event", False)

    monkeypatch.setattr(reductions, "reduce_tensor", handle)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: type("Gpu", (), {"uuid": "senders"}))
    handles = handles_of([("norm.weight", torch.zeros(3, 2, dtype=torch.bfloat16))])
    done = subprocess.run(
        [python, "-c", RECEIVER], input=base64.b64encode(handles).decode(), capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[-2] == "norm.weight (3, 2) torch.bfloat16 1"
