"""Workers of nodes that are lost, hang or cannot start: who is called instead, how often each starts, what is said.

Ray is faked: an actor is an object whose calls are futures.
"""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
from ray.exceptions import NodeDiedError, OutOfMemoryError, RayActorError, RayTaskError

from megatron_daro.config.sections import RewardSection
from megatron_daro.engine.sglang.generation import LostWorkerError, Question
from megatron_daro.errors import DeadlineError, RewardError, WorkerError
from megatron_daro.rollout.deadlines import Deadlines
from megatron_daro.runtime import node_workers, sglang_group
from megatron_daro.runtime.node_workers import MAX_RESTARTS, NodeWorkers, Verdicts, alive_nodes, shares
from megatron_daro.runtime.sglang_group import AnswerWorkers
from megatron_daro.runtime.supervisor import WorkerDiedError

OWN, A, B, GONE = (digit * 56 for digit in "cabd")
"""Ids of nodes."""


class Actor:
    """calls: futures of each method, in order; `ready` is answered at once if not said otherwise."""

    def __init__(self, options=None, number=0, starts="at once"):
        self.options, self.number, self.calls, self.starts = options, number, {}, starts

    def __getattr__(self, method):
        if method.startswith("__"):
            raise AttributeError(method)

        def remote(*arguments):
            answer = asyncio.get_running_loop().create_future()
            self.calls.setdefault(method, []).append((answer, arguments))
            if method == "ready" and self.starts != "never":
                answer.set_result("ready") if self.starts == "at once" else answer.set_exception(self.starts)
            return answer

        return SimpleNamespace(remote=remote)

    def answer(self, method, result, which=-1):
        answer, _ = self.calls[method][which]
        answer.set_exception(result) if isinstance(result, BaseException) else answer.set_result(result)


class Cluster:
    def __init__(self):
        self.alive, self.killed, self.cancelled, self.made, self.warnings = [B, OWN, A], [], [], [], []
        self.starts = "at once"
        self.is_initialized = lambda: False

    def get_runtime_context(self):
        return SimpleNamespace(get_node_id=lambda: OWN)

    def nodes(self):
        return [{"NodeID": node, "Alive": node in self.alive} for node in (B, OWN, GONE, A)]

    def kill(self, handle, no_restart):
        assert no_restart
        self.killed.append(handle)
        for answer, _ in (call for calls in handle.calls.values() for call in calls):
            if not answer.done():
                answer.set_exception(RayActorError())
                answer.exception()

    def cancel(self, reference):
        self.cancelled.append(reference)

    def make(self, options, number):
        self.made.append(Actor(options, number, self.starts))
        return self.made[-1]


@pytest.fixture
def ray(monkeypatch):
    cluster = Cluster()
    for module in (node_workers, sglang_group):
        monkeypatch.setattr(module, "ray", cluster)
    monkeypatch.setattr(node_workers, "_PAUSE_S", 0.0)
    return cluster


@pytest.fixture
def workers(ray):
    return NodeWorkers("worker", ray.make, warn=ray.warnings.append, deadlines=Deadlines(workers_start=0.05))


async def turns(count=20):
    for _ in range(count):
        await asyncio.sleep(0)


def run(work):
    return asyncio.run(asyncio.wait_for(work, 20))


async def failing(task):
    try:
        return await task
    except Exception as error:
        return error


def test_nodes_that_are_alive_come_with_the_own_one_first(ray):
    assert alive_nodes() == [OWN, A, B]


def test_each_node_has_its_worker_and_the_least_busy_one_is_called(ray, workers):
    async def scenario():
        await workers.start([OWN, A])
        assert [(one.number, one.options["num_cpus"]) for one in ray.made] == [(0, 0), (1, 0)]
        strategies = [one.options["scheduling_strategy"] for one in ray.made]
        assert [(one.node_id, one.soft) for one in strategies] == [(OWN, False), (A, False)]
        calls = [asyncio.ensure_future(workers.call("work", i, "x")) for i in range(3)]
        await turns()
        assert [[arguments for _, arguments in one.calls["work"]] for one in ray.made] == [
            [(0, "x"), (2, "x")],
            [(1, "x")],
        ]
        ray.made[0].answer("work", "first", 0)
        ray.made[0].answer("work", "third", 1)
        await turns()
        calls += [asyncio.ensure_future(workers.call("work", i)) for i in (3, 4)]
        await turns()
        assert len(ray.made[0].calls["work"]) == 4, "it has nothing to do, the other one call"
        ray.made[1].answer("work", "second")
        assert [await call for call in calls[:3]] == ["first", "second", "third"]
        workers.close()
        workers.close()
        assert ray.killed == ray.made

    run(scenario())


