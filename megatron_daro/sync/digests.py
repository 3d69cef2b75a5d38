"""Digests of some tensors as they are sent, against which a receiver's checksums are compared."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from megatron_daro.sync.buckets import tensor_bytes
from megatron_daro.sync.plan import Digest, is_hashed


def noted(
    stream: Iterable[tuple[str, Tensor]], received_dtype: str, digests: dict[str, Digest]
) -> Iterator[tuple[str, Tensor]]:
    """Pass the stream through, and put digests of some tensors (`is_hashed`) into `digests`: sha256, as servers on a
    CPU compute it; for tensors on a GPU a sum computed there, read once at the end of the stream."""
    dtype = getattr(torch, received_dtype, None)
    sums: dict[str, tuple[str, Tensor, Tensor]] = {}
    for name, tensor in stream:
        if is_hashed(name):
            text = str(tensor.dtype).removeprefix("torch.")
            cast = isinstance(dtype, torch.dtype) and dtype != tensor.dtype
            digest = device_digest if tensor.device.type == "cuda" else _sha
            sent = digest(tensor)
            received = digest(tensor.to(dtype)) if cast else sent
            if isinstance(sent, Tensor) and isinstance(received, Tensor):
                sums[name] = text, sent, received
            else:
                digests[name] = Digest(text, str(sent), str(received))
        yield name, tensor
    if sums:
        numbers = torch.stack([pair for _, *pairs in sums.values() for pair in pairs]).tolist()
        for (name, (text, *_)), sent_sum, received_sum in zip(sums.items(), numbers[::2], numbers[1::2], strict=True):
            digests[name] = Digest(text, f"{sent_sum % 2**64:016x}", f"{received_sum % 2**64:016x}", on_device=True)


_DIGEST_PART = 2**22


def device_digest(tensor: Tensor) -> Tensor:
    """Return a weighted sum of the tensor's numbers, whose bits are read as integers, modulo 2**64: int64 scalar on the
    tensor's device. Weights are odd and depend on the position, so a change of one number always changes the sum."""
    words = tensor_bytes(tensor).view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.itemsize])
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for start in range(0, len(words), _DIGEST_PART):
        part = words[start : start + _DIGEST_PART].to(torch.int64)
        place = torch.arange(start, start + len(part), device=tensor.device)
        weight = place.mul_(-7046029254386353131).bitwise_xor_(place >> 29).bitwise_or_(1)
        total += part.mul_(weight).sum()
    return total


def _sha(tensor: Tensor) -> str:
    return hashlib.sha256(tensor_bytes(tensor).cpu().numpy().data).hexdigest()[:16]
