"""A rank's file of a checkpoint while training wants its tensors back: what is copied, waited for, and written."""

from __future__ import annotations

import hashlib
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from safetensors.torch import load_file

from megatron_daro import durable
from megatron_daro.actor import shard_file
from megatron_daro.actor.shard_file import OwnBox, ShardFile

ROWS, NUMBER = 100, 6
BOX_BYTES = 4 * ROWS
TIMEOUT_S = 20


class Gate:
    """Lets boxes through one by one."""

    def __init__(self) -> None:
        self.open = threading.Semaphore(0)
        self.waiting = threading.Semaphore(0)

    def pass_(self) -> None:
        self.waiting.release()
        assert self.open.acquire(timeout=TIMEOUT_S)

    def let(self, number: int) -> None:
        for _ in range(number):
            self.open.release()

    def reached(self, number: int) -> None:
        for _ in range(number):
            assert self.waiting.acquire(timeout=TIMEOUT_S)


@pytest.fixture
def gate(monkeypatch):
    """Every box waits at the gate before it is written, when it was already read."""
    made, real = Gate(), shard_file.FileWriter.write

    def write(self, values):
        made.pass_()
        real(self, values)

    monkeypatch.setattr(shard_file.FileWriter, "write", write)
    return made


def file_of(path, number=NUMBER):
    tensors = [torch.full((ROWS,), float(n)) for n in range(number)]
    boxes = [(str(n), OwnBox(str(n), t, (0,), (ROWS,), (ROWS,))) for n, t in enumerate(tensors)]
    return tensors, ShardFile(path, boxes)


def train_on(tensors):
    for tensor in tensors:
        tensor.fill_(-1.0)


def check(path, number=NUMBER):
    stored = load_file(path)
    assert {name: set(values.tolist()) for name, values in stored.items()} == {
        str(n): {float(n)} for n in range(number)
    }
    assert durable.take_hashes(path.parent) == {path: hashlib.sha256(path.read_bytes()).hexdigest()}


@pytest.mark.parametrize(("boxes", "begun"), [(2, 1), (0, 1), (NUMBER, NUMBER)])
def test_what_the_budget_holds_is_copied_from_the_end_and_the_rest_is_waited_for(tmp_path, gate, boxes, begun):
    """`begun` boxes were begun when the tensors are wanted back, and none is finished but those before the last."""
    tensors, file = file_of(tmp_path / "shard")
    with ThreadPoolExecutor(2) as pool:
        written = pool.submit(file.write)
        gate.let(begun - 1)
        gate.reached(begun)
        released = pool.submit(file.release, boxes * BOX_BYTES + BOX_BYTES - 1)
        copied = min(boxes, NUMBER - begun)
        to_wait_for = NUMBER - copied - begun  # of those that nobody has begun
        for _ in range(to_wait_for):
            assert not released.done()
            gate.let(1)
            gate.reached(1)
        with pytest.raises(TimeoutError):
            released.result(timeout=0.05)
        gate.let(1)
        assert released.result(timeout=TIMEOUT_S) == copied * BOX_BYTES
        train_on(tensors)
        gate.let(NUMBER)
        written.result(timeout=TIMEOUT_S)
    check(tmp_path / "shard")


def test_training_goes_on_while_the_system_writes_to_the_disk(tmp_path, monkeypatch):
    synced, real = threading.Event(), shard_file.FileWriter.__exit__

    def leave(self, *error):
        assert synced.wait(TIMEOUT_S)
        real(self, *error)

    monkeypatch.setattr(shard_file.FileWriter, "__exit__", leave)
    tensors, file = file_of(tmp_path / "shard")
    with ThreadPoolExecutor(1) as pool:
        written = pool.submit(file.write)
        assert file.release(0) == 0
        train_on(tensors)
        assert not written.done()
        synced.set()
        written.result(timeout=TIMEOUT_S)
    check(tmp_path / "shard")


@pytest.mark.parametrize("budget", [0, NUMBER * BOX_BYTES])
def test_a_disk_that_refuses_does_not_hold_training_up(tmp_path, gate, monkeypatch, budget):
    _, file = file_of(tmp_path / "shard")

    def refuse(*_):
        gate.pass_()
        raise OSError(28, "the disk is full")

    monkeypatch.setattr(shard_file.FileWriter, "write", refuse)
    with ThreadPoolExecutor(2) as pool:
        written = pool.submit(file.write)
        gate.reached(1)
        released = pool.submit(file.release, budget)
        gate.let(1)
        released.result(timeout=TIMEOUT_S)
        with pytest.raises(OSError, match="full"):
            written.result(timeout=TIMEOUT_S)
    assert file.release(budget) == 0
