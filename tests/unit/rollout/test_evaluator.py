"""An evaluation during training: what it asks, what it does with answers that fail, when it is due."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
from loop_fakes import NEVER, FakePhases, make_rollout

from megatron_daro.config import EvalSet
from megatron_daro.config.sections import TrainerSection
from megatron_daro.data.stops import Stops
from megatron_daro.data.templates import HeldOut
from megatron_daro.deadlines import Deadlines
from megatron_daro.errors import DeadlineError
from megatron_daro.observe.step_lines import StepLines
from megatron_daro.rollout.evaluation import Evaluations, Evaluator
from megatron_daro.types import Prompt, Verdict


class Answers:
    """A rollouter. aborts: (group, index) -> attempts at which it fails."""

    def __init__(self, aborts=None, version=0) -> None:
        self.aborts, self.version, self.calls, self.scored = aborts or {}, version, [], []

    async def generate(self, requests):
        self.calls.append(list(requests))
        for r in reversed(requests):
            await asyncio.sleep(0)
            yield tuple(self.answer(r, i) for i in reversed(r.indices))

    def answer(self, request, index):
        attempt = sum(request.group_id in [r.group_id for r in call] for call in self.calls) - 1
        failed = attempt in self.aborts.get((request.group_id, index), ())
        one = make_rollout(request.group_id, request.attempt, index, request.prompt, self.version)
        return replace(one, text=request.prompt.answer, finish_reason="abort" if failed else "stop")

    async def score(self, rollouts):
        self.scored += rollouts
        return [Verdict(prompt.answer == "right", 0.0, "") for _, prompt in rollouts]


def held_out(name="d", golds=("right", "wrong"), categories=("", ""), **section) -> HeldOut:
    prompts = [
        Prompt(str(i), gold, "s", text="?", tokens=(3,), category=kind)
        for i, (gold, kind) in enumerate(zip(golds, categories, strict=True))
    ]
    return HeldOut(EvalSet(name=name, path=Path("x"), **section), tuple(prompts))


def evaluated(rollouter, *sets, step=0, **options):
    said = []
    evaluator = Evaluator(
        sets, rollouter, max_response_tokens=8, stops=Stops((1, 2), ("END",), (8, 4)), warn=said.append, **options
    )
    return dict(asyncio.run(evaluator.evaluate(step))), said


def test_it_samples_as_its_set_says_and_stops_as_the_run_does():
    rollouter = Answers()
    evaluated(rollouter, held_out(temperature=0.5, top_p=0.25, rollouts_per_prompt=2))
    ((first, second),) = rollouter.calls
    sampling = first.sampling
    assert (sampling.temperature, sampling.top_p, sampling.max_new_tokens) == (0.5, 0.25, 8)
    assert (sampling.stop_token_ids, sampling.stop, sampling.repetition) == ((1, 2), ("END",), (8, 4))
    assert (first.indices, first.attempt, second.prompt.id) == ((0, 1), 0, "1")


def test_questions_of_all_sets_have_numbers_of_their_own_below_zero():
    rollouter = Answers()
    metrics, _ = evaluated(rollouter, held_out("a"), held_out("b", ("wrong", "wrong", "right"), ("", "", "")))
    assert [[r.group_id for r in call] for call in rollouter.calls] == [[-1, -3], [-2, -4, -6]]
    assert metrics == {"eval/a/accuracy": 0.5, "eval/b/accuracy": 1 / 3}


def test_each_category_has_its_accuracy():
    sets = held_out(golds=("right", "wrong", "right", "right"), categories=("hard", "hard", "", "easy"))
    metrics, _ = evaluated(Answers(), sets)
    assert list(metrics.items()) == [
        ("eval/d/accuracy", 0.75), ("eval/d/accuracy/easy", 1.0), ("eval/d/accuracy/hard", 0.5),
    ]  # fmt: skip


def test_an_answer_that_failed_is_asked_for_again_at_the_next_attempt():
    rollouter = Answers({(-1, 1): (0, 1)})
    metrics, said = evaluated(rollouter, held_out(rollouts_per_prompt=2))
    asked = [[(r.group_id, r.attempt, r.indices) for r in call] for call in rollouter.calls]
    assert asked == [[(-1, 0, (0, 1)), (-2, 0, (0, 1))], [(-1, 1, (1,))], [(-1, 2, (1,))]]
    assert metrics["eval/d/accuracy"] == 0.5 and said == []


def test_answers_that_fail_each_time_are_no_score():
    rollouter = Answers({(-1, 0): range(9)})
    metrics, said = evaluated(rollouter, held_out(), held_out("e"), step=7)
    assert metrics == {"eval/e/accuracy": 0.5} and len(rollouter.calls) == 3 + 1
    (warning,) = said
    assert "of d" in warning and "step 7" in warning


def test_beside_generation_only_answers_of_its_version_count():
    rollouter = Answers({(-1, 0): (0,)}, version=5)
    metrics, said = evaluated(rollouter, held_out(rollouts_per_prompt=2), step=5, answers_beside=2)
    asked = [[(r.group_id, r.attempt, r.indices) for r in call] for call in rollouter.calls]
    assert asked == [[(-1, 0, (0, 1))], [(-2, 0, (0, 1))], [(-1, 1, (0,))]]
    assert metrics["eval/d/accuracy"] == 0.5 and said == []
    old = Answers(version=4)
    metrics, said = evaluated(old, held_out(), step=5, answers_beside=2)
    assert metrics == {} and len(old.calls) == 3 * 2
    assert "step 5" in said[0] and "newer weights" in said[0]
    _, said = evaluated(Answers({(-1, 0): range(9)}, version=5), held_out(), step=5, answers_beside=2)
    assert "missing" in said[0] and "newer weights" not in said[0], "one failed each time"


@pytest.mark.parametrize(("beside", "most"), [(1, 1), (6, 3)])
def test_beside_generation_it_asks_for_a_few_answers_at_a_time(beside, most):
    class Counted(Answers):
        running = most = 0

        async def generate(self, requests):
            self.running += 1
            self.most = max(self.most, self.running)
            async for answers in super().generate(requests):
                yield answers
            self.running -= 1

    rollouter = Counted()
    evaluated(
        rollouter, held_out(golds=["right"] * 9, categories=[""] * 9, rollouts_per_prompt=2), answers_beside=beside
    )
    assert rollouter.most == most


def evaluations(work, beside=False, **deadlines):
    section = TrainerSection(steps=5, eval_every_steps=2)
    return Evaluations(work, section, FakePhases(), Deadlines(**deadlines), beside=beside)


def collected():
    """Lines of metrics, and the list that they are written to."""
    written = []

    async def write(step, metrics):
        written.append((step, dict(metrics)))

    return StepLines(write), written


def test_one_that_hangs_is_named():
    async def evaluate(step):
        await asyncio.sleep(NEVER)

    async def go():
        one = evaluations(evaluate, evaluate=0.001)
        one.begin(3, collected()[0])
        await one.ended()

    with pytest.raises(DeadlineError, match=r"'evaluate'.*step 3"):
        asyncio.run(go())


def test_lines_that_wait_for_one_beside_are_written_in_their_order_and_once():
    async def go():
        gate, (lines, written) = asyncio.Event(), collected()

        async def evaluate(step):
            await gate.wait()
            return {"eval/x": float(step)}

        one = evaluations(evaluate, beside=True)
        await lines.add(1, {"loss": 1.0})
        assert written == [(1, {"loss": 1.0})]
        one.begin(2, lines)
        await lines.add(2, {"loss": 2.0})
        await lines.add(3, {})
        assert len(written) == 1
        gate.set()
        await one.ended()
        assert written[1:] == [(2, {"loss": 2.0, "eval/x": 2.0}), (3, {})]
        await one.ended()
        one.begin(4, lines)  # the one before is over
        await one.ended()
        await lines.add(4, {})
        await lines.close()
        assert written[3:] == [(4, {"eval/x": 4.0})]

    asyncio.run(go())


@pytest.mark.parametrize("end", ["ended", "close"])
def test_one_that_was_cancelled_leaves_its_line_without_a_result(end):
    async def go():
        lines, written = collected()

        async def evaluate(step):
            await asyncio.sleep(NEVER)

        one = evaluations(evaluate, beside=True)
        one.cancel()  # there is none yet
        one.begin(2, lines)
        await lines.add(2, {})
        one.cancel()
        await (one.ended() if end == "ended" else lines.close())
        assert written == [(2, {})]

    asyncio.run(go())
