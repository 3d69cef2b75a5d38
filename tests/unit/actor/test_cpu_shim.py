"""The redirection to the CPU happens only where there is no GPU. Each test runs in its own process."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest

pytestmark = pytest.mark.slow


def run(code: str) -> str:
    """The output of a fresh interpreter; a redirection stays in there."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_nothing_is_redirected_where_a_gpu_is():
    """A rank has the GPU of its number on its host, whatever is imported, and a redirection by hand is refused."""
    out = run("""
        import importlib, os, pkgutil, torch
        torch.cuda.is_available = lambda: True
        torch.cuda.device_count = lambda: 8
        chosen = []
        torch.cuda.set_device = chosen.append
        os.environ["LOCAL_RANK"] = "11"
        before = (torch.zeros, torch.Tensor.cuda, torch.Tensor.type, torch.cuda.current_device)
        import megatron_daro
        from megatron_daro.actor import cpu, device
        from megatron_daro.errors import ModelError
        hosts = "megatron_daro.plugins."  # need the frameworks that they plug into
        for module in pkgutil.walk_packages(megatron_daro.__path__, "megatron_daro."):
            if not module.name.endswith(("actor.device", "__main__", "logprob_kernels")) and hosts not in module.name:
                importlib.import_module(module.name)
        try:
            cpu.install()
        except ModelError as error:
            print("refused", "actor.cpu" in str(error))
        after = (torch.zeros, torch.Tensor.cuda, torch.Tensor.type, torch.cuda.current_device)
        print(device.current(), set(chosen), before == after)
    """)
    assert out.splitlines() == ["refused True", "cuda:3 {3} True"]
