"""The steps of a weight update: what is tried again and how often, who is given up, and what a restart forgets."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import numpy as np
import pytest

from megatron_daro.deadlines import Deadlines
from megatron_daro.errors import DeadlineError, LostReceiversError, LostSenderError, SyncError
from megatron_daro.sync import colocation
from megatron_daro.sync.check import ProbeAnswer
from megatron_daro.sync.colocation import Colocation
from megatron_daro.sync.plan import SendFailure, SendPlan, SendReport, Target
from megatron_daro.sync.publish import WeightSync
from megatron_daro.types import MemoryMove, Rollout

MIB = 2**20
PLAN = SendPlan(transport="shards", targets=(Target("server 0"), Target("server 1")), bucket_bytes=1, timeout_s=1.0)
WAVE_R = np.cos(np.arange(16, dtype=np.float32))
GONE = SendFailure("unanswered", "gone")


class Policy:
    """reports: what each export gives, or raises. weights: its log-probs of any text are so many waves."""

    def __init__(self, *reports):
        self.reports, self.weights, self.version = list(reports), 0.0, 0

    @asynccontextmanager
    async def hold(self):
        yield

    async def export(self, plan):
        report = self.reports.pop(0) if self.reports else SendReport()
        if isinstance(report, Exception):
            raise report
        return report

    async def logprobs_of(self, rollouts, *, temperature):
        return [self.weights * WAVE_R for _ in rollouts]


class Engine:
    """Notes the steps of all updates. endings: what each `accept` raises. served: weights that the server answers by,
    None: it is not asked. fresh: whether its process is a new one."""

    fresh = False

    def __init__(self, plans=(), endings=(), served=None):
        self.steps, self.plans, self.endings, self.served = [], list(plans), list(endings), served

    def when_back(self, call):
        self.came_back = call

    def begin_update(self, version, only=None):
        self.steps.append(f"update to {version}")
        return self

    async def prepare(self):
        self.steps.append("prepare")
        return self.plans.pop(0) if self.plans else PLAN

    async def blame(self, report):
        self.steps.append(f"blame {', '.join(report.failures)}")

    async def install(self, report):
        self.steps.append(f"install {report.num_bytes}")

    async def probe(self):
        if self.served is None or any(self.endings[:1]):
            return {}
        answer_R = np.float32(self.served) * WAVE_R
        rollout = Rollout("p", -1, 0, 0, np.zeros(17, np.int32), 1, np.ones(16, np.uint8), answer_R, "length", 0)
        return {"server 0": ProbeAnswer(rollout, rollout, 1.0, "bfloat16", fresh=self.fresh)}

    def reject(self, name, reason):
        self.steps.append(f"reject {name}")

    async def accept(self):
        if self.endings and (error := self.endings.pop(0)):
            raise error
        self.steps.append("accept")
        return {"sync/s": 1.0}

    def abandon(self, error):
        self.steps.append(f"abandon: {error}")


def published(policy, engine):
    return asyncio.run(WeightSync(policy, engine).publish(7))


def failed(*names, **options):
    return SendReport(failures=dict.fromkeys(names, GONE), **options)


def test_all_is_sent_again_after_somebody_was_given_up():
    engine = Engine()
    assert published(Policy(failed("server 1"), SendReport(5)), engine) == {"sync/s": 1.0}
    assert engine.steps == ["update to 7", "prepare", "blame server 1", "prepare", "install 5", "accept"]


def test_after_three_sendings_that_failed_nothing_is_installed():
    """Also where the engine does not say so."""
    engine = Engine()
    with pytest.raises(SyncError, match="no receiver has the weights"):
        published(Policy(*[failed("server 0")] * 4), engine)
    assert engine.steps[:-1] == ["update to 7", *["prepare", "blame server 0"] * 3, "accept"]
    assert engine.steps[-1].startswith("abandon")


def test_an_update_without_receivers_sends_and_installs_nothing():
    engine, policy = Engine(), Policy(SendReport(5))
    engine.prepare = lambda: asyncio.sleep(0, None)
    with pytest.raises(SyncError, match="no receiver has the weights"):
        published(policy, engine)
    assert engine.steps[:2] == ["update to 7", "accept"] and len(policy.reports) == 1


@pytest.mark.parametrize(
    ("names", "steps"),
    [
        (["server 1"], ["prepare", "blame server 1", "install 5"]),
        (["server 0", "server 1"], ["prepare", "blame server 0, server 1", "prepare", "install 0"]),
    ],
)
def test_failures_that_are_apart_cost_the_others_nothing(names, steps):
    engine = Engine()
    published(Policy(failed(*names, num_bytes=5, apart=True)), engine)
    assert engine.steps == ["update to 7", *steps, "accept"]


def test_a_lost_sender_begins_the_update_again_twice():
    lost, engine = LostSenderError("rank 1 died"), Engine()
    published(Policy(lost, lost, SendReport(5)), engine)
    assert engine.steps == ["update to 7", *["prepare"] * 3, "install 5", "accept"]
    engine = Engine()
    with pytest.raises(LostSenderError, match="rank 1 died"):
        published(Policy(lost, lost, lost), engine)
    assert engine.steps == ["update to 7", *["prepare"] * 3, "abandon: rank 1 died"]


def test_lost_receivers_get_an_update_of_their_own_twice():
    lost = LostReceiversError("none left")
    once = ["update to 7", "prepare", "install 0"]
    engine = Engine(endings=[lost, lost])
    assert published(Policy(), engine) == {"sync/s": 1.0}
    assert engine.steps == [*[*once, "abandon: none left"] * 2, *once, "accept"]
    engine = Engine(endings=[lost] * 3)
    with pytest.raises(LostReceiversError):
        published(Policy(), engine)
    assert engine.steps == [*once, "abandon: none left"] * 3
    engine = Engine(endings=[SyncError("refused")])
    with pytest.raises(SyncError, match="refused"):
        published(Policy(), engine)
    assert engine.steps == [*once, "abandon: refused"], "no other error is tried again"


def test_a_receiver_that_kept_its_weights_is_rejected_and_those_that_follow_are_counted():
    engine, policy = Engine(served=0.0), Policy()
    sync = WeightSync(policy, engine)

    async def scenario():
        metrics = [await sync.publish(1)]
        policy.weights = engine.served = 0.5
        metrics.append(await sync.publish(2))
        policy.weights = 0.9
        return [*metrics, await sync.publish(3)]

    assert [metrics["sync/verified"] for metrics in asyncio.run(scenario())] == [0, 1, 0]
    assert [step for step in engine.steps if "reject" in step] == ["reject server 0"]


@pytest.mark.parametrize("fresh", [True, False])
def test_a_receiver_that_comes_back_is_not_compared_with_what_a_process_before_it_was(fresh):
    engine, policy = Engine(served=0.0), Policy()
    sync = WeightSync(policy, engine)

    async def scenario():
        await sync.publish(1)
        policy.weights = engine.served = 0.8
        await sync.publish(2)
        policy.weights = 0.9  # its answer of before, and so near the new one that it may have the new weights
        engine.fresh = fresh
        await engine.came_back("server 0")

    asyncio.run(scenario())
    assert [step for step in engine.steps if "reject" in step] == ([] if fresh else ["reject server 0"])


def test_the_sampled_probe_is_scored_at_its_own_temperature_and_the_given_text_at_one():
    class Scoring(Policy):
        async def logprobs_of(self, rollouts, *, temperature):
            scored.extend((len(one.logprobs), temperature) for one in rollouts)
            return [one.logprobs for one in rollouts]

    class Probed(Engine):
        async def probe(self):
            given, sampled = (
                Rollout("p", -1, 0, 0, np.zeros(n + 1, np.int32), 1, np.ones(n, np.uint8), WAVE_R[:n] - 2, "length", 0)
                for n in (5, 3)
            )
            return {"server 0": ProbeAnswer(given, sampled, 0.7, "float32")}

    scored = []
    published(Scoring(), Probed())
    assert sorted(scored) == [(3, 0.7), (5, 1.0)]


def test_a_receiver_that_fails_again_when_it_comes_back_ends_nothing():
    engine = Engine(endings=[None, SyncError("it died again")])
    policy = Policy()
    sync = WeightSync(policy, engine)

    async def scenario():
        await sync.publish(7)
        policy.version = 9  # it was trained on
        await engine.came_back("server 1")

    asyncio.run(scenario())
    assert engine.steps[4:] == ["update to 9", "prepare", "install 0", "abandon: it died again"]


class Clock:
    """Of a policy and an engine whose moves take so many seconds each."""

    def __init__(self, monkeypatch, left=0, others=0):
        self.now, self.left, self.others, self.warnings = 1000.0, left, others, []
        monkeypatch.setattr(colocation.time, "perf_counter", lambda: self.now)
        self.colocation = Colocation(self, self, Deadlines(), self.warnings.append)

    async def offload(self, kinds):
        self.now += {"weights": 1.0, "gradients": 2.0}[min(kinds, key=("gradients", "weights", "optimizer").index)]
        return MemoryMove(len(kinds) * 1000 * MIB, self.left, 0.0)

    async def onload(self, kinds):
        self.now += 4.0
        return MemoryMove(0, 0, 0.0, self.others)

    async def release_memory(self):
        self.now += 8.0

    def allow_starts(self):
        pass

    async def publish(self, version):
        self.now += 100.0
        return {"sync/s": 100.0}

    async def turn(self):
        await self.colocation.to_policy()
        return await self.colocation.publish(self, 1)


def test_the_metrics_of_turns_are_those_of_the_moves(monkeypatch):
    clock = Clock(monkeypatch, left=3, others=5)
    first = asyncio.run(clock.colocation.publish(clock, 0))
    own = {"timing/to_engine_s": 3.0, "memory/moved_bytes": 3000.0 * MIB, "memory/left_bytes": 3.0, "sync/s": 100.0}
    assert first == own
    assert asyncio.run(clock.turn()) == {**own, "memory/servers_left_bytes": 5.0}


@pytest.mark.parametrize(
    ("hangs", "whose"), [("offload", "policy"), ("release_memory", "engine"), ("onload", "policy")]
)
def test_who_does_not_move_its_memory_in_time_is_named(monkeypatch, hangs, whose):
    clock = Clock(monkeypatch)

    async def for_ever(*kinds):
        await asyncio.Event().wait()

    setattr(clock, hangs, for_ever)
    clock.colocation = Colocation(clock, clock, Deadlines(memory=0.01), clock.warnings.append)

    async def turns():
        await clock.colocation.publish(clock, 0)
        await clock.turn()

    with pytest.raises(DeadlineError, match=f"'memory'.*{whose}"):
        asyncio.run(turns())