@pytest.mark.parametrize("death", [RayActorError(), OutOfMemoryError("killed"), NodeDiedError("gone")])
def test_a_worker_that_is_lost_is_started_again_once_and_its_callers_are_told(ray, workers, death):
    async def scenario():
        await workers.start([A])
        calls = [asyncio.ensure_future(failing(workers.call("work", i))) for i in range(2)]
        await turns()
        for which in range(2):
            ray.made[0].answer("work", death, which)
        errors = [await call for call in calls]
        assert all(type(error) is WorkerDiedError and str(error).startswith("worker 0 died: ") for error in errors)
        waiting = asyncio.ensure_future(workers.call("work", 2))
        await turns()
        assert ray.killed == ray.made[:1] and len(ray.made) == 2 and workers.restarts == 1
        assert ray.warnings == [f"{errors[0]}. It is started again (1 of {MAX_RESTARTS} times)"]
        assert "--resume" not in ray.warnings[0]  # the run goes on
        ray.made[1].answer("work", "done")
        assert await waiting == "done" and ray.made[1].options["scheduling_strategy"].node_id == A

    run(scenario())


def test_where_its_node_is_gone_a_worker_goes_to_another(ray, workers):
    async def scenario():
        await workers.start([OWN, A, B])
        ray.alive = [OWN, B]
        call = asyncio.ensure_future(failing(workers.call("work")))
        await turns()
        ray.made[0].answer("work", "done")
        lost = workers._slots[1]
        workers._lost(lost, lost.handle, "it is gone")
        await turns()
        assert ray.made[3].number == 1 and ray.made[3].options["scheduling_strategy"].node_id == B
        assert await call == "done"

    run(scenario())


def test_a_worker_that_gives_no_result_in_time_is_ended_and_started_again(ray, workers):
    async def scenario():
        await workers.start([A])
        with pytest.raises(WorkerDiedError, match=r"^worker 0: deadline 'work': no result within 0.01 s$"):
            await workers.call("work", timeout_s=0.01)
        await turns()
        assert ray.killed == ray.made[:1] and workers.restarts == 1
        assert ray.warnings[0].startswith("deadline 'work': no result within 0.01 s. It is started again (1 of")

    run(scenario())


def test_what_a_worker_raises_is_the_callers_error_and_no_loss(ray, workers):
    async def scenario():
        await workers.start([A])
        for error, raised in ((RewardError("no verdict"), RewardError), (ValueError("x"), WorkerError)):
            call = asyncio.ensure_future(failing(workers.call("work")))
            await turns()
            ray.made[0].answer("work", RayTaskError("work", "traceback", error))
            assert type(await call) is raised
        call = asyncio.ensure_future(workers.call("work"))
        await turns()
        call.cancel()
        await asyncio.wait([call])
        assert call.cancelled() and ray.cancelled == [ray.made[0].calls["work"][-1][0]]
        assert ray.killed == [] and workers.restarts == 0 and workers._slots[0].under_way == 0

    run(scenario())


def test_a_worker_that_never_starts_again_is_left_out_after_so_many_times(ray, workers, monkeypatch):
    pauses, sleep = [], asyncio.sleep
    monkeypatch.setattr(node_workers, "_PAUSE_S", 0.1)

    async def no_sleep(seconds):
        if seconds:
            pauses.append(seconds)
        await sleep(0)

    monkeypatch.setattr(asyncio, "sleep", no_sleep)

    async def scenario():
        await workers.start([A, OWN])
        ray.starts = RayTaskError("ready", "traceback", ValueError("no tokenizer"))
        listener = []
        workers.listen("ended", listener.append)
        workers._lost(workers._slots[0], ray.made[0], "it is gone")
        while len(workers._slots) == 2:
            await sleep(0)
        assert workers.restarts == MAX_RESTARTS and len(ray.killed) == MAX_RESTARTS + 1
        assert pauses == [*(0.1 * 2**n for n in range(7)), *[10.0] * (MAX_RESTARTS - 7)]
        assert ray.warnings[1] == (
            f"worker 0 failed: ValueError: no tokenizer. It is started again (2 of {MAX_RESTARTS} times)"
        )
        assert ray.warnings[-1] == (
            f"worker 0 is not started again: it was {MAX_RESTARTS} times. The last time: worker 0 failed: ValueError: "
            "no tokenizer"
        )
        call = asyncio.ensure_future(workers.call("work"))
        await turns()
        ray.made[1].answer("work", "of the other")
        assert await call == "of the other"
        waiting = asyncio.ensure_future(failing(workers.call("work")))
        await turns()
        ray.made[1].answer("work", RayActorError())
        assert type(await waiting) is WorkerDiedError
        with pytest.raises(WorkerError, match=r"^no worker is left: all are lost$"):
            await workers.call("work")
        await turns()
        assert all(task.done() for task in workers._listening)

    run(scenario())


