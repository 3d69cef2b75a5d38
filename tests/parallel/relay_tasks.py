"""What the ranks of tests/parallel/test_relayed_weights.py do."""

from __future__ import annotations

import base64
import pickle
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from megatron_daro.errors import EngineError
from megatron_daro.sync import handles
from megatron_daro.sync.buckets import WeightBucket, bucketize
from megatron_daro.sync.plan import SendPlan, Target

TENSORS = [(f"w{i}", torch.arange(float(7 * i + 3)).to(torch.bfloat16 if i % 3 else torch.float32)) for i in range(12)]


def _as_on_gpu(bucket: WeightBucket) -> Any:
    """A bucket that says it lies on a GPU, as only such ones may be handed out."""
    return SimpleNamespace(data=SimpleNamespace(is_cuda=True, nbytes=bucket.data.nbytes), tensors=bucket.tensors)


def hand_out(layout: Any, *, fails_on: int | None) -> dict[str, Any]:
    """Rank 0 exports and sends; ranks 1 and 2 relay; each has a server. What this rank's server was given.

    Only what CUDA IPC would do is left out: in the place of handles the tensors themselves are posted. fails_on: the
    rank whose server refuses the second bucket.
    """
    rank, given = dist.get_rank(), list[tuple[str, torch.Tensor]]()
    groups = handles.groups_of([(0, 1, 2), (1, 0)])
    assert groups.keys() == ({(0, 1, 2), (1, 0)} if rank < 2 else {(0, 1, 2)})
    plan = SendPlan(transport="tensor", targets=(Target(f"s{rank}"),), bucket_bytes=100, timeout_s=5.0)
    calls = 0

    async def post(url: str, route: str, body: dict[str, Any], timeout_s: float) -> None:
        nonlocal calls
        calls += 1
        if rank == fails_on and calls == 2:
            raise EngineError("no room")
        (tensors,) = body["serialized_named_tensors"]
        given.extend(pickle.loads(base64.b64decode(tensors)))

    original, handles.handles_of = handles.handles_of, pickle.dumps  # type: ignore[assignment]
    try:
        if rank == 0:
            buckets = handles.passed_on(bucketize(TENSORS, plan.bucket_bytes, copy_all=True), groups[(0, 1, 2)])
        else:
            buckets = handles.received(groups[(0, 1, 2)], torch.device("cpu"))
        report = handles.push_buckets(map(_as_on_gpu, buckets), plan, lambda: nullcontext(post))  # type: ignore[arg-type]
    finally:
        handles.handles_of = original
    dist.barrier()  # nobody waits for a bucket that does not come
    equal = len(given) == len(TENSORS) and all(
        name == other and torch.equal(value, wanted)
        for (name, value), (other, wanted) in zip(given, TENSORS, strict=True)
    )
    return {"whole": equal, "failures": sorted(report.failures), "bytes": report.num_bytes}
