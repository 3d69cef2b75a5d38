"""The Ray actor of one rank of the Megatron policy: a thin shell that ranks.py starts; actor/ and sync/ do the work."""

from __future__ import annotations

import dataclasses
import gc
import ipaddress
import os
import tempfile
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import numpy as np
import psutil
import ray
from ray.actor import ActorHandle

from megatron_daro import garbage
from megatron_daro.actor.double_buffer import Layout
from megatron_daro.actor.settings import PolicySettings
from megatron_daro.config.actor import ActorSection
from megatron_daro.config.algorithm import AlgorithmSection
from megatron_daro.config.nccl_environment import nccl_of_rank
from megatron_daro.engine.sglang.client import connect_to_servers
from megatron_daro.errors import WorkerError
from megatron_daro.observe import logs
from megatron_daro.ports import Reservation, in_address, reserve_port
from megatron_daro.runtime.rank_info import RankInfo
from megatron_daro.runtime.ray_calls import remote_class
from megatron_daro.runtime.ray_sender import RaySender
from megatron_daro.runtime.shard_export import ShardExport
from megatron_daro.runtime.snapshot_store import Description, SnapshotSerials, SnapshotStore, Source
from megatron_daro.sync.plan import Exported, SendPlan, SendReport, WeightFiles
from megatron_daro.sync.shard_sender import Offer
from megatron_daro.types import MemoryKind, MemoryMove, Sequences, StepBatch, StepResult

if TYPE_CHECKING:
    from torch import Tensor

    from megatron_daro.actor.host_memory import HostCopy
    from megatron_daro.actor.parallel import Address
    from megatron_daro.sync.senders import Senders

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")
# Methods of the "work" group run one after the other on one thread; "watch" stays free for the sentinel,
# "save" waits for a checkpoint beside the work, "snapshot" sends one to another rank, "copies" takes and gives blocks
# of snapshots at other ranks' calls, "recover" answers whatever the other threads do.
_GROUPS = {"work": 1, "watch": 1, "save": 1, "snapshot": 1, "copies": 1, "recover": 1}