def test_a_start_that_takes_too_long_counts_as_one_that_failed(ray, workers):
    async def scenario():
        await workers.start([A])
        ray.starts = "never"
        workers._lost(workers._slots[0], ray.made[0], "it is gone")
        while len(ray.made) < 3:
            await asyncio.sleep(0.01)
        assert ray.warnings[1].startswith("deadline 'workers_start' (worker 0): not done after 0.05 s")
        ray.made[2].starts = "at once"
        workers.close()
        await turns()
        assert ray.killed == ray.made and workers._starts == set()
        workers._lost(SimpleNamespace(handle=None), None, "after the end")
        assert workers._starts == set()

    run(scenario())


def test_a_worker_that_cannot_start_at_all_is_said_with_their_number(ray, workers):
    ray.starts = "never"

    async def scenario():
        with pytest.raises(DeadlineError, match=r"'workers_start' \(2 x worker\)"):
            await workers.start([A, B])

    run(scenario())


@pytest.mark.parametrize("close", [True, False])
def test_without_workers_a_call_says_why_there_are_none(ray, workers, close):
    if close:
        workers.restarts = 1
        workers.close()
    with pytest.raises(WorkerError, match=r"^no worker is left: they were not started, or are closed$"):
        run(workers.call("work"))
    assert run(workers.each("counters")) == {}


def test_all_that_are_there_are_asked_by_name(ray, workers):
    async def scenario():
        await workers.start([A, B])
        workers._slots[0].handle = None
        asked = asyncio.ensure_future(workers.each("counters"))
        await turns()
        ray.made[1].answer("counters", 5)
        return await asked

    assert run(scenario()) == {"worker 1": 5}


def test_who_listens_is_told_again_and_again_also_by_the_one_that_was_started_again(ray, workers):
    heard = []

    async def scenario():
        await workers.start([A])
        workers.listen("ended", heard.append)
        await turns()
        for number in range(2):
            ray.made[0].answer("ended", number)
            await turns()
        ray.made[0].answer("ended", RayActorError())
        await turns(60)
        assert workers.restarts == 1
        ray.made[1].answer("ended", 2)
        await turns()
        assert heard == [0, 1, 2] and len(ray.made[1].calls["ended"]) == 2
        workers.close()
        await turns()
        assert all(task.cancelled() for task in workers._listening)

    run(scenario())


def test_answer_workers_are_dealt_out_in_turn_and_a_lost_one_loses_no_group(ray, monkeypatch):
    monkeypatch.setattr(
        sglang_group,
        "actor_class",
        lambda _: SimpleNamespace(
            options=lambda **given: SimpleNamespace(remote=lambda number, *rest: ray.make((given, rest), number))
        ),
    )
    many, ended = {}, []

    async def scenario(count):
        ray.made.clear()
        answers = AnswerWorkers(
            count, "model", True, logs="logs", experts="experts", warn=ray.warnings.append, deadlines=Deadlines()
        )
        answers.when_ended(ended.extend)
        await answers.start()
        await answers.start()
        many[count] = [one.options[0]["scheduling_strategy"].node_id for one in ray.made]
        assert {one.options[1] for one in ray.made} == {("model", True, "logs", "experts")}
        await turns()
        ray.made[0].answer("ended", [1, 2])
        question = Question.__new__(Question)
        object.__setattr__(question, "timeout_s", 5.0)
        given = []
        call, answers.workers.call = answers.workers.call, lambda *a, **k: given.append((a, k)) or call(*a, **k)
        asked = asyncio.ensure_future(answers.ask(question))
        await turns()
        ray.made[0].answer("ask", ("rollout",))
        assert await asked == ("rollout",) and given == [(("ask", question), {"timeout_s": 65.0})]
        lost = asyncio.ensure_future(failing(answers.ask(question)))
        await turns()
        ray.made[0].answer("ask", RayActorError())
        assert type(await lost) is LostWorkerError
        await turns()
        assert answers.restarts == 1
        await answers.close()
        await answers.close()

    run(scenario(4))
    run(scenario(None))
    assert many == {4: [OWN, A, B, OWN], None: [OWN, A, B]} and ended == [1, 2, 1, 2]


def verdicts(ray, monkeypatch, **options):
    monkeypatch.setattr(
        node_workers,
        "actor_class",
        lambda _: SimpleNamespace(
            options=lambda **given: SimpleNamespace(remote=lambda number, *rest: ray.make((given, rest), number))
        ),
    )
    options = {"beside_driver": False, "logs": "logs", **options}
    return Verdicts(RewardSection(workers=5), warn=ray.warnings.append, deadlines=Deadlines(), **options)


