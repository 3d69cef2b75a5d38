"""Which processes are the ranks when some have no place, and which of the others are there again."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
from ray.exceptions import RayActorError

from megatron_daro.config.actor import ActorSection
from megatron_daro.convert.daro_format import StoredShard, read_index
from megatron_daro.runtime import replicas
from megatron_daro.runtime.kept_states import Source
from megatron_daro.runtime.replicas import Aside, ReplicaPlan, name_of, number_of
from megatron_daro.runtime.workers import Place


def plan(**layout):
    """Ranks in Megatron's order: TP fastest, then CP, DP, PP."""
    actor = ActorSection(**layout)
    replica = actor.tensor_parallel * actor.context_parallel
    places = [
        Place(rank // replica % actor.data_parallel, 0, exports=False, sends=False, answers=False)
        for rank in range(actor.world_size)
    ]
    return ReplicaPlan(actor, [name_of(rank) for rank in range(actor.world_size)], places)


@pytest.mark.parametrize(
    ("layout", "gone", "left"),
    [
        ({"data_parallel": 3}, [1], [0, 2]),
        ({"data_parallel": 3}, [0, 2], [1]),
        ({"data_parallel": 2}, [0, 1], []),
        ({"tensor_parallel": 2, "data_parallel": 3}, [3], [0, 1, 4, 5]),
        # Both stages of a replica: ranks 0, 1 and 4, 5 are stage 0 and 1 of the first.
        ({"tensor_parallel": 2, "pipeline_parallel": 2, "data_parallel": 2}, [5], [2, 3, 6, 7]),
        ({"context_parallel": 2, "data_parallel": 2}, [0], [2, 3]),
        # Experts lie on two ranks of a stage, so that three replicas cannot train.
        ({"data_parallel": 4, "expert_parallel": 2}, [1], [0, 2]),
        ({"data_parallel": 2, "expert_parallel": 2}, [1], []),
    ],
)
def test_whole_replicas_go_on_in_their_order(layout, gone, left):
    found = plan(**layout)
    names = found.names([name_of(rank) for rank in gone])
    assert [number_of(name) for name in names] == left
    size = found._actor.world_size // found.most
    assert found.replicas(names) == len(left) // size


def test_processes_are_back_when_they_answer_and_started_again_when_they_died(monkeypatch):
    """One has no place until later, one is idle all the time, one dies."""
    killed, calls = [], {}
    monkeypatch.setattr(replicas.ray, "kill", lambda worker, no_restart: killed.append(worker.number))

    def process(number):
        def kept():
            calls[number] = asyncio.get_running_loop().create_future()
            return calls[number]

        return SimpleNamespace(number=number, kept=SimpleNamespace(remote=kept))

    async def check():
        aside = Aside(lambda number: process(number + 10))
        aside.workers = {name_of(number): process(number) for number in range(3)}
        late = asyncio.get_running_loop().create_future()
        aside.wait_for(name_of(0), late)
        assert aside.back() == set() and set(calls) == {1, 2}
        calls[1].set_result("kept")
        calls[2].set_exception(RayActorError())
        assert aside.back() == {name_of(1)} and killed == [2]
        assert aside.workers[name_of(2)].number == 12
        late.set_result("kept")
        calls[1].set_result("kept")
        assert aside.back() == {name_of(0), name_of(1)}
        calls[12].set_result("kept")
        assert name_of(2) in aside.back()
        aside.close()
        assert not aside.workers and sorted(killed) == [0, 1, 2, 12]

    asyncio.run(check())


def test_who_waits_for_a_place_anew_is_not_asked_for_the_one_before(monkeypatch):
    killed = []
    monkeypatch.setattr(replicas.ray, "kill", lambda worker, no_restart: killed.append((worker, no_restart)))

    async def check():
        aside, (first, second) = Aside(None), (asyncio.get_running_loop().create_future() for _ in range(2))
        aside.wait_for("actor rank 1", first)
        aside.wait_for("actor rank 1", second)
        assert first.cancelled() and not second.done()
        aside.workers = {"actor rank 1": "worker"}
        aside.close()
        assert second.cancelled() and killed == [("worker", True)] and aside.workers == {}

    asyncio.run(check())


def test_the_state_that_moves_is_written_where_it_is_and_listed_for_each_model(tmp_path):
    """Rank 1 is lost: rank 2 has its copy and takes the weights of rank 0."""
    asked = {}

    class Writer:
        def __init__(self, number):
            self.write_snapshot = SimpleNamespace(remote=self._write)
            self.number = number

        async def _write(self, serial, rank, sources, directory):
            asked[rank] = self.number, serial, [(source.worker, source.owner) for source in sources]
            for folder in (directory, directory / "critic"):
                folder.mkdir(parents=True, exist_ok=True)
            return {
                name: [StoredShard(f"{name} {rank}", f"f{rank}", "0", (0,), (1,), (1,))] for name in (".", "critic")
            }

    async def check():
        first, lost, holder = (Writer(number) for number in range(3))
        (tmp_path / "moved" / "snapshot_3").mkdir(parents=True)
        moved = replicas.MovedState(tmp_path / "moved")
        sources = [Source(first, None, ("weights",), rest=False), Source(holder, 1, ("optimizer",), rest=True)]
        await moved.write(7, {"a": first, "b": lost, "c": holder}, {1: sources})
        assert asked == {0: (0, 7, []), 1: (2, 7, [(first, None), (None, 1)]), 2: (2, 7, [])}
        assert moved.directory == tmp_path / "moved" / "snapshot_7"
        assert not (tmp_path / "moved" / "snapshot_3").exists(), "of another run, or older"
        for name in (".", "critic"):
            assert [shard.key for shard in read_index(moved.directory / name)] == [
                f"{name} {rank}" for rank in range(3)
            ]
        moved.clear()
        moved.clear()
        assert moved.directory is None and not (tmp_path / "moved").exists()
        replicas.MovedState(None).clear()

    asyncio.run(check())
