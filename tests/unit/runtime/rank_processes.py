"""Processes of ranks as objects: calls are answered at once, by processes that die, freeze or have no place as told.

What a process keeps of snapshots is real (SnapshotStore); its policy is the list of steps that it has seen. Used with
the real PolicyGroup and Healing.
"""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace

import numpy as np
import torch
from ray.exceptions import ObjectLostError, RayActorError
from run_configuration import run_context
from test_packing import make_batch

from megatron_daro.actor.double_buffer import KINDS_OF_SNAPSHOT
from megatron_daro.actor.settings import PolicySettings
from megatron_daro.config.actor import ActorSection
from megatron_daro.config.algorithm import AlgorithmSection
from megatron_daro.errors import WorkerError
from megatron_daro.runtime import (
    frozen_workers,
    healing,
    policy_group,
    ranks,
    ray_calls,
    snapshot_store,
    step_shards,
    worker_group,
)
from megatron_daro.runtime.healing import HealingLimits
from megatron_daro.runtime.rank_info import RankInfo
from megatron_daro.runtime.snapshot_store import SnapshotStore
from megatron_daro.types import StepResult

ROOM = 32
MODEL = {"model_type": "qwen2", "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
MODEL |= {"hidden_size": 16, "intermediate_size": 32, "vocab_size": 64}


BATCH = make_batch([(2, 5), (1, 7), (3, 4), (2, 9)], seed=1, old=False)
LIMITS = HealingLimits(1.0, per_hour=100, hung_s=60.0)


def run(work):
    return asyncio.run(asyncio.wait_for(work, 10))


async def steps(policy, first, last):
    return [await policy.train(await policy.prepare(BATCH), step) for step in range(first, last + 1)]


class Rank:
    """A process that was started for a rank. dies_at: the call in which it dies. waits: it answers nothing, for it has
    no place."""

    def __init__(self, world, number):
        self.world, self.rank, self.host = world, number, world.hosts.get(len(world.started), "a")
        self.alive, self.dies_at, self.waits = True, "", False
        self.states, self.seen, self.log = SnapshotStore(), None, []
        self._open, self.queue = [], []
        self.keep_own_twice, self.adopt = self.states.keep_own_twice, self.states.adopt
        for name in ("open_copy", "take_block", "seal_copy", "keep_copies", "describe", "block"):
            setattr(self, name, getattr(self.states, name))

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(type(self), "do_" + name).__get__(self)

    def call(self, name, arguments, options):
        answer = asyncio.get_running_loop().create_future()
        self.world.keeper_of[answer] = self
        self._open = [one for one in self._open if not one.done()] + [answer]
        if self.waits and self.alive:
            self.queue.append((answer, name, arguments, options))
        else:
            self._do(answer, name, arguments, options)
        return answer

    def _do(self, answer, name, arguments, options):
        if name == self.dies_at:
            self.die()
        if answer.done():
            return
        if not self.alive:
            answer.set_exception(RayActorError())
            answer.exception()
        elif name != "sentinel":
            self.log.append(name)
            try:
                answer.set_result(getattr(self, name)(*arguments, **options))
            except Exception as error:
                answer.set_exception(error)
                answer.exception()

    def die(self):
        self.alive = False
        for answer in self._open:
            if not answer.done():
                answer.set_exception(RayActorError())
                answer.exception()

    def do_gpu(self):
        return f"{self.rank}"

    def do_rendezvous(self):
        folder = self.world.folder / f"meeting_{len(self.world.meetings)}"
        folder.mkdir()
        self.world.meetings.append(folder)
        return f"file://{folder}/ranks"

    def do_setup(self, address, settings, actor, algorithm, seed, timeout_s, **options):
        self.actor, self.collective_s = actor, timeout_s
        self.seen = {kind: [99] if options["to_be_restored"] else [0] for kind in KINDS_OF_SNAPSHOT}

    def do_info(self):
        size, replicas = self.actor.tensor_parallel, self.actor.data_parallel
        return RankInfo(
            data_parallel=self.rank // size % replicas,
            stage=self.rank // size // replicas,
            exports=self.rank // size % replicas == 0,
            sends=self.rank % (size * replicas) == 0,
            reports=self.rank % size == 0,
            device=self.world.device,
            host=self.host,
            remarks=("slow attention", f"rank {self.rank}") if self.rank < 2 else ("slow attention",),
            weights_key=(self.rank % size, self.rank // size // replicas),
        )

    def do_train(self, batch, micro_batches, step, **columns):
        if not all(self.world.keeper_of[column].alive for column in columns.values()):
            raise ObjectLostError("ff" * 28, None, "")
        torn = not all(handle.process.alive for handle in self.world.policy.ranks.workers.values())
        for kind in KINDS_OF_SNAPSHOT[:1] if torn else KINDS_OF_SNAPSHOT:
            self.seen[kind].append(step)
        if torn:
            raise WorkerError("connection closed by peer")
        own_s = 9.0 if self.rank in self.world.slow else 1.0
        metrics = {"loss": step / 4} if self.do_info().reports else {}
        return StepResult(metrics, own_s=own_s)

    def do_run_pass(self, name, batch, micro_batches):
        return batch.rollout_logprobs_R if self.do_info().reports else None

    def do_logprobs_of(self, batch, micro_batches, temperature, base):
        column_R = np.array([-i for length in batch.response_lengths_N for i in range(length)], np.float32)
        return column_R / temperature if self.do_info().reports else None

    def do_start_save(self, directory):
        (directory / f"rank_{self.rank}").write_text(json.dumps(self.seen["weights"]))

    def do_finish_save(self):
        if not all(handle.process.alive for handle in self.world.policy.ranks.workers.values()):
            raise WorkerError("connection closed by peer")

    def do_load(self, directory):
        self.seen = {kind: json.loads((directory / f"rank_{self.rank}").read_text()) for kind in KINDS_OF_SNAPSHOT}

    def do_snapshot_bytes(self):
        return dict.fromkeys(KINDS_OF_SNAPSHOT, ROOM), self.world.memory

    def do_start_snapshot(self, serial, keep):
        slot = self.states.own.open(keep)
        for kind in KINDS_OF_SNAPSHOT:
            values = np.zeros(ROOM, np.uint8)
            values[: len(self.seen[kind])] = self.seen[kind]
            slot.blocks[kind] = [torch.from_numpy(values)]
        slot.layout, slot.rest = dict.fromkeys(KINDS_OF_SNAPSHOT, (ROOM,)), {"key": self.do_info().weights_key}
        self.pending = slot

    def do_finish_snapshot(self, serial, keep, peer, kinds):
        if self.world.snapshots_fail:
            raise RuntimeError("the snapshot failed")
        self.pending.serial = serial
        if peer is not None:
            self.states.send(self.rank, serial, keep, peer, kinds)

    def do_snapshots(self):
        return self.states.serials

    def do_abort(self):
        pass

    def do_leave(self):
        self.seen = None

    def do_load_code(self):
        pass

    def do_restore(self, serial):
        slot = self.states.whole(serial)
        assert slot.rest == {"key": self.do_info().weights_key}
        for kind in KINDS_OF_SNAPSHOT:
            (block,) = slot.blocks[kind]
            self.seen[kind] = [0, *(int(step) for step in block if step)]


class Handle:
    def __init__(self, process):
        self.process = process

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return SimpleNamespace(remote=lambda *arguments, **options: self.process.call(name, arguments, options))


class World:
    """A PolicyGroup of such processes, tensor_parallel=2 and data_parallel=2."""

    def __init__(self, monkeypatch, folder, *, limits=None, deadlines=None, has_gpus=False, algorithm=None):
        self.folder, self.started, self.meetings, self.warnings = folder, [], [], []
        self.slow, self.device, self.memory, self.snapshots_fail = (), "cpu", 10**6, False
        self.no_place = set()  # of the processes that are started next
        self.hosts = {}  # of processes, by how many were started before; "a" without
        self.keeper_of = {}  # process of each result: each is a node of its own
        self.actor = ActorSection(tensor_parallel=2, data_parallel=2, micro_batch_tokens=64)
        fake = SimpleNamespace(
            kill=self._kill,
            put=lambda value: value,
            get=lambda answer, timeout: answer.result(),
            is_initialized=lambda: False,
        )
        for module in (healing, snapshot_store, step_shards, ray_calls, worker_group, frozen_workers):
            monkeypatch.setattr(module, "ray", fake)
        made = SimpleNamespace(options=lambda **given: SimpleNamespace(remote=self._start))
        monkeypatch.setattr(ranks, "actor_class", lambda _: made)
        (folder / "config.json").write_text(json.dumps(MODEL))
        placement = SimpleNamespace(
            has_gpus=has_gpus, shares_gpus=False, rank=lambda rank: {}, take_gpus=lambda gpus: None
        )
        self.policy = policy_group.PolicyGroup(
            run_context(
                warn=self.warnings.append, run_dir=folder, deadlines=deadlines, actor=self.actor, trainer={"seed": 5}
            ),
            PolicySettings(folder, 1, 32, 1.0, total_steps=10),
            algorithm or AlgorithmSection(name="grpo"),
            placement,
            healing=limits,
        )

    def _start(self, rank, logs, shares_gpu):
        process = Rank(self, rank)
        process.waits = rank in self.no_place
        self.started.append(process)
        return Handle(process)

    def _kill(self, handle, no_restart):
        assert no_restart
        handle.process.die()

    def process(self, rank):
        """The one that is this rank now."""
        return list(self.policy.ranks.workers.values())[rank].process

    @property
    def seen(self):
        """The steps of each rank, where weights and optimizer have the same."""
        processes = [handle.process for handle in self.policy.ranks.workers.values()]
        assert all(process.seen["weights"] == process.seen["optimizer"] for process in processes)
        return [process.seen["weights"] for process in processes]
