"""The loop of a rehearsal: which node can be lost, times and deadlines at its pace, and what it keeps of each step."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
from rehearsal_settings import NODES, setting_in

from megatron_daro.errors import ConfigError
from megatron_daro.rollout.deadlines import Deadlines
from megatron_daro.runtime.workers import Place
from megatron_daro.workshop.rehearse import loop
from megatron_daro.workshop.rehearse.thin_ranks import Loss, Script


@pytest.mark.parametrize(
    ("loss", "servers", "said"),
    [
        (None, [], None),
        (Loss(1, 2), [], None),
        (Loss(2, 2), [0, 1], None),
        (Loss(3, 2), [1], None),
        (Loss(0, 2, "silent"), [], None),
        (Loss(3, 2, "silent"), [], "--lose-how silent: node 3 has no ranks; fix: --lose-how killed"),
        (Loss(4, 2), [], "--lose-node: got 4; allowed: a node that something is on, 0 to 3; fix: --lose-node 0"),
    ],
)
def test_only_a_node_that_something_is_on_can_be_lost(loss, servers, said):
    place = SimpleNamespace(nodes=NODES)
    if said is None:
        assert loop._require_loss(place, loss) == servers
    else:
        with pytest.raises(ConfigError) as caught:
            loop._require_loss(place, loss)
        assert said in str(caught.value)
    assert (NODES.used, NODES.idle, NODES.ranks_of(0)) == ([0, 1, 2, 3], 1, [0, 1])


def rehearsal(monkeypatch, *, how: str = "", staleness: int = 0):
    one = loop._Rehearsal.__new__(loop._Rehearsal)
    trainer = SimpleNamespace(steps_per_batch=4, updates_per_batch=2)
    one._setting = setting_in(workload=SimpleNamespace(staleness=staleness, generated=100))
    one._loss = Loss(0, 1, how) if how else None  # type: ignore[arg-type]
    one._config = SimpleNamespace(trainer=trainer)  # type: ignore[assignment]
    one.stages = [loop.StagePlan(0, 5, 2, 100, 60), loop.StagePlan(1, 5, 3, 200, 90)]
    monkeypatch.setattr(loop.parts, "deadlines", lambda config: Deadlines())
    return one


def test_thin_ranks_take_their_part_of_the_planned_times(monkeypatch):
    places = [Place(0, 0, True, True, False), Place(0, 0, False, False, False), Place(0, 1, True, True, True)]
    script = rehearsal(monkeypatch)._script(places)
    assert script == Script(
        train_s=0.5, logprobs_s=0.25, send_s=0.5, stages={0: (100, 2), 1: (200, 3)}, answering=frozenset({2}),
        stage_of={0: 0, 2: 1},
    )  # fmt: skip


def test_a_silent_node_shows_within_ten_seconds(monkeypatch):
    usual = rehearsal(monkeypatch)._limits()
    assert usual == loop.paced(Deadlines(), 0.5, 8.5, 100) == rehearsal(monkeypatch, how="killed")._limits()
    assert rehearsal(monkeypatch, how="silent")._limits() == dataclasses.replace(usual, train=10.0)
    assert rehearsal(monkeypatch, staleness=1)._limits() == loop.paced(Deadlines(), 0.5, 5.0, 100)


def test_each_step_knows_what_it_cost(tmp_path, monkeypatch):
    now = [1.0]
    monkeypatch.setattr(loop, "cpu_s", lambda: now[0] / 2)
    monkeypatch.setattr(loop.time, "perf_counter", lambda: now[0])
    with loop.StepMeter(tmp_path, tensorboard=False) as meter:
        assert meter.calls() == 0
        meter.begin()
        meter.calls = lambda: int(10 * now[0])  # type: ignore[method-assign]
        now[0] = 3.0
        meter.write(1, {"a": 1.0})
        now[0] = 4.0
        meter.write(2, {"a": 2.0})
    assert meter.spent == [loop.Spent(1, 1.0, 2.0, 30), loop.Spent(2, 0.5, 1.0, 10)]
    assert meter.lines == [{"a": 1.0}, {"a": 2.0}] and len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2


def test_what_the_run_says_is_kept():
    kept = loop._Notices(total_steps=1, rollouts_per_prompt=1, mode="off")
    kept.said = []
    kept.notice("a")
    kept.warn("b")
    assert kept.said == ["a", "warning: b"]