@pytest.mark.parametrize("beside_driver", [True, False])
def test_verifiers_are_dealt_out_to_the_nodes_and_a_lost_pools_answers_go_to_another(ray, monkeypatch, beside_driver):
    async def scenario():
        one = verdicts(ray, monkeypatch, beside_driver=beside_driver)
        await one.start()
        await one.start()
        assert one.pool is None and [actor.options[1][1:] for actor in ray.made] == [
            (2, "logs"),
            (2, "logs"),
            (1, "logs"),
        ]
        scored = asyncio.ensure_future(one.score_async([("answer", "gold", "problem"), ("b", "c", "d")]))
        await turns()
        assert ray.made[0].calls["score"][0][1] == (("answer", "gold", "problem"), ("b", "c", "d"))
        ray.made[0].answer("score", RayActorError())
        await turns()
        ray.made[1].answer("score", (["right", "wrong"], 4711, 2))
        assert await scored == ["right", "wrong"] and one.failed_starts == 2
        closing = asyncio.ensure_future(one.close())
        await turns()
        assert not closing.done()
        for actor in ray.made[1:]:
            actor.answer("stop", RayActorError() if actor is ray.made[1] else None)
        await closing
        assert ray.killed == [ray.made[0], ray.made[3], *ray.made[1:3]] or set(ray.killed) == set(ray.made)
        await one.close()

    run(scenario())


def test_verifiers_that_do_not_stop_in_time_end_with_their_actors(ray, monkeypatch):
    monkeypatch.setattr(node_workers, "_STOP_S", 0.01)

    async def scenario():
        one = verdicts(ray, monkeypatch)
        await one.start()
        await one.close()

    run(scenario())
    assert ray.killed == ray.made and len(ray.made) == 3


@pytest.mark.parametrize(("beside_driver", "beside"), [(True, True), (False, False)])
def test_on_one_machine_the_pool_belongs_to_the_driver_if_it_may(ray, monkeypatch, beside_driver, beside):
    ray.alive = [OWN]
    done = []
    pool = SimpleNamespace(start=lambda: done.append("start"), close=lambda: done.append("close"), failed_starts=3)
    monkeypatch.setattr(node_workers.RewardPool, "from_section", lambda section: pool)

    async def scored(pairs):
        return [f"of {pairs}"]

    pool.score_async = scored

    async def scenario():
        one = verdicts(ray, monkeypatch, beside_driver=beside_driver)
        await one.start()
        await one.start()
        assert (one.pool is pool) == beside and len(ray.made) == (0 if beside else 1)
        if beside:
            assert one.failed_starts == 3 and await one.score_async("pairs") == ["of pairs"]
            await one.close()
            assert done == ["start", "close"]
        else:
            one.workers.close()

    run(scenario())


@pytest.mark.parametrize(
    ("workers", "nodes", "each"),
    [(7, 3, [3, 2, 2]), (6, 3, [2, 2, 2]), (2, 3, [1, 1, 1]), (4, 1, [4]), (8, 3, [3, 3, 2])],
)
def test_every_node_has_a_verifier_and_the_first_have_the_rest(workers, nodes, each):
    assert shares(workers, nodes) == each


def plain(remote):
    """The class as it is written, of one that Ray made an actor of."""
    return remote.__ray_metadata__.modified_class


def test_an_answer_worker_tells_answers_that_end_at_about_the_same_time_together(ray, monkeypatch):
    monkeypatch.setattr(node_workers, "_TOGETHER_S", 0.001)

    async def scenario():
        worker = plain(node_workers.AnswerWorker)(0, "path", False, None)
        with pytest.raises(AssertionError, match="ask follows ready"):
            await worker.ask(None)
        told = asyncio.ensure_future(worker.ended())
        await turns()
        assert not told.done()
        worker._take_ended([1])
        worker._take_ended([2, 3])
        assert await told == [1, 2, 3]
        again = asyncio.ensure_future(worker.ended())
        await asyncio.sleep(0.01)
        assert not again.done()
        worker._take_ended([4])
        assert await again == [4]

    run(scenario())


def test_a_verdict_worker_has_as_many_verifiers_as_it_is_told(ray):
    async def scenario():
        worker = plain(node_workers.VerdictWorker)(0, RewardSection(workers=7), 2, None)
        done, pool = [], worker._pool
        assert pool.counters == await worker.counters()
        worker._pool = SimpleNamespace(
            start=lambda: done.append("start"), close=lambda: done.append("close"), failed_starts=4, size=pool
        )

        async def scored(pairs):
            return [pair[0] for pair in pairs]

        worker._pool.score_async = scored
        assert await worker.ready() == (OWN, node_workers.os.getpid())
        verdicts, process, failed = await worker.score(("a", "b", "c"), ("d", "e", "f"))
        assert (verdicts, process, failed) == (["a", "d"], node_workers.os.getpid(), 4)
        await worker.stop()
        assert done == ["start", "close"]
        return pool

    assert run(scenario())._workers == 2
