"""Whose turn it is on shared GPUs: the order of the loop's steps, what is saved when, and memory that stays behind."""

from __future__ import annotations

import itertools
import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "rollout"))

from books import check_books
from loop_fakes import FAST, make_stack, run_stack

from megatron_daro.checkpoints import step_directories
from megatron_daro.controller import Controller
from megatron_daro.errors import EngineError
from megatron_daro.observe.metrics import comparable, read_metrics
from megatron_daro.sync.colocation import Colocation
from megatron_daro.types import MemoryMove

MIB = 2**20


class SharedDevice:
    """A policy and an engine of one device: whoever works without its memory there is an error."""

    def __init__(self, stack):
        self.events, self.there = stack.events, {"weights", "gradients", "optimizer"}
        self.engine_has = False
        self.left, self.others = [0], []
        for name, needed in (("prepare", {"weights"}), ("train", {"weights", "gradients", "optimizer"})):
            self._guard(stack.policy, name, needed)
        self._guard(stack.policy, "save", {"weights", "optimizer"})
        self._guard(stack.policy, "export", {"weights"}, alone=False, then=self.engine_takes)
        generate = stack.engine.generate

        async def guarded(requests):
            assert self.engine_has and not self.there, "servers generate alone"
            async for rollouts in generate(requests):
                yield rollouts

        stack.engine.generate = guarded

    def _guard(self, policy, name, needed, alone=True, then=lambda: None):
        method = getattr(policy, name)

        async def guarded(*arguments):
            assert needed <= self.there, f"{name}: {self.there}"
            assert not (alone and self.engine_has), f"{name} while servers have the device"
            assert alone or self.there == needed, f"{name}: only {needed} may be there, not {self.there}"
            then()
            return await method(*arguments)

        setattr(policy, name, guarded)

    def engine_takes(self):
        self.engine_has = True

    async def offload(self, kinds):
        moved = self.there & set(kinds)
        self.there -= moved
        self.events.append(("offload", tuple(sorted(moved))))
        left = self.left.pop(0) if len(self.left) > 1 and not self.there else self.left[0]
        return MemoryMove(len(moved) * MIB, left, 0.0)

    async def onload(self, kinds):
        assert not self.engine_has
        self.there |= set(kinds)
        self.events.append(("come back", tuple(sorted(kinds))))
        return MemoryMove(len(kinds) * MIB, 0, 0.0, self.others.pop(0) if self.others else 0)

    async def release_memory(self):
        self.engine_has = False
        self.events.append(("release",))

    def allow_starts(self):
        assert not self.there, "a server that starts looks at what is free"
        self.events.append(("allow starts",))


def in_turns(run, **options):
    """A loop over fakes that share a device."""
    stack = make_stack(run, **options)
    device = SharedDevice(stack)
    colocation = Colocation(device, device, FAST, stack.progress.warn)
    stack.controller = Controller(stack.section, replace(stack.parts, gpus=colocation), batches_ahead=0)
    return stack, device


def once(names):
    """Names that follow themselves, once: a batch takes several rounds."""
    return [name for name, _ in itertools.groupby(names)]


def test_a_step_in_turns(tmp_path):
    stack, _ = in_turns(tmp_path, trainer={"steps": 2, "save_every_steps": 1, "eval_every_steps": 2})
    assert run_stack(stack).status == "finished"
    seen = [event[0] for event in stack.events]
    share = ["offload", "sync", "offload", "allow starts"]
    assert once([name for name in seen if name not in ("generated", "abort")]) == [
        *(*share, "evaluate"),  # the weights that training starts from
        *("generate", "release", "come back", "prepare", "train", "trained", *share),
        *("generate", "release", "come back", "save", "prepare", "train", "trained", *share, "evaluate"),
        *("release", "come back", "save"),
    ]
    assert [path.name for path in step_directories(tmp_path / "checkpoints")] == ["step_000002", "step_000001"]


@pytest.mark.parametrize("updates", [1, 2])
def test_a_run_in_turns_writes_what_any_other_writes(tmp_path, updates):
    trainer = {"minibatches_per_batch": updates, "eval_every_steps": 3}
    stack, _ = in_turns(tmp_path / "turns", trainer=trainer)
    run_stack(stack)
    run_stack(make_stack(tmp_path / "apart", trainer=trainer))
    check_books(tmp_path / "turns")
    lines = {}
    for name in ("turns", "apart"):
        lines[name] = [comparable(line) for line in read_metrics(tmp_path / name)]
    for line in lines["turns"]:
        if line["step"]:
            assert line.pop("memory/left_bytes", 0) == line.pop("memory/servers_left_bytes", 0) == 0
            line.pop("memory/moved_bytes", None)
    assert lines["turns"] == lines["apart"]
    assert [p.name for p in step_directories(tmp_path / "turns" / "checkpoints")] == [
        p.name for p in step_directories(tmp_path / "apart" / "checkpoints")
    ]


def test_a_stop_while_servers_generate_still_saves(tmp_path):
    stack, device = in_turns(tmp_path, trainer={"save_every_steps": 0})
    allow_starts, turns = device.allow_starts, itertools.count()

    def stopping():
        allow_starts()
        if next(turns) == 2:  # the weights that training starts from are version 0
            stack.controller.request_stop("asked")

    device.allow_starts = stopping
    assert run_stack(stack).status == "stopped"
    assert [path.name for path in step_directories(tmp_path / "checkpoints")] == ["step_000002"]
    assert ("save", 2) in stack.events


def test_a_run_ends_where_servers_do_not_give_way(tmp_path):
    stack, device = in_turns(tmp_path)

    async def gone():
        raise EngineError("all 1 SGLang servers are gone")

    device.release_memory = gone
    with pytest.raises(EngineError, match="all 1 SGLang servers are gone"):
        run_stack(stack)
    assert ("train", 1) not in stack.events


def test_memory_that_stays_is_told_with_the_number(tmp_path):
    stack, device = in_turns(tmp_path, trainer={"steps": 3})
    device.left = [1 * MIB, 20 * MIB, 90 * MIB, 91 * MIB]  # the first: before anything was trained
    run_stack(stack)
    (warning,) = [text for text in stack.progress.messages if "colocate" in text]
    assert "90 MiB" in warning and "20 MiB" in warning
    assert [line["memory/left_bytes"] for line in read_metrics(tmp_path)] == [20 * MIB, 90 * MIB, 91 * MIB]


def test_what_servers_keep_is_told_where_it_grows(tmp_path):
    stack, device = in_turns(tmp_path, trainer={"steps": 3})
    device.others = [9000 * MIB, 9100 * MIB, 9600 * MIB, 9700 * MIB]
    run_stack(stack)
    (warning,) = [text for text in stack.progress.messages if "colocate" in text]
    assert "9,600 MiB" in warning
    assert [line["memory/servers_left_bytes"] / MIB for line in read_metrics(tmp_path)] == [9000, 9100, 9600]
