"""What a rank is: its place among them, and what the driver goes by. TrainWorker tells it when the ranks have met."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RankInfo:
    """A rank's part. exports: it takes part in exports; sends: it hands on its stage's. host: address of its node.

    reports: what its tensor and context group computed for a shard comes from this rank, one per data-parallel rank.
    device: "cuda" or "cpu". remarks: what a person should know about how it computes. weights_key: ranks with the same
    one have the same weights.
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
