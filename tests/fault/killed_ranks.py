"""`megatron-daro` whose ranks kill themselves at exact places of a step.

Arguments: PLAN FOLDER, then those of megatron-daro. PLAN: `PLACE:RANK:COUNT[:SIGNAL]`, several with commas between. The
rank sends itself the signal (SIGKILL) when it is at PLACE for the COUNT-th time, over all processes of that rank, and
leaves a file PLACE.RANK.COUNT in FOLDER. Places:

    idle          after its part of a step, while answers are generated
    old_logprobs, ref_logprobs    a pass before the step begins
    forward       a step begins
    backward      gradients of the last micro-batch are there
    optimizer     before the weights change
    updated       the weights have changed, and no other rank knows
    snapshot      the snapshot was begun
    copy          the snapshot is whole, and no copy of it was sent
    export        the first weights are about to be sent
    shards        the same, with engine.sglang.sync shards, where every rank sends
    save          its part of a checkpoint is about to be collected
    saved         the same, and its file is being written
    restore       it is about to go back to a snapshot
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import driver_stacks
import ray

from megatron_daro import cli

sys.path.append(str(Path(__file__).resolve().parents[1]))

import own_ranks


def _doomed(plan: str, folder: Path, rank_class: Any) -> Any:
    """The class of a rank with this plan."""
    deaths = {tuple(text.split(":")[:3]): text.split(":")[3:] for text in plan.split(",")}

    def reached(rank: int, place: str) -> None:
        count = folder / f"count.{place}.{rank}"
        number = int(count.read_text()) + 1 if count.exists() else 1
        count.write_text(str(number))
        death = deaths.get((place, str(rank), str(number)))
        if death is not None:
            (folder / f"{place}.{rank}.{number}").touch()
            os.kill(os.getpid(), getattr(signal, death[0] if death else "SIGKILL"))
            time.sleep(60)

    def before(owner: Any, name: str, rank: int, place: str) -> None:
        original = getattr(owner, name)

        def call(*arguments: Any, **options: Any) -> Any:
            reached(rank, place)
            return original(*arguments, **options)

        setattr(owner, name, call)

    class DoomedWorker(rank_class):  # type: ignore[misc]
        def __init__(self, rank: int, log_folder: Path | None = None) -> None:
            super().__init__(rank, log_folder)
            from megatron_daro.actor import step
            from megatron_daro.runtime.snapshot_store import SnapshotStore

            before(step, "run_schedule", rank, "forward")
            before(step, "check_gradients", rank, "backward")
            before(step, "apply_update", rank, "optimizer")
            before(SnapshotStore, "send", rank, "copy")

        @ray.method(concurrency_group="work")
        def train(self, *arguments: Any, **columns: Any) -> Any:
            result = super().train(*arguments, **columns)
            reached(self._rank, "updated")
            return result

        @ray.method(concurrency_group="work")
        def start_snapshot(self, *arguments: Any) -> None:
            super().start_snapshot(*arguments)
            threading.Timer(0.3, reached, (self._rank, "idle")).start()
            reached(self._rank, "snapshot")

        @ray.method(concurrency_group="work")
        def run_pass(self, name: str, *arguments: Any) -> Any:
            reached(self._rank, name)
            return super().run_pass(name, *arguments)

        @ray.method(concurrency_group="work")
        def export(self, *arguments: Any, **options: Any) -> Any:
            reached(self._rank, "export")
            return super().export(*arguments, **options)

        @ray.method(concurrency_group="work")
        def send_shards(self, *arguments: Any) -> Any:
            reached(self._rank, "shards")
            return super().send_shards(*arguments)

        @ray.method(concurrency_group="work")
        def start_save(self, *arguments: Any) -> None:
            reached(self._rank, "save")
            super().start_save(*arguments)
            reached(self._rank, "saved")

        @ray.method(concurrency_group="work")
        def restore(self, *arguments: Any) -> None:
            reached(self._rank, "restore")
            super().restore(*arguments)

    return DoomedWorker


if __name__ == "__main__":
    driver_stacks.install()
    own_ranks.install(partial(_doomed, sys.argv[1], Path(sys.argv[2])))
    sys.exit(cli.main(sys.argv[3:]))
