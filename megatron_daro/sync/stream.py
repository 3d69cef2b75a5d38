"""Buckets that came to this process as a WeightSource: for engines that are handed a stream instead of the policy.

Place in the data flow: Engine.update_weights(buckets) -> StreamSource -> the same transports as the policy's own ranks.
It has no forward pass, so it cannot score; it refuses streams that lack a tensor, which servers would not notice.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
from torch import Tensor

from megatron_daro.config.model_shape import read_model_shape
from megatron_daro.convert.hf_reader import HFCheckpoint
from megatron_daro.errors import SyncError
from megatron_daro.sync.broadcast import BroadcastSender
from megatron_daro.sync.buckets import unbucket
from megatron_daro.sync.disk import write_checkpoint
from megatron_daro.sync.source import BroadcastPlan, Post, SendReport
from megatron_daro.types import Rollout, WeightBucket

# Written into some checkpoints, computed anew by every reader.
_NO_WEIGHTS = ("rotary_emb.inv_freq",)


class StreamSource:
    """Weights as buckets in memory."""

    def __init__(self, buckets: Sequence[WeightBucket], version: int, *, post: Post, model_path: Path) -> None:
        """Args: buckets: all tensors. post: calls a server. model_path: the checkpoint that servers were started with.

        Raises:
            SyncError: a tensor of that checkpoint is in no bucket. ModelError: the checkpoint cannot be read.
        """
        _check_complete(buckets, model_path)
        self._buckets, self.version = buckets, version
        self._post, self._model_path = post, model_path

    @asynccontextmanager
    async def hold(self) -> AsyncIterator[None]:
        """Nothing changes these."""
        yield

    async def broadcast(self, plan: BroadcastPlan) -> SendReport:
        """Sends from this process, over gloo."""
        sender = BroadcastSender("127.0.0.1", "gloo", self._post)
        try:
            return await asyncio.to_thread(sender.send, self._tensors(), plan)
        finally:
            await asyncio.to_thread(sender.close)

    async def write(self, directory: Path, shard_bytes: int) -> SendReport:
        """Writes the tensors as a checkpoint."""
        return await asyncio.to_thread(write_checkpoint, directory, [self._tensors()], self._model_path, shard_bytes)

    async def push(self, plan: BroadcastPlan) -> SendReport:
        """These buckets lie in host memory."""
        raise SyncError("engine.sglang.sync: got tensor for weights in host memory; allowed: distributed or disk")

    async def score(self, rollouts: Sequence[Rollout]) -> list[np.ndarray] | None:
        """It cannot."""
        return None

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        for bucket in self._buckets:
            yield from unbucket(bucket)


def _check_complete(buckets: Sequence[WeightBucket], model_path: Path) -> None:
    with HFCheckpoint(model_path) as checkpoint:
        wanted = {name for name in checkpoint.names() if not name.endswith(_NO_WEIGHTS)}
    if read_model_shape(model_path).tie:
        wanted -= {"lm_head.weight"}
    missing = sorted(wanted - {entry[0] for bucket in buckets for entry in bucket.entries})
    if missing:
        raise SyncError(
            f"weight update: {len(missing)} of {len(wanted)} tensors of {model_path} never came, the first: "
            f"{missing[0]}; allowed: all of them in every update"
        )
