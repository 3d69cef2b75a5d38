"""SGLang's Python on a GPU without its compiled kernels: what a server of tests/gpu/gpu_runs.py imports there, as far
as a CPU shows it: torch says that a GPU is there, and nothing computes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from sglang_pool import required_environment

STAND_INS = Path(__file__).resolve().parents[2] / "tools" / "sglang_cpu" / "stand_ins"
ON_A_GPU = """
import importlib.machinery, sys
from types import SimpleNamespace
import torch
import sglang_cpu_start  # torchvision's operators
gpu = SimpleNamespace(major=9, minor=0, total_memory=2**37, multi_processor_count=132, name="a GPU", gcnArchName="")
torch.version.cuda = "13.0"
torch.cuda.is_available, torch.cuda.device_count, torch.cuda.current_device = lambda: True, lambda: 1, lambda: 0
torch.cuda.get_device_capability, torch.cuda.get_device_name = lambda *a: (9, 0), lambda *a: gpu.name
torch.cuda.get_device_properties = lambda *a: gpu
from sglang.srt.utils import is_cuda
assert is_cuda()
import sglang.srt.entrypoints.http_server, sglang.srt.managers.scheduler, sglang.srt.models.qwen3
import sglang.srt.layers.attention.triton_backend as triton_backend, sgl_kernel
from sglang.kernels.fused_op import get_fused_op_backend
print(sgl_kernel.__file__, get_fused_op_backend(), triton_backend.is_arch_support_pdl())
"""


sys.path.append(str(Path(__file__).resolve().parents[1] / "gpu"))

from gpu_runs import WITHOUT_KERNELS  # noqa: E402  (found through the line above)


def test_a_server_on_a_gpu_is_imported_without_compiled_kernels():
    environment = {**os.environ, **WITHOUT_KERNELS["env"], "SGLANG_USE_CPU_ENGINE": "0", "PYTHONPATH": str(STAND_INS)}
    done = subprocess.run(
        [required_environment() / "bin" / "python", "-W", "ignore", "-c", ON_A_GPU],
        env=environment, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.stdout.split()[-3:] == [
        str(STAND_INS / "sgl_kernel" / "__init__.py"),
        "KernelBackend.TORCH",
        "False",
    ], done.stderr[-2000:]
