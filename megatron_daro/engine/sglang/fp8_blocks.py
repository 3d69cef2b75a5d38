"""Servers whose matrices are fp8 blocks: how they are started, and whether both ends agree on which matrices these are.

A matrix that only one end treats as blocks would be read as other numbers, so what was sent as blocks is compared with
what a server keeps as blocks, at the first update of each process. sync/fp8_cast.py makes the blocks.
Source: sglang 0.5.23: srt/utils/weight_checker.py: the answer to "checksum" always names quantized matrices, and others
unless they are skipped, so skipping everything leaves the quantized ones; srt/models: which projections are fused.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from megatron_daro.config.precision import FP8_BLOCK
from megatron_daro.families import families

FIRST_SGLANG = (0, 5, 23)
"""The oldest version known to report which of its matrices are blocks."""
MANIFEST_CALL: Mapping[str, Any] = {"action": "checksum", "skip_tensor_list": ["."]}
"""Body of a /weights_checker call whose answer names only the quantized matrices."""
_ROLES = (
    "qkv",
    "attention_output",
    "gate_up",
    "down",
    "expert_gate_up",
    "expert_down",
    "shared_gate_up",
    "shared_down",
)
_SHARED = ".shared_experts."
_FUSED = (
    (re.compile(r"\.experts\.\d+\.(gate_proj|up_proj|w1|w3)\.weight$"), ".experts.w13_weight"),
    (re.compile(r"\.experts\.\d+\.(down_proj|w2)\.weight$"), ".experts.w2_weight"),
    (re.compile(r"\.[qkv]_proj\.weight$"), ".qkv_proj.weight"),
    (re.compile(r"\.(gate|up)_proj\.weight$"), ".gate_up_proj.weight"),
)


def fp8_arguments() -> dict[str, Any]:
    """Return arguments of a server that expects blocks. It starts with random weights: its files have no blocks."""
    blocks = {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "weight_block_size": [FP8_BLOCK, FP8_BLOCK],
    }
    overrides = json.dumps({"quantization_config": blocks})
    return {"quantization": "fp8", "load_format": "dummy", "json_model_override_args": overrides}


def fp8_matrices(model_type: str) -> tuple[str, ...]:
    """Return the names of a family's matrices that are sent as blocks, with `{layer}` and `{expert}` for numbers."""
    tensors = families()[model_type].tensors
    return tuple(name for role in _ROLES for name in tensors.get(role, ()))


def fp8_disagreement(sent: Iterable[str], reported: Iterable[str]) -> str:
    """Return how a server's fp8 matrices differ from those that were sent; empty if they agree.

    Args:
        sent: HF names of the matrices that were sent as blocks. reported: the server's names of those it keeps as
            blocks.
    """
    theirs = set(reported)
    # On some GPUs a server appends shared experts to the routed ones (models/glm4_moe.py, `load_weights`).
    place = _SHARED if any(_SHARED in name for name in theirs) else ".experts.0."
    ours = {_server_name(name.replace(_SHARED, place)) for name in sent}
    if ours == theirs:
        return ""
    unread, unsent = sorted(ours - theirs), sorted(theirs - ours)
    parts = [f"manifest {_manifest(theirs)} of {len(theirs)} matrices, sent was {_manifest(ours)} of {len(ours)}"]
    if unread:
        parts.append(f"it does not keep {len(unread)} of them as blocks, the first: {unread[0]}")
    if unsent:
        parts.append(f"it keeps {len(unsent)} as blocks that are sent otherwise, the first: {unsent[0]}")
    return "fp8 blocks: " + "; ".join(parts)


def _manifest(names: Iterable[str]) -> str:
    """Return a hash of the sorted names and the block's size: the first 12 hex digits of sha256."""
    lines = [*sorted(names), f"e4m3 {FP8_BLOCK}x{FP8_BLOCK}"]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:12]


def _server_name(name: str) -> str:
    for pattern, fused in _FUSED:
        if pattern.search(name):
            return pattern.sub(fused, name)
    return name
