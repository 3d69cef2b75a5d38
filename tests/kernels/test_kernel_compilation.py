"""The Triton kernels compile for GPUs that nobody has here, to machine code, within the memory of a program there.

`bash tests/triton_kernels.sh` runs this file.
"""

from __future__ import annotations

import importlib.util
import os

import pytest

if importlib.util.find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("needs Triton, not interpreted: bash tests/triton_kernels.sh", allow_module_level=True)

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from megatron_daro.actor import logprob_kernels as kernels

# Shared memory that a program may have, by compute capability: CUDA C++ Programming Guide, "Technical Specifications
# per Compute Capability", in KiB.
SHARED_KIB = {80: 163, 89: 99, 90: 227, 100: 227}
DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
MATRICES, FP32 = (
    {"hidden", "weight", "gradient"},
    {"statistics", "maximum", "log_sum", "label_gradient", "offset", "slope"},
)


def type_of(name, dtype):
    if name in MATRICES:
        return f"*{DTYPES[dtype]}"
    if name in FP32:
        return "*fp32"
    return "constexpr" if name.isupper() else {"labels": "*i64", "temperature": "fp32"}.get(name, "i32")


def compiled(kernel, dtype, capability, **constants):
    shape = kernels.tile_shape(dtype)
    signature = {name: type_of(name, dtype) for name in kernel.arg_names}
    sizes = {name: value for name, value in kernels._constants(shape).items() if name.isupper()}
    aligned = {"hidden_stride", "weight_stride", "depth"}  # as the launcher finds them for any real model
    attributes = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(kernel.arg_names)
        if signature[name].startswith("*") or name in aligned
    }
    source = ASTSource(kernel, signature, {**sizes, **constants}, attributes)
    options = {"num_warps": shape.warps, "num_stages": shape.stages}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


@pytest.mark.parametrize("capability", sorted(SHARED_KIB))
@pytest.mark.parametrize("dtype", sorted(DTYPES, key=str))
@pytest.mark.parametrize("name", ["statistics", "gradient"])
def test_a_kernel_compiles_and_fits(name, dtype, capability, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    if name == "statistics":
        columns = kernels.tile_shape(dtype).columns_per_part
        code = compiled(kernels._statistics_kernel, dtype, capability, COLUMNS_PER_PART=columns)
    else:
        code = compiled(kernels._gradient_kernel, dtype, capability, WITH_SLOPE=True)
    assert len(code.asm["cubin"]) > 1000
    assert code.metadata.shared <= SHARED_KIB[capability] * 1024
    if dtype.itemsize == 2:  # on tensor cores; fp32 is multiplied exactly, without them
        assert {80: "mma.sync", 89: "mma.sync", 90: "wgmma", 100: "tcgen05"}[capability] in code.asm["ptx"]
