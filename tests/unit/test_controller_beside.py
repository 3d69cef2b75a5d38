"""Evaluations beside generation: they stop nothing, are of one version, and no line or checkpoint lacks them, but
where a stop ends them, which is said."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent / "rollout"))

from books import check_books
from loop_fakes import FAST, Crash, digest, make_stack, resume_stack, run_stack, with_parts

from megatron_daro.checkpoints import find_latest_valid
from megatron_daro.errors import EngineError, NonFiniteError
from megatron_daro.observe.metrics import comparable, read_metrics
from megatron_daro.rollout.evaluation import Evaluations

EVALUATE = {"eval_every_steps": 2, "save_every_steps": 3}
KEY = "eval/held_out/accuracy"


def evaluated_by(stack, evaluate, beside=True):
    """The loop whose evaluations, beside generation or not, are these."""
    evaluations = Evaluations(evaluate, stack.section, stack.phases, FAST, beside=beside)
    return with_parts(stack, evaluations=evaluations)


def gated(stack, *, of_step, beside=True):
    """The evaluation of this step waits for the gate; the result says which weights it saw, before and after."""
    gate = asyncio.Event()

    async def evaluate(step):
        stack.events.append(("evaluate", step))
        before = stack.engine.weights
        if step == of_step:
            await gate.wait()
        assert stack.engine.weights == before
        stack.events.append(("evaluated", step))
        return {KEY: digest(before) % 100 / 100}

    evaluated_by(stack, evaluate, beside)
    return gate


async def until(condition):
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0)


def test_generation_and_training_go_on_and_the_next_sync_waits(tmp_path):
    stack = make_stack(tmp_path, evaluate_beside=True, trainer=EVALUATE)

    async def go():
        gate = gated(stack, of_step=2)
        run = asyncio.ensure_future(stack.controller.run())
        await until(lambda: ("trained", 3) in stack.events)
        for _ in range(300):
            await asyncio.sleep(0)
        held = list(stack.events)
        lines, shown = [line["step"] for line in read_metrics(tmp_path)], list(stack.progress.steps)
        gate.set()
        await run
        return held, lines, shown

    held, lines, shown = asyncio.run(go())
    began = held.index(("evaluate", 2))
    assert {"generate", "train", "trained"} <= {kind for kind, _ in held[began:]}
    assert ("evaluated", 2) not in held and ("sync", 3) not in held
    assert lines == [0, 1]  # that of step 2 waits for its evaluation
    assert shown == [1, 2]  # what a person sees does not
    assert [line["step"] for line in read_metrics(tmp_path) if KEY in line] == [0, 2, 4, 6]
    check_books(tmp_path)


def test_a_line_waits_for_its_evaluation_and_not_for_the_next_batch(tmp_path):
    stack, more = make_stack(tmp_path, evaluate_beside=True, trainer=EVALUATE), asyncio.Event()
    generate = stack.engine.generate

    async def slow(requests):
        if ("evaluate", 2) in stack.events:
            await more.wait()
        async for rollouts in generate(requests):
            yield rollouts

    async def go():
        gate, stack.engine.generate = gated(stack, of_step=2), slow
        run = asyncio.ensure_future(stack.controller.run())
        await until(lambda: ("evaluate", 2) in stack.events)
        gate.set()
        await until(lambda: read_metrics(tmp_path)[-1]["step"] == 2)
        more.set()
        await run

    asyncio.run(go())


@pytest.mark.parametrize("staleness", [0, 1])
def test_the_numbers_are_those_of_an_evaluation_that_has_the_engine_for_itself(tmp_path, staleness):
    runs = []
    for beside in (False, True):
        stack = make_stack(
            tmp_path / str(beside), evaluate_beside=beside, trainer=EVALUATE, rollout={"max_staleness": staleness}
        )
        assert run_stack(stack).status == "finished"
        lines = [comparable(line) for line in read_metrics(stack.run)]
        for line in lines:  # the books are read while the next batch is being generated
            for key in [key for key in line if key.startswith("rollout/groups_")]:
                del line[key]
        runs.append((lines, stack.policy.weights))
    assert runs[0] == runs[1]


@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_crash_during_an_evaluation_loses_no_line(tmp_path, number):
    unbroken = make_stack(tmp_path / "unbroken", evaluate_beside=True, trainer=EVALUATE)
    run_stack(unbroken)
    run = tmp_path / "broken"
    with pytest.raises(Crash):
        run_stack(make_stack(run, crash=("evaluate", number, "enter"), evaluate_beside=True, trainer=EVALUATE))
    assert resume_stack(make_stack(run, evaluate_beside=True, trainer=EVALUATE)).step == 6
    lines = [[comparable(line) for line in read_metrics(one)] for one in (run, unbroken.run)]
    assert lines[0] == lines[1]


def test_a_checkpoint_has_the_line_of_its_step(tmp_path):
    stack = make_stack(tmp_path, evaluate_beside=True, trainer={"eval_every_steps": 2, "save_every_steps": 2})

    async def go():
        gate = gated(stack, of_step=4)
        run = asyncio.ensure_future(stack.controller.run())
        await until(lambda: ("evaluate", 4) in stack.events)
        await until(lambda: find_latest_valid(tmp_path, stack.progress) is not None)  # threads write checkpoints
        for _ in range(300):
            await asyncio.sleep(0)
        newest = find_latest_valid(tmp_path, stack.progress)
        gate.set()
        await run
        return newest

    newest = asyncio.run(go())
    assert newest is not None and newest[1]["step"] == 2  # step 4 is saved when its evaluation is there


@pytest.mark.parametrize("beside", [True, False])
@pytest.mark.parametrize("at", ["evaluate", "trained"])
def test_a_stop_ends_the_evaluation_or_begins_none_and_writes_the_line_without_it(tmp_path, beside, at):
    stack = make_stack(tmp_path, evaluate_beside=beside, trainer=EVALUATE)

    async def go():
        gated(stack, of_step=2, beside=beside)
        run = asyncio.ensure_future(stack.controller.run())
        await until(lambda: (at, 2) in stack.events)
        stack.controller.request_stop("Ctrl-C")
        return await asyncio.wait_for(run, 20)

    outcome = asyncio.run(go())
    assert outcome.status == "stopped" and ("evaluated", 2) not in stack.events
    assert (("evaluate", 2) in stack.events) == (at == "evaluate")
    assert [text for text in stack.progress.messages if "step 2 is not evaluated" in text]
    assert [line["step"] for line in read_metrics(tmp_path) if KEY in line] == [0]
    assert [line["step"] for line in read_metrics(tmp_path)] == list(range(outcome.step + 1))


def test_an_evaluation_that_fails_ends_the_run(tmp_path):
    stack = make_stack(tmp_path, evaluate_beside=True, trainer=EVALUATE)

    async def evaluate(step):
        if step == 2:
            raise EngineError("all servers are gone")
        return {}

    evaluated_by(stack, evaluate)
    with pytest.raises(EngineError, match="all servers are gone"):
        run_stack(stack)
    assert (stack.engine.closed, stack.policy.closed) == (1, 1)
    assert [line["step"] for line in read_metrics(tmp_path)][:3] == [0, 1, 2]


def test_a_failure_beside_an_evaluation_loses_no_line(tmp_path):
    stack = make_stack(tmp_path, evaluate_beside=True, trainer=EVALUATE)

    async def go():
        gated(stack, of_step=2)
        stack.policy.nonfinite_steps = {3: "raise"}
        await stack.controller.run()

    with pytest.raises(NonFiniteError):
        asyncio.run(go())
    assert [line["step"] for line in read_metrics(tmp_path)] == [0, 1, 2]
