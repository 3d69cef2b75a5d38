"""Which processes are the ranks when some have no place, and which of the others are there again."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
from ray.exceptions import RayActorError

from megatron_daro.config.actor import ActorSection
from megatron_daro.runtime import replicas
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
