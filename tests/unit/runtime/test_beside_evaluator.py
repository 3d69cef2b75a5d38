"""An evaluation beside generation takes answers of its own version only, a few at a time."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import numpy as np

from megatron_daro.config.sections import EvalSet
from megatron_daro.data.stops import Stops
from megatron_daro.data.templates import HeldOut
from megatron_daro.reward.pool import RewardPool
from megatron_daro.rollout.evaluation import Evaluator
from megatron_daro.rollout.rollouter import SingleTurn
from megatron_daro.types import Prompt, Rollout


class Servers:
    """Answers with version 3; the first `other` answers with version 4. most: requests at once."""

    def __init__(self, other: int) -> None:
        self.other, self.asked, self.running, self.most = other, 0, 0, 0

    async def generate(self, requests):
        (request,) = requests
        self.running += 1
        self.most = max(self.most, self.running)
        await asyncio.sleep(0)
        answers = []
        for index in request.indices:
            self.asked += 1
            one = Rollout("p", request.group_id, 0, index, np.array([1, 2], np.int32), 1, np.ones(1, np.uint8),
                          np.zeros(1, np.float32), "stop", 3, f"####{request.prompt.answer}")  # fmt: skip
            answers.append(replace(one, weight_version=4) if self.asked <= self.other else one)
        self.running -= 1
        yield tuple(answers)


def evaluated(servers: Servers, said: list[str]) -> dict[str, float]:
    prompts = tuple(Prompt(str(d), str(d), "", text="x", tokens=(1,)) for d in range(10))
    sets = [HeldOut(EvalSet(name="digits", path=Path("x"), rollouts_per_prompt=2, temperature=1.0), prompts)]
    with RewardPool("exact", workers=0) as pool:
        one = Evaluator(
            sets,
            SingleTurn(servers, pool),
            max_response_tokens=8,
            stops=Stops((1,)),
            answers_beside=6,
            warn=said.append,
        )
        return dict(asyncio.run(one.evaluate(3)))


def test_answers_of_newer_weights_are_asked_for_again():
    servers, said = Servers(other=5), []
    assert evaluated(servers, said) == {"eval/digits/accuracy": 1.0, "eval/digits/pass_at/2": 1.0}
    assert (servers.asked, servers.most, said) == (25, 3, [])


def test_a_version_that_cannot_be_had_any_more_is_no_score():
    servers, said = Servers(other=10_000), []
    assert evaluated(servers, said) == {}
    assert len(said) == 1


def test_answers_that_span_versions_are_asked_for_again():
    class Updated(Servers):
        """The first answers of version 3 were ended by version 4."""

        async def generate(self, requests):
            async for answers in super().generate(requests):
                began = self.asked <= 4
                yield tuple(replace(one, version_spans=((3, 0), (4, 1))) if began else one for one in answers)

    servers, said = Updated(other=0), []
    assert evaluated(servers, said)["eval/digits/accuracy"] == 1.0
    assert (servers.asked, said) == (24, [])
