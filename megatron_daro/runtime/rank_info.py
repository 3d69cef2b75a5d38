"""What the driver knows of a rank: its place and its tasks. TrainWorker reports it once the ranks have joined."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RankInfo:
    """A rank's part. exports: whether it takes part in exports; sends: whether it sends what its stage exports. host:
    address of its node.

    reports: whether it returns what its tensor and context group computed for a shard; one rank per data-parallel rank
    does. device: "cuda" or "cpu". remarks: what a person should know about how it computes. weights_key: ranks with
    equal keys have equal weights.
    """

    data_parallel: int
    stage: int
    exports: bool
    sends: bool
    reports: bool
    device: str = "cpu"
    host: str = ""
    remarks: tuple[str, ...] = ()
    weights_key: tuple[int, ...] = ()