def _in_thread(group: str) -> Callable[[Callable[_Arguments, _Result]], Callable[_Arguments, _Result]]:
    """Run a method in the thread of its group, independently of other groups, and log its unexpected errors.

    The group is set on the undecorated method: Ray looks for it there, beneath all decorators, and if it is missing
    silently runs all methods in one thread. Source: ray 2.60.0, actor.py, _ActorClassMethodMetadata.create,
    `inspect.unwrap`.
    """

    def decorated(method: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
        ray.method(concurrency_group=group)(method)
        return logs.failures_logged(method)

    return decorated


def meeting_place(address: str, folder: Callable[[], Path]) -> tuple[str, Reservation | None]:
    """Return the URL at which torch has the ranks meet: a file below `folder` if the address is loopback, else a port
    at the address, which is reserved until the reservation is closed."""
    if ipaddress.ip_address(address).is_loopback:
        return f"file://{tempfile.mkdtemp(prefix='megatron_daro_', dir=folder())}/ranks", None
    reserved = reserve_port(address)
    return f"tcp://{in_address(address)}:{reserved.port}", reserved


def _session_folder() -> Path:
    """Return the folder of Ray's session on this node."""
    context = ray.get_runtime_context()
    return Path(context.get_temp_dir(), context.get_session_name())


@remote_class(concurrency_groups=_GROUPS, max_restarts=0, max_task_retries=0)
class TrainWorker:
    """One rank of the policy. `setup` must be called on all ranks at once."""

    def __init__(self, rank: int, log_folder: Path | None = None, shares_gpu: bool = False) -> None:
        logs.take_over(log_folder, f"actor rank {rank}")
        os.environ.update(nccl_of_rank(os.environ, shares_gpu=shares_gpu))
        self._rank = rank
        self._policy: Any = None
        self._remarks: tuple[str, ...] = ()
        self._senders: Senders | None = None
        self._shard_export: ShardExport | None = None
        self._reserved: Reservation | None = None
        self._relays: dict[tuple[int, ...], Any] = {}
        self._states = SnapshotStore()
        self._snapshot: tuple[int, Any] | None = None  # number, and its PendingSnapshot
        self._reference: HostCopy | None = None
        self._heals = False
        # Where process groups listen: this rank's, and all ranks'.
        self._addresses: frozenset[Address] = frozenset()
        self._all_addresses: frozenset[Address] = frozenset()

    @_in_thread("watch")
    def sentinel(self) -> None:
        """Block for as long as the process lives."""
        threading.Event().wait()

    @_in_thread("work")
    def gpu(self) -> str:
        """Return which GPU of its node Ray gave to this rank; empty if none."""
        return ",".join(str(gpu) for gpu in ray.get_runtime_context().get_accelerator_ids().get("GPU", ()))

    @_in_thread("work")
    def rendezvous(self) -> str:
        """Return where the ranks can meet: a file if this node's address is loopback, else this address and a free
        port.

        Not a port on loopback: torch's rendezvous server listens on every interface.
        """
        place, self._reserved = meeting_place(ray.util.get_node_ip_address(), _session_folder)
        return place

    @_in_thread("work")
    def setup(
        self,
        init_method: str,
        settings: PolicySettings,
        actor: ActorSection,
        algorithm: AlgorithmSection,
        seed: int,
        timeout_s: float,
        *,
        heals: bool = False,
        to_be_restored: bool = False,
    ) -> None:
        """Join the process group and build the policy. Collective. heals: the process must outlive its groups.
        to_be_restored: `restore` comes next."""
        self._actor = actor
        if heals:
            # Else torch ends the process when a peer is gone; here, `abort` ends the calls that wait. Source: torch
            # 2.13, ProcessGroupNCCL.hpp, ErrorHandlingMode.
            os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
        if init_method.startswith("file:"):
            os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        with garbage.paused():
            from megatron_daro.actor import parallel
            from megatron_daro.actor.policy import MegatronPolicy
            from megatron_daro.actor.translation import layout_of

        self._remarks = parallel.configure_process(expandable_segments=settings.expandable_segments)
        before = parallel.listening()
        parallel.initialize(layout_of(actor), rank=self._rank, init_method=init_method, seed=seed, timeout_s=timeout_s)
        self._heals = heals
        self._note_addresses(before)
        if self._reserved is not None:
            self._reserved.close()  # torch listens on it
        self._policy = MegatronPolicy(
            settings, actor, algorithm, to_be_restored=to_be_restored, reference=self._reference
        )
        self._reference = self._policy.reference
        gc.freeze()  # else a collection scans all modules, while the other ranks of a collective call wait

    @_in_thread("work")
    def info(self) -> RankInfo:
        """Return this rank's part."""
        from megatron_daro.actor import device, parallel
        from megatron_daro.actor.weights import exports_weights, sends_for_stage

        return RankInfo(
            data_parallel=parallel.data_parallel_rank(),
            stage=parallel.pipeline_parallel_rank(),
            exports=exports_weights(),
            sends=sends_for_stage(),
            reports=parallel.reports_for_shard(),
            device=device.current().type,
            host=ray.util.get_node_ip_address(),
            remarks=(*self._remarks, *self._policy.remarks),
            weights_key=parallel.weights_key(),
        )

    @_in_thread("work")
    def train(self, batch: StepBatch, micro_batches: Sequence[Sequence[int]], step: int, **columns: Any) -> StepResult:
        """Do one optimizer step on this rank's shard. Collective; only ranks that report return metrics.

        columns: those of the shard that were computed after it was sent; they replace those of `batch`.
        """
        result = self._policy.train_step(dataclasses.replace(batch, **columns), micro_batches, step=step)
        return result if self._reports() else dataclasses.replace(result, metrics={})

    @_in_thread("work")
    def run_pass(
        self,
        name: str,
        batch: Sequences,
        micro_batches: Sequence[Sequence[int]],
    ) -> np.ndarray | None:
        """Return float32 [R], the shard's column `name` of `AlgorithmSection.passes`; None if another rank reports
        it."""
        column_R = self._policy.run_pass(name, batch, micro_batches)
        return column_R if self._reports() else None

    @_in_thread("work")
    def logprobs_of(
        self, batch: Sequences, micro_batches: Sequence[Sequence[int]], temperature: float, base: bool
    ) -> np.ndarray | None:
        """Return float32 [R] log-probs of the shard under the current weights, of logits divided by `temperature`; None
        if another rank reports them. base: without adapters."""
        column_R = self._policy.logprobs(batch, micro_batches, temperature=temperature, base=base)
        return column_R if self._reports() else None

    def _reports(self) -> bool:
        from megatron_daro.actor import parallel

        return parallel.reports_for_shard()

    @_in_thread("work")
    def join_relays(self, members: Sequence[tuple[int, ...]]) -> None:
        """Make the groups in which buckets go to ranks of other hosts. Collective over all ranks."""
        from megatron_daro.actor import parallel
        from megatron_daro.sync.handles import groups_of

        before = parallel.listening()
        self._relays |= groups_of(members)
        self._note_addresses(before)

    def _note_addresses(self, before: frozenset[Address]) -> None:
        """Note where the groups made since `before` listen, for `abort`; do nothing if ranks do not heal. Collective
        over all ranks."""
        from megatron_daro.actor import parallel

        if self._heals:
            self._addresses |= parallel.listening() - before
            self._all_addresses = parallel.gathered_addresses(self._addresses)

    @_in_thread("work")
    def relay(self, plan: SendPlan, members: tuple[int, ...]) -> SendReport:
        """Pass the buckets that another rank exports on to this host's servers. Args: members: ranks of a group that
        `join_relays` made."""
        from megatron_daro.actor import device
        from megatron_daro.sync.handles import push_buckets, received

        return push_buckets(received(self._relays[members], device.current()), plan, connect_to_servers)

    @_in_thread("work")
    def export(
        self, plan: SendPlan | None, members: tuple[int, ...] = (), what: Exported = "policy"
    ) -> SendReport | None:
        """Send weights as the plan says. Collective over the exporting ranks of the stages that take part; only ranks
        with a plan send and report. Args: members: ranks of a group that `join_relays` made; the others get every
        bucket."""
        from megatron_daro.actor import device
        from megatron_daro.sync.senders import Senders

        if plan is None:
            for _ in self._exported(what):  # takes part in the gathers of the rank that sends
                pass
            return None
        if self._senders is None:
            backend = "nccl" if device.current().type == "cuda" else "gloo"
            self._senders = Senders(ray.util.get_node_ip_address(), backend, connect_to_servers, RaySender())
        return self._senders.send(self._exported(what), plan, group=self._relays.get(members))

    @_in_thread("work")
    def write(self, files: WeightFiles) -> SendReport:
        """Write this stage's part of a checkpoint; the other exporting ranks take part in the gathers, by `export`
        without a plan."""
        from megatron_daro.actor import parallel
        from megatron_daro.sync.files import write_weight_files

        return write_weight_files(self._exported(files.what), files, f"stage{parallel.pipeline_parallel_rank()}")

    def _exported(self, what: Exported) -> Iterator[tuple[str, Tensor]]:
        name = {"policy": "export", "critic": "export_critic", "adapter": "export_adapter"}[what]
        return getattr(self._policy, name)()

    @_in_thread("work")
    def offer_shards(self, plan: SendPlan) -> Offer:
        """Begin to listen for the servers' ranks that need weights of this rank. Not collective."""
        if self._shard_export is None:
            host = ray.util.get_node_ip_address()
            self._shard_export = ShardExport(self._policy, self._actor, self._rank, host, connect_to_servers)
        return self._shard_export.offer(plan)

    @_in_thread("work")
    def send_shards(self, plan: SendPlan, offers: Sequence[Offer]) -> SendReport:
        """Send the weights that this rank offered. Args: offers: those of all ranks, on the rank that calls the
        servers; else empty."""
        from megatron_daro.actor.weights import sends_for_stage

        assert self._shard_export is not None, "offer_shards comes first"
        return self._shard_export.send(plan, offers, digests=sends_for_stage())

    @_in_thread("work")
    def move(self, kinds: Sequence[MemoryKind], away: bool) -> MemoryMove:
        """Move this rank's memory to the host, or back."""
        return self._policy.offload(kinds) if away else self._policy.onload(kinds)

    @_in_thread("work")
    def start_save(self, directory: Path) -> None:
        """Begin to write the checkpoint. Collective."""
        self._policy.start_save(directory)

    @_in_thread("save")
    def finish_save(self) -> None:
        """Wait until this rank's part is on the disk."""
        self._policy.finish_save()

    @_in_thread("work")
    def load(self, directory: Path) -> None:
        """Read a checkpoint. Collective."""
        self._policy.load(directory)

    @_in_thread("work")
    def snapshot_bytes(self) -> tuple[dict[MemoryKind, int], int]:
        """Return the bytes of a snapshot by kind, and the free bytes of this node's memory."""
        return self._policy.snapshot_bytes, psutil.virtual_memory().available

    @_in_thread("work")
    def keep_own_twice(self, twice: bool) -> None:
        """See `SnapshotStore.keep_own_twice`."""
        self._states.keep_own_twice(twice)

    @_in_thread("work")
    def start_snapshot(self, serial: int, keep: int | None) -> None:
        """Begin snapshot `serial`, without overwriting snapshot `keep` if this process keeps two."""
        self._snapshot = serial, self._policy.start_snapshot(self._states.own.open(keep), serial)

    @_in_thread("snapshot")
    def finish_snapshot(
        self, serial: int, keep: int | None, peer: ActorHandle | None, kinds: Sequence[MemoryKind]
    ) -> None:
        """Wait until snapshot `serial` is whole, here and in the process of `peer`, if there is one. Args: kinds: of
        memory, that the peer gets."""
        number, pending = self._snapshot or (None, None)
        if pending is None or number != serial:
            raise WorkerError(f"snapshot {serial} was given up; the newest is {number}")
        pending.wait()
        if peer is not None:
            self._states.send(self._rank, serial, keep, peer, kinds)

    @_in_thread("copies")
    def open_copy(self, rank: int, serial: int, keep: int | None) -> None:
        """See `SnapshotStore.open_copy`."""
        self._states.open_copy(rank, serial, keep)

    @_in_thread("copies")
    def take_block(self, rank: int, serial: int, kind: MemoryKind, number: int, block: np.ndarray) -> None:
        """See `SnapshotStore.take_block`."""
        self._states.take_block(rank, serial, kind, number, block)

    @_in_thread("copies")
    def seal_copy(self, rank: int, serial: int, layout: Layout, rest: dict[str, Any]) -> None:
        """See `SnapshotStore.seal_copy`."""
        self._states.seal_copy(rank, serial, layout, rest)

    @_in_thread("copies")
    def keep_copies(self, ranks: Collection[int]) -> None:
        """See `SnapshotStore.keep_copies`."""
        self._states.keep_copies(ranks)

    @_in_thread("copies")
    def describe(self, owner: int | None, serial: int) -> Description:
        """See `SnapshotStore.describe`."""
        return self._states.describe(owner, serial)

    @_in_thread("copies")
    def block(self, owner: int | None, serial: int, kind: MemoryKind, number: int) -> np.ndarray:
        """See `SnapshotStore.block`."""
        return self._states.block(owner, serial, kind, number)

    @_in_thread("recover")
    def snapshots(self) -> SnapshotSerials:
        """Return which snapshots this process has, whatever else it is doing."""
        return self._states.serials

    @_in_thread("recover")
    def abort(self) -> None:
        """End the collective calls that wait in this process with an error. Called on every living rank."""
        from megatron_daro.actor import parallel

        if (shards := self._shard_export) is not None:
            shards.close()
        parallel.abort(self._addresses, self._all_addresses)

    @_in_thread("work")
    def leave(self) -> None:
        """Leave the process groups, and release the policy; `setup` comes next. Not collective."""
        from megatron_daro.actor import parallel
        from megatron_daro.actor.compat import forget_rotary_tables

        if self._policy is not None:
            self._policy.end_background_work()
        if self._senders is not None:
            self._senders.close()
        if self._shard_export is not None:
            self._shard_export.close()
        self._policy, self._relays, self._snapshot, self._shard_export = None, {}, None, None
        self._addresses = self._all_addresses = frozenset()
        parallel.shutdown()
        forget_rotary_tables()
        gc.unfreeze()
        gc.collect()  # remains of the policy hold process groups and GPU memory

    @_in_thread("work")
    def load_code(self) -> None:
        """Import what `setup` needs beforehand: it takes seconds, during which other ranks would wait."""
        with garbage.paused():
            from megatron_daro.actor import parallel, policy  # noqa: F401

    @_in_thread("work")
    def adopt(self, serial: int, sources: Sequence[Source]) -> None:
        """Get a snapshot of this rank from the processes that have it."""
        self._states.adopt(serial, sources)

    @_in_thread("work")
    def restore(self, serial: int) -> None:
        """Restore the policy from a snapshot."""
        self._policy.restore(self._states.whole(serial))
